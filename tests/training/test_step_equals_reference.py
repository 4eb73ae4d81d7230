"""Loss and every gradient of the parallel step against a serial GPT or BERT in float64 that shares no code with it."""

from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mjax.parallel import layers, mappings
from mjax.parallel.zero import sums_by_layer
from tests.against_reference import largest_error
from tests.products import seldom
from tests.small import BLOOM, small_config

# --- Every two choices together ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A row of the table: what is chosen in each dimension of a run."""

    model: str
    schedule: str
    pipe: int
    chunks: int
    data: int
    tensor: int
    sequence_parallel: bool
    zero: int
    recompute: str
    dropout: float
    packed: bool
    kernel: str
    layers: str
    loss_chunks: int


CHOICES = Case(
    model=("gpt", "bloom", "pre-LN", "post-LN"),
    schedule=("", "gpipe", "1f1b", "zb-h1"),
    pipe=(1, 2, 4),
    chunks=(1, 2),
    data=(1, 2, 4),
    tensor=(1, 2, 4),
    sequence_parallel=(False, True),
    zero=(0, 1, 3),
    recompute=("none", "selective", "full", "offload"),
    dropout=(0.0, 0.1),
    packed=(False, True),
    kernel=("xla", "xla_blocks"),
    layers=("loop", "apart", "halves"),
    loss_chunks=(1, 3),
)

# Of all choices that go together, every two stand in one row at least. The products are run by `pytest --long`: here,
# in test_pipeline, test_packed_samples, test_bloom and test_bert_step.
# fmt: off
CASES = [
    #    model      schedule pp cp dp tp SP     ZeRO recompute   drop packed attention     layers  loss_chunks
    Case("gpt",     "",      1, 1, 1, 1, False, 0, "none",      0.0, True,  "xla_blocks", "apart",  1),
    Case("gpt",     "",      1, 1, 2, 2, False, 0, "selective", 0.1, True,  "xla",        "loop",   1),
    Case("gpt",     "gpipe", 2, 2, 2, 4, True,  1, "none",      0.1, True,  "xla_blocks", "loop",   1),
    Case("gpt",     "1f1b",  4, 1, 1, 1, False, 0, "selective", 0.0, False, "xla",        "loop",   3),
    Case("gpt",     "zb-h1", 2, 2, 4, 2, True,  3, "full",      0.0, True,  "xla",        "loop",   1),
    Case("gpt",     "",      1, 1, 2, 2, False, 1, "none",      0.1, True,  "xla",        "halves", 3),
    Case("bloom",   "",      1, 1, 1, 4, True,  0, "selective", 0.0, False, "xla_blocks", "halves", 3),
    Case("pre-LN",  "",      1, 1, 1, 2, True,  0, "full",      0.1, False, "xla",        "halves", 1),
    Case("post-LN", "",      1, 1, 2, 4, False, 1, "full",      0.0, False, "xla_blocks", "halves", 1),
    Case("bloom",   "",      1, 1, 4, 4, True,  3, "selective", 0.1, False, "xla",        "apart",  1),
    Case("bloom",   "gpipe", 2, 2, 4, 2, True,  1, "selective", 0.1, False, "xla",        "loop",   3),
    Case("bloom",   "1f1b",  2, 2, 2, 1, False, 1, "selective", 0.0, True,  "xla",        "loop",   3),
    Case("bloom",   "1f1b",  4, 1, 2, 2, True,  0, "full",      0.1, True,  "xla_blocks", "loop",   3),
    Case("bloom",   "zb-h1", 4, 1, 1, 1, False, 0, "none",      0.1, False, "xla_blocks", "loop",   3),
    Case("pre-LN",  "",      1, 1, 2, 4, True,  1, "full",      0.0, False, "xla",        "apart",  3),
    Case("pre-LN",  "gpipe", 4, 1, 4, 1, False, 3, "none",      0.1, False, "xla",        "loop",   1),
    Case("pre-LN",  "1f1b",  2, 1, 2, 4, False, 3, "none",      0.0, False, "xla_blocks", "loop",   1),
    Case("pre-LN",  "zb-h1", 2, 2, 1, 2, False, 0, "selective", 0.1, False, "xla_blocks", "loop",   3),
    Case("post-LN", "",      1, 1, 4, 2, True,  3, "selective", 0.1, False, "xla_blocks", "apart",  3),
    Case("post-LN", "gpipe", 2, 1, 1, 2, True,  0, "full",      0.0, False, "xla_blocks", "loop",   3),
    Case("post-LN", "1f1b",  2, 2, 4, 1, False, 0, "full",      0.1, False, "xla",        "loop",   3),
    Case("post-LN", "zb-h1", 4, 1, 1, 4, False, 0, "full",      0.0, False, "xla",        "loop",   3),
    Case("post-LN", "zb-h1", 4, 1, 2, 2, False, 1, "none",      0.1, False, "xla_blocks", "loop",   1),
    Case("gpt",     "",      1, 1, 4, 2, True,  3, "offload",   0.1, True,  "xla",        "loop",   3),
    Case("bloom",   "",      1, 1, 2, 4, False, 1, "offload",   0.0, False, "xla_blocks", "loop",   1),
    Case("pre-LN",  "",      1, 1, 1, 1, False, 0, "offload",   0.1, False, "xla_blocks", "loop",   1),
    Case("post-LN", "",      1, 1, 1, 2, True,  0, "offload",   0.0, False, "xla",        "loop",   3),
]
OFTEN = {1, 3, 4, 5, 9, 11, 16, 19, 26}  # a third of the rows; the others are `long`
# ZeRO-1 sums layer by layer, in the last micro-batch; with one it also gathers so. Without ZeRO the last one is outside
# the loop too.
BY_LAYER = [
    Case("gpt",     "",      1, 1, 4, 1, False, 1, "selective", 0.1, True,  "xla",        "apart", 3),
    Case("post-LN", "",      1, 1, 4, 1, False, 1, "none",      0.0, False, "xla_blocks", "apart", 1),
    Case("bloom",   "",      1, 1, 2, 1, False, 1, "full",      0.1, False, "xla",        "apart", 3),
    Case("bloom",   "",      1, 1, 2, 2, True,  1, "selective", 0.1, False, "xla",        "apart", 3),
    Case("gpt",     "",      1, 1, 2, 1, False, 3, "none",      0.1, False, "xla",        "apart", 1),
    Case("pre-LN",  "",      1, 1, 4, 1, False, 0, "selective", 0.1, False, "xla",        "apart", 1),
]
# fmt: on

MODELS = {
    "gpt": {},
    "bloom": {**BLOOM, "heads": 12},  # no power of two, and divided by 4 ranks
    "pre-LN": {"kind": "bert", "layernorm": "pre", "activation": "gelu_erf"},
    "post-LN": {"kind": "bert", "layernorm": "post", "mlm_activation": "gelu_erf"},
}
PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


def config_of(case):
    mesh = {"pipe": case.pipe, "chunks": case.chunks, "sequence_parallel": case.sequence_parallel, "zero": case.zero}
    return small_config(
        case.data,
        case.tensor,
        1 if case.schedule else 4 // case.data,
        case.recompute,
        "fp64",
        case.dropout,
        mesh=mesh | ({"schedule": case.schedule} if case.schedule else {}),
        samples=PACKED if case.packed else {},
        layers=4,
        attention=case.kernel,
        unroll="off" if case.layers == "loop" else "on",
        streams=2 if case.layers == "halves" else 1,
        loss_chunks=case.loss_chunks,
        **MODELS[case.model],
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=() if i in OFTEN else pytest.mark.ci)
        for i, case in enumerate(CASES)
    ],
)
def test_loss_and_every_gradient_equal_the_serial_reference(case):
    errors = largest_error(config_of(case), scale=2.0**20)  # the loss scale is divided out
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("case", "micro_batches"),
    [
        pytest.param(case, n, id="-".join(map(str, (*case, n))), marks=mark)
        for i, case in enumerate(BY_LAYER)
        for n in (4, 1)  # and two, in CASES
        for mark in [pytest.mark.all if (i % 2 == 0) == (n == 1) else pytest.mark.ci if i else ()]
    ],
)
def test_sums_of_one_and_of_several_micro_batches_layer_by_layer_equal_it_too(case, micro_batches):
    config = config_of(case)
    samples = 16 // case.data // micro_batches
    config = replace(config, train=replace(config.train, global_batch=16, micro_batch=samples))
    assert config.micro_batches == micro_batches
    assert sums_by_layer(config) == (case.zero == 1)
    errors = largest_error(config, scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("micro_batch", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_weights_that_data_does_not_divide_are_summed_layer_by_layer_too(micro_batch):
    config = small_config(3, 1, micro_batch, "selective", "fp64", 0.1, 6, {"zero": 1}, layers=4, unroll="on")
    assert config.model.hidden % 3
    assert sums_by_layer(config)
    errors = largest_error(config, scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


def _goes_together(case):
    return (
        bool(case.schedule) == (case.pipe > 1)
        and (case.chunks == 1 or case.pipe == 2)  # four layers
        and (case.tensor > 1 or not case.sequence_parallel)
        and (case.data > 1 or not case.zero)
        and not (case.packed and case.model.endswith("LN"))
        and not (case.layers != "loop" and case.schedule)
        and not (case.recompute == "offload" and (case.schedule or case.layers != "loop"))
        and (case.layers != "halves" or (case.tensor > 1 and case.data < 4 and case.zero < 3))
        and case.pipe * case.data * case.tensor <= 16
    )


def test_every_two_choices_that_go_together_are_in_a_case():
    def pairs(case):
        return combinations(enumerate(case), 2)

    assert all(map(_goes_together, CASES))
    possible = {pair for case in map(Case._make, product(*CHOICES)) if _goes_together(case) for pair in pairs(case)}
    assert possible == {pair for case in CASES for pair in pairs(case)}


# --- Products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "recompute", "dropout"),
    seldom(product([(1, 1), (2, 4), (8, 1), (1, 8)], ["none", "selective", "full", "offload"], [0.1, 0.0])),
)
def test_meshes_without_a_pipeline_equal_the_serial_reference(mesh, recompute, dropout):
    data, model = mesh
    config = small_config(
        data, model, micro_batch=8 // data // 2 or 1, recompute=recompute, dropout=dropout, compute="fp64"
    )
    errors = largest_error(config)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("data", "model", "recompute", "mesh"),
    [
        pytest.param(2, 4, "none", {"sequence_parallel": True}, marks=pytest.mark.ci),
        pytest.param(1, 8, "selective", {"sequence_parallel": True}, marks=pytest.mark.ci),
        pytest.param(2, 2, "full", {"sequence_parallel": True, "zero": 1}, marks=pytest.mark.ci),
        pytest.param(4, 2, "none", {"zero": 1}, marks=pytest.mark.ci),
        pytest.param(2, 2, "none", {"zero": 3}, marks=pytest.mark.ci),
        pytest.param(4, 2, "selective", {"sequence_parallel": True, "zero": 3}, marks=pytest.mark.ci),
        (3, 2, "full", {"zero": 3}),  # three divide few dims of a weight: most stay whole
    ],
)
def test_sequence_parallelism_and_sharded_storage_change_no_number(data, model, recompute, mesh):
    batch = {"global_batch": 4 * data, "micro_batch": 2}
    errors = largest_error(small_config(data, model, recompute=recompute, compute="fp64", mesh=mesh, **batch))
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.ci
def test_blocked_attention_equals_the_serial_reference():
    errors = largest_error(small_config(2, 2, micro_batch=2, compute="fp64", attention="xla_blocks"))
    assert max(errors.values()) < 1e-12, errors


# --- Breaking f and g -------------------------------------------------------------------------------------------------


def test_a_region_that_f_does_not_open_is_refused(monkeypatch):
    monkeypatch.setattr(mappings, "enter", lambda x: x)
    with pytest.raises(ValueError, match=r"expected float64\[16,32\]{V:\(data,expert,context\)}"):
        largest_error(small_config(2, 4, compute="fp64"))


def test_a_region_that_g_does_not_close_is_refused(monkeypatch):
    monkeypatch.setattr(mappings, "leave", lambda x: x)
    with pytest.raises(ValueError, match="a leave\\(\\) is missing"):
        largest_error(small_config(2, 4, compute="fp64"))


def test_closing_a_region_twice_is_refused(monkeypatch):
    once = mappings.leave
    monkeypatch.setattr(mappings, "leave", lambda x: once(once(x)))
    with pytest.raises(ValueError, match="already the same on every rank"):
        largest_error(small_config(2, 4, compute="fp64"))


def test_an_f_without_its_backward_sum_is_seen_in_the_gradients(monkeypatch):
    @jax.custom_vjp
    def enter(x):
        return lax.pcast(x, "model", to="varying")

    def backward(_, gradient):  # rank 0's part alone, where f would have summed all
        return (lax.psum(jnp.where(lax.axis_index("model") == 0, gradient, 0), "model"),)

    enter.defvjp(lambda x: (enter(x), None), backward)
    monkeypatch.setattr(mappings, "enter", enter)
    errors = largest_error(small_config(2, 4, compute="fp64"))
    assert errors["loss"] < 1e-12
    assert errors["blocks.mlp_norm.scale"] > 1e-4


def test_a_bias_added_before_g_is_seen_in_the_loss(monkeypatch):
    def call(self, x, tokens):
        kernel = self.kernel[...]
        return mappings.leave(jnp.tensordot(x, kernel, kernel.ndim - 1) + self.bias[...])

    monkeypatch.setattr(layers.RowParallelLinear, "__call__", call)
    assert largest_error(small_config(2, 4, compute="fp64"))["loss"] > 1e-4
