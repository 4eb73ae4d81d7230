"""The mark of tests that compile for a GPU, which needs JAX's CUDA wheels but no GPU (`make test-compiler`)."""

import pytest

needs_compiler = pytest.mark.compiler
