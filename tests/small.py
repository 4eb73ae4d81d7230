"""The small model that most tests share, so that compiled programs are shared too."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import (
    Config,
    DataConfig,
    GPTConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)
from mjax.config.model import convert_kind
from mjax.models.build import build_model
from mjax.parallel.mesh import batch_specs, make_mesh
from mjax.parallel.weights import leaf_name, trainable_only
from mjax.parallel.zero import plan_storage, split_into_virtual_stages
from mjax.step.precision import parameter_type
from mjax.step.step import TrainProgram, build_program, loss_and_gradients

MODEL = GPTConfig(
    layers=2,
    hidden=32,
    heads=8,
    sequence=16,
    vocabulary=60,
    vocabulary_multiple=64,
    attention="xla",
    hidden_dropout=0.1,
    attention_dropout=0.1,
)

# BLOOM's variant, with a number of heads that is not a power of two.
BLOOM = {"positions": "alibi", "embedding_layernorm": True, "hidden": 48, "heads": 6}

# Compiled quickly rather than well: compilation is the cost of these tests, and they compare numbers.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def small_config(
    data=1,
    model=1,
    micro_batch=1,
    recompute="none",
    compute="fp32",
    dropout=0.1,
    global_batch=8,
    mesh=None,
    samples=None,
    unroll="auto",
    loss_chunks=1,
    **changes,
) -> Config:
    kind = "bert_task" if "head" in changes else changes.pop("kind", "gpt")
    changes.pop("kind", None)
    architecture = convert_kind(MODEL, kind)
    rates = {name for name in ("hidden_dropout", "attention_dropout") if name in architecture.__dataclass_fields__}
    return Config(
        model=replace(architecture, **dict.fromkeys(rates, dropout), **changes),
        mesh=MeshConfig(data=data, model=model, **(mesh or {})),
        data=DataConfig(mock=True, **(samples or {})),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        precision=PrecisionConfig(compute=compute),
        train=TrainConfig(
            steps=100,
            global_batch=global_batch,
            micro_batch=micro_batch,
            recompute=recompute,
            unroll=unroll,
            loss_chunks=loss_chunks,
            seed=1234,
        ),
    )


def batch_of(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    if config.model.samples is None:
        return examples_of(config, seed)
    if config.model.samples == "pairs":
        return pairs_of(config, seed)
    shape = (config.train.global_batch, config.model.sequence + 1)
    rows = np.random.default_rng(seed).integers(0, config.model.vocabulary, shape).astype(np.int32)
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:], **packing_of(*rows[:, 1:].shape)}
    return {name: batch[name] for name in config.data.batch_types()}


def pairs_of(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Random pairs for a BERT: another amount of padding and of masked tokens in each, and none masked in the first."""
    random, shape = np.random.default_rng(seed), (config.train.global_batch, config.model.sequence)
    row, place = np.arange(shape[0])[:, None], np.arange(shape[1])
    length = shape[1] - row * 3 % (shape[1] // 2)
    return {
        "tokens": random.integers(0, config.model.vocabulary, shape).astype(np.int32),
        "labels": random.integers(0, config.model.vocabulary, shape).astype(np.int32),
        "loss_mask": (place < length) & ((place * 7 + row * 3) % shape[0] < row),
        "token_types": ((place >= 2 + row % 5) & (place < length)).astype(np.int32),
        "documents": (place >= length).astype(np.int32),
        "sentence_order": random.integers(0, 2, shape[0]).astype(np.int32),
    }


def examples_of(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Random examples for the head of a task: another amount of padding in each row, and labels that are text."""
    model, random = config.model, np.random.default_rng(seed)
    shape = config.train.global_batch, model.sequences, model.sequence
    row, place = np.arange(shape[0] * shape[1]).reshape(*shape[:2], 1), np.arange(shape[2])
    length = shape[2] - row * 3 % (shape[2] // 2)
    limit = length[:, 0, 0] if model.head == "span" else model.num_labels
    return {
        "tokens": random.integers(0, model.vocabulary, shape).astype(np.int32),
        "token_types": ((place >= 2 + row % 5) & (place < length)).astype(np.int32),
        "documents": (place >= length).astype(np.int32),
        **{name: random.integers(0, limit, shape[0]).astype(np.int32) for name in model.label_names},
    }


def packing_of(samples: int, positions: int) -> dict[str, np.ndarray]:
    """Four documents a sample, cut elsewhere in each, the second of them one token long; and a mask under which every
    sample has another number of unmasked labels, the first has 0."""
    row, place = np.arange(samples)[:, None], np.arange(positions)
    second = 2 + row % (positions // 2 - 3)
    cuts = np.stack([np.zeros_like(second), second, second + 1, np.full_like(second, positions // 2)])
    documents = (place >= cuts).sum(0) - 1
    starts = np.take_along_axis(cuts[:, :, 0].T, documents, axis=1)
    return {
        "documents": documents.astype(np.int32),
        "positions": (place - starts).astype(np.int32),
        "loss_mask": (place * 7 + row * 3) % samples < row,
    }


@cache
def program_of(config: Config) -> TrainProgram:
    """The program of `config`, written and compiled once for all tests of a process."""
    return build_program(config, make_mesh(config.mesh))


def initial_state(program: TrainProgram):
    """The first state with the bits of XLA's defaults; at level 0, the last bit depends on the shape of an array."""
    return program.initialize.lower().compile(compiler_options={"xla_backend_optimization_level": 1})()


def named(tree) -> dict[str, np.ndarray]:
    return {leaf_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def weights_of(config: Config):
    """A model of `config` as NumPy's arrays, which every mesh starts from.

    Biases and LayerNorm weights are drawn at random, so that a term which multiplies them cannot hide behind zeros.
    """
    model, random = config.model, np.random.default_rng(config.train.seed)

    def draw(path, weight):
        name, noise = leaf_name(path), random.standard_normal(weight.shape)
        noise *= 0.1 if name.endswith(("bias", "scale")) else model.init_std
        return (noise + name.endswith("scale")).astype(weight.dtype)

    shapes = jax.eval_shape(lambda: build_model(0, model, parameter_type(config.precision.compute)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@cache
def compiled_step(config: Config):
    """The program of `config` and its compiled training step: (state, batch, limit of the loss) → state, metrics."""
    program = program_of(config)
    limit = jax.ShapeDtypeStruct((), jnp.float32)
    step = program.train_step.lower(program.abstract_state, program.abstract_batch, limit)
    return program, step.compile(compiler_options=QUICKLY)


def state_of(config: Config):
    """The first state with the weights of `measure_weights`."""
    program = program_of(config)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state.model)
    return program.begin(jax.device_put(split_into_virtual_stages(weights_of(config), config.mesh), shardings))


MEANS = {
    "bert": ("mlm_loss", "order_loss", "order_accuracy"),
    "bert_task": ("loss", "accuracy"),
    "mixture": ("loss", "router_entropy", "balance_loss", "z_loss", "expert_load"),  # with both coefficients
}


def names_of(model):
    """The means that a model reports."""
    if model.kind != "deepseek":
        return MEANS.get(model.kind, ("loss",))
    return (*MEANS["mixture"], *(["mtp_loss"] if model.mtp_layers else []))


def as_vector(means, names):
    """Return a model's report as one array, in the order of the serial references: [] of one name, else [k]. One device
    has no rounds."""
    means = {name: mean for name, mean in means.items() if not mean.ndim and name != "dispatch_rounds"}
    assert means.keys() == set(names)
    values = [means[name] for name in names]
    return values[0] if len(values) == 1 else jnp.stack(values)


def gradient_program(config: Config, names: tuple[str, ...] | None = None):
    """(weights, batch, step, scale) → loss and gradients on the mesh of `config`, and a function that places the
    weights on it.
    """
    names = names or names_of(config.model)
    mesh = make_mesh(config.mesh)
    model = split_into_virtual_stages(weights_of(config), config.mesh)
    plan = plan_storage(model, nnx.get_partition_spec(model), config.mesh)
    specs = jax.tree.map(lambda storage: storage.spec, plan)
    shardings = jax.tree.map(partial(jax.NamedSharding, mesh), specs)

    def summarized(model, batch, step, scale):
        means, gradients = loss_and_gradients(config, plan, model, batch, step, scale)
        return model.summary(means), gradients

    program = jax.shard_map(
        summarized,
        mesh=mesh,
        in_specs=(specs, batch_specs(config.batch_arrays(), config.model.sequence), P(), P()),
        out_specs=(P(), trainable_only(specs)),
        check_vma=True,
    )

    def with_vector(*arguments):
        means, gradients = program(*arguments)
        return as_vector(means, names), gradients

    return jax.jit(with_vector, compiler_options=QUICKLY), lambda: jax.device_put(model, shardings)
