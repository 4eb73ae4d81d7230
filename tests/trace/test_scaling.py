"""Traces of layers with experts that are computed from one, compared with traces."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from mjax.cluster.hardware import gpu_named
from mjax.config import MeshConfig, available_configs, load_config
from mjax.planner import layer as layers
from mjax.planner import memory
from mjax.planner.layer import Traced, kinds_of
from mjax.planner.program import SAMPLE_TAGS, TAGS
from mjax.planner.search import find, predictions

CACHES = (
    layers._traced, layers._layer_forward, layers._layer_backward, layers._head_of, layers.layer_program,
    layers.layer_collectives, layers.kernels_of,
    memory._of_sample, memory._of_micro_batch, find, predictions,
)  # fmt: skip


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


def sizes_of(of, kernel="cudnn", recompute="selective"):
    """All that predictions read from the traces of a layer and a head."""
    forward, head = layers.layer_forward(of), layers.head(of)
    backward = layers.layer_backward(of, kernel, recompute)
    return (
        [value for name, value in vars(forward).items() if name != "program"],
        [value for name, value in vars(backward).items() if name != "program"],
        [value for name, value in vars(head).items() if name != "program"],
        memory._of_sample(of, kernel, recompute),
        layers.kernels_of(of, kernel, recompute),
        [layers.layer_collectives(of, axis) for axis in ("expert", "context", "model")],
    )


@pytest.mark.ci
def test_experts_and_samples_follow_from_one_trace(traces, monkeypatch):
    """Rows fill tiles, whose number goes with no power of ranks of `expert` or of samples. On 8 a rank has one expert,
    which nothing cuts out. Only a layer on one rank of `expert` has other operations."""
    of = Traced.of(replace(load_config("mixtral_8x7b"), mesh=MeshConfig(data=2, expert=2)))
    made = traces()
    cases = [replace(of, expert=each, samples=samples) for each in (1, 2, 8) for samples in (1, 2)]
    scaled = [sizes_of(case) for case in cases]
    assert {(each.expert, each.samples) for each in made} == {(each, SAMPLE_TAGS[0]) for each in (1, TAGS[0])}
    monkeypatch.setattr(layers, "SAMPLE_TAGS", ())
    for case, sizes in zip(cases, scaled, strict=True):
        made = traces()
        assert sizes_of(case) == sizes
        assert {(each.expert, each.samples) for each in made} == {(case.expert, case.samples)}


@pytest.mark.all
@pytest.mark.parametrize("name", [name for name in available_configs() if load_config(name).model.experts])
def test_traces_of_every_config_are_those_scaled(traces, monkeypatch, name):
    """Each kind of layers, on every number of ranks that a search tries, with all else that it varies."""
    config = load_config(name)
    context = [(1, None), *((n, across) for n in (2, 4) for across in ("heads", "gather"))]
    experts = [n for n in (1, 2, 4, 8) if config.model.experts % n == 0]
    meshes = product((1, 2, 4, 8, 16), (False, True), context, experts, (1, 2))
    kinds = []
    for ranks, tokens, (parts, across), expert, samples in meshes:
        if not config.model.splits(ranks) or (tokens and ranks == 1) or ranks * expert > 16:
            continue
        if (across == "heads" and config.model.heads // ranks % parts) or config.model.sequence < 512 * parts > 512:
            continue
        mesh = MeshConfig(model=ranks, expert=expert, data=expert, context=parts, sequence_parallel=tokens)
        mesh = replace(mesh, context_attention=across or "auto")
        kinds += [replace(of, samples=samples) for _, of in kinds_of(replace(config, mesh=mesh))]
    made = traces()
    for recompute in ("none", "full"):
        scaled = {of: sizes_of(of, "cudnn", recompute) for of in kinds}
        few = len(made)
        with monkeypatch.context() as plainly:
            plainly.setattr(layers, "SAMPLE_TAGS", ())
            for of, sizes in scaled.items():
                traces()
                assert sizes_of(of, "cudnn", recompute) == sizes, of
                few -= len(made)
        assert few < 0
        traces()


@pytest.mark.ci
def test_offload_has_the_program_of_full(traces, monkeypatch):
    """`layer_backward` computes what `offload` keeps from the trace of `full`."""
    of = Traced.of(load_config("llama3_8b"))
    traces()
    computed = [sizes_of(replace(of, ranks=ranks), "cudnn", "offload") for ranks in (1, 2)]
    part = layers._part
    monkeypatch.setattr(
        layers,
        "_part",
        lambda of, what, kernel="xla", recompute="none", *how: part(
            of, what, kernel, "offload" if recompute == "full" else recompute, *how
        ),
    )
    traces()
    assert [sizes_of(replace(of, ranks=ranks), "cudnn", "offload") for ranks in (1, 2)] == computed


@pytest.mark.ci
def test_search_traces_each_layer_once(traces):
    """Of three modes of recomputation and the head, on 1 to 8 ranks of `model`."""
    made = traces()
    find(load_config("gpt_345m"), 8, gpu_named("h100"), None, ("mesh.schedule", "mesh.pipe", "mesh.zero"))
    assert Counter(each.ranks for each in made) == dict.fromkeys((1, 2, 4, 8), 5)


def test_traces_of_earlier_commands_are_read(traces, tmp_path):
    """Of a mixture, and of a layer in float8; a damaged file is as none, and a folder of all."""
    folder, mixture = tmp_path / "traces", Traced.of(load_config("olmoe_1b_7b"))
    narrow = replace(Traced.of(load_config("gpt_345m")), compute="fp8")
    made = traces()
    with layers.earlier_traces(folder):
        sizes = [sizes_of(of) for of in (mixture, narrow)]
    assert made
    made = traces()
    with layers.earlier_traces(folder):
        assert [sizes_of(of) for of in (mixture, narrow)] == sizes
    assert not made
    (file,) = folder.iterdir()
    file.write_text(file.read_text()[:-1])
    made = traces()
    with layers.earlier_traces(folder):
        assert sizes_of(narrow) == sizes[1]
    assert made
    folder.chmod(0o777)
    made = traces()
    with layers.earlier_traces(folder):
        assert sizes_of(narrow) == sizes[1]
    assert made
