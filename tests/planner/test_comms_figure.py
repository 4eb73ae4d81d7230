"""The picture of what a device sends: a bar for each axis, as long as its bytes, in the colours of the sources."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from mjax.parallel import scopes
from mjax.planner.comms import Collective, Ledger
from mjax.planner.comms_figure import COLOURS, draw_communication, pieces


def record(axes, part, phase, rows, counts=(1,)):
    return Collective("permute", axes, 4, (rows,), "float32", part, phase, counts=counts)


# Stage 0 sends more over `model`, stage 1 more over `data`.
LEDGER = Ledger(
    (
        record(("model",), scopes.LAYER, "backward", 3000, (4, 2)),
        record(("model",), scopes.EMBEDDING, "forward", 3000, (2, 0)),
        record(("model",), scopes.LAYER, "forward", 3000, (4, 2)),
        record(("data",), scopes.GRADIENT, "", 6000, (1, 2)),
        record(("pipe", "data"), scopes.OPTIMIZER, "", 1, (1, 1)),
    )
)


def pixels_of(ledger, file):
    """How many pixels of each colour the picture has."""
    draw_communication(ledger, file, "a config")
    image = imread(file)[..., :3]
    height, width, _ = image.shape
    assert 300 < height < 1000
    assert width == 1500
    parts = COLOURS.keys() - {"", scopes.LOSS}  # black and grey are the letters' too
    counts = {part: (np.abs(image - to_rgb(COLOURS[part])).max(-1) < 0.01).sum() for part in parts}
    return {part: int(count) for part, count in counts.items()}


def test_a_bar_is_that_of_the_stage_that_sends_most_over_its_axis():
    assert pieces(LEDGER.over("model")) == {
        (scopes.LAYER, "forward"): 4 * 12000,
        (scopes.LAYER, "backward"): 4 * 12000,
        (scopes.EMBEDDING, "forward"): 2 * 12000,
    }
    assert pieces(LEDGER.over("data")) == {(scopes.GRADIENT, ""): 2 * 24000}
    assert pieces(Ledger(())) == {}


def test_bars_are_as_long_as_the_bytes_they_stand_for_and_what_is_too_small_is_left_out(tmp_path):
    pixels = pixels_of(LEDGER, tmp_path / "comms.png")
    shown = {part for part, count in pixels.items() if count > 50}
    assert shown == {scopes.LAYER, scopes.EMBEDDING, scopes.GRADIENT}
    assert pixels[scopes.GRADIENT] / pixels[scopes.EMBEDDING] == pytest.approx(2, rel=0.1)


def test_a_step_of_one_device_gives_an_empty_picture(tmp_path):
    assert not any(pixels_of(Ledger(()), tmp_path / "comms.png").values())
