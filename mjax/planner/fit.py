"""Check whether a config fits into the memory of a GPU, before anything is compiled; the section of a plan on it.

What does not fit is refused with the cheapest changes that make it fit (`search.changes_that_fit`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from mjax.cluster.hardware import USABLE_FRACTION, Gpu
from mjax.cluster.launch import MEMORY_FRACTIONS, host_memory
from mjax.config import Config
from mjax.config.axes import PIPE, in_words
from mjax.config.checks import can_run_layers
from mjax.config.kernels import HOPPER, capability_of, resolved_on_gpu
from mjax.errors import UsageError
from mjax.planner.memory import HEADROOM, fits_host, free_share, predict_memory, usable_memory
from mjax.planner.search import RECOMPUTE, changes_that_fit, with_values
from mjax.planner.section import Section, layers_in_words
from mjax.step.precision import in_float8
from mjax.step.unrolling import is_unrolled, repeats_in_stack
from mjax.trace.layers import kinds_of, layer_forward
from mjax.utils.figures import GIB, named_rows

DEFAULT_FRACTION = 0.75  # of a GPU's memory, JAX's default


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
