"""The picture of predicted and published scaling holds what the model says."""

from io import BytesIO

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.published import table_1
from benchmarks.scaling_figure import draw_scaling


def test_the_picture_shows_every_published_run_beside_its_prediction(monkeypatch):
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    file = BytesIO()
    draw_scaling(file)
    speed, scaling, everything = drawn[0].axes
    lines = {line.get_label(): line.get_ydata() for line in speed.lines}
    assert lines["published"] == pytest.approx([137, 138, 142, 135, 138, 140, 148, 155, 163, 163])
    assert np.abs(np.array(lines["predicted"]) / lines["published"] - 1).max() < 0.06
    published = [line.get_ydata() for line in scaling.lines if line.get_label().endswith("published")]
    assert np.round(published).tolist() == [[100, 95, 82, 77], [96, 83, 79, 74]]
    assert sum(len(line.get_xdata()) for line in everything.lines if line.get_label()[0] != "_") == 32
    assert len(table_1()) == len(lines["published"])
    file.seek(0)
    assert imread(file).std() > 0.05
