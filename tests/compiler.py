"""The mark of tests that compile for a GPU, which needs no GPU."""

import pytest

from mjax.packages import cuda_build

needs_compiler = pytest.mark.skipif(
    cuda_build() is None, reason="needs JAX's CUDA wheels: pip install -r requirements-cuda.txt"
)
