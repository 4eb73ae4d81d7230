"""The checks of words and names: each rule finds a sentence or a name, and code and good sentences pass."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_words
from scripts.check_names import check_names
from scripts.check_words import COMMENT, DOCS, DOCSTRING, HELP, MESSAGE, TEST, Text

ROOT = Path(__file__).resolve().parent.parent
BAD = [
    (DOCS, "The matrix\nproducts of a layer take 40 ms.", 0),
    (DOCS, "A sentence.\n\nAnother one that is held back by the network.", 2),
    (DOCS, "| row |\n|---|\n| `x` | such a run is refused |", 2),
    (DOCS, "It is long. What lacks memory is tried again with chunks.", 0),
    (DOCS, "- Data are split.\n- Those of the batch are not.", 1),
    (DOCSTRING, "What a layer keeps.", 0),
    (DOCSTRING, "Of `find`, the rows.", 0),
    (HELP, "Number of labels that count.", 0),
    (COMMENT, "the schedule knows nothing of devices", 0),
    (COMMENT, "this is no matrix", None),
    (MESSAGE, "X is no file of mjax", 0),
    (MESSAGE, "--mesh.pipe 2 is not there for X", 0),
    (TEST, "test what is written is read", 0),
    (DOCS, "The `matrix product` of\n\n```\nmatrix products\n```\nand [stretch](summand.md) <!-- mend -->", 5),
    (DOCS, "`masters` are copied. What is a rank? It is the index of a device. There is no need for more.", None),
    (DOCSTRING, "By default, the sum.", 0),
    (DOCSTRING, "Without a mesh, return the sum.", None),
]


@pytest.mark.parametrize(("where", "text", "line"), BAD)
def test_phrase_is_reported_in_its_line(where, text, line):
    assert [found for found, _ in check_words.check(Text(where, 0, text))] == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Fix the planner", "names no component"),
        ("planner: mend what a second reading found", "'mend' does not say what changed"),
        ("planner: Add time_step", "'Add' does not say what changed"),
        (f"planner: add {'x' * 60}", "the subject has 73 characters"),
        ("planner: add time_step\n\nIt is computed anew.", "'anew' in a commit"),
        ("planner, docs: add time_step\n\nA search reads it once.\n# mend this\n", ""),
        ("Merge branch 'main'", ""),
    ],
)
def test_commit_message_names_component_and_change(message, words, tmp_path):
    (tmp_path / "message").write_text(message)
    hook = subprocess.run(
        [ROOT / "scripts" / "hooks" / "commit-msg", tmp_path / "message"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert hook.returncode == bool(words)
    assert words in hook.stdout


def test_planted_sentence_fails_the_check(tmp_path, monkeypatch, capsys):
    files = {
        "mjax/a.py": '"""Rows."""\n\n# dear to compute\nx = "this run is no run of mjax"  # prose: ok, a name\n',
        "README.md": "# mjax\n\nA run goes on.\n",
        "benchmarks/log/a.md": "It is refused.\n",
        "a.ipynb": '{"cells": [\n{"cell_type": "markdown",\n"source": [\n"One.\\n",\n"It is refused."\n]}]}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_words.py"])
    assert check_words.main() == 1
    found = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in found] == ["README.md:3", "a.ipynb:5", "mjax/a.py:3"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def rounded(x): pass", ["rounded"]),
        ("def at_step(x): pass", ["at_step"]),
        ("def is_told(): pass", ["is_told"]),
        ("def find(kept_rows): pass", ["find"]),
        ("def find(each): pass", ["each"]),
        ("def find():\n    for found in x:\n        others, y = found", ["found", "others"]),
        ("class Choice: pass", ["Choice"]),
        ("MOST, x = 3, 4", ["MOST"]),
        ("MAX_MOST_STEPS = 3", []),
        ("def quantize(x): return x\nclass RouterOutput: pass\nlayer = 3", []),
    ],
)
def test_names_of_no_field_are_found(source, names):
    assert [name for _, _, name, _ in check_names(ast.parse(source))] == names
