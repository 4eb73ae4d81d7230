"""The parallel step beside the serial reference: the largest difference of loss (of a BERT its figures) and
gradients."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config import MeshConfig
from tests import reference
from tests.small import batch_of, gradient_program, named, weights_of

STEP = 3  # numbers the dropout masks

# One number added to all scores of a softmax changes nothing.
WITHOUT_EFFECT = {"multiple_choice": ("head.bias",), "span": ("head.bias", "final_norm.bias")}


def in_layer_order(tree, config) -> dict[str, np.ndarray]:
    """Whole arrays by name, layers as [l, …] even where a pipeline has cut them into chunks."""

    def joined(name, value):
        cut = name.startswith("blocks.") and config.mesh.chunks > 1
        return value.reshape(-1, *value.shape[2:]) if cut else value

    return {name: joined(name, value) for name, value in named(tree).items()}


@cache
def _serial(config) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    masks = None
    if config.model.hidden_dropout:
        sequences = config.train.global_batch * config.model.sequences
        masks = reference.dropout_masks(config.model, sequences, config.train.seed, STEP)
    found, gradients = reference.loss_and_gradients(named(weights_of(config)), config.model, batch_of(config), masks)
    return np.asarray(found), {name: np.asarray(gradient) for name, gradient in gradients.items()}


def reference_of(config) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return reported values and gradients, computed once for all meshes, kernels and kinds of recomputation."""
    train = replace(config.train, micro_batch=1, recompute="none", loss_chunks=1, unroll="auto")
    return _serial(replace(config, model=replace(config.model, attention="xla"), mesh=MeshConfig(), train=train))


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
