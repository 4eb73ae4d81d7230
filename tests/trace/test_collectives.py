"""The communication of a step is a contract: closed forms for every parallel mode, held against the ledger of the
traced step of 8.3 billion parameters. Letters as everywhere: b, s, h, l, v, and p ranks of `model`."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.published import whole_rows
from mjax.config import MeshConfig, load_config
from mjax.config.pattern import stage_kinds
from mjax.parallel import mappings, named_scopes
from mjax.parallel.mesh import abstract_mesh
from mjax.parallel.pipeline_schedules import build_schedule, find_schedule
from mjax.planner import ledger as collectives
from mjax.planner.ledger import OPERATIONS, Collective, Ledger, read_collectives
from tests.planner.configs import changed
from tests.products import one_in
from tests.small import small_config
from tests.traced import traced_step

L, H, V, S = 72, 3072, 51200, 1024  # gpt_8b
p, D = 8, 64  # its ranks of `model` and of `data`
GIB = 2**30

ledger = cache(collectives.ledger)  # several tests read the same one


def gpt_8b(mesh=None, **train):
    """Without sequence parallelism, unless `mesh` has it."""
    return changed(whole_rows(load_config("gpt_8b")), mesh=mesh or {}, train=train)


def summed(found):
    """{(source, kind): (times, bytes that a device sends)} of a ledger, on the stage where they are most."""
    rows = {}
    for record in found.records:
        times, sent = rows.get((record.source, record.operation), (0, 0))
        rows[record.source, record.operation] = times + record.counts[0], sent + record.sent[0]
    return rows


def on_a_ring(kind, ranks, payload):
    return {"all-reduce": 2}.get(kind, 1) * (ranks - 1) / ranks * payload


def expected(rows, ranks):
    """`summed` of {(source, kind): (times, bytes of the tensor of each)}."""
    return {key: (times, times * on_a_ring(key[1], ranks, size)) for key, (times, size) in rows.items()}


# --- Tensor parallelism -----------------------------------------------------------------------------------------------


def test_printed_ledger_sums_each_axis():
    gather = Collective("all-gather", ("model",), 4, (2, 8), "bfloat16", "layer", "forward", counts=(3,))
    reduce = Collective("all-reduce", ("data",), 2, (1024, 1024), "float32", "gradient")
    assert [" ".join(line.split()) for line in str(Ledger((gather, reduce))).splitlines()[1:]] == [
        "data gradient all-reduce 1 4.00 MiB",  # the axis with most bytes first
        "data total 1 4.00 MiB",
        "model layer forward all-gather 3 288 B",  # 3 calls × 3/4 of 8 × 8 numbers of 2 bytes
        "model total 3 288 B",
    ]


@pytest.mark.parametrize(("recompute", "micro_batch"), [("none", 8), ("selective", 8), ("full", 2)])
def test_tensor_parallelism_sends_four_or_five_all_reduces(recompute, micro_batch):
    m, tokens = 8 // micro_batch, micro_batch * S
    rows = {
        ("embedding forward", "all-reduce"): (m, 2 * tokens * H),
        ("layer forward", "all-reduce"): (2 * L * m, 2 * tokens * H),
        ("layer backward", "all-reduce"): (2 * L * m, 2 * tokens * H),
        ("head backward", "all-reduce"): (m, 2 * tokens * H),
    }
    if recompute == "full":  # the sum of attention alone: the MLP's is not needed again
        rows["layer recomputation", "all-reduce"] = L * m, 2 * tokens * H
    found = summed(ledger(gpt_8b(recompute=recompute, micro_batch=micro_batch)).filter_axes("model"))
    cross_entropy = found.pop(("head forward", "all-reduce"))  # maximum; sum of exponentials and the label's logit
    assert cross_entropy == (2 * m, m * on_a_ring("all-reduce", p, 3 * 4 * tokens))
    # Squared norms of the gradients that are split: six of a layer (QKV, MLP up, two kernels back), and the embedding.
    assert found.pop(("optimizer", "all-reduce")) == (1, on_a_ring("all-reduce", p, 4 * (6 * L + 1)))
    assert found == expected(rows, p)


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_gradients_cross_data_once_in_float32(micro_batch):
    found = ledger(gpt_8b(micro_batch=micro_batch, recompute="none" if micro_batch == 8 else "full")).filter_axes(
        "data"
    )
    assert {(r.operation, r.dtype, r.loops) for r in found.records} == {("all-reduce", "float32", ())}
    layer = (12 * H * H + 7 * H) // p + 6 * H  # split kernels and biases; LayerNorms and two biases are whole
    parameters = L * layer + V * H // p + S * H + 2 * H
    assert summed(found) == {
        ("gradient", "all-reduce"): (16, on_a_ring("all-reduce", D, 4 * parameters)),
        ("loss", "all-reduce"): (1, on_a_ring("all-reduce", D, 4)),
    }


# --- Sequence parallelism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recompute", "gathers", "scatters"), [("none", 0, 0), ("selective", 2, 0), ("full", 2, 1)])
def test_sequence_parallelism_gathers_and_scatters_tokens(recompute, gathers, scatters):
    found = ledger(gpt_8b({"sequence_parallel": True}, recompute=recompute))
    whole = 2 * 8 * S * H
    rows = {
        ("embedding forward", "reduce-scatter"): (1, whole),
        ("embedding backward", "all-gather"): (1, whole),
        ("layer forward", "all-gather"): (2 * L, whole),
        ("layer forward", "reduce-scatter"): (2 * L, whole),
        ("layer backward", "all-gather"): (2 * L, whole),
        ("layer backward", "reduce-scatter"): (2 * L, whole),
        ("head forward", "all-gather"): (1, whole),
        ("head backward", "reduce-scatter"): (1, whole),
    }
    if gathers:
        rows["layer recomputation", "all-gather"] = gathers * L, whole
    if scatters:
        rows["layer recomputation", "reduce-scatter"] = scatters * L, whole
    activations = [record for record in found.filter_axes("model").records if record.dtype == "bfloat16"]
    assert summed(Ledger(tuple(activations))) == expected(rows, p)
    # The weights that act on split tokens are summed over `model` as well, with the sum over `data`, once a step.
    whole_weights = 4 * (L * 6 * H + S * H + 2 * H)
    both = found.filter_axes("data", "model")
    assert {record.loops for record in both.records} == {()}
    assert summed(both) == {("gradient", "all-reduce"): (9, on_a_ring("all-reduce", D * p, whole_weights))}


# --- ZeRO -------------------------------------------------------------------------------------------------------------

# A layer's weights on a rank of `model`: QKV, projection, MLP up and down; the biases of QKV and of MLP up; and six
# rows that are whole. The bias of QKV, [3, n / p, d], has no dim that 64 divides: it stays whole on every replica.
KERNELS, QKV_BIAS, MLP_BIAS, ROWS = 12 * H * H // p, 3 * H // p, 4 * H // p, 6 * H
OTHERS = V * H // p + S * H + 2 * H  # embedding, positions, final LayerNorm


def test_zero_1_gathers_and_scatters_once():
    found = ledger(gpt_8b({"zero": 1}, micro_batch=2)).filter_axes("data")
    split = L * (KERNELS + MLP_BIAS + ROWS) + OTHERS
    rows = summed(found)
    rows.pop(("loss", "all-reduce"))
    rows.pop(("optimizer", "all-reduce"))
    assert rows == expected(
        {("weights", "all-gather"): (15, 2 * split / 15), ("gradient", "reduce-scatter"): (15, 4 * split / 15)}, D
    ) | {("gradient", "all-reduce"): (1, on_a_ring("all-reduce", D, 4 * L * QKV_BIAS))}
    assert {record.loops for record in found.records} == {()}


def test_zero_3_gathers_a_layer_twice():
    m, micro_batch = 2, 4
    rows = summed(ledger(gpt_8b({"zero": 3}, micro_batch=micro_batch)).filter_axes("data"))
    layer = KERNELS + MLP_BIAS + ROWS
    assert rows["weights", "all-gather"] == (4, on_a_ring("all-gather", D, 2 * OTHERS))
    assert rows["weights forward", "all-gather"] == (11 * L * m, m * L * on_a_ring("all-gather", D, 2 * layer))
    # Not again: the biases, which are only added, but that of MLP up, which the GELU needs.
    again = layer - 2 * H - MLP_BIAS
    times, sent = rows["weights recomputation", "all-gather"]
    assert sent == pytest.approx(m * L * on_a_ring("all-gather", D, 2 * again))
    assert times == 8 * L * m
    scattered = on_a_ring("reduce-scatter", D, 4 * (m * L * layer + OTHERS))
    assert rows["gradient", "reduce-scatter"] == (11 * L * m + 4, scattered)


@pytest.mark.parametrize("zero", [1, 3])
def test_groups_sum_their_shards_once(zero):
    """HSDP: weights are gathered within a group, however many micro-batches there are, and only the gradients of the
    shards, in float32, cross groups."""
    groups = 4
    found = ledger(gpt_8b({"zero": zero, "replicate": groups}, micro_batch=2))
    assert {r.operation for r in found.records if "replicate" in r.axes and r.axes != ("replicate",)} <= {"all-reduce"}
    ((kind, (_, sent)),) = summed(found.filter_axes("replicate")).items()
    stored = L * (KERNELS + MLP_BIAS + ROWS) + OTHERS
    assert kind == ("gradient", "all-reduce")
    assert {record.loops for record in found.filter_axes("replicate").records} == {()}
    stored += L * QKV_BIAS  # whose 96 channels 16 ranks divide
    assert sent == on_a_ring("all-reduce", groups, 4 * stored / (D // groups))


# --- Pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 3), *one_in(1, [("gpipe", 1), ("1f1b", 1)], pytest.mark.ci)])
def test_pipeline_runs_its_table(schedule, chunks):
    P_, M, tokens = 4, 8, S
    mesh = {"pipe": P_, "schedule": schedule, "virtual_stages": chunks}
    found = ledger(gpt_8b(mesh, micro_batch=1, recompute="none"))
    ticks = build_schedule(schedule, P_, M, chunks).ticks
    whole = 2 * tokens * H
    reduced = on_a_ring("all-reduce", p, whole)

    def stages(source, over, kind="all-reduce"):
        records = [r for r in found.filter_axes(*over).records if (r.source, r.operation) == (source, kind)]
        return [sum(times) for times in zip(*(r.counts for r in records), strict=True)], sum(r.sent for r in records)

    for source in ("layer forward", "layer backward"):
        times, sent = stages(source, ["model"])
        assert times == [2 * M * L // P_] * P_
        assert list(sent) == [2 * M * L // P_ * reduced] * P_
    assert stages("embedding forward", ["model"])[0] == [M, 0, 0, 0]
    assert stages("head forward", ["model"])[0] == [0, 0, 0, 2 * M]
    assert stages("head backward", ["model"])[0] == [0, 0, 0, M]
    times, sent = stages("pipeline", ["pipe"], "permute")
    assert (times, list(sent)) == ([2 * ticks] * P_, [2 * ticks * whole] * P_)
    # The embedding is used at both ends: one master copy, gathered over the stages in bf16, its gradients scattered.
    assert stages("weights", ["pipe"], "all-gather")[1][0] == on_a_ring("all-gather", P_, 2 * OTHERS)
    assert stages("gradient", ["pipe"], "reduce-scatter")[1][0] == on_a_ring("reduce-scatter", P_, 4 * OTHERS)
    # A stage sums the gradients of its layers over data, and of its part of the embedding.
    own = L // P_ * ((12 * H * H + 7 * H) // p + 6 * H) + OTHERS // P_
    assert stages("gradient", ["data"])[1][0] == on_a_ring("all-reduce", D, 4 * own)


# --- The reader -------------------------------------------------------------------------------------------------------


def test_reader_rejects_what_it_cannot_count(monkeypatch):
    def loop(x):
        return jax.lax.while_loop(
            lambda x: x.sum() > 0, lambda x: mappings.vary(mappings.reduce_from_region(x), frozenset({"model"})), x
        )

    mesh = abstract_mesh(MeshConfig(data=2, model=4))
    inside = jax.shard_map(loop, mesh=mesh, in_specs=P("model"), out_specs=P("model"), check_vma=True)
    with pytest.raises(ValueError, match="in a loop of unknown length"):
        read_collectives(jax.jit(inside).trace(jnp.ones((8, 3))).jaxpr)
    monkeypatch.delitem(OPERATIONS, "psum_invariant")
    with pytest.raises(ValueError, match=r"psum_invariant over \('model',\) is not a known collective"):
        read_collectives(traced_step(small_config(1, 2))[1])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("recompute", "mesh"),
    [
        ("none", {}),
        ("full", {"zero": 3, "sequence_parallel": True}),
        ("selective", {"pipe": 2, "virtual_stages": 2, "zero": 1, "sequence_parallel": True}),
    ],
)
def test_ledger_is_that_of_step_with_dropout(recompute, mesh):
    config = small_config(2, 2, layers=4, micro_batch=2, global_batch=16, recompute=recompute, mesh=mesh)
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.1
    whole = read_collectives(
        traced_step(config)[1],
        find_schedule(config) if config.mesh.pipe > 1 else None,
        stage_kinds(config.model, config.mesh),
    )
    assert Counter(whole) == Counter(ledger(config).records)
    assert {record.part for record in whole} <= set(named_scopes.PARTS)
    assert ("layer recomputation" in {record.source for record in whole}) == (recompute != "none")
