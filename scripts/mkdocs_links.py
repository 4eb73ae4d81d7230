"""A hook of mkdocs: links from docs/ to source files become links to the repository."""

import os
import re
from typing import Any

REPOSITORY = "https://github.com/mjax/mjax/blob/main/"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite relative links that lead out of docs/."""
    folder = os.path.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link[1]))
        return link[0] if target.startswith("docs/") else f"]({REPOSITORY}{target}"

    return re.sub(r"\]\((\.\.[^)#\s]*)", outside, markdown)
