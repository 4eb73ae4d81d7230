"""Compare the parallel step with the serial reference: largest difference of loss (for BERT all metrics) and
gradients."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config import MeshConfig, OptimizerConfig
from mjax.config.pattern import find_rows
from tests import reference
from tests.small import as_vector, batch_of, compiled_step, gradient_program, named, names_of, state_of, weights_of

STEP = 3  # numbers the dropout masks

# One number added to all scores of a softmax changes nothing.
WITHOUT_EFFECT = {"multiple_choice": ("head.bias",), "span": ("head.bias", "final_norm.bias")}


def in_layer_order(tree, config) -> dict[str, np.ndarray]:
    """Whole arrays by name, layers as [l, …] even where a pipeline has cut them into chunks."""

    def joined(name, value):
        rows = find_rows(config.model, config.mesh, name)
        cut = rows and rows.even and rows.chunks > 1
        return value.reshape(-1, *value.shape[2:]) if cut else value

    return {name: joined(name, value) for name, value in named(tree).items()}


@cache
def _serial(config) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    masks = None
    if config.model.hidden_dropout:
        sequences = config.train.global_batch * config.model.sequences
        masks = reference.dropout_masks(config.model, sequences, config.train.seed, STEP)
    weights, model = named(weights_of(config)), config.model
    found, gradients = reference.loss_and_gradients(
        merged(weights, model), model.without_lora(), batch_of(config), masks
    )
    return np.asarray(found), of_trained(gradients, weights, model)


# --- LoRA: W + s A B in place of W, and the chain rule ----------------------------------------------------------------

PARTS = {"qkv": "q k v", "query": "q", "key_value": "k v"}


def adapters_of(weights, model):
    """Yield each kernel with adapters: its name, and for each of these its index in the kernel, A [l, in, r], B [l, r,
    out] and the shape of that part of the kernel."""
    named = {"q", "k", "v", "out", "gate", "up", "down", "query", "q_up", "kv_up", "q_down", "kv_down"}
    wanted = named if "all" in model.lora_targets else {*model.lora_targets}
    for name, a in weights.items():
        if not name.endswith(".adapter.a"):
            continue
        layer = name.removesuffix(".adapter.a")
        kernel, b, last = weights[f"{layer}.kernel"], weights[f"{layer}.adapter.b"], layer.rpartition(".")[2]
        if last in ("out", "down", "q_down", "kv_down"):
            yield layer, [(np.s_[:], a.reshape(len(a), -1, a.shape[-1]), b, kernel.shape)]
            continue
        parts = "gate up" if last == "up" and kernel.ndim - b.ndim == 0 else PARTS.get(last, last)
        chosen = [i for i, part in enumerate(parts.split()) if part in wanted]
        assert len(chosen) == a.shape[2] == b.shape[1], name
        whole = len(parts.split()) == 1
        yield (
            layer,
            [
                (
                    np.s_[:] if whole else np.s_[:, :, part],
                    a[:, :, i],
                    b[:, i].reshape(*b.shape[:1], b.shape[2], -1),
                    kernel.shape if whole else (*kernel.shape[:2], *kernel.shape[3:]),
                )
                for i, part in enumerate(chosen)
            ],
        )


def scale_of(model):
    return (model.lora_alpha or 2 * model.lora_rank) / model.lora_rank


def merged(weights, model):
    """The weights of the model without adapters that computes the same."""
    if not model.lora_rank:
        return weights
    base = {name: weight.copy() for name, weight in weights.items() if ".adapter." not in name}
    for layer, adapters in adapters_of(weights, model):
        for index, a, b, shape in adapters:
            base[f"{layer}.kernel"][index] += scale_of(model) * np.einsum("lir,lro->lio", a, b).reshape(shape)
    return base


def of_trained(gradients, weights, model):
    """The gradients of trained weights: unchanged, or of all A and B, computed from the gradients of the merged
    kernels."""
    gradients, found = {name: np.asarray(gradient) for name, gradient in gradients.items()}, {}
    if not model.lora_rank:
        return gradients
    for layer, adapters in adapters_of(weights, model):
        to_a, to_b = [], []
        for index, a, b, _ in adapters:
            gradient = gradients[f"{layer}.kernel"][index].reshape(len(a), a.shape[1], -1)
            to_a.append(scale_of(model) * np.einsum("lio,lro->lir", gradient, b))
            to_b.append(scale_of(model) * np.einsum("lir,lio->lro", a, gradient))
        for name, parts, axis in (("a", to_a, 2), ("b", to_b, 1)):
            name = f"{layer}.adapter.{name}"
            found[name] = np.stack(parts, axis).reshape(weights[name].shape)
    return found


def reference_of(config) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return reported values and gradients, computed once for all meshes, kernels and kinds of recomputation."""
    train = replace(config.train, micro_batch=1, recompute="none", loss_chunks=1, unroll="auto")
    return _serial(replace(config, model=replace(config.model, attention="xla"), mesh=MeshConfig(), train=train))


def update_errors(config) -> dict[str, float]:
    """Return the largest error by name, of reported values and of every weight after a complete step.

    AdamW's update is about as large as the clipped gradient. A frozen weight that moves has an infinite error.
    """
    optimizer = OptimizerConfig(learning_rate=1.0, schedule="constant", epsilon=1.0, clip_norm=0.01, weight_decay=0.1)
    config = replace(config, optimizer=optimizer)
    with jax.enable_x64(True):
        program, step = compiled_step(config)
        state = state_of(config)
        state = replace(state, step=jax.device_put(np.int32(STEP), state.step.sharding))
        state, metrics = step(state, program.put_on_devices(batch_of(config)), jnp.float32(np.inf))
        expected_means, gradients = reference_of(config)
        means = as_vector({"loss": metrics.loss, **metrics.metrics}, names_of(config.model))
        errors = {"loss": float(np.abs(means - expected_means).max())}
        before, norm = named(weights_of(config)), np.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        assert norm > optimizer.clip_norm
        for name, weight in in_layer_order(state.model, config).items():
            update = 0.0
            if name in gradients:
                assert np.abs(gradients[name]).max() > 1e-6, f"{name} has no gradient to compare"
                gradient = gradients[name] * optimizer.clip_norm / (norm + 1e-6)
                update = gradient / (np.abs(gradient) + optimizer.epsilon) + optimizer.weight_decay * before[name]
            error = float(np.abs(weight - (before[name] - update)).max())
            errors[name] = error if name in gradients or error == 0 else np.inf
        assert errors.keys() == {"loss", *before}
        return {name: np.inf if np.isnan(error) else error for name, error in errors.items()}


def largest_error(config, scale=1.0) -> dict[str, float]:
    """Return the largest error by name, of reported values and of the gradient of every weight."""
    with jax.enable_x64(True):
        program, place = gradient_program(config)
        weights, batch = place(), batch_of(config)
        expected_loss, expected = reference_of(config)
        loss, gradients = program(weights, batch, jnp.int32(STEP), jnp.float64(scale))
        errors = {"loss": float(np.abs(loss - expected_loss).max())}
        without_effect = WITHOUT_EFFECT.get(getattr(config.model, "head", None), ())
        for name, gradient in in_layer_order(gradients, config).items():
            assert gradient.dtype == np.float64
            nothing = name in without_effect or name.endswith("router.bias")
            assert nothing or np.abs(expected[name]).max() > 1e-6, f"{name} has no gradient to compare"
            errors[name] = float(np.abs(gradient - expected[name]).max())
        assert errors.keys() == {"loss", *expected}
        return {name: np.inf if np.isnan(error) else error for name, error in errors.items()}  # `max` passes over NaN
