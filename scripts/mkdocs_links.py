"""A hook of mkdocs: links from docs/ to source files lead to the repository, or are text where none is configured."""

import os
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite relative links that lead out of docs/."""
    folder = os.path.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else link[1]

    return re.sub(r"\[([^\[\]]+)\]\((\.\.[^)#\s]*)(?:#[^)\s]*)?\)", outside, markdown)
