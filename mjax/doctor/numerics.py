"""Operations of training on this device, compared with NumPy in float64: small ones, and the attention kernel.

A miscompiled kernel or a broken chip silently gives wrong results; JAX 0.11.0 and 0.11.1 did on one kind of GPU, and
only outside `jit` (jax issue 40633). So operations run both inside and outside `jit` where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from mjax.config import Config, MeshConfig
from mjax.config.axes import MODEL
from mjax.config.model import GPTConfig, ModelConfig
from mjax.doctor import GREEN, RED, YELLOW, Found, advice_on, check, listed
from mjax.doctor.devices import by_kind, called
from mjax.errors import UsageError
from mjax.models import attention_kernels
from mjax.models.norms import LayerNorm
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.mesh import make_mesh
from mjax.step import kernel_trial

# Relative error of products in full float32; TF32 rounds inputs to 11 bits, with errors of 1e-4 and more.
FULL_FLOAT32 = 1e-5

# Largest allowed difference from NumPy's float64, relative to the largest value: products of 16-bit inputs are summed
# in float32, and probabilities and results rounded to 8 (bf16) or 11 (fp16) bits.
BOUNDS = {"bf16": 3e-2, "fp16": 5e-3, "fp32": 1e-4, "fp64": 1e-4}

WRONG = "do not train here; try another device (CUDA_VISIBLE_DEVICES), then another version of jax, and report it"


@dataclass(frozen=True)
class Operation:
    """An operation with its reference result; both are lists of arrays.

    Attributes:
      inputs: arguments of `run`; with constants, XLA would compute at compile time instead of on the device.
      truth: the reference result.
      bound: largest allowed difference, relative to the largest value.
    """

    name: str
    run: Callable[..., Sequence[Array]]
    inputs: Sequence[Array]
    truth: Sequence[np.ndarray]
    bound: float
    modes: tuple[str, ...] = ("jit", "no jit")

    def result(self, mode: str) -> Sequence[Array]:
        """The device's result."""
        return (jax.jit(self.run) if mode == "jit" else self.run)(*self.inputs)


@check("numerics")
def check_numerics(
    operations: Callable[[jax.Device], Sequence[Operation]] | None = None, devices: Sequence[jax.Device] | None = None
) -> Found | list[Found]:
    """Check each operation on each device; one finding for all, or one for each that is wrong."""
    devices = [device for kind in by_kind().values() for device in kind] if devices is None else devices
    errors, default = {}, 0.0
    wrong: list[Found] = []
    for device in devices:
        with jax.default_device(device):
            tried = (operations or standard_operations)(device)
            for operation in tried:
                # A compiler's fault shows on any GPU, a chip's in either mode: one mode is enough on the others.
                modes = operation.modes if device is devices[0] else operation.modes[:1]
                by_mode = {mode: relative_error(operation.result(mode), operation.truth) for mode in modes}
                errors[operation.name] = max(*by_mode.values(), errors.get(operation.name, 0.0))
                if off := [mode for mode, error in by_mode.items() if not error < operation.bound]:
                    worst = max(by_mode.values())
                    text = f"{operation.name} is wrong on {called(device)} ({listed(off)}): relative error {worst:.1e}"
                    allowed = f"{operation.bound:.0e} is allowed"
                    wrong.append((RED, f"{text}, {allowed}", WRONG, {"error_relative": worst}))
            default = max(default, default_error())
    figures = {f"{name.replace(' ', '_')}_relative": error for name, error in errors.items()}
    if wrong:
        return wrong
    parts = ", ".join(f"{operation.name} {errors[operation.name]:.0e} (< {operation.bound:.0e})" for operation in tried)
    parts += f" on the worst of {len(devices)} devices" if len(devices) > 1 else ""
    precision = "full" if default < FULL_FLOAT32 else f"TF32 or less ({default:.0e})"
    figures["fp32_default_relative"] = default
    return GREEN, f"errors against NumPy: {parts}; float32 products are {precision} by default", None, figures


def standard_operations(device: jax.Device) -> list[Operation]:
    """A bf16 and a float32 matrix product, and training's cross entropy and LayerNorm with their gradients."""
    return [_product(jnp.bfloat16, 2**-8), _product(jnp.float32, FULL_FLOAT32), _cross_entropy(device), _layer_norm()]


def default_error() -> float:
    """Error of a float32 product at JAX's default precision, relative to the largest value."""
    product = _product(jnp.float32, FULL_FLOAT32)
    return relative_error([jax.jit(jnp.matmul)(*product.inputs)], product.truth)


def _product(dtype, bound: float) -> Operation:
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.standard_normal(shape), dtype) for shape in ((256, 512), (512, 256)))
    truth = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    name = f"{'bf16' if dtype == jnp.bfloat16 else 'fp32'} product"
    return Operation(name, lambda a, b: [jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)], (a, b), [truth], bound)


def _cross_entropy(device: jax.Device) -> Operation:
    """Loss [t] and gradient of the logits [t, v] of mjax's own cross entropy, over one rank of `model`."""
    random = np.random.default_rng(1)
    logits = jnp.asarray(4 * random.standard_normal((64, 1000)), jnp.float32)
    labels = random.integers(0, 1000, 64)

    def loss_and_gradient(logits, labels):
        losses, backward = jax.vjp(lambda x: vocab_parallel_cross_entropy(x, labels), logits)
        return losses, backward(jnp.ones_like(losses))[0]

    mesh = make_mesh(MeshConfig(), [device])
    specs = P(None, MODEL), P()
    sharded = jax.shard_map(loss_and_gradient, mesh=mesh, in_specs=specs, out_specs=(P(), P(None, MODEL)))

    exact = np.asarray(logits, np.float64)
    exponentials = np.exp(exact - exact.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    rows = np.arange(len(labels))
    gradient = probabilities.copy()
    gradient[rows, labels] -= 1
    truth = [-np.log(probabilities[rows, labels]), gradient]
    return Operation("cross entropy", sharded, (logits, jnp.asarray(labels)), truth, 1e-5, modes=("jit",))


def _layer_norm() -> Operation:
    """Output and gradient of the input [t, h] of mjax's own LayerNorm."""
    random = np.random.default_rng(2)
    x = jnp.asarray(random.standard_normal((64, 512)) + 3, jnp.float32)
    above = jnp.asarray(random.standard_normal((64, 512)), jnp.float32)  # gradient of the output
    norm = LayerNorm(512, 1e-5, jnp.float32)

    def run(x, above):
        output, backward = jax.vjp(norm, x)
        return output, *backward(above)

    exact = np.asarray(x, np.float64)
    deviation = np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    output = (exact - exact.mean(-1, keepdims=True)) / deviation
    exact_above = np.asarray(above, np.float64)
    along = (exact_above * output).mean(-1, keepdims=True)
    gradient = (exact_above - exact_above.mean(-1, keepdims=True) - output * along) / deviation
    return Operation("LayerNorm", run, (x, above), [output, gradient], 1e-5)


def relative_error(arrays: Sequence[Array], truth: Sequence[np.ndarray]) -> float:
    """Largest difference relative to the largest value of each array; infinite if a value is not finite."""
    errors = []
    for array, right in zip(arrays, truth, strict=True):
        difference = np.abs(np.asarray(array, np.float64) - right).max()
        errors.append(difference / max(1e-30, np.abs(right).max()) if np.isfinite(difference) else np.inf)
    return float(max(errors))


# --- Attention --------------------------------------------------------------------------------------------------------


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
        text, _, advice = str(error).rpartition("; ")
        return RED, text, advice_on(text, advice)
    error = largest_error(kernel, model, compute, documents)
    figures = {"largest_error_relative": error}
    tried = compute if compute in ("bf16", "fp16") else "fp32"
    text = f"{kernel}, {tried}, head size {model.head_size}: within {error:.1e} of NumPy, forward and backward"
    if platform == "gpu" and jax.local_device_count() > 1:
        text += f", on {called(jax.local_devices()[0])} of {jax.local_device_count()}"
    if compute == "fp64":
        text += "; the config's fp64 is not tested"
    if not error < BOUNDS[compute]:
        text = f"{kernel} is wrong in {tried}: relative error {error:.1e}, {BOUNDS[compute]:.0e} is allowed"
        other = "xla" if kernel != "xla" else "xla_blocks"
        return RED, text, f"--model.attention {other}, and report it with jax's version", figures
    if notices:  # `auto` selected a slower kernel, and says why
        why = notices[0].removeprefix("attention: ")
        advice = "--model.attention-dropout 0" if model.attention_dropout > 0 else None
        return YELLOW, f"{text}; {why}", advice, figures
    if config is None and kernel == "cudnn":
        text += "; with --model.attention-dropout above 0, as in the papers' configs, the slower xla"
    return GREEN, text, None, figures


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
