"""The attention kernel that training would use on this machine, run forward and backward and compared with NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config import Config
from mjax.config.model import GPTConfig, ModelConfig
from mjax.doctor.devices import called
from mjax.doctor.finding import GREEN, RED, YELLOW, Found, advice_on, check
from mjax.doctor.numerics import relative_error
from mjax.errors import UsageError
from mjax.models import attention_kernels, kernel_trial

# Largest allowed difference from NumPy's float64, relative to the largest value: products of 16-bit inputs are summed
# in float32, and probabilities and results rounded to 8 (bf16) or 11 (fp16) bits.
BOUNDS = {"bf16": 3e-2, "fp16": 5e-3, "fp32": 1e-4, "fp64": 1e-4}


@check("attention")
def check_attention(config: Config | None = None) -> Found:
    """Check output and gradients of the kernel that `auto`, or the config, selects here.

    Without a config: bf16, head size 64, no dropout.
    """
    model = GPTConfig(attention_dropout=0.0) if config is None else config.model
    compute = "bf16" if config is None else config.precision.compute
    documents = config is not None and "documents" in config.batch_arrays()
    platform = jax.default_backend()
    notices: list[str] = []
    try:
        kernel = kernel_trial.resolve_attention(model, compute, platform, notices.append, documents)
    except UsageError as error:
        found, _, advice = str(error).rpartition("; ")
        return RED, found, advice_on(found, advice)
    error = largest_error(kernel, model, compute, documents)
    figures = {"largest_error_relative": error}
    tried = compute if compute in ("bf16", "fp16") else "fp32"
    found = f"{kernel}, {tried}, head size {model.head_size}: within {error:.1e} of NumPy, forward and backward"
    if platform == "gpu" and jax.local_device_count() > 1:
        found += f", on {called(jax.local_devices()[0])} of {jax.local_device_count()}"
    if compute == "fp64":
        found += "; the config's fp64 is not tested"
    if not error < BOUNDS[compute]:
        found = f"{kernel} is wrong in {tried}: relative error {error:.1e}, {BOUNDS[compute]:.0e} is allowed"
        other = "xla" if kernel != "xla" else "xla_blocks"
        return RED, found, f"--model.attention {other}, and report it with jax's version", figures
    if notices:  # `auto` selected a slower kernel, and says why
        why = notices[0].removeprefix("attention: ")
        advice = "--model.attention-dropout 0" if model.attention_dropout > 0 else None
        return YELLOW, f"{found}; {why}", advice, figures
    if config is None and kernel == "cudnn":
        found += "; with --model.attention-dropout above 0, as in the papers' configs, the slower xla"
    return GREEN, found, None, figures


def largest_error(kernel: str, model: ModelConfig, compute: str, documents: bool) -> float:
    """Largest difference of output and gradients between `kernel` and NumPy, relative to the largest value of each.

    Two samples of at most 128 positions, two heads; with `documents`, several documents in each.
    """
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(compute, jnp.float32)
    shape = (2, min(model.sequence, 128), 2, model.head_size)
    random = np.random.default_rng(0)
    inputs = [jnp.asarray(random.standard_normal(shape), dtype) for _ in range(3)]
    options = kernel_trial.trial_options(model, shape[1], documents)

    def total(q, k, v):
        out = attention_kernels.attend(q, k, v, kernel, **options).astype(jnp.float32)
        return jnp.square(out).sum(), out

    gradients, output = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    expected = reference(*(np.asarray(x, np.float64) for x in inputs), **options)
    return relative_error((output, *gradients), expected)


def reference(q, k, v, causal: bool, documents=None, slopes=None, window=None) -> tuple[np.ndarray, ...]:
    """Attention by its formula, softmax(q kᵀ / √d) v, and the gradients of the sum of its squares; float64.

    Shapes: q, k, v [b, s, n, d], documents [b, s], slopes [n] → output and gradients of q, k and v [b, s, n, d].
    """
    scale = 1 / np.sqrt(q.shape[-1])
    scores = np.einsum("bqnd,bknd->bnqk", q, k) * scale
    back = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])  # distance from a query back to a key
    if slopes is not None:
        scores -= np.asarray(slopes, np.float64)[:, None, None] * back
    if causal:
        scores = np.where(back >= 0, scores, -np.inf)
    if window is not None:
        scores = np.where(back < window, scores, -np.inf)
    if documents is not None:
        documents = np.asarray(documents)
        scores = np.where((documents[:, :, None] == documents[:, None, :])[:, None], scores, -np.inf)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    output = np.einsum("bnqk,bknd->bqnd", probabilities, v)
    above = 2 * output
    of_v = np.einsum("bnqk,bqnd->bknd", probabilities, above)
    of_probabilities = np.einsum("bqnd,bknd->bnqk", above, v)
    mean = (of_probabilities * probabilities).sum(-1, keepdims=True)
    of_scores = probabilities * (of_probabilities - mean) * scale
    of_q = np.einsum("bnqk,bknd->bqnd", of_scores, k)
    of_k = np.einsum("bnqk,bqnd->bknd", of_scores, q)
    return output, of_q, of_k, of_v
