"""The kernels of a run, of attention and of the products of experts: chosen by rule (`kernels.py`), then run once and
compared with `xla`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mjax.config import Config
from mjax.config.kernels import capability_of, choose_grouped, choose_kernel
from mjax.config.model import ModelConfig
from mjax.errors import UsageError
from mjax.models.attention_kernels import attend
from mjax.models.positions import alibi_slopes
from mjax.parallel.grouped import ROWS, group, grouped_product
from mjax.parallel.random import DropoutKey
from mjax.step.unrolling import with_unrolling


def with_kernel(config: Config, announce: Callable[[str], None] = print) -> Config:
    """`config` with `model.attention` set to the kernel for this process's devices (`resolve_attention`), in a
    mixture of experts `model.grouped` (`resolve_grouped`), and `train.unroll` (`with_unrolling`).

    Raises:
      UsageError: the requested kernel does not support the run, or fails in the trial.
    """
    documents, platform = "documents" in config.batch_arrays(), jax.default_backend()
    kernel = resolve_attention(
        config.model, config.precision.compute, platform, announce, documents, config.sequence_chunks
    )
    model = replace(config.model, attention=kernel)
    if model.grouped_kernel:
        model = model.with_grouped(resolve_grouped(config, platform, announce))
    return with_unrolling(replace(config, model=model), on_gpu=platform == "gpu")


def resolve_attention(
    model: ModelConfig,
    compute: str,
    platform: str,
    announce: Callable[[str], None] = print,
    documents: bool = False,
    chunks: int = 1,
) -> str:
    """The kernel of this run: chosen by rule; one of a GPU is run once on a small array and compared with `xla`.

    Args:
      model: `model.attention` is the requested kernel; `auto` leaves the choice to the rule.
      compute: compute dtype of the run, as in the config.
      platform: `jax.default_backend()`.
      announce: receives one sentence if a slower kernel than cuDNN's has to be used on a GPU, or a slower way.
      documents: whether attention stays within documents (`data.reset_attention`, and BERT's padding).
      chunks: as for `choose_kernel`.

    Raises:
      UsageError: the requested kernel does not support the run, or fails in the trial.
    """
    capability = capability_of(jax.local_devices()[0])
    kernel, obstacle = choose_kernel(model, compute, platform, documents, capability, chunks)
    if model.attention == "auto" and platform == "gpu" and obstacle:
        announce(f"attention: the slower kernel xla is used instead of cuDNN flash, because {obstacle}")
    refusal = _self_test(kernel, model, compute, documents)
    if refusal is None:
        if kernel == "cudnn" and documents:
            announce("attention: cuDNN gets the documents as a bias, as JAX has no public interface for their offsets")
        return kernel
    options = {"document masks": documents, "ALiBi": model.biased_scores, "a window": model.window is not None}
    asked = [what for what, is_there in options.items() if is_there]
    if model.attention == "auto" and kernel == "cudnn" and asked:  # not supported by every version and GPU
        what = " and ".join(asked)
        announce(f"attention: the slower kernel xla is used, because cuDNN flash refuses {what} ({refusal})")
        return "xla"
    raise UsageError(f"the attention kernel {kernel} does not run here ({refusal}); use --model.attention xla")


def resolve_grouped(config: Config, platform: str, announce: Callable[[str], None] = print) -> str:
    """The kernel of the products of experts: chosen by rule, then run once on small groups and compared with `xla`.

    Args:
      config: of a mixture of experts; `model.grouped` is the requested kernel.
      platform: `jax.default_backend()`.
      announce: receives one sentence if `xla` has to be used on a GPU, where it runs one tile after the other.

    Raises:
      UsageError: the requested kernel does not support the run, or fails in the trial.
    """
    kernel, obstacle = choose_grouped(config, platform, capability_of(jax.local_devices()[0]))
    asked = config.model.grouped
    if asked == "auto" and platform == "gpu" and obstacle:
        announce(f"experts: their products run one tile after the other, because pallas cannot be used: {obstacle}")
    refusal = None if kernel == "xla" else _grouped_refusal(kernel, config.precision.compute)
    if refusal is None:
        return kernel
    if asked == "auto":
        announce(f"experts: their products run one tile after the other, because pallas does not run here ({refusal})")
        return "xla"
    raise UsageError(f"the kernel {kernel} does not run here ({refusal}); use --model.grouped xla")


def _grouped_refusal(kernel: str, compute: str) -> str | None:
    """Run `kernel` on three groups, one of them empty, forward and backward, and compare with `xla` in float32.

    Returns:
      The error message if it does not run.

    Raises:
      UsageError: its results are wrong.
    """
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(compute, jnp.float32)
    groups, place = group(jnp.repeat(jnp.array([0, 2, 0]), jnp.array([100, 7, 60])), 3, ROWS[kernel])
    keys = jax.random.split(jax.random.key(0))
    rows = jax.random.normal(keys[0], (len(place), 64), jnp.float32)
    x = jnp.zeros((len(groups.of_tile) * groups.rows, 64)).at[place].set(rows)
    kernels = jax.random.normal(keys[1], (3, 64, 96), jnp.float32)

    def output_and_gradients(kernel, dtype):
        def total(x, kernels):
            out = grouped_product(x.astype(dtype), kernels.astype(dtype), groups, kernel).astype(jnp.float32)
            return jnp.square(out).sum(), out

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, kernels)

    try:
        results = jax.block_until_ready(output_and_gradients(kernel, dtype))
    except Exception as error:  # whatever the library reports is about this kernel
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    _compare(
        f"the kernel {kernel} of experts", results, output_and_gradients("xla", jnp.float32), "--model.grouped xla"
    )
    return None


def _compare(kernel: str, results, expected, instead: str, tolerance: float = 5e-2) -> None:
    """Refuse a kernel that is off by more than `tolerance` of the largest value."""
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        difference = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        if not difference < tolerance:
            raise UsageError(
                f"{kernel} gives wrong results here (off by {difference:.1e} of the largest); use {instead} and report "
                "the versions in environment.json"
            )


def trial_options(model: ModelConfig, positions: int, documents: bool) -> dict[str, Any]:
    """Options of `attend` for a trial on two samples with two query heads: everything the model needs except dropout.

    Args:
      model: model with this attention.
      positions: s, of each sample; a window is limited to half of it, so that it has an effect.
      documents: whether attention stays within documents; each sample has several, split at different places.
    """
    return {
        "documents": jnp.arange(positions) // jnp.array([[5], [7]]) if documents else None,  # [b, s]
        "causal": model.causal,
        "slopes": jnp.asarray(alibi_slopes(2)) if model.biased_scores else None,
        "window": None if model.window is None else min(model.window, max(1, positions // 2)),
    }


def _self_test(kernel: str, model: ModelConfig, compute: str, documents: bool) -> str | None:
    """Run `kernel` forward and backward on two query heads, and compare with `xla` in float32.

    Returns:
      The error message if it does not run.

    Raises:
      UsageError: its results are wrong.
    """
    if kernel in ("xla", "xla_blocks"):
        return None  # the reference, and the same of operations that every XLA has: compiling it to see takes seconds
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(compute, jnp.float32)
    shape = (2, min(model.sequence, 128), 2, model.head_size)
    q, k, v = (jax.random.normal(key, shape, jnp.float32) for key in jax.random.split(jax.random.key(0), 3))
    k, v = (x[:, :, : 2 if model.groups == model.heads else 1] for x in (k, v))
    options = trial_options(model, shape[1], documents)
    if kernel == "flash" and model.attention_dropout > 0:  # the masks are those of `xla`
        options |= {"rate": model.attention_dropout, "key": DropoutKey.of(0, jnp.int32(1), jnp.arange(2))}

    def output_and_gradients(kernel, dtype):
        def total(q, k, v):
            q, k, v = (x.astype(dtype) for x in (q, k, v))
            out = attend(q, k, v, kernel, **options).astype(jnp.float32)
            return jnp.square(out).sum(), out

        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    try:
        results = jax.block_until_ready(output_and_gradients(kernel, dtype))
    except Exception as error:  # whatever the library reports is about this kernel
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    tolerance = 1e-4 if dtype == jnp.float32 else 5e-2
    expected = output_and_gradients("xla", jnp.float32)
    _compare(f"the attention kernel {kernel}", results, expected, "--model.attention xla", tolerance)
    return None
