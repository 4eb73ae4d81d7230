"""XLA flags that mjax sets, each with its reason: the only place.

For speed there is none yet: a flag enters the table with a measurement on a GPU. An unknown flag ends every process
that has it set, so each says for which versions of JAX it holds. A flag that is set in XLA_FLAGS is left as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mjax.cluster.launch import set_variable
from mjax.errors import UsageError


@dataclass(frozen=True)
class XlaFlag:
    """A flag of XLA.

    Attributes:
      name: without the dashes.
      value: as typed.
      versions: of JAX, as in a requirement.
      reason: with the measurement, for a flag that is there for speed.
    """

    name: str
    value: str
    versions: str
    reason: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


FASTER: tuple[XlaFlag, ...] = ()
"""For every command. XLA for CPUs knows the flags of GPUs, and ignores them."""

REPEATABLE = (
    XlaFlag(
        "xla_gpu_exclude_nondeterministic_ops",
        "true",
        ">=0.10.2,<0.13",
        "the gradient of the embedding is summed in a fixed order instead of by atomics; cuDNN's backward pass too",
    ),
    XlaFlag(
        "xla_gpu_enable_triton_gemm",
        "false",
        ">=0.10.2,<0.13",
        "XLA refuses to compile the step with the flag above and Triton's products: 'Failed to get configs'",
    ),
    XlaFlag(
        "xla_gpu_autotune_level",
        "0",
        ">=0.10.2,<0.13",
        "a restart would choose other kernels for products, by their time at that moment",
    ),
)
"""For `train.py --deterministic`. They say nothing to XLA for CPUs, where a run is repeatable anyway."""


def be_fast() -> None:
    """Set the flags of FASTER; before JAX uses a device."""
    _add(FASTER)


def be_repeatable() -> None:
    """Set the flags of REPEATABLE; before JAX uses a device.

    Raises:
      UsageError: XLA_FLAGS contradicts them.
    """
    given = values_of(os.environ.get("XLA_FLAGS", ""))
    for flag in REPEATABLE:
        if given.get(flag.name, flag.value).lower() != flag.value:
            raise UsageError(
                f"--deterministic needs {flag}, and XLA_FLAGS has --{flag.name}={given[flag.name]}; leave one of them "
                "out"
            )
    _add(REPEATABLE)


def for_one_call(platform: str) -> dict[str, int]:
    """Options for a program that runs once, such as that of the initial weights.

    On CPUs LLVM optimizes less, in a third of the time and with the same bits. XLA_FLAGS go first. Not measured on a
    GPU.
    """
    level = "xla_backend_optimization_level"
    return {} if platform != "cpu" or level in values_of(os.environ.get("XLA_FLAGS", "")) else {level: 1}


def values_of(flags: str) -> dict[str, str]:
    """The values of the flags in XLA_FLAGS, by name."""
    return {name: value or "true" for name, value in re.findall(r"--(\w+)(?:=(\S*))?", flags)}


def _add(flags: Iterable[XlaFlag]) -> None:
    before = os.environ.get("XLA_FLAGS", "")
    absent = [flag for flag in flags if flag.name not in values_of(before)]
    if not absent:
        return
    from packaging.specifiers import SpecifierSet  # with importlib.metadata a tenth of the time of --help

    from mjax.utils.packages import installed

    version = installed().get("jax", "0")
    new = [str(flag) for flag in absent if SpecifierSet(flag.versions).contains(version)]
    if new:
        set_variable("XLA_FLAGS", " ".join([before, *new]).strip())
