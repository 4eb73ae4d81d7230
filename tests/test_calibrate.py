"""Arrays of benchmarks/calibrate.py are read from memory: its loops hold no array as a constant."""

import jax
import numpy as np
import pytest

from benchmarks.calibrate import Arguments, drawn, kernels, loop_of


def all_kernels(devices, **chosen):
    return list(kernels(Arguments(output="rates.json", **chosen), "bf16", True, devices))


def test_timed_kernels_close_over_no_array():
    found = all_kernels(jax.devices()[:4], shrink=128)
    assert {kernel.kind for kernel in found} == {"launch", "copy", "product", "attention", "sum"}
    for kernel in found:
        if kernel.kind != "attention":  # cuDNN's is traced for a GPU only
            assert not jax.make_jaxpr(kernel.function)(kernel.shapes).consts


@pytest.mark.ci
def test_timed_arrays_are_random_and_change():
    found = all_kernels(jax.devices()[:4], kinds=("copy", "product", "sum"), shrink=256)
    for kernel in found:
        arrays = drawn(kernel.shapes)
        for array, shape in zip(jax.tree.leaves(arrays), jax.tree.leaves(kernel.shapes), strict=True):
            assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
            assert shape.sharding in (None, array.sharding)
            scaled = np.asarray(array, np.float64) * array.shape[0] ** 0.5
            assert 0.8 < scaled.std() < 1.2
            assert len(np.unique(scaled)) > min(100, scaled.size / 2)
        after = loop_of(kernel.function)(arrays, 100)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(after))
        different = jax.tree.map(lambda a, b: bool((a != b).any()), arrays, after)
        assert jax.tree.leaves(different)[0]
