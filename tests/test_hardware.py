"""The one table of GPUs: names, peaks, and a sentence for missing entries."""

import pytest

from mjax.cluster.hardware import GPUS, find_gpu, gpu_named
from mjax.errors import UsageError


def test_every_gpu_is_found_by_all_names():
    for gpu in GPUS:
        assert gpu_named(gpu.name.upper()) is gpu
        assert all(find_gpu(kind) is gpu and gpu_named(kind) is gpu for kind in gpu.device_kinds)
    names = [gpu.name for gpu in GPUS] + [kind for gpu in GPUS for kind in gpu.device_kinds]
    assert len(set(names)) == len(names)


def test_unknown_gpu_is_refused():
    with pytest.raises(UsageError, match="--gpu h10 is not known; did you mean h100"):
        gpu_named("h10")
    assert find_gpu("NVIDIA GeForce RTX 4090") is None


def test_peaks_are_dense_and_in_flops():
    assert gpu_named("h100").peak("bf16") == gpu_named("h100").mfu_peak("fp8") == 989.4e12
    assert gpu_named("v100").peak("bf16") is None
    lanes = {7: 16e9, 8: 32e9, 9: 64e9, 10: 64e9}  # sixteen of them, one way
    for gpu in GPUS:
        assert 100 <= gpu.peak_tflops["fp16"] <= 2500, gpu.name  # with sparsity it would be twice as much
        assert gpu.node_bandwidth * 4 < gpu.memory_bandwidth
        assert 14 * 2**30 < gpu.usable_bytes < gpu.memory_bytes
        assert gpu.host_bandwidth == lanes[gpu.compute_capability[0]]
    assert {gpu.name for gpu in GPUS if gpu.half_precision == "fp16"} == {
        "v100-16gb",
        "v100",
        "v100-dgx2h",
        "v100-dgx2",
    }


def test_smaller_server_has_its_share_of_memory():
    h100 = gpu_named("h100")
    assert (h100.host_memory_per_node, h100.host_bytes) == (2e12, 2.5e11)
    half = h100.with_server(4)
    assert (half.host_memory_per_node, half.host_bytes) == (1e12, 2.5e11)
    assert half.network_bandwidth_per_node == h100.network_bandwidth_per_node / 2
    pcie = gpu_named("h100-pcie").with_server(4)
    assert (pcie.host_memory_per_node, pcie.host_bytes) == (None, None)
