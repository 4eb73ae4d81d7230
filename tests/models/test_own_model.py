"""A model of one file outside mjax gets everything: any mesh, checkpoints, a plan, FLOPs, the ledger, memory, text."""

import json
from dataclasses import replace
from functools import cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax import cli
from mjax.config import MeshConfig
from mjax.errors import UsageError
from mjax.generation import Generator
from mjax.hardware import gpu_named
from mjax.models.block import Block, stack
from mjax.models.build import build_model, count_parameters
from mjax.parallel.mesh import make_mesh
from mjax.planner.comms import ledger
from mjax.planner.compile import compile_step
from mjax.planner.compile_section import totals
from mjax.planner.memory import predict_memory
from mjax.sampling import Sampling
from mjax.training.flops import model_flops
from mjax.training.metrics import read_metrics
from tests import toy_model
from tests.compiler import needs_compiler
from tests.conftest import ROOT
from tests.products import one_in
from tests.reference import QUICKLY
from tests.small import gradient_program, named, packing_of, weights_of

pytestmark = pytest.mark.usefixtures("quick_runs")

MODEL = replace(toy_model.config.model, layers=4, hidden=32, sequence=16, feed_forward=24, attention="xla")
PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}
MESHES = {
    "1 × 1": {},
    "2 × 4": {"data": 2, "model": 4},
    "2 × 4, sequence parallel, FSDP": {"data": 2, "model": 4, "sequence_parallel": True, "zero": 3},
    "pipe 2": {"pipe": 2, "data": 2, "model": 2},
    "pipe 2, split backward passes": {"pipe": 2, "schedule": "zb-h1"},
    "pipe 2, two chunks": {"pipe": 2, "chunks": 2},
    "two streams": {"data": 2, "model": 2, "streams": 2},
    "loss in chunks": {"data": 2, "model": 4, "loss_chunks": 5},
}


def config_of(architecture=MODEL, recompute="none", packed=True, streams=1, loss_chunks=1, **mesh):
    config = toy_model.config
    train = replace(config.train, global_batch=8, micro_batch=streams, recompute=recompute, streams=streams)
    return replace(
        config,
        model=architecture,
        mesh=MeshConfig(**mesh),
        data=replace(config.data, mock=True, **(PACKED if packed else {})),
        precision=replace(config.precision, compute="fp64"),
        train=replace(train, loss_chunks=loss_chunks),
    )


def batch_of(config):
    rows = np.random.default_rng(0).integers(0, config.model.vocabulary, (8, config.model.sequence + 1))
    rows = rows.astype(np.int32)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:], **packing_of(8, config.model.sequence)}


# --- The same in 30 lines of NumPy's kind -----------------------------------------------------------------------------


def norm(x, scale, model):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.epsilon) * scale


def rotated(x, places):
    """Pairs (i, i + d / 2) as complex numbers, turned by an angle: x [b, s, n, d]."""
    half = x.shape[-1] // 2
    turn = jnp.exp(1j * places[..., None] * 1e4 ** (-jnp.arange(half) / half))[:, :, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], -1)


def layer_of(w, x, model, batch):
    h = norm(x, w["attention_norm.scale"], model)
    q = rotated(jnp.einsum("bsh,hnd->bsnd", h, w["attention.query.kernel"]), batch["positions"])
    k, v = jnp.einsum("bsh,hckd->cbskd", h, w["attention.key_value.kernel"])
    k = rotated(k, batch["positions"])
    scores = jnp.einsum("bqkgd,bpkd->bkgqp", q.reshape(*k.shape[:3], -1, k.shape[-1]), k) / np.sqrt(model.head_size)
    same = batch["documents"][:, :, None] == batch["documents"][:, None]
    visible = (np.tri(x.shape[1], dtype=bool) & same)[:, None, None]
    context = jnp.einsum("bkgqp,bpkd->bqkgd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), v)
    x = x + jnp.einsum("bsnd,ndh->bsh", context.reshape(q.shape), w["attention.out.kernel"])
    up = jnp.einsum("bsh,hcf->cbsf", norm(x, w["mlp_norm.scale"], model), w["mlp.up.kernel"])
    return x + (up[0] / (1 + jnp.exp(-up[0])) * up[1]) @ w["mlp.down.kernel"]


def serial_logits(weights, model, batch, balance=None):
    x = weights["embedding.table"][batch["tokens"]]
    for name in sorted({key.rpartition(".")[0] for key in weights if key.endswith("attention.query.kernel")}):
        prefix = name.removesuffix("attention.query")
        stacked = {key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)}
        for number in range(len(stacked["attention_norm.scale"])):
            x = layer_of({key: w[number] for key, w in stacked.items()}, x, model, batch)
            if balance is not None:
                balance.append((x**2).sum())
    return (norm(x, weights["final_norm.scale"], model) @ weights["head.table"].T)[..., : model.vocabulary]


def serial_loss(weights, model, batch, balance=None):
    scores = serial_logits(weights, model, batch, balance)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["labels"][..., None], -1)[..., 0]
    return -(chosen * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


@cache
def expected_of(model):
    config = config_of(model)
    loss = jax.jit(jax.value_and_grad(serial_loss), static_argnums=1, compiler_options=QUICKLY)
    return loss(named(weights_of(config)), model, batch_of(config))


@pytest.mark.parametrize(
    ("mesh", "recompute"), one_in(2, [*((mesh, "none") for mesh in MESHES), ("pipe 2", "selective")])
)
def test_loss_and_gradients_equal_the_serial_reference_in_float64(mesh, recompute):
    with jax.enable_x64(True):
        config = config_of(recompute=recompute, **MESHES[mesh])
        program, place = gradient_program(config)
        loss, gradients = program(place(), batch_of(config), jnp.int32(0), jnp.float64(1.0))
        expected_loss, expected = expected_of(MODEL)
        assert abs(float(loss) - float(expected_loss)) < 1e-13
        for name, gradient in named(gradients).items():
            np.testing.assert_allclose(
                gradient.reshape(expected[name].shape), expected[name], rtol=0, atol=1e-14, err_msg=name
            )


# --- Sums beside the stream, and stacks of different layers -----------------------------------------------------------


class BalancedBlock(Block):
    """A layer that adds the squares of the stream to the loss."""

    def __call__(self, x, context):
        x = super().__call__(x, context)
        return x, {"balance_loss": jnp.square(x).sum()}


class BalancedInPhases(Block):
    """The same for two streams."""

    def phases(self, x, context):
        x = yield from super().phases(x, context)
        return x, {"balance_loss": jnp.square(x).sum()}


class Balanced(toy_model.Toy):
    loss_weights: ClassVar = {"loss": 1.0, "balance_loss": 0.25}
    block: ClassVar = BalancedBlock

    def __init__(self, key, config, dtype):
        super().__init__(key, config, dtype)
        parts = lambda key: vars(toy_model.toy_layer(key, config, dtype))  # noqa: E731
        names = ("attention_norm", "attention", "mlp_norm", "mlp")
        layer = lambda key: self.block(**{name: parts(key)[name] for name in names})  # noqa: E731
        self.blocks = stack(key, config.layers, layer)

    def counts(self, batch):
        return super().counts(batch) | {"balance_loss": batch["tokens"].size}


class BalancedConfig(toy_model.ToyConfig):
    module = f"{__name__}:Balanced"


class InPhases(Balanced):
    block: ClassVar = BalancedInPhases


class InPhasesConfig(toy_model.ToyConfig):
    module = f"{__name__}:InPhases"


class Stacked(toy_model.Toy):
    """Two layers, then three of another width of the MLP."""

    def __init__(self, key, config, dtype):
        super().__init__(key, config, dtype)
        wide = replace(config, feed_forward=2 * config.feed_forward)
        self.blocks = nnx.List([
            stack(key, 2, lambda key: toy_model.toy_layer(key, config, dtype)),
            stack(key, 3, lambda key: toy_model.toy_layer(key, wide, dtype)),
        ])  # fmt: skip


class StackedConfig(toy_model.ToyConfig):
    module = f"{__name__}:Stacked"


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        pytest.param("1 × 1", BalancedConfig, marks=pytest.mark.ci),
        ("2 × 4", BalancedConfig),
        pytest.param("pipe 2", BalancedConfig, marks=pytest.mark.ci),
        pytest.param("pipe 2, two chunks", BalancedConfig, marks=pytest.mark.ci),
        pytest.param("pipe 2, split backward passes", BalancedConfig, marks=pytest.mark.ci),
        ("two streams", InPhasesConfig),  # and an MLP that is not written in phases
    ],
)
def test_a_sum_of_the_layers_is_part_of_the_loss_on_every_mesh(mesh, kind):
    with jax.enable_x64(True):
        model = kind(**vars(MODEL))
        config = config_of(model, **MESHES[mesh])
        weights = named(weights_of(config_of(model)))
        program, place = gradient_program(config, names=("loss", "balance_loss"))
        found, gradients = program(place(), batch_of(config), jnp.int32(0), jnp.float64(1.0))

        def total(weights):
            balance = []
            loss = serial_loss(weights, model, batch_of(config), balance)
            mean = sum(balance) / batch_of(config)["tokens"].size
            return loss + 0.25 * mean, jnp.stack([loss, mean])

        gradient = jax.jit(jax.grad(total, has_aux=True), compiler_options=QUICKLY)
        expected_gradients, expected = gradient(weights)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for name, gradient in named(gradients).items():
            wanted = expected_gradients[name]
            np.testing.assert_allclose(gradient.reshape(wanted.shape), wanted, rtol=0, atol=1e-12, err_msg=name)


def test_layers_that_two_streams_would_run_without_what_they_add_are_refused():
    config = config_of(BalancedConfig(**vars(MODEL)), **MESHES["two streams"])
    with pytest.raises(UsageError, match=r"--train.streams 2 needs .* BalancedBlock has no `phases` of its own"):
        ledger(config)


class Capped(toy_model.Toy):
    """Scores of at most 30, so that they are not the rows of a table times the stream."""

    def logits(self, x, tokens):
        return 30 * jnp.tanh(super().logits(x, tokens) / 30)


class CappedConfig(toy_model.ToyConfig):
    module = f"{__name__}:Capped"


def test_logits_of_its_own_are_those_of_the_loss_and_are_refused_in_chunks():
    model = CappedConfig(**vars(MODEL))
    with jax.enable_x64(True):
        program, place = gradient_program(config_of(model))
        weights = jax.tree.map(lambda weight: 20 * weight, place())
        found, _ = program(weights, batch_of(config_of(model)), jnp.int32(0), jnp.float64(1.0))
        batch = batch_of(config_of(model))
        scores = 30 * jnp.tanh(serial_logits(named(weights), model, batch) / 30)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["labels"][..., None], -1)[..., 0]
        expected = -(chosen * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(
        UsageError, match=r"--train.loss-chunks 2 needs .* `output` .* Capped has a `logits` of its own"
    ):
        ledger(config_of(model, loss_chunks=2))


@pytest.mark.parametrize(
    "mesh", ["1 × 1", pytest.param("2 × 4", marks=pytest.mark.ci), "2 × 4, sequence parallel, FSDP"]
)
def test_stacks_of_different_layers_run_one_after_the_other(mesh):
    with jax.enable_x64(True):
        model = StackedConfig(**vars(replace(MODEL, layers=5)))
        config = config_of(model, **MESHES[mesh])
        program, place = gradient_program(config)
        loss, gradients = program(place(), batch_of(config), jnp.int32(0), jnp.float64(1.0))
        expected_loss, expected = expected_of(model)
        assert abs(float(loss) - float(expected_loss)) < 1e-13
        for name, gradient in named(gradients).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-14, err_msg=name)


def test_flops_and_memory_of_stacks_are_those_of_their_layers_added_up_and_a_pipeline_is_refused():
    model = StackedConfig(**vars(replace(MODEL, layers=5)))
    alone = {width: model_flops(config_of(replace(MODEL, layers=1, feed_forward=width))) for width in (24, 48)}
    head = 2 * alone[24] - model_flops(config_of(replace(MODEL, layers=2)))
    found = model_flops(config_of(model))
    assert found == 2 * (alone[24] - head) + 3 * (alone[48] - head) + head
    with pytest.raises(UsageError, match=r"--mesh.pipe 2 cannot split a toy, which has several stacks of layers"):
        ledger(config_of(replace(model, layers=6), pipe=2))
    kept = {width: predict_memory(config_of(replace(MODEL, layers=1, feed_forward=width))) for width in (24, 48)}
    planned = predict_memory(config_of(model), gpu_named("h100").compute_capability)
    assert planned.activations == 2 * kept[24].activations + 3 * kept[48].activations


# --- What comes with it -----------------------------------------------------------------------------------------------

FLAGS = "--data.mock --train.eval-interval 0 --train.micro-batch 1 --optimizer.warmup-steps 0 --log.no-tensorboard"
WIDE = "--mesh.data", "8", "--mesh.model", "2"
DEEP = "--mesh.pipe", "2", "--mesh.data", "4", "--mesh.model", "2"


def losses_of(folder, name, *flags):
    command = ["train", "--config", str(ROOT / "tests" / "toy_model.py"), "--runs", str(folder), "--name", name]
    assert cli.main([*command, *FLAGS.split(), *flags]) == 0
    return [record["loss"] for record in read_metrics(folder / name / "metrics.jsonl")]


@pytest.mark.ci
def test_a_run_is_continued_bit_for_bit_and_on_another_mesh(tmp_path):
    same = "--optimizer.decay-steps", "4", *WIDE
    whole = losses_of(tmp_path, "whole", "--train.steps", "4", *same)
    losses_of(tmp_path, "cut", "--train.steps", "2", *same)
    assert losses_of(tmp_path, "cut", "--train.steps", "4", *same) == whole
    losses_of(tmp_path, "moved", "--train.steps", "2", *same)
    assert losses_of(tmp_path, "moved", "--train.steps", "4", *same, *DEEP) == pytest.approx(whole, rel=1e-6)


def test_the_plan_counts_its_parameters_and_flops_by_hand(capsys):
    assert cli.main(["plan", "--config", str(ROOT / "tests" / "toy_model.py"), "--data.mock", "--json"]) == 0
    model, train = toy_model.config.model, toy_model.config.train
    h, f, s, v = model.hidden, model.feed_forward, model.sequence, model.padded_vocabulary
    layer = h * (model.heads + 2 * model.kv_heads) * model.head_size + h * h + 3 * h * f
    parameters = model.layers * (layer + 2 * h) + h + 2 * v * h
    assert json.loads(capsys.readouterr().out)["run"]["parameters"] == count_parameters(model) == parameters
    forward = 2 * s * (model.layers * (layer + 2 * s * h) + v * h)
    assert model_flops(toy_model.config) == 3 * train.global_batch * forward


def test_greedy_text_is_what_the_whole_forward_pass_gives():
    config = replace(config_of(packed=False), precision=replace(toy_model.config.precision, compute="fp32"))
    weights = jax.tree.map(lambda w: w * 4, build_model(3, config.model))
    prompt, generator = [5, 17, 31], Generator(config, make_mesh(config.mesh))
    (found,) = generator.generate(weights, [prompt], Sampling(tokens=6, temperature=0.0), eod=-1)
    ids, length = list(prompt), len(prompt) + 6
    logits = jax.jit(serial_logits, static_argnums=1, compiler_options=QUICKLY)
    for _ in range(6):
        batch = {
            "tokens": np.array([ids + [0] * (length - len(ids))]),  # what follows is not seen
            "positions": np.arange(length)[None],
            "documents": np.zeros((1, length)),
        }
        ids.append(int(logits(named(weights), config.model, batch)[0, len(ids) - 1].argmax()))
    assert found.tokens == ids[3:]


@needs_compiler
def test_the_ledger_and_the_predicted_memory_are_those_of_the_compiled_step():
    model = replace(MODEL, hidden=1024, feed_forward=2816, sequence=1024, vocabulary=32_000, attention="auto")
    config = replace(
        config_of(model, packed=False, data=2, model=4), train=replace(toy_model.config.train, global_batch=16)
    )
    config = replace(config, precision=replace(config.precision, compute="bf16"))
    compiled = compile_step(config, "h100")
    assert compiled.program.bytes_by() == {key: size for key, (_, size) in totals(ledger(config).records).items()}
    predicted = predict_memory(config, gpu_named("h100").compute_capability).total
    assert predicted == pytest.approx(compiled.memory.total, rel=0.05)
