"""Build the site in site/ from docs/: `make docs`. With `serve`, show it at localhost:8000.

The pages are written for GitHub. The site generator zensical reads a copy of them, in build/docs, with links to GitHub
for other files of the repository. A link to a missing file ends the build.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "docs"
FENCE = re.compile(r"^( *)(```+)\w*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)(\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\])\(([^)\s]+)\)")
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
SERVED = {".md", ".svg", ".png"}  # what the site has of docs/


def repository_link(page: str, target: str, repository: str, image: bool = False) -> str:
    """The link of a page, absolute if the site lacks the file.

    Args:
      page: Path of the page in the repository.
      target: Link as the page has it.
      repository: Its address.
      image: True for the file itself instead of GitHub's page about it.

    Raises:
      FileNotFoundError: The repository has no such file.
    """
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return target
    file = os.path.normpath(os.path.join(os.path.dirname(page), path))
    if file.startswith("..") or not (ROOT / file).exists():
        raise FileNotFoundError(f"{page} links to {target}, which does not exist")
    if file.startswith("docs/") and Path(file).suffix in SERVED:
        return target
    kind = "raw" if image else "tree" if (ROOT / file).is_dir() else "blob"
    return f"{repository}/{kind}/main/{file}" + ("#" + anchor if anchor else "")


def convert(text: str, page: str, repository: str) -> str:
    """Change a page from GitHub's Markdown to the site's, whose tables show the backslash of `\\|` in code."""

    def link(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        label = LINK.sub(link, label)  # a picture that is a link
        return f"{image}{label}({repository_link(page, target, repository, bool(image))})"

    def prose(part: str) -> str:
        part = re.sub(r"<!--.*?-->\n?(?=\n)|<!--.*?-->", "", part, flags=re.DOTALL)
        part = TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), part)
        return LINK.sub(link, part.replace("<details>", '<details markdown="1">'))

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        diagram = fence[0].startswith("```mermaid")
        block = f'<div class="flow" markdown="1">\n\n{fence[0]}\n\n</div>' if diagram else fence[0]
        parts += [prose(text[end : fence.start()]), block]
        end = fence.end()
    return "".join([*parts, prose(text[end:])])


def copy_pages() -> None:
    """Write build/docs from docs/."""
    repository = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["repo_url"]
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "docs", COPY, ignore=shutil.ignore_patterns("*.toml"))
    for file in COPY.rglob("*.md"):
        page = f"docs/{file.relative_to(COPY)}"
        file.write_text(convert(file.read_text(), page, repository))


if __name__ == "__main__":
    try:
        copy_pages()
    except FileNotFoundError as error:
        sys.exit(str(error))
    command = ["serve"] if sys.argv[1:] == ["serve"] else ["build", "--clean", "--strict"]
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", *command], cwd=ROOT).returncode)
