"""The choice between a loop over the layers and layers compiled one after the other (`train.unroll`).

A loop keeps what the backward pass needs in stacked arrays: XLA fills them with zeros, copies every layer's part in and
out, and slices the weights of each layer from theirs. Written out, layers leave their results where they are. The
compiled program is larger and takes longer to compile. Its memory is at most that of the loop, except where the
backward pass gathers tokens again (sequence parallelism with recomputation).
"""

from __future__ import annotations

from dataclasses import replace

from mjax.config import Config
from mjax.models.build import layers_differ
from mjax.parallel.axes import copies
from mjax.parallel.zero import sums_in_last
from mjax.planner.memory import HEADROOM, free_share, memory_of, predict_memory

MOST_LAYERS = 80
"""Compiling takes one to two seconds for each."""
MOST_GPUS = 8
"""Of FSDP without a loop: a server."""


def with_unrolling(config: Config, usable: float | None) -> Config:
    """`config` with `train.unroll` decided: as it says, or with `auto` on a GPU whose memory the step leaves HEADROOM
    of.

    A pipeline keeps its loop, since its stages keep activations in slots. So does FSDP over several servers, where the
    loop is as fast, and over `model` without sequence parallelism, where nothing keeps XLA from gathering the weights
    of many layers early (`models/block.py`). And so does a mixture of experts, whose rows of several layers XLA would
    have in memory at once: compiled for 8 H100s it needed up to 40% more than predicted; and a model with layers of
    several kinds, of which nobody has compared the two. And so do sequences over `context`: without a loop XLA
    recomputes several layers at once, beside all-to-alls; compiled for 8 H100s, `llama3_8b_128k` needed 64 instead of
    34 GiB. And so do activations in host memory, which without a loop would stay on the device until the backward pass.

    Args:
      config: validated; `model.attention` is a kernel's name, or `auto`, resolved as on a GPU.
      usable: bytes that XLA may allocate on each GPU; None on other devices.
    """
    if config.train.unroll != "auto":
        return config
    return replace(config, train=replace(config.train, unroll="off" if is_looped(config, usable) else "on"))


def is_looped(config: Config, usable: float | None) -> bool:
    """Whether the layers run in a loop; arguments as for `with_unrolling`."""
    if config.train.unroll != "auto":
        return config.train.unroll == "off"
    mesh = config.mesh
    kept = config.model.parted_experts() or layers_differ(config.model) or mesh.context > 1
    kept = kept or config.train.recompute == "offload"
    if usable is None or mesh.pipe > 1 or config.model.layers > MOST_LAYERS or kept:
        return True
    if mesh.zero == 3 and (mesh.devices > MOST_GPUS or (mesh.model > 1 and not mesh.splits_tokens)):
        return True
    unrolled = replace(config, train=replace(config.train, unroll="on"))
    return free_share(predict_memory(unrolled).total, usable) < HEADROOM


def layers_in_words(unrolled: bool) -> str:
    """The row of a plan that says how the layers are compiled."""
    return "one after the other, without a loop" if unrolled else "in a loop"


def sums_beside_layers(config: Config) -> bool:
    """Whether gradients are summed over `data` beside the backward pass of the layers, in the last micro-batch, rather
    than after it; `train.unroll` is decided."""
    mesh, train = config.mesh, config.train
    if copies(mesh) == 1 or train.unroll != "on":
        return False
    return mesh.zero == 3 or sums_in_last(config)


def unrolled_here(config: Config) -> Config:
    """`with_unrolling` for the GPUs of this process."""
    import jax  # a plan does not need it

    found = memory_of(jax.local_devices()[0])
    return with_unrolling(config, None if found is None else found[0])
