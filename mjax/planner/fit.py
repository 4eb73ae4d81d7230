"""Check whether a config fits into the memory of a GPU, and propose changes that make it fit, cheapest first.

Every combination of the changes below is evaluated; one that is valid (`validate`) and leaves HEADROOM of the memory
free is proposed, unless a part of it is enough. Prices only order the proposals: they are ranks, not times. Changes
that cost nothing come first, then those that cost a little, then those that repeat a whole forward pass, and other GPUs
last.

    sequence parallelism    the same bytes sent, fewer kept (arXiv 2205.05198, section 4.2.2)
    ZeRO-1                  weights and moments sharded over `data`: a gather instead of half an all-reduce
    the loss in chunks      the logits twice, if they are the peak
    selective recomputation attention, LayerNorm and GELU again, but no matrix product with weights
    a loop over the layers  copies into and out of stacks
    a smaller micro-batch   the same work in smaller, slower products; shorter bubbles in a pipeline
    full recomputation      the forward pass a second time: a third more work
    offload                 the same, and copies of the layers' inputs to host memory and back
    ZeRO-3                  weights gathered in every layer, forward and backward
    more `model` or `pipe`  the same GPUs, less data parallelism: more communication, bubbles
    more GPUs
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mjax.cluster.hardware import USABLE_FRACTION, Gpu
from mjax.cluster.launch import MEMORY_FRACTIONS, host_memory
from mjax.config import Config
from mjax.config.axes import PIPE, in_words
from mjax.config.checks import can_run_layers, validate
from mjax.config.kernels import HOPPER, capability_of, resolved_on_gpu
from mjax.errors import UsageError
from mjax.planner.memory import HEADROOM, Memory, fits_host, free_share, predict_memory, usable_memory
from mjax.planner.search import LEAST_POSITIONS, value_of, with_loss_chunks, with_values
from mjax.planner.section import Section, layers_in_words
from mjax.step.precision import in_float8
from mjax.step.unrolling import is_unrolled, repeats_in_stack
from mjax.trace.layers import kinds_of, layer_forward
from mjax.utils.figures import GIB, named_rows

# Ranks of the cost of a change; a combination costs their sum.
SEQUENCE_PARALLEL, ZERO_1, LOSS_CHUNKS, SELECTIVE, LOOP, SMALLER_MICRO_BATCH, FULL, OFFLOAD, ZERO_3, OTHER_MESH = (
    1, 2, 3, 4, 6, 8, 16, 20, 24, 32,
)  # fmt: skip
MORE_GPUS = 128
RECOMPUTE = {"none": 0, "selective": SELECTIVE, "full": FULL, "offload": OFFLOAD}
ZERO = {0: 0, 1: ZERO_1, 3: ZERO_3}

DEFAULT_FRACTION = 0.75  # of a GPU's memory, JAX's default


@dataclass(frozen=True)
class Change:
    """A change of a config that makes it fit.

    Attributes:
      flags: what to type, such as '--mesh.sequence-parallel --train.micro-batch 2'.
      config: the changed config.
      memory: its memory.
      price: the rank of its cost.
    """

    flags: str
    config: Config
    memory: Memory
    price: int

    def needs(self, config: Config) -> str:
        """Its memory: `20.2 GiB`, or `20.2 GiB on each of 16` if it uses another number of devices than `config`; and
        host memory, if it needs some."""
        devices = self.config.mesh.devices
        more = f" on each of {devices:,}" if devices != config.mesh.devices else ""
        host = f" and {self.memory.host / GIB:.1f} GiB of host memory" if self.memory.host else ""
        return f"{self.memory.total / GIB:.1f} GiB{host}{more}"


def changes_that_fit(config: Config, usable: float, count: int = 3, host: float | None = None) -> list[Change]:
    """The cheapest changes with which `config` leaves HEADROOM of `usable` bytes free and needs at most `host` bytes of
    host memory for each device (None if these are not known), cheapest first.

    No proposal contains another. The global batch, the model and its numbers do not change.
    """
    proposed: list[tuple[dict[str, Any], Change]] = []
    for price, values in sorted(_candidates(config), key=lambda candidate: candidate[0]):
        if any(values.items() <= other.items() or _includes(values, other) for other, _ in proposed):
            continue
        changed = with_values(config, values)
        try:
            validate(with_values(changed, {"data.mock": True}))
            memory = predict_memory(changed)
        except UsageError:
            continue
        if free_share(memory.total, usable) >= HEADROOM and fits_host(memory, host):
            flags = (
                f"--{name.replace('_', '-')}" + f" {value}" * (value is not True) for name, value in values.items()
            )
            proposed.append((values, Change(" ".join(flags), changed, memory, price)))
            if len(proposed) == count:
                break
    return [change for _, change in proposed]


ADA = (8, 9)
"""Compute capability of the first GPUs with float8 products; Hopper's is 9.0."""
MULTIPLE = 16
"""cuBLAS multiplies float8 matrices whose sizes are multiples of this."""


def check_float8(config: Config, gpu: str, capability: tuple[int, ...]) -> None:
    """Refuse float8 on a GPU without it, and sizes that its products do not take.

    Args:
      config: validated.
      gpu: its name, for the message.
      capability: its compute capability.

    Raises:
      UsageError: one sentence, with what to change.
    """
    if not in_float8(config.precision):
        return
    if capability < ADA:
        raise UsageError(
            f"--precision.compute fp8 needs a GPU with compute capability 8.9 or more, such as an H100, and {gpu} has "
            f"{'.'.join(map(str, capability))}; use --precision.compute bf16"
        )
    model, train = config.model, config.train
    tokens = train.micro_batch * model.sequences * model.sequence
    if tokens % MULTIPLE:
        raise UsageError(
            f"--precision.compute fp8 multiplies micro-batches of a multiple of {MULTIPLE} tokens, and --train.micro-"
            f"batch {train.micro_batch} has {tokens}; use a --train.micro-batch that is a multiple of {MULTIPLE}"
        )
    for _, of in kinds_of(config):
        for product in layer_forward(of).program.products:
            if product.of_weight and (product.k % MULTIPLE or product.n % MULTIPLE):
                raise UsageError(
                    f"--precision.compute fp8 multiplies matrices whose sizes are multiples of {MULTIPLE}, and a rank "
                    f"of --mesh.model {config.mesh.model} has a weight of {product.k} × {product.n}; change the mesh "
                    "or the model, or use --precision.compute bf16"
                )


def check_gpu_at_hand(config: Config, name: str, force: bool, say: Callable[[str], None]) -> None:
    """Refuse what does not fit on the GPUs of this process, and warn if it barely fits, before compiling.

    On a CPU nothing is refused: its memory is shared with other processes and may be swapped. A wrong number of devices
    is refused elsewhere.

    Args:
      config: validated.
      name: name of the config in messages.
      force: only report and continue.
      say: called with that sentence, or the warning.

    Raises:
      UsageError: the config does not fit, or needs an attention kernel or float8 products that are not available.
    """
    import jax  # a plan does not need it

    from mjax.cluster.processes import place_on_host

    device = jax.local_devices()[0]
    usable = usable_memory(device)
    if usable is None or config.mesh.devices != jax.device_count():
        return
    check_float8(config, device.device_kind, capability_of(device))
    config = resolved_on_gpu(config, capability_of(device))
    try:
        host = host_memory() / (jax.local_device_count() * place_on_host()[1])
        if warning := check_memory(config, usable, device.device_kind, name, host):
            say(f"memory  {warning}")
    except UsageError as error:
        if not force:
            raise UsageError(f"{error}; --force tries it anyway") from None
        say(f"memory  {error}; continuing because of --force")


def check_memory(config: Config, usable: float, gpu: str, name: str = "this config", host: float | None = None) -> str:
    """Refuse what does not fit, with the numbers and changes that would fit.

    Args:
      config: validated.
      usable: bytes that XLA may allocate on each device.
      gpu: name of the device.
      name: name of the config in messages.
      host: bytes of this machine's memory for each device; None if they are not known.

    Returns:
      A warning if it fits but leaves less than HEADROOM free, else an empty string.

    Raises:
      UsageError: it needs more than `usable`, or more than `host`.
    """
    memory = predict_memory(config)
    if not fits_host(memory, host):
        raise UsageError(
            f"{name} keeps {memory.host / GIB:.1f} GiB of activations in host memory for each GPU, and this machine "
            f"has {host / GIB:.1f} GiB for each; use --train.recompute full, or a smaller --train.micro-batch"
        )
    free = free_share(memory.total, usable)
    if free >= HEADROOM:
        return ""
    changes = changes_that_fit(config, usable, host=host)
    nearest = "; or ".join(f"{change.flags} ({change.needs(config)})" for change in changes)
    if free >= 0:
        advice = f"what leaves more, cheapest first: {nearest}" if changes else "no change of mesh leaves more"
        return (
            f"{name} is predicted to need {memory.total / GIB:.1f} of the {usable / GIB:.1f} GiB that are usable on "
            f"{gpu}, which leaves {free:.1%}; the prediction may be off by {HEADROOM:.0%}, so it may not fit; {advice}"
        )
    advice = f"what fits, cheapest first: {nearest}" if changes else "no change of mesh or recomputation makes it fit"
    largest_first = sorted(memory.parts.items(), key=lambda part: -part[1])
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest_first if size / GIB >= 0.05)
    raise UsageError(
        f"{name} needs {memory.total / GIB:.1f} GiB on each GPU ({kinds}) and {usable / GIB:.1f} GiB of {gpu} are "
        f"usable{_larger_fraction(memory.total, usable)}; {advice}"
    )


# --- The combinations -------------------------------------------------------------------------------------------------


def _candidates(config: Config) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every combination of changes: its price, and the changed fields by dotted name."""
    mesh, train = config.mesh, config.train
    losses = [config.train.loss_chunks for config in (config, *with_loss_chunks(config, predict_memory(config)))]
    unrolled = is_unrolled(config, on_gpu=True)
    powers = (1 << k for k in range(train.micro_batch.bit_length()))
    halves = [train.micro_batch // power for power in powers if train.micro_batch % power == 0]
    recomputes = [mode for mode in RECOMPUTE if RECOMPUTE[mode] >= RECOMPUTE[train.recompute]]
    for sizes, recompute in itertools.product(_meshes(config), recomputes):
        devices = math.prod(sizes.values())
        moved = OTHER_MESH * any(size != getattr(mesh, axis) for axis, size in sizes.items())
        moved += MORE_GPUS * (devices > mesh.devices) * devices // mesh.devices
        splits = {mesh.sequence_parallel, True} if sizes["model"] > 1 else {mesh.sequence_parallel}
        replicas = sizes["data"] * sizes["context"]
        zeros = [stage for stage in ZERO if stage >= mesh.zero and (replicas > 1 or stage == mesh.zero)]
        share = train.global_batch // sizes["data"]
        micro_batches = [size for size in halves if size <= share and share % size == 0]
        unrolls = ["off", train.unroll] if unrolled and sizes["pipe"] == 1 else [train.unroll]
        for micro_batch, split, zero, chunks, unroll in itertools.product(
            micro_batches, splits, zeros, losses, unrolls
        ):
            every = {
                **{f"mesh.{axis}": size for axis, size in sizes.items()},
                "mesh.sequence_parallel": split,
                "mesh.zero": zero,
                "train.recompute": recompute,
                "train.micro_batch": micro_batch,
                "train.loss_chunks": chunks,
                "train.unroll": unroll,
            }
            values = {name: value for name, value in every.items() if value != value_of(config, name)}
            price = moved + RECOMPUTE[recompute] - RECOMPUTE[train.recompute]
            price += SEQUENCE_PARALLEL * ("mesh.sequence_parallel" in values)
            price += ZERO[zero] * ("mesh.zero" in values)
            price += LOSS_CHUNKS * ("train.loss_chunks" in values) + LOOP * ("train.unroll" in values)
            price += SMALLER_MICRO_BATCH * ((train.micro_batch // micro_batch).bit_length() - 1)
            if values:
                yield price, values


def _meshes(config: Config) -> list[dict[str, int]]:
    """Sizes by axis: of the config's mesh; of meshes with `data` given to another axis; with 2 to 64 times the GPUs."""
    mesh, positions = config.mesh, config.model.sequence
    sizes = {"pipe": mesh.pipe, "data": mesh.data, "context": mesh.context, "model": mesh.model}
    meshes = [sizes]
    for factor in (2, 4, 8):
        if mesh.data % factor == 0:
            less = sizes | {"data": mesh.data // factor}
            meshes += [less | {axis: sizes[axis] * factor} for axis in ("model", "pipe", "context")]
    for factor in (2, 4, 8, 16, 32, 64):
        meshes += [sizes | {axis: sizes[axis] * factor} for axis in ("model", "pipe", "data", "context")]

    def is_sensible(context: int, model: int) -> bool:
        # Devices of `model` communicate in every layer, so they should share a server: at most eight, unless it has
        # more. Sequences are split if they are long.
        return model <= max(8, mesh.model) and (context == mesh.context or positions // context >= LEAST_POSITIONS)

    return [sizes for sizes in meshes if is_sensible(sizes["context"], sizes["model"])]


def _includes(values: dict[str, Any], proposed: dict[str, Any]) -> bool:
    """True if `values` include what is proposed already, or go further, such as a smaller micro-batch."""

    def strength(name: str, value: Any) -> int:
        return -value if name == "train.micro_batch" else RECOMPUTE.get(value, 1 if value == "off" else value)

    return all(name in values and strength(name, values[name]) >= strength(name, proposed[name]) for name in proposed)


def _larger_fraction(needed: float, usable: float) -> str:
    """A hint if the memory exists but JAX was not told to use it."""
    possible = usable / DEFAULT_FRACTION * USABLE_FRACTION
    if any(name in os.environ for name in MEMORY_FRACTIONS) or needed > possible:
        return ""
    return f" ({possible / GIB:.1f} with {MEMORY_FRACTIONS[0]}={USABLE_FRACTION} in the environment, where it fits)"


# --- The memory section of a plan, and its picture --------------------------------------------------------------------


WHEN = {
    "head": "with the logits of a micro-batch",
    "backward": "in the backward pass of the layers",
    "reduction": "when gradients are summed over data",
    "update": "when Muon orthogonalises matrices",
}


def memory_section(config: Config, gpu: Gpu | None = None, figure: Path | None = None, name: str = "") -> Section:
    """The section of a plan.

    Args:
      gpu: the GPU it has to fit into.
      figure: output file of the plot.
    """
    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    memory = predict_memory(config)
    values: dict[str, Any] = {
        "total": memory.total,
        **memory.parts,
        "host": memory.host,
        "moment": memory.moment,
        "attention": config.model.attention,
        "unrolled": is_unrolled(config, on_gpu=True),
        "float8": in_float8(config.precision),
        "loss_chunks": config.train.loss_chunks,
        "figure": None if figure is None else str(figure),
    }
    rows = {kind: f"{size / GIB:8.2f} GiB" for kind, size in memory.parts.items()}
    rows["total"] = f"{memory.total / GIB:8.2f} GiB on each device, {WHEN[memory.moment]}"
    if memory.host:
        rows["host memory"] = f"{memory.host / GIB:8.2f} GiB for each device: the inputs of all layers"
    rows["attention"] = f"by {values['attention']}"
    if values["float8"]:
        rows["products"] = "with the layers' weights in float8: e4m3, gradients e5m2; all others in bf16"
    if values["loss_chunks"] > 1:
        chunks, local = config.train.loss_chunks, config.model.padded_vocabulary // config.mesh.model
        logits = f"{-(-local // chunks):,} logits of a token at a time"
        rows["loss"] = f"in {chunks} chunks of the vocabulary, {logits}, computed twice"
    lines = []
    if gpu is not None:
        rows["layers"] = layers_in_words(values["unrolled"])
        if values["unrolled"] and config.mesh.context > 1 and config.train.recompute != "none":
            rows["layers"] += " (over context XLA then recomputed many at once: llama3_8b_128k took 64 GiB, not 34)"
        if not values["unrolled"] and repeats_in_stack(config.model):
            rows["layers"] += (
                " (a pattern of windows then took more: 16 layers of qwen3_8b on 8 GPUs 14.7 GiB, not 9.3)"
            )
        free = free_share(memory.total, gpu.usable_bytes)
        changes = [] if free >= HEADROOM else changes_that_fit(config, gpu.usable_bytes, host=gpu.host_bytes)
        if memory.host:
            needed, available = min(gpu.gpus_per_node, config.mesh.devices) * memory.host, gpu.host_memory_per_node
            values |= {"host_of_server": needed, "host_memory": available}
            rows["host memory"] += f"; {_server_in_words(needed, available)}"
        values |= {
            "gpu": gpu.name,
            "usable": gpu.usable_bytes,
            "fits": free >= 0 and fits_host(memory, gpu.host_bytes),
            "free": free,
            "changes": [
                {"flags": change.flags, "total": change.memory.total, "devices": change.config.mesh.devices}
                for change in changes
            ],
        }
        verdict = "it fits" if free >= HEADROOM else "it may not fit" if free >= 0 else "it does not fit"
        rows["verdict"] = f"{verdict} into the {gpu.usable_bytes / GIB:.1f} GiB that are usable on {gpu.name}"
        if not fits_host(memory, gpu.host_bytes):
            share = f"{gpu.host_bytes / GIB:,.0f} GiB of host memory that a server has for each GPU"
            rows["verdict"] += f", but not into the {share}: use --train.recompute full, or a smaller micro-batch"
        if 0 <= free < HEADROOM:
            rows["verdict"] += f": {free:.1%} are left free, and the prediction may be off by {HEADROOM:.0%}"
        lines = [f"{change.flags}  →  {change.needs(config)}" for change in changes]
        if lines:
            lines = [f"what fits and leaves {HEADROOM:.0%}, cheapest first:", *(f"  {line}" for line in lines)]
        elif free < HEADROOM:
            lines = [f"no change of mesh or recomputation makes it fit and leaves {HEADROOM:.0%}"]
    if figure is not None:
        draw_modes(config, figure, gpu, name)
        rows["picture"] = str(figure)
    return Section("Memory", values, [*named_rows(rows), *lines])


def _server_in_words(needed: float, available: float | None) -> str:
    if available is None:
        return f"{needed / GIB:,.1f} GiB in a server, whose memory is not known"
    words = f"{needed / GIB:,.1f} of the {available / GIB:,.0f} GiB of a server"
    return words if needed <= available else f"{words}, which is too much: use --train.recompute full"


def draw_modes(config: Config, file: Path | BinaryIO, gpu: Gpu | None = None, name: str = "") -> None:
    """Draw the memory of a validated config and of the same with each recomputation mode; `name` is for the title."""
    from mjax.pictures.plan import draw_memory  # matplotlib takes a second to import

    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    modes = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in RECOMPUTE:
            changed = with_values(config, {"mesh.sequence_parallel": split, "train.recompute": recompute})
            if can_run_layers(changed):
                modes[recompute + ", sequence parallel" * split] = predict_memory(changed).parts
    heading = f"Memory of a device by recomputation mode{', for ' * bool(name)}{name}"
    micro_batch, attention = config.train.micro_batch, config.model.attention
    about = f"{in_words(config.mesh, PIPE)}, micro-batches of {micro_batch}, attention by {attention}"
    draw_memory(modes, file, heading, about, gpu, HEADROOM)
