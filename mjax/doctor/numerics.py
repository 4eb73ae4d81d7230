"""Operations of training on this device, compared with their formulas in float64.

A miscompiled kernel or a broken chip silently gives wrong results.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mjax.config import Config, GPTConfig, ModelConfig
from mjax.config.kernels import choose_kernel, choose_moe_kernel, gpu_capability
from mjax.doctor import GREEN, RED, YELLOW, Finding, MachineInfo
from mjax.doctor.devices import device_name, devices_to_check
from mjax.errors import first_line
from mjax.models.parts import attention_kernels
from mjax.models.parts.mask import AttentionMask
from mjax.models.parts.positions import alibi_slopes
from mjax.parallel import grouped

# Largest allowed errors of kernels: matmuls of 16-bit inputs accumulate in float32, and probabilities and results are
# rounded to 8 (bf16) or 11 (fp16) bits. Other dtypes are tested in float32.
DTYPES = {"bf16": (jnp.bfloat16, 3e-2), "fp16": (jnp.float16, 5e-3)}
FLOAT32 = (jnp.float32, 1e-4)
WRONG = "do not train here; try another device (CUDA_VISIBLE_DEVICES), then another version of jax, and report it"


@dataclass(frozen=True)
class Operation:
    """An operation and its formula.

    Attributes:
      run, formula: functions of the inputs with one output; the formula has float64 inputs.
      shapes: of the inputs.
      dtype: of the inputs.
      bound: largest allowed error.
    """

    name: str
    run: Callable[..., Array]
    formula: Callable[..., Array]
    shapes: tuple[tuple[int, ...], ...]
    dtype: type
    bound: float

    def error(self) -> float:
        """The largest difference of output and gradients from the formula, relative to the largest value of each."""
        random = np.random.default_rng(0)
        inputs = [jnp.asarray(random.standard_normal(shape), self.dtype) for shape in self.shapes]
        results = jax.jit(partial(_output_and_gradients, self.run))(*inputs)
        with jax.enable_x64(True):
            inputs = [jnp.asarray(x, jnp.float64) for x in inputs]
            truth = jax.jit(partial(_output_and_gradients, self.formula))(*inputs)
        pairs = [(np.asarray(x, np.float64), np.asarray(right)) for x, right in zip(results, truth, strict=True)]
        return float(np.max([np.abs(x - right).max() / np.abs(right).max() for x, right in pairs]))  # NaN if one is


def _output_and_gradients(run: Callable[..., Array], *inputs: Array) -> tuple[Array, ...]:
    """The output of `run`, and the gradients of a weighted sum of its squares."""

    def total(*inputs):
        output = run(*inputs)
        weights = jnp.arange(output.size).reshape(output.shape) % 7
        return (weights * jnp.square(output.astype(jnp.promote_types(output.dtype, jnp.float32)))).sum(), output

    gradients, output = jax.grad(total, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
    return output, *gradients


def _cross_entropy(logits: Array) -> Array:
    return -jax.nn.log_softmax(4 * logits)[:, 0]


MATMUL, NORM = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST), partial(jax.nn.standardize, epsilon=1e-5)
SHAPES = ((256, 512), (512, 256))
OPERATIONS = [
    Operation("bf16 matmul", MATMUL, MATMUL, SHAPES, jnp.bfloat16, 2**-7),
    Operation("fp32 matmul", MATMUL, MATMUL, SHAPES, jnp.float32, 1e-5),
    Operation("default fp32 matmul", jnp.matmul, jnp.matmul, SHAPES, jnp.float32, 1e-2),  # TF32: 1e-4 and more
    Operation("cross entropy", _cross_entropy, _cross_entropy, ((64, 1000),), jnp.float32, 1e-5),
    Operation("LayerNorm", NORM, NORM, ((64, 512),), jnp.float32, 1e-5),
]


def check_numerics(machine: MachineInfo) -> list[Finding]:
    """Check small operations on each device."""
    return judge(OPERATIONS, devices_to_check(), WRONG)


def judge(operations: Sequence[Operation], devices: Sequence[jax.Device], advice: str) -> list[Finding]:
    """Run operations; one finding for all, or one with this advice for each wrong one."""
    worst, wrong = {}, []
    for device, operation in itertools.product(devices, operations):
        text = f"{operation.name} on {device_name(device)}"
        try:
            with jax.default_device(device):
                error = operation.error()
        except Exception as problem:  # any error of a library concerns this operation
            wrong.append(Finding(RED, f"{text} does not run ({first_line(problem)})", advice))
            continue
        worst[operation.name] = float(np.maximum(error, worst.get(operation.name, 0.0)))
        if not error < operation.bound:
            text += f" is wrong: relative error {error:.1e}, at most {operation.bound:.0e} is allowed"
            wrong.append(Finding(RED, text, advice, {"error_relative": error}))
    errors = ", ".join(f"{name}: {error:.0e}" for name, error in worst.items())
    text = f"relative errors on {', '.join(map(device_name, devices))}: {errors}"
    figures = {f"{name.replace(' ', '_')}_relative": error for name, error in worst.items()}
    return wrong or [Finding(GREEN, text, None, figures)]


# --- The kernels of a run ---------------------------------------------------------------------------------------------


def check_attention(machine: MachineInfo) -> list[Finding]:
    """Check the kernel that the config selects on this device; without a config: bf16, head size 64, no dropout.

    Raises:
      UsageError: it does not support the config.
    """
    config, device = machine.config or Config(model=GPTConfig(attention_dropout=0.0)), jax.local_devices()[0]
    kernel, obstacle = choose_kernel(config, device.platform, gpu_capability(device))
    operation = attention(kernel, config.model, config.precision.compute, "documents" in config.batch_arrays())
    findings = judge([operation], [device], "--model.attention xla, and report it")
    return findings + _slower(config.model.attention, device, obstacle)


def check_experts(machine: MachineInfo) -> list[Finding]:
    """Check the kernel of the expert matmuls that the config selects on this device; nothing without experts.

    Raises:
      UsageError: it does not support the config.
    """
    config, device = machine.config, jax.local_devices()[0]
    if config is None or not config.model.moe_kernel:
        return []
    kernel, obstacle = choose_moe_kernel(config, device.platform, gpu_capability(device))
    products = expert_products(kernel, config.precision.compute)
    findings = judge([products], [device], "--model.moe-kernel xla, and report it")
    return findings + _slower(config.model.moe_kernel, device, obstacle)


def _slower(setting: str, device: jax.Device, obstacle: str | None) -> list[Finding]:
    """A finding if `auto` has to use a slower kernel on a GPU."""
    if setting != "auto" or device.platform != "gpu" or not obstacle:
        return []
    return [Finding(YELLOW, f"a slower kernel is used, because {obstacle}", "change that, if it can be")]


def attention(kernel: str, model: ModelConfig, compute: str, documents: bool) -> Operation:
    """Attention of two samples of at most 128 positions with two heads and the model's mask, without dropout.

    A window is limited to half of the positions, so that it has an effect.
    """
    s, groups = min(model.sequence, 128), 2 if model.groups == model.heads else 1
    slopes = alibi_slopes(2) if model.biased_scores else np.zeros(2)
    window = None if model.window is None else min(model.window, max(1, s // 2))
    numbers = np.arange(s) // np.array([[5], [7]]) if documents else np.zeros((2, s))  # of documents [b, s]
    distance = np.arange(s)[:, None] - np.arange(s)  # from a query back to a key
    visible = ((distance >= 0) | (not model.causal)) & (distance < (window or s))
    visible = visible & (numbers[:, :, None] == numbers[:, None, :])[:, None]
    mask = AttentionMask(model.causal, window, slopes=jnp.asarray(slopes) if model.biased_scores else None)
    if documents:
        mask = replace(mask, documents=jnp.asarray(numbers))

    def formula(q, k, v):
        k, v = (jnp.repeat(x, 2 // groups, axis=2) for x in (k, v))
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(model.head_size) - slopes[:, None, None] * distance
        return jnp.einsum("bnqk,bkne->bqne", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), v)

    def run(q, k, v):
        return attention_kernels.attend(q, k, v, mask, kernel)

    q, k, v = (2, s, 2, model.head_size), (2, s, groups, model.head_size), (2, s, groups, model.value_size)
    name = f"{kernel} in {compute} with head size {model.head_size}"
    return Operation(name, run, formula, (q, k, v), *DTYPES.get(compute, FLOAT32))


def expert_products(kernel: str, compute: str) -> Operation:
    """The matmuls of three experts, one of them without rows."""
    experts = np.repeat([0, 2, 0], [100, 7, 60])

    def run(x, kernels):
        groups, rows = grouped.assign_rows(jnp.asarray(experts), 3, grouped.TILE_ROWS[kernel])
        buffer = jnp.zeros((len(groups.of_tile) * groups.rows, 64), x.dtype).at[rows].set(x)
        return grouped.grouped_matmul(buffer, kernels, groups, kernel)[rows]

    def formula(x, kernels):
        return jnp.einsum("re,ri,eio->ro", np.eye(3)[experts], x, kernels)

    return Operation(f"{kernel} in {compute}", run, formula, ((167, 64), (3, 64, 96)), *DTYPES.get(compute, FLOAT32))
