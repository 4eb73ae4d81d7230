"""The devices that JAX sees, and the share of their memory that it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import jax

from mjax.cluster.hardware import USABLE_FRACTION
from mjax.cluster.launch import MEMORY_FRACTIONS
from mjax.doctor.driver import Driver, visible_gpus
from mjax.doctor.finding import (
    FIGURE,
    GREEN,
    RED,
    YELLOW,
    Finding,
    Found,
    advice_on,
    check,
    first_line,
    gibibytes,
    listed,
)

ENOUGH = 0.85  # of a GPU's memory; the rest is for CUDA, NCCL and cuDNN


def by_kind() -> dict[str, list[jax.Device]]:
    """The devices to check, by JAX's name for their kind: all GPUs, or one CPU device however many are simulated."""
    devices = jax.local_devices()
    kinds: dict[str, list[jax.Device]] = {}
    for device in devices[:1] if devices[0].platform == "cpu" else devices:
        kinds.setdefault(device.device_kind, []).append(device)
    return kinds


def called(device: jax.Device) -> str:
    """'GPU 3', by JAX's number: 0 is the first in CUDA_VISIBLE_DEVICES."""
    return f"{device.platform.upper()} {device.id}"


@check("devices")
def check_devices(
    driver: Driver, cuda: int | None, complaints: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Found:
    """Start JAX and compare its devices with the GPUs that the driver shows.

    Args:
      driver, cuda: as in `driver.check_driver`.
      complaints: list that collects JAX's log messages while it starts; read afterwards.
    """
    platforms = environment.get("JAX_PLATFORMS")
    try:
        devices = jax.local_devices()
    except Exception as error:  # an assertion, a RuntimeError or a ValueError, by version and reason
        reason = (list(complaints) or [first_line(error)])[-1]
        if platforms:
            found = f"JAX has no device with JAX_PLATFORMS={platforms} ({reason})"
            advice = "unset JAX_PLATFORMS to train on the CPU; for a GPU, see the line driver"
            return RED, found, advice_on(reason, advice)
        return RED, f"JAX has no device: {reason}", advice_on(reason, "fix the lines above first")
    kinds = [device.device_kind for device in devices]
    counts = {kind: kinds.count(kind) for kind in kinds}
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        what = f"the CPU, {cores} cores" if len(devices) == 1 else f"{len(devices)} simulated devices of the CPU"
        if driver.gpus and not platforms and visible_gpus(driver, environment):
            if cuda is None:
                return YELLOW, f"{what}; the GPU cannot be used", "fix the line driver"
            why = f": {complaints[-1]}" if complaints else ""
            found = f"{what}, although {len(driver.gpus)} GPU{'s are' if len(driver.gpus) > 1 else ' is'} here{why}"
            return RED, found, f'pip install --upgrade --force-reinstall "jax[cuda{cuda}]"'
        return GREEN, f"{what}{f', by JAX_PLATFORMS={platforms}' if platforms else ''}"
    found = listed([f"{count} × {kind}" for kind, count in counts.items()])
    if any(" MIG " in kind for kind in kinds):  # the driver counts whole GPUs
        return GREEN, f"{found}, a slice of a GPU"
    expected = visible_gpus(driver, environment)
    if len(devices) < expected:
        return YELLOW, f"{found}; the driver shows {expected}", "nvidia-smi; sudo dmesg | grep -i xid"
    if len(counts) > 1:
        advice = "choose those of one kind with CUDA_VISIBLE_DEVICES; a step waits for the slowest"
        return YELLOW, f"{found}: of different kinds", advice
    return GREEN, found


@check("device memory")
def check_device_memory(driver: Driver, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the share of a GPU's memory that JAX takes; nothing on a CPU."""
    totals = dict(zip(driver.gpus, driver.memory, strict=False))  # the driver does not know it for a slice of a GPU
    for kind, devices in by_kind().items():
        if devices[0].platform == "gpu":
            limit = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)
            yield from judge_device_memory(limit, totals.get(kind, 0.0), environment, kind)


@check("device memory")
def judge_device_memory(limit: float, total: float, environment: Mapping[str, str], kind: str) -> Found:
    """Compare the bytes that JAX may use with those of a GPU; 0 means unknown."""
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator == "platform":
        found = "XLA_PYTHON_CLIENT_ALLOCATOR=platform asks the driver for every array, which is slow"
        return YELLOW, found, "unset XLA_PYTHON_CLIENT_ALLOCATOR"
    if not limit or not total:
        usable = gibibytes(limit) if limit else "an unknown part"
        return FIGURE, f"JAX may use {usable} of {kind}{'' if total else '; the driver does not report its memory'}"
    figures = {"usable_gib": limit / 2**30, "total_gib": total / 2**30}
    found = f"JAX may use {gibibytes(limit)} of {gibibytes(total)} of {kind}"
    if environment.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0"):
        found += ", allocated piece by piece (XLA_PYTHON_CLIENT_PREALLOCATE), so that it may become fragmented"
        return YELLOW, found, "unset XLA_PYTHON_CLIENT_PREALLOCATE", figures
    if limit < ENOUGH * total:
        named = next((name for name in MEMORY_FRACTIONS if name in environment), MEMORY_FRACTIONS[0])
        advice = f"export {named}={USABLE_FRACTION}"
        return YELLOW, f"{found}, {limit / total:.0%}", advice, figures
    return GREEN, found, None, figures
