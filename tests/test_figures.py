"""The pictures of the docs: drawn from their code, readable on a phone, each on a page and described in words."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import mjax
from mjax.config import load_config, with_values
from scripts.figures import memory
from scripts.figures.svg import MIN_TEXT_AT_400, Drawing
from tests.conftest import ROOT
from tests.test_docs import FENCE, PAGES

IMAGES = ROOT / "docs" / "images"
KINDS = ("parameters", "optimizer", "gradients", "activations")
SVG_FILES = sorted(IMAGES.glob("*.svg"))


def test_pictures_are_those_of_their_code():
    result = subprocess.run([sys.executable, ROOT / "scripts" / "make_figures.py", "--check"], capture_output=True)
    assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()


@pytest.mark.parametrize("file", SVG_FILES, ids=lambda file: file.stem)
def test_picture_is_readable(file):
    root = ElementTree.parse(file).getroot()
    width = float(root.get("viewBox").split()[2])
    sizes = [float(text.get("font-size")) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(size * 400 / width >= MIN_TEXT_AT_400 for size in sizes)
    assert root.find("{http://www.w3.org/2000/svg}title").text
    assert "prefers-color-scheme:dark" in file.read_text()


def test_every_picture_is_on_a_page():
    shown = set()
    for text in PAGES.values():
        for description, name in re.findall(r"!\[([^\]]*)\]\([^)\s]*images/([\w.-]+)\)", FENCE.sub("", text)):
            assert len(description.split()) >= 4, f"{name}: {description!r} describes too little"
            shown.add(name)
        shown |= set(re.findall(r'src="[^"]*images/([\w.-]+)"', text))
    assert {file.name for file in IMAGES.iterdir()} == shown


def test_text_outside_the_picture_is_rejected():
    drawing = Drawing(640, 100, "a test")
    with pytest.raises(ValueError, match="leaves the picture: 600 to"):
        drawing.text(600, 50, "too long for this place")
    with pytest.raises(ValueError, match="too small to read"):
        drawing.text(10, 50, "small", size=10)
    with pytest.raises(ValueError, match="wider than its box"):
        drawing.box(0, 0, 40, 20, "a long label")


def test_hatched_box_shows_its_pattern():
    drawing = Drawing(640, 100, "a test")
    drawing.box(0, 0, 40, 20, hatch=True)
    assert 'style="fill:url(#hatch)"' in drawing.svg()  # a fill attribute would lose against the color of the class
    assert '<pattern id="hatch"' in drawing.svg()


@pytest.mark.ci
def test_memory_pictures_show_the_plan():
    loop = {"train.unroll": "off"}
    cases = [("llama3_8b", {"mesh.zero": zero} | loop, amounts) for zero, amounts in memory.LLAMA3_8B.items()]
    for name, amounts in memory.LLAMA3_70B.items():
        ranks = {"mesh.data": 8, "mesh.model": 8} if name.endswith("TP") else {"mesh.data": 64, "mesh.model": 1}
        mode = {"mesh.pipe": 1, "mesh.zero": 3, "train.recompute": name.split()[0]}
        cases.append(("llama3_70b", mode | ranks, amounts))
    for name, values, shown in cases:
        planned = mjax.plan(with_values(load_config(name), values), "h100")["memory"]
        gib = {kind: planned[kind] / 2**30 for kind in (*KINDS, "logits", "workspace", "usable")}
        assert shown == pytest.approx((*map(gib.get, KINDS), gib["logits"] + gib["workspace"]), abs=0.01), values
        assert round(gib["usable"], 1) == memory.USABLE_GIB


def test_memory_blocks_add_up():
    kept = {mode: sum(size for _, size, modes in memory.BLOCKS if mode in modes) for mode in ("none", "selective")}
    assert kept == {"none": 32, "selective": 20}
