"""Render the numbers of docs/numbers.toml into the pages that show them, or check that the pages are up to date.

python scripts/make_numbers.py            # write
python scripts/make_numbers.py --check    # exit code 1 names what is out of date

A page shows a number as `<!--num:NAME-->text<!--/-->` and a table as `<!--table:NAME-->` … `<!--/-->`, with the text in
docs/numbers.toml. README.md and the pages of docs/results show no other number: a digit outside of code, links, names
such as float64 and these marks is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = ROOT / "docs" / "numbers.toml"
PLACE = re.compile(r"<!--(num|table):([\w.]+)-->(.*?)<!--/-->", re.DOTALL)
NAME = re.compile(r"\{(\w+)\}")
UNCOUNTED = re.compile(  # code, marks, addresses, HTML, the numbers of papers, names with digits
    r"```.*?```|!\[[^\]]*\]|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|<[^>\n]*>|\b\d{4}\.\d{5}\b|\b[A-Za-z_]+[\w.-]*\d[\w.-]*|\bGPT-2\b"
    r"|^#+ [^\n]*$|^[ ]*\d+\. ",
    re.DOTALL | re.MULTILINE,
)
FIELDS = {"text", "means", "date", "hardware", "command"}


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that show numbers of the table."""
    return [root / "README.md", root / "docs" / "index.md", *sorted((root / "docs" / "results").glob("*.md"))]


def table_text(entry: dict[str, Any], numbers: dict[str, Any]) -> str:
    """A Markdown table: text columns to the left, columns after the first `left` to the right."""
    left = entry.get("left", 1)
    header = entry["header"]
    aligned = ["---" if column < left else "---:" for column in range(len(header))]
    text = "\n".join("| " + " | ".join(line) + " |" for line in (header, aligned, *entry["rows"]))
    return NAME.sub(lambda name: numbers[name[1]]["text"], text)


def render(text: str, numbers: dict[str, Any], where: str) -> str:
    """The page with every number and table as docs/numbers.toml has it.

    Raises:
      ValueError: the page names a number that is not there.
    """

    def place(mark: re.Match[str]) -> str:
        kind, name = mark[1], mark[2]
        entry = numbers.get("tables", {}).get(name) if kind == "table" else numbers.get(name)
        if entry is None:
            raise ValueError(f"{where}: docs/numbers.toml has no {kind} {name}")
        content = f"\n\n{table_text(entry, numbers)}\n\n" if kind == "table" else entry["text"]
        return f"<!--{kind}:{name}-->{content}<!--/-->"

    return PLACE.sub(place, text)


def loose_numbers(text: str) -> list[str]:
    """Numbers of a page that docs/numbers.toml does not have."""
    bare = UNCOUNTED.sub(" ", PLACE.sub(" ", text))
    return re.findall(r"(?<![\w.⁰-⁹-])\d(?:[\d,.]*\d)?(?![\w⁰-⁹])", bare)


def record(name: str, text: str, hardware: str, numbers: Path = NUMBERS, day: date | None = None) -> None:
    """Store a measured number with today's date, for benchmarks.

    Raises:
      KeyError: docs/numbers.toml has no such number.
    """
    lines = numbers.read_text().splitlines(keepends=True)
    start = lines.index(f"[{name}]\n") if f"[{name}]\n" in lines else None
    if start is None:
        raise KeyError(f"docs/numbers.toml has no number {name}; add it with its meaning and command")
    values = {"text": f'"{text}"', "date": str(day or date.today()), "hardware": f'"{hardware}"'}
    for at in range(start + 1, len(lines)):
        if lines[at].startswith("["):
            break
        key = lines[at].partition(" = ")[0]
        if key in values:
            lines[at] = f"{key} = {values[key]}\n"
    numbers.write_text("".join(lines))


def main() -> int:
    """Write the pages, or name what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    numbers, faults, shown = tomllib.loads(NUMBERS.read_text()), [], set()
    for file in pages():
        name, text = str(file.relative_to(ROOT)), file.read_text()
        rendered = render(text, numbers, name)
        shown |= {mark[2] for mark in PLACE.finditer(text)}
        if rendered != text and check:
            faults.append(f"{name} is out of date; run: python scripts/make_numbers.py")
        elif rendered != text:
            file.write_text(rendered)
        if name != "docs/index.md" and (loose := loose_numbers(text)):
            faults.append(f"{name} shows numbers that docs/numbers.toml lacks: {', '.join(loose)}")
    tables = numbers.get("tables", {})
    shown |= {name for table in tables.values() for row in table["rows"] for cell in row for name in NAME.findall(cell)}
    for name, entry in [*numbers.items(), *tables.items()]:
        if name != "tables":
            if missing := FIELDS - set(entry) - ({"text"} if "rows" in entry else set()):
                faults.append(f"docs/numbers.toml: {name} lacks {', '.join(sorted(missing))}")
            if name not in shown:
                faults.append(f"docs/numbers.toml: {name} is on no page")
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
