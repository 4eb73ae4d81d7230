"""Model FLOPs of a step, and the peaks they are divided by: the one place for both.

Model FLOPs are those of the forward and backward pass as arXiv 2205.05198, appendix A, counts them: matrix products
only, attention over the full s × s matrix, nothing for recomputation. With a feed-forward width of 4 h they are

    72 B L s h² (1 + s / 6h + v / 12hL)
"""

from __future__ import annotations

from mjax.config import Config

# Dense peak in TFLOP/s of 16-bit matrix products, by the name JAX gives the device (`jax.devices()[0].device_kind`).
# Sources: NVIDIA's data sheets of V100, A100, H100, H200 and B200 (the figure without sparsity).
PEAK_TFLOPS = {
    "Tesla V100-SXM2-16GB": 125.0,
    "Tesla V100-SXM2-32GB": 125.0,
    "Tesla V100-SXM3-32GB": 125.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H200": 989.4,
    "NVIDIA B200": 2250.0,
}


def model_flops(config: Config) -> float:
    """FLOPs of one step over all devices."""
    model = config.model
    h, f, s, v = model.hidden, model.mlp_width, model.sequence, model.padded_vocabulary
    layer = 2 * (4 * h * h + 2 * h * f) + 4 * s * h  # per token, forward: QKV and projection, MLP, attention
    sequence = s * model.layers * layer  # forward
    if model.head == "pretraining":
        sequence += s * 2 * h * v
        if model.kind == "bert":
            sequence += s * 2 * h * h + 2 * h * h + 4 * h  # MLM head, pooler, order head
    else:
        sequence += s * 4 * h if model.head == "span" else 2 * h * h + 2 * h * model.outputs  # pooler, the task's head
    return float(3 * config.train.global_batch * model.choices * sequence)  # the backward pass costs twice the forward


def peak_tflops(device_kind: str, compute: str) -> float | None:
    """Peak of one device in TFLOP/s, or None where it is not known: then no MFU is printed.

    To add a device, put its dense 16-bit figure and the source of it into `PEAK_TFLOPS`.
    """
    return PEAK_TFLOPS.get(device_kind) if compute in ("bf16", "fp16") else None
