"""The pages say what is true: their Python runs, prints what they claim, and their links lead somewhere.

A ```python block is run after those above it on its page; the ```output block that follows one is what it prints.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COMPILE_QUICKLY, ROOT

PAGES = [ROOT / "README.md", ROOT / "notebooks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "===== end of block ====="


def _blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """Line, code and promised output of each Python block of `page`."""
    text, found = page.read_text(), []
    for fence in FENCE.finditer(text):
        language, body = fence.groups()
        if language == "python":
            found.append((text[: fence.start(2)].count("\n") + 1, body, None))
        elif language == "output":
            assert found, f"{page.name}: an output block follows no Python block"
            line, code, before = found[-1]
            assert before is None, f"{page.name}: two output blocks follow the code of line {line}"
            found[-1] = (line, code, body)
    return found


def _script(page: Path, blocks) -> str:
    # As in conftest.py: by default garbage is collected for a fifth of the time of a trace.
    parts = ["import gc; gc.set_threshold(50_000)", "space = {'__name__': '__main__'}"]
    for line, code, _ in blocks:
        source = "\n" * (line - 1) + code  # so that a traceback names the line of the page
        parts.append(f"exec(compile({source!r}, {str(page)!r}, 'exec'), space)\nprint({MARK!r}, flush=True)")
    return "\n".join(parts)


LONG = ("extending.md", "how-it-works.md", "planning.md", "python.md")  # train or plan for half a minute and more


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.ci if page.name in LONG else ())
        for page in PAGES
        if _blocks(page)
    ],
)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path):
    blocks = _blocks(page)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {COMPILE_QUICKLY}",
        "MPLBACKEND": "agg",
    }
    command = [sys.executable, "-c", _script(page, blocks)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    printed = result.stdout.split(MARK + "\n")
    for (line, _, promised), actual in zip(blocks, printed, strict=False):
        if promised is not None:
            assert actual == promised, f"{page.name}, line {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    headings = {_anchor(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # another site
        assert (page.parent / file).exists(), f"{page.name} links to {target}, which does not exist"
        assert file or anchor in headings, f"{page.name} links to {target}, and has no such heading"


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
