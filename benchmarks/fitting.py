"""Fits rates to measured times: for the published calibrations and for one measured on the user's machine.

Rates of a machine come from kernels, never from whole steps.

`benchmarks/calibrate.py` times kernels and collectives and passes them on as `Measurement`s. Each kind determines the
rates that it alone depends on, in this order:

    launch      a chain of tiny kernels                       launch
    copy        x → 2 x, far larger than the caches           memory
    attention   flash attention, each direction alone         attention, a row for each head size and length
    product     matrix products from small to large           matmul, inner
    sum         all-reduces from small to large               node, collective
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mjax.cluster.hardware import Gpu
from mjax.planner.time import FRACTIONS, MAX_FRACTION, Calibration, Rates, default_calibration

# Rates determined by each kind of measurement.
SETTLES = {
    "launch": ("launch",),
    "copy": ("memory",),
    "attention": ("attention",),
    "product": ("matmul", "inner"),
    "sum": ("node", "collective"),
}


@dataclass(frozen=True)
class Measurement:
    """The time of one kernel or collective.

    Attributes:
      kind: one of SETTLES.
      sizes: launch: kernels. copy: bytes read and written. attention: FLOPs inside the mask, head size, positions, and
        1 for the backward pass, 0 for the forward. product: m, n, k. sum: ranks, bytes.
      seconds: measured time.
    """

    kind: str
    sizes: tuple[float, ...]
    seconds: float

    def predicted(self, rates: Rates) -> float:
        """Seconds by the model of time."""
        if self.kind == "launch":
            return self.sizes[0] * rates.calibration.launch
        if self.kind == "copy":
            return rates.traffic(*self.sizes)
        if self.kind == "attention":
            flops, head, positions, backward = self.sizes
            return rates.flash(flops, int(head), int(positions), bool(backward))
        if self.kind == "product":
            return rates.product(*self.sizes)
        ranks, whole = self.sizes
        return rates.sum(int(ranks), 1, whole)


def calibrate(
    measurements: Sequence[Measurement], gpu: Gpu, compute: str, start: Calibration | None = None
) -> tuple[Calibration, list[str]]:
    """The fitted calibration, and the rates that the measurements do not determine, which stay as in `start`.

    Args:
      measurements: of any of the kinds.
      gpu: its data sheet.
      compute: type of the measured products and attention.
      start: of the fit.

    No machine is much faster than its data sheet: if the times imply it, the arrays were too small to determine a rate.
    """
    found, unsettled = dataclasses.replace(start or default_calibration(gpu), gpu=gpu.name), []
    for kind, names in SETTLES.items():
        chosen = [m for m in measurements if m.kind == kind]
        if kind == "attention":
            rows = _attention(chosen, Rates(gpu, found, compute))
            found = dataclasses.replace(found, attention=rows or found.attention)
            unsettled += [] if rows else names
            continue
        if not chosen:
            unsettled += names
            continue

        def residuals(calibration: Calibration, chosen=chosen) -> np.ndarray:
            rates = Rates(gpu, calibration, compute)
            return np.array([np.log(m.predicted(rates) / m.seconds) for m in chosen])

        fitted = fit_rates(found, names[: len(chosen)], residuals)
        if any(getattr(fitted, name) > MAX_FRACTION for name in names if name in FRACTIONS):
            unsettled += names
            continue
        unsettled += [name for name in names if math.isclose(getattr(found, name), getattr(fitted, name), rel_tol=1e-9)]
        found = fitted
    return found, unsettled


def _attention(measurements: Sequence[Measurement], rates: Rates) -> tuple[tuple[int, int, float, float], ...]:
    """A row for each head size and length that was measured in both directions; none if one cannot be."""
    shares: dict[tuple[int, int], dict[bool, float]] = {}
    for each in measurements:
        flops, head, positions, backward = each.sizes
        working = max(each.seconds - rates.calibration.launch, 1e-3 * each.seconds)
        shares.setdefault((int(head), int(positions)), {})[bool(backward)] = flops / working / rates.peak
    rows = tuple((*sizes, both[False], both[True]) for sizes, both in sorted(shares.items()) if len(both) == 2)
    return rows if all(0 < share <= MAX_FRACTION for row in rows for share in row[2:]) else ()


def fit_rates(
    calibration: Calibration,
    names: Sequence[str],
    residuals: Callable[[Calibration], np.ndarray],
    steps: int = 50,
) -> Calibration:
    """`calibration` with the rates `names` that minimise the sum of squared `residuals`.

    Gauss–Newton on the logarithms of the rates, so that they stay positive, with steps of a factor of √e at most.
    """

    def at(x: np.ndarray) -> Calibration:
        return dataclasses.replace(calibration, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    x, small = np.log([getattr(calibration, name) for name in names]), 1e-4
    for _ in range(steps):
        here = residuals(at(x))
        slopes = np.stack([(residuals(at(x + small * row)) - here) / small for row in np.eye(len(x))], axis=1)
        step = np.linalg.lstsq(slopes, here, rcond=1e-6)[0]
        x = x - np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 1e-7:
            break
    return at(x)
