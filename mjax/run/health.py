"""The health of a run, and the response to it, so that a broken run never destroys good checkpoints.

`Health` classifies steps by their metrics, without device, clock or files:

    healthy       the loss is finite and not far above its running mean
    settling      skipped while fp16's dynamic loss scale falls, or passed over on purpose: neutral
    skipped       nothing was updated, because a gradient, weight or moment was not finite
    spike         the loss is more than k standard deviations above the mean of the last healthy steps

The metrics of a step reach the host while the next one runs. So the limit for the loss of step s is always computed
from the losses up to step s - 2. The limit is known before s is started, and the same whether the host waited for s - 1
(before a save) or not. Everything is a function of the losses. A checkpoint contains `as_dict`, and a run that
continues from it classifies steps as the run that wrote it did, in every process.

`Guard` responds:

- A checkpoint is *good* once training has continued healthily after it. The last good one is pinned (`good.json`): no
  other checkpoint replaces it before it is good itself.
- While the run is unhealthy, due checkpoints are postponed. A checkpoint that has to be saved then, because the run is
  stopped or done, is marked in its manifest, never becomes good, and removes no other.
- A loss spike is reported; with `skip` the compiled step drops the update; with `rollback` the run goes back to the
  last good checkpoint and skips the batches that led to the spike. Steps keep their numbers and batches, so sample
  order stays a function of the step: `passed_over.json` lists the steps that update nothing.
- Beyond the limits the run ends with exit code 3. With `unhealthy.json` in its folder, the next start continues only if
  the user names a checkpoint (`--step`).

All decisions follow from metrics that are the same in every process; only process 0 writes.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.cluster.processes import broadcast_int, is_first
from mjax.config import Config, HealthConfig
from mjax.config.axes import NAMES, axes_sharing_weights
from mjax.config.model_file import run_flags
from mjax.config.plain_values import check, read_if_exists
from mjax.errors import PrintLine, UnhealthyError, join_shortened, shorten_list
from mjax.parallel import mappings
from mjax.parallel.random import uint32_words
from mjax.parallel.weights import leaf_name
from mjax.run.callbacks import Callback
from mjax.run.metrics import Record, finite_or_none
from mjax.run.start import checkpoint_state
from mjax.step.losses import StepMetrics
from mjax.step.precision import MIN_LOSS_SCALE
from mjax.utils.files import write_whole

if TYPE_CHECKING:
    from mjax.run.loop import Run

HEALTHY, SETTLING, SKIPPED, SPIKE = "healthy", "settling", "skipped", "spike"

WINDOW = 100  # steps of the running mean; more than half of them unhealthy end the run
DEVIATIONS = 6.0  # a loss so many standard deviations above its running mean is a spike
MAX_SKIPPED_STEPS = 20  # steps in a row: then the run ends
CHECK_EVERY = 100  # steps between comparisons of the replicas, and checks of weights and moments
MAX_RATIO_TO_MEAN = 10.0  # times the mean: a spike if too few losses are known for a deviation, or in an evaluation
GOOD_AFTER = 10  # healthy steps after a checkpoint (fewer if the next one comes earlier) that make it the last good one
MIN_DEVIATION = 0.01  # of the mean: a nearly constant loss has no spikes of a few thousandths
MAX_ROLLBACKS = 3  # to one checkpoint
ROLLBACK_BATCHES = 10  # skipped by a rollback, up to and including that of the spike
PASSED_OVER, UNHEALTHY, REMEDY = "passed_over.json", "unhealthy.json", "restore it, or remove it"

Rollback = TypedDict("Rollback", {"steps": tuple[int, int], "spike": int, "loss": float, "from": int})
"""An entry of passed_over.json: first and last step, the spike with its loss, and the checkpoint gone back to."""


class HealthState(TypedDict):
    """The result of `Health.as_dict`."""

    losses: list[float]
    unhealthy: list[int]
    skipped_in_a_row: int
    limits: tuple[float | None, float | None]


class HostValues(TypedDict, total=False):
    """The values that a run stores in the manifest of each checkpoint."""

    health: HealthState
    suspect: bool
    passed_over: list[Rollback]
    continued_from: int | None
    val_loss: float | None


class UnhealthyEnd(TypedDict):
    """The content of unhealthy.json."""

    problem: str
    way_out: str


class Health:
    """The health after step `step`.

    Attributes:
      step: the last that was observed.
      skipped_in_a_row: consecutive skipped steps up to this one.
    """

    def __init__(self, config: HealthConfig, step: int = 0, state: HealthState | None = None):
        """Begin after `step`, with the result of `as_dict` there; None: from scratch."""
        state = state or {"losses": [], "unhealthy": [], "skipped_in_a_row": 0, "limits": [None, None]}
        self.config, self.step = config, step
        self.skipped_in_a_row: int = state["skipped_in_a_row"]
        self._losses = deque(state["losses"], maxlen=WINDOW)  # of healthy steps
        self._unhealthy = deque(state["unhealthy"], maxlen=WINDOW)  # whether a step was; no settling ones
        self._limits = tuple(math.inf if limit is None else limit for limit in state["limits"])  # of the next two steps

    def as_dict(self) -> HealthState:
        """The whole state as plain values, exactly."""
        return {
            "losses": list(self._losses),
            "unhealthy": list(self._unhealthy),
            "skipped_in_a_row": self.skipped_in_a_row,
            "limits": [None if math.isinf(limit) else limit for limit in self._limits],
        }

    def limit(self, step: int) -> float:
        """The loss above which `step`, one of the next two, is a spike: a float32; infinity if there is no limit."""
        return self._limits[step - self.step - 1]

    def observe(self, step: int, loss: float | None, skipped: bool = False, settling: bool = False) -> str:
        """Record the next step and return its state.

        Args:
          step: the one after the last.
          loss: None if it was not finite.
          skipped: whether a value was not finite, as opposed to a loss above the limit.
          settling: whether this step is neutral.
        """
        assert step == self.step + 1
        limit = self.limit(step)
        if settling:
            state = SETTLING
        elif skipped or loss is None:
            state = SKIPPED
        else:
            state = SPIKE if loss > limit else HEALTHY
        if state == HEALTHY:
            self._losses.append(loss)
        if state != SETTLING:
            self._unhealthy.append(int(state != HEALTHY))
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if state == SKIPPED else 0
        self.step, self._limits = step, (self._limits[1], self._next_limit())
        return state

    def observe_validation(self, loss: float) -> bool:
        """Return True if the loss of an evaluation after the last step is plausible; if not, the step is unhealthy."""
        plausible = math.isfinite(loss) and not (self._losses and loss > MAX_RATIO_TO_MEAN * _mean(self._losses) > 0)
        if not plausible and self._unhealthy:
            self._unhealthy[-1] = 1
        return plausible

    @property
    def suspect(self) -> bool:
        """True if the state may be bad: the last step was unhealthy, or most of the last few."""
        recent = list(self._unhealthy)[-GOOD_AFTER:]
        return bool(recent) and (bool(recent[-1]) or 2 * sum(recent) > len(recent))

    def deviations(self, loss: float) -> str:
        """Describe how far a loss is above the running mean."""
        mean = _mean(self._losses)
        return f"{(loss - mean) / self._deviation(mean):.1f} standard deviations above its running mean {mean:.4f}"

    def problem(self, ended: bool = False) -> str | None:
        """Return the reason why the run must not continue, or None.

        Args:
          ended: whether there are no more steps; for a short run the share is then computed over all its steps.
        """
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            return f"{self.skipped_in_a_row} steps in a row were skipped"
        unhealthy, steps = sum(self._unhealthy), len(self._unhealthy)
        if (steps == WINDOW or ended) and 2 * unhealthy > steps:
            return f"{unhealthy} of the last {steps} steps were skipped or had a loss far above its running mean"
        return None

    def _next_limit(self) -> float:
        if self.config.spike == "ignore" or not self._losses:
            return math.inf
        mean = _mean(self._losses)
        if len(self._losses) < WINDOW // 4:
            limit = MAX_RATIO_TO_MEAN * mean if mean > 0 else math.inf
        else:
            limit = mean + DEVIATIONS * self._deviation(mean)
        return float(np.float32(limit)) if limit < 1e38 else math.inf  # as the compiled step compares it

    def _deviation(self, mean: float) -> float:
        variance = _mean((loss - mean) ** 2 for loss in self._losses)
        return max(math.sqrt(variance), MIN_DEVIATION * abs(mean)) or math.inf


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


class HealthMonitor(Callback):
    """Sets `unhealthy` in the metrics of a step, for the callbacks that follow."""

    def __init__(self, guard: Guard):
        self.guard = guard

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Set the problem of the step."""
        metrics.unhealthy = self.guard.observe(metrics)


class Guard(Callback):
    """The health of one run, and the checkpoints that depend on it. The last callback: it saves or ends the run.

    Attributes:
      health: of the last step that was observed.
      passed_over: rollbacks.
      good: the last good checkpoint; None if none is known.
      continued_from: the checkpoint that the user chose to continue from, if any.
      spike: step and loss of a spike that the run has to go back from; None: continue.
    """

    def __init__(
        self, config: Config, checkpoints: Checkpoints, print_line: PrintLine, continued_from: int | None = None
    ):
        """Nothing is read before `begin`."""
        self.config, self.checkpoints, self.print_line = config, checkpoints, print_line
        self.folder = checkpoints.folder.parent
        self.health = Health(config.health)
        self.passed_over: list[Rollback] = []
        self.good: int | None = None
        self.continued_from = continued_from
        self.spike: tuple[int, float] | None = None
        self._previous_good: int | None = None
        self._candidate: int | None = None  # a checkpoint that may become good
        self._healthy_since = 0  # healthy steps after the candidate
        self._is_postponed = False
        self._nonfinite = False  # the last step had values that were not finite
        self._replicas: Replicas | None = None

    def on_start(self, run: Run) -> None:
        """Load the health at `run.step`."""
        self._replicas = self._replicas or Replicas(run.program.abstract_state.model, run.mesh)
        self.begin(run.step)

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True if the state is to be saved or checked."""
        return run.saves or self.is_due(step) or self._nonfinite or step % CHECK_EVERY == 0

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Check the state and save it, or end the run.

        Raises:
          UnhealthyError: too many steps were unhealthy, or the state cannot be right: no step would repair that.
          RunError: two saves in a row failed.
        """
        has_state = run.step == step
        saves = has_state and (run.ends or run.saves or self.is_due(step))
        run.saves = run.saves and not has_state
        if saves:
            run.begin_activity(step, "saving")
        if has_state and (saves or self.needs_state(run, step)):
            self._check(run, step)
        self._nonfinite = metrics.nonfinite is not None
        if problem := self.health.problem(ended=step == self.config.train.steps):
            self.give_up(problem)
        if saves:
            start = time.perf_counter()
            if self.save(step, checkpoint_state(run.state), run.ends, metrics.val_loss):
                run.blocked = time.perf_counter() - start

    def _check(self, run: Run, step: int) -> None:
        self._replicas.check(step, run.state.model)
        names, broken = run.program.gradient_names, np.flatnonzero(jax.device_get(run.program.broken(run.state)))
        if broken.size:
            first = f"{names[broken[0]]} first, {broken.size} of {len(names)}"
            self.give_up(f"after step {step} weights or moments are not finite, or above 1e20 ({first})")

    def begin(self, start: int) -> None:
        """Load the health stored in checkpoint `start`; without one, start from scratch."""
        exists = start in self.checkpoints.steps()
        values = _host_values(self.checkpoints, start) if exists else HostValues()
        self.health = Health(self.config.health, start, values.get("health"))
        if self.continued_from is None:
            self.continued_from = values.get("continued_from")
        self.good = self.checkpoints.last_good()
        rollbacks = read_if_exists(list[Rollback], self.folder / PASSED_OVER, REMEDY)
        self.passed_over = values.get("passed_over", []) if rollbacks is None else rollbacks
        self.spike, self._is_postponed, self._healthy_since = None, False, 0
        self._candidate = start if exists and start > 0 and not values.get("suspect") else None
        if values.get("suspect"):
            self.print_line(f"checkpoint {start} was saved while the run was unhealthy; {self._last_good()}")
        for entry in self.passed_over:
            if entry["steps"][1] > start:
                self.print_line(_describe_rollback(entry))

    # --- Steps --------------------------------------------------------------------------------------------------------

    def limit(self, step: int) -> float | None:
        """The loss above which the compiled step drops the update of `step`; None if there is no limit."""
        if self._passes_over(step):
            return -math.inf
        if self.config.health.spike == "skip":
            return self.health.limit(step)
        return math.inf if self.passed_over or self.config.health.spike == "rollback" else None

    def observe(self, record: Record) -> str | None:
        """Classify a step: None if it is healthy, otherwise the problem, to follow 'step N'."""
        passed_over = self._passes_over(record.step)
        settling = bool(passed_over) or self._is_scale_settling(record)
        limit = self.health.limit(record.step)
        state = self.health.observe(record.step, record.loss, record.nonfinite is not None, settling)
        problem = None
        if passed_over:
            problem = f"passed over: {_describe_rollback(passed_over)}"
        elif record.nonfinite is not None:
            scale = f" at loss scale {record.loss_scale:g}" if self.config.precision.compute == "fp16" else ""
            problem = f"skipped{scale}: {record.nonfinite}"
        elif state == SPIKE:
            dropped = "; its update was dropped" if record.skipped else ""
            distance = self.health.deviations(record.loss)
            problem = f"loss spike: {record.loss:.4f} is {distance} (limit {limit:.4f}){dropped}"
            if self.config.health.spike == "rollback" and self.good is None:
                problem += "; there is no good checkpoint to roll back to yet"
            elif self.config.health.spike == "rollback" and self.spike is None:
                self.spike = record.step, record.loss
        if record.val_loss is not None and not self.health.observe_validation(record.val_loss):
            state, problem = SKIPPED, f"leaves weights with which the validation loss is {record.val_loss:g}"
        self._update_candidate(state)
        return problem

    def _passes_over(self, step: int) -> Rollback | None:
        return next((entry for entry in self.passed_over if entry["steps"][0] <= step <= entry["steps"][1]), None)

    def _is_scale_settling(self, record: Record) -> bool:
        """True if the step was skipped because fp16's dynamic loss scale is too large and can still fall.

        It falls after gradients that are not finite; it does not cause a loss that is not finite without them.
        """
        precision = self.config.precision
        return record.grad_norm is None and precision.compute == "fp16" and record.loss_scale > MIN_LOSS_SCALE

    def _update_candidate(self, state: str) -> None:
        """Update the candidate checkpoint from the state of a step."""
        if state in (SKIPPED, SPIKE):
            self._candidate = None
        if state == HEALTHY and self._candidate is not None:
            self._healthy_since += 1
            if self._healthy_since >= GOOD_AFTER:
                self._confirm()

    def _confirm(self) -> None:
        self.checkpoints.mark_good(self._candidate)
        self._previous_good, self.good, self._candidate = self.good, self._candidate, None

    def _drop_failed(self) -> None:
        """A checkpoint whose save failed is not a candidate, and not good."""
        self.checkpoints.wait_until_finished()
        if self._candidate in self.checkpoints.failed:
            self._candidate = None
        if self.good in self.checkpoints.failed:
            self.good = self._previous_good

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is due after `step`, or was postponed."""
        interval = self.config.checkpoint.interval
        return self._is_postponed or bool(interval and step % interval == 0)

    def save(self, step: int, state: Any, ends: bool, val_loss: float | None = None) -> bool:
        """Save a checkpoint, or postpone it while the run is unhealthy and does not end; True if a save has begun.

        Raises:
          RunError: two saves in a row failed.
        """
        self._drop_failed()
        if self.spike is not None:
            return False  # steps after the last good checkpoint will be abandoned
        suspect = self.health.suspect
        if suspect and not ends:
            if not self._is_postponed:
                self.print_line(f"checkpoint {step} is postponed until the run is healthy; {self._last_good()}")
            self._is_postponed = True
            return False
        if self._candidate is not None and self._healthy_since > 0:
            self._confirm()
        host: HostValues = {
            "health": self.health.as_dict(),
            "suspect": suspect,
            "passed_over": self.passed_over,
            "continued_from": self.continued_from,
            "val_loss": None if val_loss is None else finite_or_none(val_loss),
        }
        self.checkpoints.save(step, state, host, rotate=not suspect, last=ends)
        self._is_postponed, self._healthy_since, self._candidate = False, 0, None if suspect else step
        return True

    def _last_good(self) -> str:
        return "none is known to be good" if self.good is None else f"the last good one is {self.good}"

    # --- Rolling back and giving up -----------------------------------------------------------------------------------

    def go_back(self) -> int:
        """Prepare to continue from the last good checkpoint, whose step is returned, without the batches that led to
        the spike.

        Raises:
          UnhealthyError: there were too many rollbacks to it.
        """
        self._drop_failed()
        (step, loss), good = self.spike, self.good
        if good is None:
            self.give_up("the loss spiked, and the checkpoint to roll back to could not be saved")
        if sum(entry["from"] == good for entry in self.passed_over) >= MAX_ROLLBACKS:
            self.give_up(f"the loss spiked again after {MAX_ROLLBACKS} rollbacks to checkpoint {good}")
        self.checkpoints.abandon(after=good)
        first = max(good + 1, step - ROLLBACK_BATCHES + 1)
        entry: Rollback = {"steps": (first, step), "spike": step, "loss": loss, "from": good}
        if is_first():
            write_whole(self.folder / PASSED_OVER, json.dumps([*self.passed_over, entry], indent=1) + "\n")
        self.print_line(f"rolling back to checkpoint {good}")
        self.passed_over = [*self.passed_over, entry]
        return good

    def give_up(self, problem: str) -> None:
        """End the run; the next start has to name a checkpoint to continue from.

        Raises:
          UnhealthyError: always; it names the command that continues from the last good checkpoint.
        """
        self._drop_failed()
        steps, good = self.checkpoints.steps(), self.good
        if not steps:
            fix = "start again with a lower --optimizer.learning-rate or --precision.compute fp32"
            raise UnhealthyError(f"{problem}, and nothing is saved; {fix}")
        target = "the last good checkpoint" if good is not None else f"checkpoint {steps[0]} (none is known to be good)"
        flags = f"{run_flags(self.folder, self.config.model)} --step {steps[0] if good is None else good}"
        rate = self.config.optimizer.learning_rate / 2
        command = f"python train.py {flags} --optimizer.learning-rate {rate:g} --allow-change"
        way_out = f"look at {self.folder / 'metrics.jsonl'}, then continue from {target}: {command}"
        if is_first():
            write_whole(self.folder / UNHEALTHY, json.dumps({"problem": problem, "way_out": way_out}, indent=1) + "\n")
        raise UnhealthyError(f"{problem}; {way_out}")


def _describe_rollback(entry: Rollback) -> str:
    first, last = entry["steps"]
    spike = f"the loss spiked at step {entry['spike']} ({entry['loss']:.4f})"
    return f"steps {first} to {last} train on nothing, because {spike} on the way from checkpoint {entry['from']}"


def _host_values(checkpoints: Checkpoints, step: int) -> HostValues:
    source = f"the manifest of checkpoint {checkpoints.folder / str(step)}"
    return check(HostValues, checkpoints.host_values(step), source, "continue from another one with --step")


def not_finite(metrics: StepMetrics, names: list[str]) -> str | None:
    """Name the values of a step that were not finite, so that nothing was updated; None if all were finite.

    Args:
      names: `TrainProgram.gradient_names`.
    """
    finite_loss = math.isfinite(float(metrics.loss))
    where = "" if finite_loss else "; the loss was not finite before them"
    if metrics.nonfinite:
        first = f"{names[int(metrics.first_nonfinite)]} first, {int(metrics.nonfinite)} of {len(names)}"
        return f"gradients are not finite ({first}{where})"
    if not math.isfinite(float(metrics.grad_norm)):
        return f"gradients are not finite (the norm of all together{where})"
    return None if finite_loss else "the loss is not finite"


def check_start(folder: Path, step: int | None) -> None:
    """Reject a run that ended unhealthy, unless a checkpoint to continue from is given.

    Raises:
      UsageError: unhealthy.json or passed_over.json is damaged.
      UnhealthyError: it did, and no checkpoint was given to continue from.
    """
    read_if_exists(list[Rollback], folder / PASSED_OVER, REMEDY)
    if step is None and (marked := read_if_exists(UnhealthyEnd, folder / UNHEALTHY, REMEDY)):
        raise UnhealthyError(f"{folder} ended unhealthy ({marked['problem']}); {marked['way_out']}")


def continue_from(checkpoints: Checkpoints, step: int, print_line: PrintLine) -> None:
    """Make checkpoint `step`, which exists, the newest, and remove the mark of an unhealthy end from the run.

    Later checkpoints are set aside. A command that is run again does not go back a second time: the checkpoints that it
    has saved since record that they follow from `step`.
    """
    steps, marker = checkpoints.steps(), checkpoints.folder.parent / UNHEALTHY
    repeated = not marker.exists() and _host_values(checkpoints, steps[-1]).get("continued_from") == step
    if broadcast_int(repeated):  # process 0 removes the marker
        print_line(f"checkpoint {steps[-1]} continues from {step} already; to go back again, move the later ones away")
        return
    checkpoints.abandon(after=step)
    if is_first():
        marker.unlink(missing_ok=True)


# --- Replicas, which must be bit-identical ----------------------------------------------------------------------------
#
# Every replica has a copy of the weights and updates it with the same summed gradient, so the copies stay equal without
# a comparison. A bit that flips in the memory of one device, a device that computes wrongly, or a process
# that runs something else affects one copy, and through its gradients slowly corrupts all others.
#
# So each device hashes its shards, and the hashes, four bytes per array, are gathered and compared on the host of every
# process, all with the same result. Weights that ZeRO splits over the replicas exist once: there is nothing to compare.
# Ranks of `context` have copies too. Experts that `expert` splits have one in each of its groups.
#
# The hash of an array of words x_i is Σ (2i + 1) x_i modulo 2^32. Odd numbers have inverses, so a change of a single
# element is always detected, and any other change is missed with probability 2^-32.

DIMS = [NAMES.index(axis) for axis in axes_sharing_weights()]
"""The dims of the device array along which replicas are numbered."""
MAX_SHOWN_DEVICES = 4


class Replicas:
    """The copies of one model on its data-parallel replicas.

    Args:
      model: abstract weights with shardings.
      mesh: the mesh they are on.
    """

    def __init__(self, model: Any, mesh: Mesh):
        self.mesh, specs = mesh, []
        self._copied: dict[int, tuple[str, list[int]]] = {}  # by leaf: name, dims along which it has copies
        for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(model)):
            split = jax.tree.leaves(tuple(leaf.sharding.spec))
            if dims := [dim for dim in DIMS if NAMES[dim] not in split and mesh.devices.shape[dim] > 1]:
                self._copied[index] = leaf_name(path), dims
                specs.append(leaf.sharding.spec)
        self._hash = jax.jit(jax.shard_map(_hashes, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=True))

    def check(self, step: int, model: Any) -> None:
        """Compare the copies of the weights after `step`. Every process calls this.

        Raises:
          UnhealthyError: they differ; in every process.
        """
        if not self._copied:
            return
        leaves = jax.tree.leaves(model)
        hashes = jax.device_get(self._hash([leaves[index] for index in self._copied]))  # [*mesh, arrays]
        # Names of the arrays that differ, by position on the mesh.
        differing: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for (name, dims), of_array in zip(self._copied.values(), np.moveaxis(hashes, -1, 0), strict=True):
            copies = np.moveaxis(of_array, dims, range(len(dims)))
            if (copies == copies[(0,) * len(dims)]).all():
                continue
            for position in np.ndindex(of_array.shape):
                group = of_array[tuple(slice(None) if dim in dims else at for dim, at in enumerate(position))]
                (usual, count), *rest = Counter(group.flat).most_common()
                if rest and (of_array[position] != usual or rest[0][1] == count):  # of two either may be right
                    differing[position].append(name)
        if differing:
            raise UnhealthyError(self._describe(step, differing))

    def _describe(self, step: int, differing: dict[tuple[int, ...], list[str]]) -> str:
        shape = [self.mesh.devices.shape[dim] for dim in DIMS]
        replicas = {at: int(np.ravel_multi_index([at[dim] for dim in DIMS], shape)) for at in differing}
        copies = [
            f"replica {replicas[at]} (device {device.id} of process {device.process_index})"
            for at, device in ((at, self.mesh.devices[at]) for at in sorted(differing, key=replicas.__getitem__))
        ]
        arrays = join_shortened(list(dict.fromkeys(itertools.chain(*differing.values()))), " arrays")
        differ = "differs from the others" if len(copies) == 1 else "differ"
        copies = shorten_list(copies, MAX_SHOWN_DEVICES)
        return (
            f"after step {step} the replicas have different weights: {' and '.join(copies)} {differ} in {arrays}; "
            "a device or its memory is faulty, or a process computes something else; nothing was saved since the last "
            "comparison: find out which, exclude that host, and run the same command to continue"
        )


def _hashes(shards: list[Array]) -> Array:
    """A hash of each shard of each device, replicated: uint32 [*axes.NAMES, arrays]."""
    everywhere = frozenset(NAMES)
    hashes = jnp.stack([_hash_shard(mappings.vary(shard, everywhere)) for shard in shards])
    hashes = hashes.reshape(*[1] * len(NAMES), -1)
    for dim, axis in enumerate(NAMES):
        hashes = mappings.all_gather_invariant(hashes, axis, dim)
    return hashes


def _hash_shard(shard: Array) -> Array:
    """uint32 []."""
    words = uint32_words(shard).reshape(-1)
    odd = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return (words * odd).sum(dtype=jnp.uint32)
