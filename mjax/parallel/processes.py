"""One program in many processes: start-up, and the few things that all of them have to agree on.

`jax.distributed` is the engine: every process runs the same program over the same mesh and owns the devices of its
host. Process 0 writes what a run records; all read their own rows of a batch and write their own part of a checkpoint.
"""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from mjax.errors import UsageError
from mjax.launch import Distributed

# How launchers tell a process how many there are: Slurm's srun, Open MPI's mpirun.
PROCESS_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def start(where: Distributed) -> None:
    """Join the other processes, if a launcher or the flags say that there are some; before any device is touched.

    Raises:
      UsageError: only some of the three flags were given, or the others could not be reached.
    """
    given = (where.coordinator, where.processes, where.process)
    if any(value is not None for value in given) and None in given:
        raise UsageError(
            "--distributed.coordinator HOST:PORT, --distributed.processes N and --distributed.process I go together; "
            "under srun or mpirun none of them is needed"
        )
    launched = (
        any(int(os.environ.get(name, "1")) > 1 for name in PROCESS_COUNTS) or "JOB_COMPLETION_INDEX" in os.environ
    )
    if where.coordinator is None and not launched:
        return
    try:
        jax.distributed.initialize(where.coordinator, where.processes, where.process)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"the processes of this run could not find each other ({reason}); check --distributed"
        ) from error


def is_first() -> bool:
    """Whether this process writes what the run records."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Return when every process has come to this point, named `what`."""
    if jax.process_count() > 1:
        with jax.transfer_guard("allow"):  # the loop forbids transfers that nobody asked for; this one is meant
            multihost_utils.sync_global_devices(what)


def from_first(number: int) -> int:
    """Process 0's `number` (32 bits), in every process."""
    if jax.process_count() == 1:
        return number
    with jax.transfer_guard("allow"):
        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def told_to_stop(step: int) -> bool:
    """Whether the processes have agreed to stop after `step`, because one of them got SIGTERM.

    All must ask at every step. With a single process the answer is always no: it watches its own signals.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
