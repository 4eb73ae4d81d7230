"""The kernels that the lines of a compiled program launch."""

from __future__ import annotations

import re

from benchmarks.aot.hlo import CONTROL, Line, Module, arrays_of

# Lines that cost nothing: they name values, or move less than a kernel launch costs.
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "domain",
}  # fmt: skip
LIBRARIES = {"__cudnn$fmha": "attention, cuDNN", "__cublas": "matrix product, cuBLAS"}  # by the call's target
PALLAS, FLASH = "__gpu$xla.gpu.triton", "/flash_"  # its target, and the names of our kernels
HOST = ":S(5)"  # the memory space of an array in host memory, in its layout
TO_HOST, FROM_HOST = "copy to host memory", "copy from host memory"  # kernels of no multiprocessor
MOVES = {
    "broadcast", "concatenate", "copy", "copy-start", "dynamic-slice", "dynamic-update-slice", "pad", "reshape",
    "reverse", "slice", "transpose",
}  # fmt: skip


class Kernels(Module):
    """The computations of a module, and the kernels that their lines launch."""

    def __init__(self, text: str):
        super().__init__(text)
        self._products: dict[str, bool] = {}

    def kernel_of(self, line: Line) -> str | None:
        """The type of kernel that a line launches; None if it launches none, or a collective."""
        opcode = line.opcode
        if opcode in FREE or opcode in CONTROL or opcode == "async-update" or opcode.endswith("-done"):
            return None
        if self.operation_of(line):
            return None
        if copied := self.host_copy(line):
            return copied[0]
        if opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', line.attributes)[1]
            if target == "AllocateBuffer":
                return None
            if target == PALLAS and FLASH in line.source:
                return "attention, Pallas"
            known = (kernel for prefix, kernel in LIBRARIES.items() if target.startswith(prefix))
            return next(known, f"custom call {target}")
        if opcode == "fusion":
            return self._fusion(line)
        if opcode in ("copy", "copy-start"):
            return "copy"
        return opcode.removesuffix("-start")

    def _fusion(self, line: Line) -> str:
        inside = self.computations[line.attribute("calls")]
        if called := [inner for inner in inside if inner.opcode == "custom-call"]:
            return self.kernel_of(called[0])  # with a slice of a buffer, or written into one (jax 0.11)
        config = re.search(r'"fusion_backend_config":\{"kind":"([^"]*)"', line.attributes)
        emitter = config[1] if config else ""
        if self._has_product(line.attribute("calls")):
            maker = "Triton" if emitter.startswith("__triton") else "cuDNN" if "cudnn" in emitter else "XLA"
            return f"matrix product, {maker}"
        if emitter.startswith("__triton"):
            return "fusion, Triton"
        if emitter == "__custom_fusion":
            return "copy"  # a slice of a buffer, passed on or written in place
        return "fusion, reduction" if "kind=kInput" in line.attributes else "fusion, element-wise"

    def _has_product(self, name: str) -> bool:
        if name not in self._products:
            lines = self.computations[name]
            self._products[name] = any(
                line.opcode in ("dot", "convolution", "scaled-dot")
                or (line.opcode == "fusion" and self._has_product(line.attribute("calls")))
                for line in lines
            )
        return self._products[name]

    def moves(self, line: Line) -> bool:
        """True if a line computes nothing but indices."""
        if line.opcode == "fusion":
            inside = self.computations[line.attribute("calls")]
            return all(self.moves(inner) or re.fullmatch(r"\w+\[\]", inner.shape) for inner in inside)
        return line.opcode in MOVES or line.opcode in FREE

    def host_copy(self, line: Line) -> tuple[str, int] | None:
        """The direction and the bytes of a copy between device and host that `line` starts, or is; None for others.

        Arrays of all layers stay where they are: a slice of one moves, or is written in place.
        """
        if not line.opcode.startswith(("copy", "fusion", "dynamic-")) or line.opcode.endswith("-done"):
            return None
        arrays = re.findall(r"[a-z]\w*\[[\d,]+\](?:\{[^}]*\})?", line.shape)  # without numbers, such as indices
        if HOST not in line.shape or not arrays:
            return None
        result = arrays[0] if line.opcode == "copy-start" else arrays[-1]
        return TO_HOST if HOST in result else FROM_HOST, min(arrays_of(shape)[0][1] for shape in arrays)
