"""FLOPs of a step: those of the model and those of the hardware, counted on the products of the traced model.

**Model FLOPs** are those of the forward and backward pass as arXiv 2205.05198, appendix A, counts them: matrix products
only, attention over the full s × s matrix, nothing for recomputation. With a feed-forward width of 4 h they are

    72 B L s h² (1 + s / 6h + v / 12hL)

MFU is these over the peak, so recomputation lowers it. A causal model needs half of its attention, and who counts it so
(Megatron today) gives s / 12h for s / 6h: `causal=True`.

The backward pass has two products for one of the forward pass: the gradient of its input, and that of its weight, if
that is trained. A frozen weight, of a model with adapters, has only the first.

**Hardware FLOPs** add the forward products that `train.recompute` repeats, and those of the logits with
`train.loss_chunks`. With full recomputation they are those of arXiv 2104.04473, equation 3,

    96 B L s h² (1 + s / 6h + v / 16hL)

and selective recomputation repeats the attention core, (1 + 2s / 9h + …) for (1 + s / 6h + …). (Appendix A of
2205.05198 has s / 3h there: it counts the repeated core three times, as if its backward pass were repeated too.) What a
kernel repeats inside itself, as flash attention does in its backward pass, is not counted.
"""

from __future__ import annotations

from dataclasses import replace

from mjax.cluster.hardware import gpu_of
from mjax.config import Config
from mjax.trace.layers import Layer, Traced, head, kinds_of, layer_forward


def model_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of one step over all devices, nothing counted twice.

    Args:
      config: validated.
      causal: count the half of the attention that a causal model needs; a model that is not causal needs all of it.
    """
    of_head = head(_whole(Traced.of(config)))
    forward = _layers(config, causal) + of_head.flops
    frozen = _frozen(config) + (0.0 if of_head.trained else of_head.flops)
    return config.train.global_batch * (3 * forward - frozen)


def hardware_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of a step: `model_flops` and the forward products that `train.recompute` and `train.loss_chunks` do
    again."""
    train = config.train
    whole = _layers(config, causal)
    again = {"none": 0.0, "selective": _attention(config, causal), "full": whole, "offload": whole}
    scores = head(_whole(Traced.of(config))).products[-1].flops if train.loss_chunks > 1 else 0.0
    return model_flops(config, causal) + train.global_batch * (again[train.recompute] + scores)


def _layers(config: Config, causal: bool) -> float:
    """Forward FLOPs of the layers per sample."""
    weights = sum(count * sum(op.flops for op in layer.of_weights) for count, layer in _kinds(config))
    return weights + _attention(config, causal)


def _frozen(config: Config) -> float:
    """Forward FLOPs of the layers' frozen weights per sample."""
    return sum(
        count * (sum(op.flops for op in layer.of_weights) - sum(op.flops for op in layer.of_trained))
        for count, layer in _kinds(config)
    )


def _attention(config: Config, causal: bool) -> float:
    """FLOPs of scores and weighted sums."""
    full = sum(count * sum(op.flops for op in layer.of_activations) for count, layer in _kinds(config))
    return full / 2 if causal and config.model.causal else full


def _kinds(config: Config) -> list[tuple[int, Layer]]:
    """For each kind of layers how many the model has, and one of them."""
    return [(layers, layer_forward(_whole(of))) for layers, of in kinds_of(config)]


def _whole(of: Traced) -> Traced:
    """The traced model without any split."""
    return replace(of, ranks=1, sequence_parallel=False, expert=1, context=1, across=None)


def peak_tflops(device_kind: str, compute: str) -> float | None:
    """Dense peak of one device that an MFU is a share of, in TFLOP/s, or None if it is unknown: then no MFU is printed.

    Args:
      device_kind: as named by JAX. `mjax/cluster/hardware.py` has the table, and describes how to add a device.
      compute: compute dtype of the config; fp8 has the peak of bf16 (`Gpu.mfu_peak`).
    """
    gpu = gpu_of(device_kind)
    peak = None if gpu is None else gpu.mfu_peak(compute)
    return None if peak is None else peak / 1e12
