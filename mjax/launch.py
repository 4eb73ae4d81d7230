"""Set up a process before JAX is imported."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mjax.bounds import Bounds
from mjax.errors import UsageError
from mjax.hardware import USABLE_FRACTION

HUGE_PAGES = "glibc.malloc.hugetlb=1"
# Two names of one setting; JAX refuses to start with both.
MEMORY_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# How launchers tell a process how many there are: Slurm's srun, Open MPI's mpirun.
PROCESS_COUNTS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun"}


def has_nvidia_gpu() -> bool:
    """True where this machine shows an NVIDIA device; found out without touching it."""
    return (
        Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    )


def launched_by(environment: Mapping[str, str] = os.environ) -> tuple[str, int | None] | None:
    """The launcher that has started several processes, and how many if it says so; None: this one is alone."""
    for variable, launcher in PROCESS_COUNTS.items():
        if int(environment.get(variable, "1")) > 1:
            return launcher, int(environment[variable])
    return ("Kubernetes", None) if "JOB_COMPLETION_INDEX" in environment else None


def claim_gpu_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let XLA take nine tenths of a GPU's memory unless the environment says otherwise.

    By itself it takes three quarters. The rest is for CUDA, cuBLAS and NCCL. `mjax plan` counts with the same share
    (`hardware.USABLE_FRACTION`).
    """
    if not any(name in environment for name in MEMORY_FRACTIONS):
        environment[MEMORY_FRACTIONS[0]] = str(USABLE_FRACTION)


def restart_with_huge_pages() -> None:
    """On a CPU, restart this process with huge pages for its heap, once.

    XLA maps its arena of activations again at every step; with 4 KiB pages a step of a gigabyte begins with 300,000
    page faults, an eighth of its time. The C library reads the setting before `main`, so it cannot be made from inside.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or has_nvidia_gpu() or "glibc.malloc.hugetlb" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}".lstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def simulate_devices(count: int) -> None:
    """Make JAX see `count` devices on this machine's CPU, for the flag --simulate.

    Raises:
      UsageError: `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"--simulate is {count}; it must be at least 1")
    if "jax" in sys.modules:  # the file of a config may import it; no device has been touched yet
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
    )


@dataclass(frozen=True)
class Distributed:
    """Rendezvous of the processes of a run; not needed under srun, mpirun or in a Kubernetes indexed job."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    processes: int | None = None
    """Number of processes."""
    process: int | None = None
    """Index of this one, from 0."""
    start_timeout: Annotated[int, Bounds(ge=5)] = 300
    """Seconds in which all processes have to come together."""
    heartbeat: Annotated[int, Bounds(ge=5)] = 25
    """Seconds of silence after which a process is lost and the run ends. One that dies is noticed at once."""
    watchdog: float | None = None
    """Seconds without a finished step after which process 0 says who is behind; 0: never. When not given: a minute or
    ten median steps, whichever is longer."""
    hang_limit: float | None = None
    """Seconds without a finished step after which the run ends with exit code 1, for a launcher to start it again; ten
    times as many while it compiles, or all evaluate or save. When not given: never."""

    @property
    def several(self) -> bool:
        """True where a launcher or the flags say that this process is one of several."""
        return launched_by() is not None or None not in (self.coordinator, self.processes, self.process)


def leave_accelerators_alone() -> None:
    """Have JAX see the CPU only: work that needs no accelerator must not take the memory of one that is training."""
    os.environ["JAX_PLATFORMS"] = "cpu"
