"""FLOPs of a step: those of the model and those of the hardware. The one place where they are counted.

**Model FLOPs** are those of the forward and backward pass as arXiv 2205.05198, appendix A, counts them: matrix products
only, attention over the full s × s matrix, nothing for recomputation. With a feed-forward width of 4 h they are

    72 B L s h² (1 + s / 6h + v / 12hL)

MFU is these over the peak, so recomputation lowers it. A causal model needs half of its attention, and who counts it so
(Megatron today) gives s / 12h for s / 6h: `causal=True`.

**Hardware FLOPs** add the forward products that `train.recompute` repeats. With full recomputation they are those of
arXiv 2104.04473, equation 3,

    96 B L s h² (1 + s / 6h + v / 16hL)

and selective recomputation repeats the attention core, (1 + 2s / 9h + …) for (1 + s / 6h + …). (Appendix A of
2205.05198 has s / 3h there: it counts the repeated core three times, as if its backward pass were repeated too.) What a
kernel repeats inside itself, as flash attention does in its backward pass, is not counted.
"""

from __future__ import annotations

from mjax.config import Config
from mjax.hardware import gpu_of


def model_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of one step over all devices, nothing counted twice.

    Args:
      config: validated.
      causal: count the half of the attention that a causal model needs; a model that is not causal needs all of it.
    """
    # The backward pass costs twice the forward.
    return 3 * config.train.global_batch * config.model.choices * (_layers(config, causal) + _head(config))


def hardware_flops(config: Config, causal: bool = False) -> float:
    """As `model_flops`, with the forward products that `train.recompute` does again."""
    again = {"none": 0.0, "selective": _attention(config, causal), "full": _layers(config, causal)}
    sequences = config.train.global_batch * config.model.choices
    return model_flops(config, causal) + sequences * again[config.train.recompute]


def _layers(config: Config, causal: bool) -> float:
    """Forward FLOPs of a sequence in all layers."""
    model = config.model
    h, f = model.hidden, model.mlp_width
    return model.sequence * model.layers * 2.0 * (4 * h * h + 2 * h * f) + _attention(config, causal)


def _attention(config: Config, causal: bool) -> float:
    """Those of scores and weighted sums."""
    model = config.model
    full = 4.0 * model.sequence**2 * model.hidden * model.layers
    return full / 2 if causal and model.causal else full


def _head(config: Config) -> float:
    """Forward FLOPs of a sequence after the layers."""
    model = config.model
    h, s, v = model.hidden, model.sequence, model.padded_vocabulary
    if model.head != "pretraining":
        return s * 4 * h if model.head == "span" else 2 * h * h + 2 * h * model.outputs  # pooler, the task's head
    if model.kind == "bert":
        return s * 2 * h * v + s * 2 * h * h + 2 * h * h + 4 * h  # MLM head, pooler, order head
    return s * 2 * h * v


def peak_tflops(device_kind: str, compute: str) -> float | None:
    """Dense peak of one device in TFLOP/s, or None where it is not known: then no MFU is printed.

    Args:
      device_kind: as JAX calls it. `mjax/hardware.py` has the table, and says how to add a device to it.
      compute: compute type of the config.
    """
    gpu = gpu_of(device_kind)
    return None if gpu is None else gpu.peak_tflops.get(compute)
