"""What benchmarks/calibrate.py times reads its arrays from memory: the compiled loops hold no array as a constant."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.calibrate import PRODUCTS, Arguments, Kernel, _product, drawn, kernels, loop_of
from mjax.planner.compile import SHEETS, _without_compilation_cache
from mjax.planner.hlo import Module
from tests.compiler import needs_compiler

TARGETS = ("__cublas", "__cudnn$fmha")


class Origins:
    """Where the operands of matrix products come from, in a compiled program."""

    def __init__(self, text):
        self.computations, self.entry = (module := Module(text)).computations, module.entry
        self.lines = {(name, line.name): line for name, lines in self.computations.items() for line in lines}
        self.caller = {}
        for name, line in self.lines:
            line = self.lines[name, line]
            for attribute in ("calls", "to_apply", "body", "condition"):
                self.caller.setdefault(line.attribute(attribute), (name, line))

    def products(self):
        """(name, numbers of the program's arguments that it is computed from) of every operand of a product."""
        for (computation, _), line in self.lines.items():
            called = line.opcode == "custom-call" and any(target in line.attributes for target in TARGETS)
            if line.opcode == "dot" or called:
                for operand in line.operands:
                    yield f"{line.opcode} {line.name}: {operand}", self.of(computation, operand)

    def of(self, computation, name, index=None):
        """The arguments behind a value, or behind element `index` of a tuple."""
        line = self.lines[computation, name]
        if line.opcode == "parameter":
            number = int(line.inside)
            if computation == self.entry:
                return {number}
            outside, caller = self.caller[computation]
            return self.of(outside, caller.operands[number], index)
        if line.opcode == "get-tuple-element":
            return self.of(computation, line.operands[0], int(line.attribute("index")))
        if line.opcode == "tuple" and index is not None:
            return self.of(computation, line.operands[index])
        passes = index if line.opcode in ("while", "opt-barrier") else None
        return set().union(*(self.of(computation, operand, passes) for operand in line.operands))


def check(text, products):
    found = list(Origins(text).products())
    assert len(found) >= 2 * products, text
    for operand, arguments in found:
        assert arguments, f"{operand} comes from no argument"


def compiled(kernel, devices=None):
    shapes = kernel.shapes
    if devices is not None:
        one = jax.sharding.SingleDeviceSharding(devices[0])
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), shapes)
    return loop_of(kernel.function).lower(shapes, 4).compile().as_text()


def constant_weight(m, n, k, dtype):
    """As a product was timed once: XLA makes the weight a broadcast inside the product's kernel."""
    kernel = jnp.full((k, n), 1.0 / k, dtype)
    return Kernel("product", (m, n, k), lambda x: _product((x, kernel))[0], jax.ShapeDtypeStruct((m, k), dtype))


def all_kernels(devices, **chosen):
    return list(kernels(Arguments(output="rates.json", **chosen), "bf16", True, devices))


def test_every_kind_is_timed_and_closes_over_no_array():
    found = all_kernels(jax.devices()[:4], shrink=128)
    assert {kernel.kind for kernel in found} == {"launch", "copy", "product", "attention", "sum"}
    for kernel in found:
        if kernel.kind != "attention":  # cuDNN's is traced for a GPU only
            assert not jax.make_jaxpr(kernel.function)(kernel.shapes).consts
    assert jax.make_jaxpr(constant_weight(8, 8, 8, jnp.bfloat16).function)(jnp.ones((8, 8), jnp.bfloat16)).consts


def test_operands_of_products_come_from_arguments():
    (first, *_) = all_kernels(jax.devices(), kinds=("product",), shrink=64)
    check(compiled(first), products=1)
    with pytest.raises(AssertionError, match="comes from no argument"):
        check(compiled(constant_weight(*first.sizes, jnp.bfloat16)), products=1)


@pytest.mark.ci
def test_arrays_are_random_and_each_call_changes_them():
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


@needs_compiler
def test_on_an_h100_products_and_attention_read_their_operands():
    from jax.experimental.topologies import get_topology_desc

    sheet = (SHEETS / "h100.txtpb").read_text()
    devices = get_topology_desc(platform="cuda", topology="1x1x1", target_config=sheet).devices
    on_h100 = partial(compiled, devices=devices)
    with _without_compilation_cache():
        for kernel in all_kernels(devices, kinds=("product",)):
            check(on_h100(kernel), products=1)
        for kernel in all_kernels(devices, kinds=("attention",)):
            check(on_h100(kernel), products=1 + int(kernel.sizes[3]))  # forward, or forward and backward
        with pytest.raises(AssertionError, match="comes from no argument"):
            check(on_h100(constant_weight(*PRODUCTS[0], jnp.bfloat16)), products=1)
