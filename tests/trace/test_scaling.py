"""Traces that a search needs, and those kept from earlier commands."""

from collections import Counter
from dataclasses import replace

import pytest

from mjax.cluster.hardware import gpu_named
from mjax.config import load_config
from mjax.planner import layer as layers
from mjax.planner import ledger as ledgers
from mjax.planner import memory
from mjax.planner.layer import TraceSpec
from mjax.planner.search import make_predictors, search_and_time
from tests.small import small_config

CACHES = layers._record, memory._measure_sizes, search_and_time, make_predictors


@pytest.fixture
def traces(monkeypatch):
    """Begins without traces when called, and holds what has been traced since."""
    made, trace = [], layers._trace

    def noted(of, *how):
        made.append(of)
        return trace(of, *how)

    def forget():
        for cache in CACHES:
            cache.cache_clear()
        made.clear()
        return made

    monkeypatch.setattr(layers, "_trace", noted)
    yield forget
    forget()


def records_of(of):
    """The traces of a layer and a head."""
    return layers.layer_forward(of), layers.layer_backward(of, "cudnn", "selective"), layers.head(of)


@pytest.mark.ci
def test_search_traces_each_layer_once(traces):
    """Three modes of recomputation and the head, on 1 to 8 ranks of `model`; backward passes only where it may fit."""
    made = traces()
    search_and_time(load_config("gpt_345m"), 8, gpu_named("h100"), None, ("mesh.schedule", "mesh.pipe", "mesh.zero"))
    assert Counter(each.mesh.model for each in made).keys() == {1, 2, 4, 8}
    assert len(made) <= 16


def test_earlier_ledger_and_weights_are_read(tmp_path, monkeypatch):
    config = small_config(data=2, model=2)
    with layers.earlier_traces(tmp_path / "traces"):
        first, weights = ledgers.ledger(config), memory.measure_weights(config.model)
    monkeypatch.setattr(ledgers, "build_program", None)  # nothing is traced
    monkeypatch.setattr(memory, "abstract_weights", None)
    memory.measure_weights.cache_clear()
    with layers.earlier_traces(tmp_path / "traces"):
        assert ledgers.ledger(config) == first
        assert memory.measure_weights(config.model) == weights
    assert first.count > 0


def test_traces_of_earlier_commands_are_read(traces, tmp_path):
    """A mixture, and a layer in float8; a damaged file is as none, and a folder of all."""
    folder, mixture = tmp_path / "traces", TraceSpec.from_config(load_config("olmoe_1b_7b"))
    narrow = replace(TraceSpec.from_config(load_config("gpt_345m")), compute="fp8")
    made = traces()
    with layers.earlier_traces(folder):
        records = [records_of(of) for of in (mixture, narrow)]
    assert made
    made = traces()
    with layers.earlier_traces(folder):
        assert [records_of(of) for of in (mixture, narrow)] == records
    assert not made
    (file,) = folder.iterdir()
    file.write_text(file.read_text()[:-1])
    made = traces()
    with layers.earlier_traces(folder):
        assert records_of(narrow) == records[1]
    assert made
    folder.chmod(0o777)
    made = traces()
    with layers.earlier_traces(folder):
        assert records_of(narrow) == records[1]
    assert made
