"""Kernel choice by rule, without JAX: attention (the column `where` of the table in `attention_kernels.py`), grouped
matmuls of experts (`parallel/grouped.py`), and layers compiled with or without a loop.

Training passes the local GPU, the planner any GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mjax.config import Config
from mjax.config.model import ModelConfig
from mjax.config.pattern import layer_stacks
from mjax.errors import UsageError

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities, NVIDIA's numbers for GPU generations
FUSED = ("cudnn", "flash")  # kernels that write no scores to memory
BLOCK = 64  # positions of a tile of `flash`
MIN_MATMUL_DIM = 16  # rows and columns of Triton's smallest matmul; all dims of the grouped matmuls are multiples
MAX_UNROLLED_LAYERS = 80  # layers that `--train.unroll auto` compiles without a loop: each takes one to two seconds
SERVER = 8  # GPUs on which FSDP overlaps its all-gathers with layers that are compiled without a loop
FLASH_INTERPRETED = "flash, interpreted"  # kernel name for `flash` without a GPU: hundreds of times slower, for tests


class AttentionWork(NamedTuple):
    """Attention as a fused kernel has to compute it.

    Attributes:
      width: of a head's queries, keys or values, the widest.
      positions: of the keys.
      chunks: equal parts of these; with more than one, the queries are two of them.
      dropout: rate on probabilities.
      bias: what cuDNN gets as a bias of the scores, if anything.
    """

    width: int
    positions: int
    chunks: int = 1
    dropout: float = 0.0
    bias: str = ""


def kernel_obstacle(kernel: str, work: AttentionWork, capability: tuple[int, ...] = HOPPER) -> str | None:
    """The reason why a fused kernel cannot do this work, if there is one: all limits of the kernels."""
    if kernel == "cudnn":
        largest, where = (256, "") if capability >= HOPPER else (128, " on GPUs before H100")
        if work.chunks > 1:
            return "it needs as many queries as keys, as with --mesh.context-attention ulysses"
        if work.dropout > 0:
            return f"it has no dropout and --model.attention-dropout is {work.dropout}"
        if work.width % 8 or work.width > largest:
            return f"it needs a head size that is a multiple of 8 up to {largest}{where}, and heads have {work.width}"
        if work.bias and work.positions % 2:
            return f"with {work.bias} it needs an even number of positions and --model.sequence is {work.positions}"
        return None
    if not 16 <= work.width <= 128:
        return f"it needs a head size from 16 to 128, and heads have {work.width}"
    if work.positions % (multiple := BLOCK * work.chunks):
        return f"it needs a multiple of {multiple} positions and --model.sequence is {work.positions}"
    return None


def choose_kernel(config: Config, platform: str, capability: tuple[int, ...] = HOPPER) -> tuple[str, str | None]:
    """Choose the attention kernel.

    Args:
      config: `model.attention` is the requested kernel; `auto` leaves the choice to the rule. With several chunks of a
        sequence (`Config.sequence_chunks`) a rank has the queries of two, and all keys.
      platform: cpu or gpu.
      capability: compute capability of the GPU.

    Returns:
      The kernel, and why the fused one cannot be used, if so.

    Raises:
      UsageError: `cudnn` or `flash` was requested by name and does not support the run.
    """
    model, requested, compute = config.model, config.model.attention, config.precision.compute
    padded = "--data.reset-attention" if model.causal else "a BERT's padding"
    bias = padded if "documents" in config.batch_arrays() else "ALiBi" if model.biased_scores else ""
    width = max(model.head_size, model.value_size)
    work = AttentionWork(width, model.sequence, config.sequence_chunks, model.attention_dropout, bias)
    is_flash = requested == "flash" or (requested == "auto" and work.chunks > 1 and platform == "gpu")
    fused = "flash" if is_flash else "cudnn"
    obstacle = _why_not_gpu(platform, capability)
    if not obstacle and compute not in ("bf16", "fp16", "fp8"):
        obstacle = f"it computes in bf16 or fp16 and --precision.compute is {compute}"
    obstacle = obstacle or kernel_obstacle(fused, work, capability)
    return _choose("attention", requested, fused, obstacle, "xla" if platform == "gpu" else "xla_blocks"), obstacle


def _choose(flag: str, requested: str, fused: str, obstacle: str | None, fallback: str) -> str:
    """The requested kernel; with auto the fused one, or the fallback if there is an obstacle."""
    if requested == fused and obstacle:
        raise UsageError(f"--model.{flag} {requested} is not supported here ({obstacle}); change that, or use auto")
    return requested if requested != "auto" else fallback if obstacle else fused


def position_multiple(config: Config) -> int:
    """The number that divides the positions of a program: ranks of `context` have equal parts, `flash` whole blocks."""
    block = BLOCK if config.model.attention in ("flash", FLASH_INTERPRETED) else 1
    return math.lcm(block * config.sequence_chunks, config.mesh.context)


WIDTHS = [width << octave for octave in range(3, 40) for width in (2, 3)]
"""16, 24, 32, 48, 64, …: few programs for texts of any length, and at most a third is padding."""


SLOTS = [width << octave for octave in range(2, 40) for width in (4, 5, 6, 7)]
"""16, 20, 24, 28, 32, 40, …: sizes of a cache, which every token reads; at most a fifth is padding."""


def pad_width(config: Config, needed: int, min_width: int, rows: int = 1, widths: Sequence[int] = WIDTHS) -> int:
    """Round `needed` positions of `rows` sequences up to one of `widths` from `min_width` on, and to a multiple for the
    mesh and the attention kernel; at most `model.sequence`."""
    ranks = config.mesh.context * config.mesh.model if config.mesh.sequence_parallel else 1
    unit = math.lcm(position_multiple(config), ranks // math.gcd(ranks, rows))
    width = next(width for width in widths if width >= max(needed, min_width))
    return min(-(-width // unit) * unit, config.model.sequence)


def context_attention_choices(config: Config) -> list[str]:
    """The values of `--mesh.context-attention` that the heads, positions and attention kernel of a config allow."""
    model, mesh = config.model, config.mesh
    possible = {
        "ulysses": model.heads // mesh.model % mesh.context == 0,
        "allgather": model.attention != "cudnn",  # which takes as many queries as keys
    }
    multiples = {way: position_multiple(replace(config, mesh=replace(mesh, context_attention=way))) for way in possible}
    return [way for way, multiple in multiples.items() if possible[way] and model.sequence % multiple == 0]


def attention_on_gpu(config: Config, capability: tuple[int, ...] = HOPPER) -> str:
    """The attention kernel of `config` on an NVIDIA GPU.

    Raises:
      UsageError: as in `choose_kernel`.
    """
    return choose_kernel(config, "gpu", capability)[0]


def with_kernels(config: Config, platform: str, capability: tuple[int, ...] = HOPPER) -> tuple[Config, list[str]]:
    """Set `model.attention` and, in a mixture, `model.moe_kernel` to the kernels that the rules choose.

    Returns:
      The config, and a sentence for each slower kernel that `auto` has to use on a GPU.

    Args:
      platform, capability: as for `choose_kernel`.

    Raises:
      UsageError: a requested kernel does not support the run.
    """
    model, notes = config.model, []
    kernel, obstacle = choose_kernel(config, platform, capability)
    if model.attention == "auto" and platform == "gpu" and obstacle:
        notes.append(f"attention: the slower kernel xla is used instead of cuDNN flash, because {obstacle}")
    if kernel == "cudnn" and "documents" in config.batch_arrays():
        notes.append("attention: cuDNN gets the documents as a bias, as JAX has no public interface for their offsets")
    if model.moe_kernel:
        moe_kernel, obstacle = choose_moe_kernel(config, platform, capability)
        if model.moe_kernel == "auto" and platform == "gpu" and obstacle:
            notes.append(f"experts: their matmuls run one after the other, because pallas cannot be used: {obstacle}")
        model = with_moe_kernel(model, moe_kernel)
    return replace(config, model=replace(model, attention=kernel)), notes


def resolve_kernels(config: Config, capability: tuple[int, ...]) -> Config:
    """Return `config` with the kernels for an NVIDIA GPU."""
    return with_kernels(config, "gpu", capability)[0]


def is_unrolled(config: Config, on_gpu: bool) -> bool:
    """True if the layers are compiled without a loop.

    With `auto` a GPU has no loop, except in three cases. XLA would start work of many layers at the same time: FSDP
    all-gathers between servers, all-to-alls over `context`, recomputation, copies to the host, expert rows. Pipeline
    stages store activations in slots. Layers are of several kinds or too many to compile in two minutes.
    """
    train, mesh, model = config.train, config.mesh, config.model
    if train.unroll != "auto":
        return train.unroll == "on"
    from_servers = mesh.zero == 3 and mesh.devices > SERVER
    looped = from_servers or mesh.context > 1 or train.recompute in ("full", "offload") or model.experts
    looped = looped or mesh.pipe > 1 or len(layer_stacks(model)) > 1 or model.layers > MAX_UNROLLED_LAYERS
    return on_gpu and not looped


def with_unrolling(config: Config, on_gpu: bool) -> Config:
    """Return `config` with `train.unroll` on or off (`is_unrolled`)."""
    return replace(config, train=replace(config.train, unroll="on" if is_unrolled(config, on_gpu) else "off"))


def with_moe_kernel(model: ModelConfig, kernel: str) -> ModelConfig:
    """Return the model with this kernel for the grouped matmuls of its experts, if it has experts."""
    changes: dict[str, Any] = {"moe_kernel": kernel} if model.moe_kernel else {}
    return replace(model, **changes)


def choose_moe_kernel(config: Config, platform: str, capability: tuple[int, ...] = HOPPER) -> tuple[str, str | None]:
    """Choose the kernel for the grouped matmuls of experts.

    Args:
      config: of a mixture of experts; `model.moe_kernel` is the requested kernel.
      platform, capability: as for `choose_kernel`.

    Returns:
      The kernel, and why `pallas` cannot be used, if so.

    Raises:
      UsageError: `pallas` was requested by name and does not support the run.
    """
    model = config.model
    obstacle = _why_not_gpu(platform, capability)
    if not obstacle and config.precision.compute == "fp64":
        obstacle = "it computes in bf16, fp16 or fp32 and --precision.compute is fp64"
    odd = [size for size in (model.hidden, model.expert_width // config.mesh.model) if size % MIN_MATMUL_DIM]
    if not obstacle and odd:
        dims = f"an expert's matrix has a dim of {odd[0]} on a GPU"
        obstacle = f"it needs sizes that are multiples of {MIN_MATMUL_DIM} and {dims}"
    return _choose("moe-kernel", model.moe_kernel, "pallas", obstacle, "xla"), obstacle


def gpu_capability(device) -> tuple[int, ...]:
    """Compute capability of a JAX device; HOPPER if it has none."""
    number = getattr(device, "compute_capability", "")
    return tuple(int(part) for part in number.split(".")) if number[:1].isdigit() else HOPPER


def _why_not_gpu(platform: str, capability: tuple[int, ...]) -> str | None:
    if platform != "gpu":
        return f"it needs an NVIDIA GPU and this process runs on {platform}"
    if capability < AMPERE:
        return f"it needs compute capability 8.0 (A100) or more, and the GPU has {'.'.join(map(str, capability))}"
    return None
