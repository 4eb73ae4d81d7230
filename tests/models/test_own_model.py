"""A model of one file outside mjax gets everything: any mesh, checkpoints, a plan, FLOPs, the ledger, memory, text."""

import json
from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.aot.hlo import counted, read_collectives
from mjax.cluster.hardware import gpu_named
from mjax.commands import cli
from mjax.config import DataConfig, LlamaConfig, MeshConfig
from mjax.config.axes import sizes
from mjax.config.pattern import LayerKind, Pattern
from mjax.errors import UsageError
from mjax.models.block import Block
from mjax.models.build import count_parameters, mixing_class
from mjax.models.stack import stack
from mjax.planner.command import compile_step
from mjax.planner.layer import model_flops
from mjax.planner.ledger import ledger
from mjax.planner.memory import predict_memory
from mjax.planner.search import meshes
from mjax.planner.time import predict_time
from tests import reference, toy_model
from tests.conftest import ROOT
from tests.models.own_models import hybrid
from tests.small import batch_of, gradient_program, named, weights_of
from tests.traced import count_in_program

pytestmark = pytest.mark.usefixtures("quick_runs")

MODEL = replace(toy_model.config.model, layers=4, hidden=32, sequence=16, feed_forward=24, attention="xla")
PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


def config_of(architecture=MODEL, compute="fp64", loss_chunks=1, **mesh):
    config = toy_model.config
    train = replace(config.train, global_batch=8, micro_batch=1, loss_chunks=loss_chunks)
    return replace(
        config,
        model=architecture,
        mesh=MeshConfig(**mesh),
        data=replace(config.data, mock=True, **PACKED),
        precision=replace(config.precision, compute=compute),
        train=train,
    )


def as_llama(model):
    """The same model for the serial reference: it is a Llama."""
    fields = ("layers", "hidden", "heads", "kv_heads", "sequence", "feed_forward", "vocabulary", "vocabulary_multiple")
    return LlamaConfig(norm_epsilon=model.epsilon, **{name: getattr(model, name) for name in fields})


def compare(config, total, names=None, batch=None):
    """Compare the means and gradients of the step with `total`: weights → the loss, and the means."""
    with jax.enable_x64(True):
        program, place = gradient_program(config, names)
        batch = batch_of(config) if batch is None else batch
        found, gradients = program(place(), batch, jnp.int32(0), jnp.float64(1.0))
        differentiated = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=reference.QUICKLY)
        (_, expected), wanted = differentiated(named(weights_of(config)))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for name, gradient in named(gradients).items():
        np.testing.assert_allclose(gradient.reshape(wanted[name].shape), wanted[name], atol=1e-12, err_msg=name)


# --- Sums next to the residual stream, custom logits, and stacks of different layers ----------------------------------


class BalancedBlock(Block):
    """A layer that adds the squares of the stream to the loss, and reports their cubes."""

    mixes_positions = False

    def __call__(self, x, context):
        x = super().__call__(x, context)
        return x, {"balance_loss": (x**2).sum(), "cubes": (x**3).sum()}


class Balanced(toy_model.Toy):
    loss_weights: ClassVar = {"loss": 1.0, "balance_loss": 0.25}

    def __init__(self, key, config, dtype):
        super().__init__(key, config, dtype)
        parts = lambda key: vars(toy_model.toy_layer(key, config, dtype))  # noqa: E731
        names = ("attention_norm", "attention", "mlp_norm", "mlp")
        layer = lambda key: BalancedBlock(**{name: parts(key)[name] for name in names})  # noqa: E731
        self.blocks = stack(key, config, layer)

    def counts(self, batch):
        return super().counts(batch) | dict.fromkeys(("balance_loss", "cubes"), batch["tokens"].size)


class BalancedConfig(toy_model.ToyConfig):
    module = f"{__name__}:Balanced"


class Capped(toy_model.Toy):
    """Scores of at most 30, so that they are not the rows of a table times the stream."""

    def logits(self, x, tokens):
        return 30 * jnp.tanh(super().logits(x, tokens) / 30)


class CappedConfig(toy_model.ToyConfig):
    module = f"{__name__}:Capped"


class Stacked(toy_model.Toy):
    """Two layers, then three of another width of the MLP."""

    def __init__(self, key, config, dtype):
        super().__init__(key, config, dtype)
        wide = replace(config, feed_forward=2 * config.feed_forward)
        narrow, wide = (partial(toy_model.toy_layer, config=each, dtype=dtype) for each in (config, wide))
        self.blocks = stack(key, config, {"narrow": narrow, "wide": wide})


class StackedConfig(toy_model.ToyConfig):
    module = f"{__name__}:Stacked"
    pattern = Pattern((LayerKind(weights="wide"),), (LayerKind(weights="narrow"),) * 2)


STACKED = StackedConfig(**vars(replace(MODEL, layers=5)))


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(MODEL, {"pipe": 2, "virtual_stages": 2, "data": 2, "model": 2}, marks=pytest.mark.ci),
        pytest.param(MODEL, {"data": 2, "model": 2, "loss_chunks": 5}, marks=pytest.mark.ci),
        (STACKED, {"data": 2, "model": 4, "sequence_parallel": True, "zero": 3}),
    ],
    ids=["pipeline", "loss in chunks", "stacks"],
)
def test_loss_and_gradients_equal_the_serial_reference(model, mesh):
    config = config_of(model, **mesh)

    def total(weights):
        loss, (reported, _) = reference.total(weights, as_llama(model), batch_of(config))
        return loss, reported

    compare(config, total)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [(BalancedConfig, {"pipe": 2}), pytest.param(BalancedConfig, {"data": 2, "model": 4}, marks=pytest.mark.ci)],
    ids=["pipeline", "mesh"],
)
def test_sum_of_layers_is_part_of_the_loss(kind, mesh, monkeypatch):
    """Its weight scales the gradient; a metric without a weight has no gradient."""
    model = kind(**vars(MODEL))
    config = config_of(model, **mesh)
    twin, batch, norm = as_llama(model), batch_of(config), reference.norm

    def total(weights):
        streams = []

        def noted(x, w, name, *how):
            if name == "attention_norm" or name == "final_norm":
                streams.append(x)  # what every layer is given, and what the last one gives
            return norm(x, w, name, *how)

        monkeypatch.setattr(reference, "norm", noted)
        loss, _ = reference.total(weights, twin, batch)
        squares, cubes = (sum((x**n).sum() for x in streams[1:]) / batch["tokens"].size for n in (2, 3))
        return loss + 0.25 * squares, jnp.stack([loss, squares, cubes])

    compare(config, total, ("loss", "balance_loss", "cubes"))


def test_own_logits_are_in_the_loss_and_refused_in_chunks(monkeypatch):
    model = CappedConfig(**vars(MODEL))
    config, scores = config_of(model), reference.next_token_scores
    capped = lambda *x: 30 * jnp.tanh(scores(*x) / 30)  # noqa: E731
    monkeypatch.setattr(reference, "next_token_scores", capped)

    def total(weights):
        loss, (reported, _) = reference.total(weights, as_llama(model), batch_of(config))
        return loss, reported

    compare(config, total)
    with pytest.raises(UsageError, match=r"--train.loss-chunks 2 needs a loss that computes no logits"):
        ledger(config_of(model, loss_chunks=2))


@pytest.mark.parametrize("way", ["ulysses", "allgather"])
def test_positions_split_over_context_equal_the_serial_reference(way):
    config = replace(config_of(context=2, context_attention=way), data=DataConfig(mock=True))

    def total(weights):
        loss, (reported, _) = reference.total(weights, as_llama(MODEL), batch_of(config))
        return loss, reported

    compare(config, total)


class Shifted(toy_model.GatedMLP):
    """Mixes each token with the one before it; the attribute of its base is not for its own `__call__`."""

    def __call__(self, x, context):
        return super().__call__(jnp.roll(x, 1, 0), context)


class Counted(toy_model.Rotary):
    def apply_to_qk(self, q, k, context):
        return q * jnp.arange(q.shape[1])[:, None, None], k


def test_old_name_of_a_position_encoding_is_rejected():
    """Otherwise the method would never be called, and the model would have no positions."""
    with pytest.raises(UsageError, match=r"Old\.turn is apply_to_qk now; rename the method"):
        type("Old", (toy_model.Rotary,), {"turn": lambda self, q, k, context: (q, k)})


class OwnEmbedding(toy_model.Toy):
    def embed(self, batch, context):
        return super().embed(batch, context).at[0].set(0.0)


def toy_of(model=toy_model.Toy, block=Block, mlp=toy_model.GatedMLP, positions=toy_model.Rotary):
    """The config of a toy with these classes."""

    def layer(key, config, dtype):
        made = toy_model.toy_layer(key, config, dtype)
        made.attention.positions, made.mlp = positions(), mlp(key, config, dtype)
        names = "attention_norm", "attention", "mlp_norm", "mlp"
        return block(**{name: getattr(made, name) for name in names})

    class Made(model):
        def __init__(self, key, config, dtype):
            super().__init__(key, config, dtype)
            self.blocks = stack(key, config, partial(layer, config=config, dtype=dtype))

    made = type("MadeConfig", (toy_model.ToyConfig,), {"build": lambda self, key, dtype: Made(key, self, dtype)})
    Made.__name__ = model.__name__
    return made(**vars(MODEL))


@pytest.mark.parametrize(
    "parts", [{"mlp": Shifted}, {"positions": Counted}, {"model": OwnEmbedding}], ids=lambda parts: next(iter(parts))
)
def test_class_that_may_mix_positions_is_refused_under_context(parts):
    (cls,) = parts.values()
    model = toy_of(**parts)
    with pytest.raises(UsageError, match=rf"--mesh.context 2 .* {cls.__name__} of a toy .*mixes_positions = False"):
        ledger(config_of(model, context=2))
    assert {context for _, _, context, _ in meshes(config_of(replace(model, sequence=2**14)), 8)} == {1}


def test_layer_answers_for_the_modules_in_it():
    model = toy_of(block=BalancedBlock, mlp=Shifted)
    assert mixing_class(model) is None
    assert {context for _, _, context, _ in meshes(config_of(replace(model, sequence=2**15)), 8)} == {1, 2, 4, 8}


def test_flops_and_memory_of_stacks_are_those_of_layers_added():
    alone = {width: model_flops(config_of(replace(MODEL, layers=1, feed_forward=width))) for width in (24, 48)}
    head = 2 * alone[24] - model_flops(config_of(replace(MODEL, layers=2)))
    assert model_flops(config_of(STACKED)) == 2 * (alone[24] - head) + 3 * (alone[48] - head) + head
    with pytest.raises(
        UsageError, match=r"--mesh.pipe 8 is more than a toy can fill with 6 layers; use at most 6 stages"
    ):
        ledger(config_of(replace(STACKED, layers=6), pipe=8))
    kept = {width: predict_memory(config_of(replace(MODEL, layers=1, feed_forward=width))) for width in (24, 48)}
    planned = predict_memory(config_of(STACKED), gpu_named("h100").compute_capability)
    assert planned.activations == 2 * kept[24].activations + 3 * kept[48].activations


# --- What comes with it -----------------------------------------------------------------------------------------------


def test_plan_counts_parameters_and_flops_as_by_hand(capsys):
    assert cli.main(["plan", "--config", str(ROOT / "tests" / "toy_model.py"), "--json"]) == 0
    model, train = toy_model.config.model, toy_model.config.train
    h, f, s, v = model.hidden, model.feed_forward, model.sequence, model.padded_vocabulary
    layer = h * (model.heads + 2 * model.kv_heads) * model.head_size + h * h + 3 * h * f
    parameters = model.layers * (layer + 2 * h) + h + 2 * v * h
    assert json.loads(capsys.readouterr().out)["run"]["parameters"] == count_parameters(model) == parameters
    forward = 2 * s * (model.layers * (layer + 2 * s * h) + v * h)
    assert model_flops(toy_model.config) == 3 * train.global_batch * forward


class WithoutRecurrence(hybrid.HybridConfig):
    pattern = Pattern((LayerKind(weights="attention"),))


@pytest.mark.parametrize("kernel", ["auto", "xla"])
def test_layers_without_attention_take_no_time_for_it(kernel):
    values, gpu = vars(replace(hybrid.config.model, attention=kernel)), gpu_named("h100")
    configs = (config_of(kind(**values), "bf16") for kind in (WithoutRecurrence, hybrid.HybridConfig))
    whole, third = (predict_time(config, gpu).parts["attention"] for config in configs)
    assert 0 < third == pytest.approx(whole / 3)


def test_search_plans_model_without_field_for_dropout(capsys):
    flags = "--gpu", "h100", "--devices", "2", "--json"
    assert cli.main(["plan", "--config", str(ROOT / "tests" / "toy_model.py"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["search"]["best"]


@pytest.mark.compiler
def test_ledger_and_memory_are_those_of_the_compiled_step():
    model = replace(MODEL, hidden=1024, feed_forward=2816, sequence=1024, vocabulary=32_000, attention="auto")
    config = config_of(model, "bf16", data=2, model=4)
    config = replace(config, train=replace(config.train, global_batch=16), data=DataConfig(mock=True))
    compiled = compile_step(config, "h100")
    found = counted(read_collectives(compiled.text, sizes(config.mesh)))
    expected = count_in_program(ledger(config))
    assert {key: size for key, (_, size) in found.items()} == {key: size for key, (_, size) in expected.items()}
    predicted = predict_memory(config, gpu_named("h100").compute_capability).total
    assert predicted == pytest.approx(compiled.memory.total, rel=0.05)
