"""Checkpoints: the state of a run on disk, written atomically, and independent of the mesh.

    runs/NAME/checkpoints/
  200/                     one folder per checkpoint, named by its step
    model/  optimizer/  …  one folder per field of the state, written by Orbax; inside, arrays by dotted path
    manifest.json          the step, dtype and shape of every array, size and checksum of every file, host values
  300.writing/             not a checkpoint yet
  100.damaged/             set aside, for you to inspect and remove
  400.abandoned/           likewise: the run went back to an earlier checkpoint and continued from there
  good.json                the last good checkpoint, which stays until another is good

**The layout depends neither on classes nor on meshes.** A state is stored as {dotted path: whole array}, such as
`model.blocks.mlp.up.kernel`, and restored to the shardings of the current mesh. It does not matter on which mesh it was
written, or into how many chunks a pipeline had split the layers: they are always stored in order.

**A checkpoint appears by one rename.** `save` copies the arrays to host memory and returns, so training continues (and
may donate the buffers) while a thread writes `300.writing`, adds the manifest, syncs everything to disk and renames it
to `300`. A process killed before the rename leaves a folder that is not a checkpoint; the next save removes it. A save
is reported only when the rename is on disk too.

**A checkpoint counts when it opens.** One array of each field is read back before the manifest is written, so before
an older checkpoint may be removed.

**Damage is detected.** Orbax 0.12 notices a missing or truncated data file, but stores arrays as Zstandard frames
without a checksum: a flipped byte silently gives other weights. So every file is compared with the manifest before
Orbax reads it; if the newest checkpoint is damaged, the previous one is used, with a notice.

**Only intact checkpoints are removed.** Retention removes checkpoints whose manifest exists and has their step. A
damaged one is set aside as `200.damaged`. Unreadable or renamed checkpoints and all other folders are left unchanged.
All of this is reported. The base of adapters stays as long as a run in the same folder names it: a pin in this run
would need its owner's permission, and would stay when those adapters are removed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from mjax.checkpoint import arrays, folders
from mjax.checkpoint.folders import BASE, GOOD, Damaged, Good, Unusable, reason
from mjax.checkpoint.mirror import Mirror, fetch_files
from mjax.cluster.processes import any_process, barrier, broadcast_int, is_first
from mjax.config.plain_values import read
from mjax.errors import PrintLine, RunError, UsageError
from mjax.utils.files import make_folder, put, rename, set_aside, write_whole
from mjax.utils.stores import to_stderr

SAVE_SECONDS = 4 * 3600  # Orbax's timeout is 20 minutes: too short for a large state on a slow file system
REPLICA_SLICE_BYTES = 1 << 20  # replicas share the writing of arrays above this size

# Orbax logs through absl, with a stack trace for each of its threads that fails. What a user needs of that is in our
# errors, so its records are dropped here; those of other users of absl pass.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}checkpoint{os.sep}" not in record.pathname)


def _report_unraisable(problem: Any) -> None:
    """Report nothing when the other parts of a failed save meet the closed event loop of Orbax."""
    if not (problem.exc_type is RuntimeError and str(problem.exc_value) == "Event loop is closed"):
        _report_any(problem)


_report_any, sys.unraisablehook = sys.unraisablehook, _report_unraisable


@dataclass(frozen=True)
class _Save:
    """A save of checkpoint `step`.

    Attributes:
      finish: called with the folder when it is complete, and the bytes in it.
      if_failed: the consequence of a failure, for the notice; None: no notice.
      host: values for the manifest.
    """

    step: int
    finish: Callable[[Path, int], None]
    if_failed: str | None = None
    host: dict[str, Any] | None = None


class Checkpoints:
    """The checkpoints of one run, in one folder that all its processes see.

    Every process calls every method; each writes its shards, and process 0 does the work that is done once.

    Attributes:
      folder: runs/NAME/checkpoints; created by the first save.
      keep_last: how many of the latest checkpoints to keep.
      keep_every: keep checkpoints whose step is a multiple of this forever; None: none.
      on_notice: called with one line of text when a checkpoint was saved, is damaged, or an unfinished one was removed;
        also from the writing thread.
      mirror: uploads each checkpoint to an object store, if the run is in one.
      failed: steps whose save failed, the same in every process after `wait_until_finished`.
      keep_best: whether to keep the checkpoint with the lowest validation loss, too.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        keep_every: int | None = None,
        on_notice: PrintLine = print,
        mirror: Mirror | None = None,
    ):
        self.folder, self.mirror, self.on_notice = Path(folder).absolute(), mirror, on_notice
        self.keep_last, self.keep_every, self.keep_best = keep_last, keep_every, False
        # Orbax compiles a program for each shape whose writing replicas share: seconds, for arrays of a few bytes.
        self._saving = ocp.Context()
        self._saving.array.saving.min_slice_bytes_for_replica_parallel = REPLICA_SLICE_BYTES
        # If folders are created in the background and that fails, threads wait for them for 300 s.
        self._saving.async_options.create_directories_asynchronously = False
        self._saving.async_options.timeout_secs = SAVE_SECONDS
        self._loading = ocp.Context()
        self._loading.pytree.loading.partial_load = True  # `read` of some arrays
        # By step, with the label of the problem; a run continued from an earlier step writes them again.
        self._unusable: dict[int, str] = {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.failed: set[int] = set()
        self._error: RunError | None = None  # of the save before the one in progress
        self._pending: tuple[int, Future] | None = None
        self._blocks_others = False  # they wait for a part that this process could not write
        self._pinning: Future | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.close()
        except RunError:  # has been reported
            if kind is None:
                raise

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, ascending. Their content is not checked."""
        return folders.steps_in(self.folder)

    # --- Saving -------------------------------------------------------------------------------------------------------

    def try_save(self, mesh: Mesh) -> None:
        """Write, open and remove a small checkpoint, so that a run that cannot save ends before its first step.

        Args:
          mesh: of the run; every device has a part of the checkpoint.

        Raises:
          UsageError: it failed; the message has the system's reason.
        """
        existed, numbers = self.folder.exists(), np.arange(mesh.size, dtype=np.int32)
        step = broadcast_int(max(self.steps(), default=-1) + 1)
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        array = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
        self._begin(_Save(step, self._discard), {"trial": array})
        error = self._wait_for_error()
        if is_first() and not existed:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        if error is not None:
            problem = f"{self.folder.parent} can hold no checkpoints: {reason(error)}"
            raise UsageError(f"{problem}; correct that, or choose another folder") from error

    def save(
        self, step: int, state: Any, host: dict[str, Any] | None = None, rotate: bool = True, last: bool = False
    ) -> None:
        """Save `state`, a pytree of jax arrays, as checkpoint `step`; does nothing if that exists and is intact.

        Returns as soon as the arrays are copied off the devices, when they may be donated. Only one save runs at a
        time; a second waits for the first. A failure is reported when it happens, and the next save is tried.

        Args:
          step: of the checkpoint.
          state: the arrays.
          host: plain values to store with the arrays, the same in every process. A run that passes them decides which
            checkpoints are good (`mark_good`), and until one is the oldest stays.
          rotate: whether this checkpoint may replace an older one.
          last: whether no save follows: this one is finished when it returns, and is tried twice.

        Raises:
          RunError: this save and the one before it failed, or both attempts of the last.
        """
        self.wait_until_finished()
        if last:
            self._error = None  # of an earlier save
        for if_failed in ("trying it again", None) if last else ("the next save is tried",):
            finish = functools.partial(self._publish, step, host is not None, rotate, time.monotonic())
            second = self._error is not None
            if not self._begin(_Save(step, finish, None if second else if_failed, host), state):
                return
            if last or second:
                self.wait_until_finished()
            if self._error is None:
                return

    def wait_until_finished(self) -> None:
        """Return when no save is in progress; `failed` then contains the step of one that failed, in every process.

        Raises:
          RunError: the last two saves failed, or one of several processes could not write its part of one. Earlier
            checkpoints are intact.
        """
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.result()
        if self._pending is None:
            return
        (step, _), before = self._pending, self._error
        error, self._error = self._wait_for_error(), None
        if error is None:
            self.failed.discard(step)
            return
        self.failed.add(step)
        if before is not None or self._blocks_others:
            in_a_row = "two saves in a row failed: " if before is not None else ""
            raise RunError(f"{in_a_row}{self._failure(step, error)}") from error
        self._error = RunError(self._failure(step, error))

    def check_for_errors(self) -> None:
        """Return when no save is in progress, and raise the error of the last one.

        Raises:
          RunError: the last save failed; the message has the system's reason. Earlier checkpoints are intact.
        """
        self.wait_until_finished()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last save and release the thread.

        Raises:
          RunError: the last save failed.
        """
        try:
            self.check_for_errors()
        finally:
            self._writer.shutdown()

    def _begin(self, save: _Save, state: Any) -> bool:
        """Start to write a checkpoint; False if it exists. `_wait_for_error` returns errors of this part too."""
        error, exists, response, leaves = None, False, None, arrays.leaves_by_path(state)
        chunks = functools.partial(arrays.chunks_on_disk, arrays.names_with_layer_dim(state))
        self._saving.array.saving.scoped_storage_options_creator = chunks
        if is_first():
            try:
                exists = save.step in self._usable()
                make_folder(self.folder)
                self._remove_unfinished()
            except OSError as problem:
                error = problem
        if broadcast_int(exists):
            return False
        if not broadcast_int(error is not None):
            try:
                with self._orbax(), self._saving:
                    folder = self._temporary_folder(save.step)
                    response = ocp.save_checkpointables_async(folder, arrays.group_by_field(leaves))
            except Exception as problem:
                error = problem
        # The thread must not hold references to the arrays.
        metadata = {name: arrays.type_and_shape(array) for name, array in leaves.items()}
        self._pending = save.step, self._writer.submit(self._commit, save, metadata, response, error)
        return True

    def _commit(
        self, save: _Save, metadata: dict[str, list], response: ocp.AsyncResponse | None, error: Exception | None
    ) -> Exception | None:
        """Wait for Orbax, add the manifest, and make it a checkpoint by one rename; runs in the writing thread.

        Returns:
          `error`, or an error of this part; None if there was none.
        """
        folder = self._temporary_folder(save.step)
        try:
            if error is not None:
                raise error
            if response is not None:
                with self._orbax():
                    response.result()  # every process has written its part
            if is_first():
                arrays.check_opens(folder, metadata)
                save.finish(folder, folders.write_manifest(folder, save.step, metadata, save.host))
        except Exception as problem:
            # Orbax begins with a longer name.
            for leftover in self.folder.glob(f"{folder.name}*") if is_first() else ():
                shutil.rmtree(leftover, ignore_errors=True)  # a full disk needs the space back
            if save.if_failed is not None:
                report = self.on_notice if is_first() else to_stderr
                waits = "the other processes wait for it, so the run ends"
                report(f"{self._failure(save.step, problem)}; {waits if self._blocks_others else save.if_failed}")
            return problem
        return None

    def _wait_for_error(self) -> Exception | None:
        """Wait for the save in progress, and return the error of one of the processes; None if there was none."""
        (_, commit), self._pending = self._pending, None
        error = commit.result()
        if self._blocks_others:
            return error
        return (error or RunError("another process reports why")) if any_process(error is not None) else None

    @contextlib.contextmanager
    def _orbax(self) -> Iterator[None]:
        """Run a block whose failure in one of several processes blocks the others for hours: they cannot agree."""
        self._blocks_others = jax.process_count() > 1
        yield
        self._blocks_others = False

    def _publish(self, step: int, pins_good: bool, rotate: bool, started: float, folder: Path, size: int) -> None:
        """Make a complete folder a checkpoint."""
        self._set_aside(step)
        final = self.folder / str(step)
        try:
            put(folder, final)
        except OSError:
            if not folder.exists():  # renamed, but not on the disk
                rename(final, folder)
            raise
        self.on_notice(f"checkpoint {step} saved: {size / 1e6:,.1f} MB in {time.monotonic() - started:.1f} s")
        if self.mirror is not None:
            self.mirror.enqueue(step)
        if rotate:
            try:
                self._apply_retention(step, pins_good)
            except OSError as error:
                self.on_notice(f"older checkpoints could not be removed: {reason(error)}")

    def _discard(self, folder: Path, size: int) -> None:
        """Remove the checkpoint of `try_save`, by the steps in which others get their names."""
        put(folder, folder.with_suffix(".deleting"))
        shutil.rmtree(folder.with_suffix(".deleting"))

    def _apply_retention(self, newest: int, pins_good: bool) -> None:
        for step in [step for step, label in self._unusable.items() if label == Damaged.label]:
            self._attempt(self._set_aside, step, "set aside")
        for step in self._usable():
            try:
                folders.read_manifest(self.folder / str(step), self.on_notice)
            except Unusable as error:  # it was renamed, or is being copied here
                self._unusable[step] = f"{error.label}-while-training"  # not one to set aside
                self.on_notice(f"checkpoint {step} is {error.label}, so it is not counted and stays: {error}")
        usable = self._usable()
        retained = {newest, *usable[-self.keep_last :]}
        if self.mirror is not None and self.mirror.uploading is not None:
            retained.add(self.mirror.uploading)
        if pins_good:
            good = self.last_good()
            retained.add(usable[0] if good is None else good)
        run = self.folder.parent
        try:
            bases = folders.find_adapters_of(run, [file.parent for file in run.parent.glob(f"*/{BASE}")])
        except (OSError, UsageError) as error:
            self.on_notice(f"no older checkpoint is removed, as it may be the base of adapters: {reason(error)}")
            return
        retained |= {base.step for base in bases.values()}
        if self.keep_best and (losses := self._validation_losses()):
            retained.add(min(losses, key=losses.__getitem__))
        if self.keep_every is not None:
            retained |= {step for step in usable if step % self.keep_every == 0}
        for step in set(usable) - retained:
            self._attempt(self._remove, step, "removed")

    def _attempt(self, change: Callable[[int], None], step: int, action: str) -> None:
        try:
            change(step)
        except OSError as error:
            self.on_notice(f"checkpoint {step} could not be {action}: {reason(error)}")

    def _remove(self, step: int) -> None:
        # Renamed first: a process killed while deleting must not leave half a checkpoint under a valid name.
        deleting = self.folder / f"{step}.deleting"
        rename(self.folder / str(step), deleting)
        shutil.rmtree(deleting)

    def _set_aside(self, step: int) -> None:
        """Rename a path that has the name of checkpoint `step` but is not one; it is neither used nor lost."""
        if not (self.folder / str(step)).exists():  # another process was faster
            return
        aside = set_aside(self.folder / str(step), self._unusable.pop(step, "not-a-checkpoint"))
        self.on_notice(f"renamed {step} to {aside.name} in {self.folder}; remove it when you do not need it")

    def _remove_unfinished(self) -> None:
        for entry in sorted(self.folder.iterdir()):
            leftover = re.fullmatch(r"(\d+)\.(deleting|writing(\.orbax-checkpoint-tmp.*)?)", entry.name)
            if leftover and entry.is_dir():
                shutil.rmtree(entry)
                if leftover[2] != "deleting":
                    self.on_notice(f"removed {entry.name}: an unfinished save of checkpoint {leftover[1]}")

    def _temporary_folder(self, step: int) -> Path:
        return self.folder / f"{step}.writing"

    def _usable(self) -> list[int]:
        return [step for step in self.steps() if step not in self._unusable]

    def _failure(self, step: int, error: Exception) -> str:
        try:
            intact = ", ".join(map(str, self._usable())) or "none"
        except OSError:
            intact = "unknown, as the folder cannot be read"
        return f"checkpoint {step} could not be saved in {self.folder}: {reason(error)}; intact checkpoints: {intact}"

    # --- Good checkpoints, and host values ----------------------------------------------------------------------------

    def mark_good(self, step: int) -> None:
        """Mark checkpoint `step` as good when it is written: it is pinned instead of the previous one."""
        if is_first():
            self._pinning = self._writer.submit(self._pin, step)

    def _pin(self, step: int) -> None:
        try:
            if step not in self._usable():
                return  # its save failed
            write_whole(self.folder / GOOD, json.dumps({"step": step}) + "\n")
        except OSError as error:
            self.on_notice(f"checkpoint {step} could not be pinned: {reason(error)}")
            return
        self._apply_retention(step, pins_good=True)

    def last_good(self) -> int | None:
        """The last checkpoint that was marked as good; None if there was none or it no longer exists."""
        if not (self.folder / GOOD).exists():
            return None
        try:
            step = read(Good, self.folder / GOOD, "the oldest checkpoint stays instead")["step"]
        except UsageError as error:
            self.on_notice(str(error))
            return None
        return step if step in self._usable() else None

    def host_values(self, step: int) -> dict[str, Any]:
        """The host values stored with checkpoint `step`; empty if there are none, or it is damaged."""
        try:
            return folders.read_manifest(self.folder / str(step), self.on_notice).get("host") or {}
        except Unusable:
            return {}

    def is_best(self, loss: float) -> bool:
        """True in every process if the validation loss of every checkpoint is higher than `loss`, nats per label."""
        self.wait_until_finished()
        return bool(broadcast_int(is_first() and all(loss < other for other in self._validation_losses().values())))

    def _validation_losses(self) -> dict[int, float]:
        """The validation loss of each checkpoint after whose step it was measured."""
        losses = {step: self.host_values(step).get("val_loss") for step in self._usable()}
        return {step: loss for step, loss in losses.items() if loss is not None}

    def abandon(self, after: int) -> None:
        """Set the checkpoints after step `after` aside, so that the run continues from there; in every process."""
        self.wait_until_finished()
        later = [step for step in self.steps() if step > after]
        barrier(f"checkpoints after {after}")  # all have seen them
        if later and is_first():
            names = ", ".join(set_aside(self.folder / str(step), "abandoned").name for step in later)
            self.on_notice(f"set aside the checkpoints after {after} as {names}; remove them when you do not need them")
        barrier(f"checkpoints before {after}")

    # --- Restoring ----------------------------------------------------------------------------------------------------

    def restore(self, target: Any, step: int | None = None, field: str | None = None) -> tuple[int, Any]:
        """Read the newest intact checkpoint, or checkpoint `step`, bit for bit.

        Args:
          target: pytree of `jax.ShapeDtypeStruct` with shardings; the arrays are returned with these, in the same tree.
          step: the checkpoint to read; None: the newest intact one.
          field: read only this field of the state, such as 'model'; `target` is then that field's tree, and the bytes
            of the other fields are not read.

        Returns:
          The step and the tree of arrays.

        Raises:
          UsageError: there is no such checkpoint, or it has another model than `target`.
          RunError: checkpoint `step` is damaged, or all are.
          ValueError: a leaf of `target` has no sharding; Orbax would use the one on disk.
        """
        wanted = arrays.leaves_by_path(target, field)
        if bare := [name for name, leaf in wanted.items() if leaf.sharding is None]:
            raise ValueError(f"{bare[0]} of the target has no sharding")
        chosen = self.find(target, step, field)
        leaves = self.read(chosen, wanted)
        return chosen, jax.tree.unflatten(jax.tree.structure(target), [leaves[name] for name in wanted])

    def read(self, step: int, wanted: dict[str, Any]) -> dict[str, jax.Array]:
        """Read some arrays of a checkpoint that `find` has checked.

        Args:
          step: of the checkpoint.
          wanted: `jax.ShapeDtypeStruct` with a sharding, by name.
        """
        stored = folders.read_manifest(self.folder / str(step))["arrays"]
        as_stored = {name: arrays.shape_on_disk(leaf, tuple(stored[name][1])) for name, leaf in wanted.items()}
        with self._loading:
            fields = ocp.load_checkpointables(self.folder / str(step), arrays.group_by_field(as_stored))
        leaves = {name: array for field in fields.values() for name, array in field.items()}
        arrays.check_types(step, leaves, wanted)
        for name, leaf in wanted.items():  # one by one, to avoid two copies of everything
            if leaves[name].shape != leaf.shape:
                leaves[name] = arrays.reshape(leaves.pop(name), leaf)
        return leaves

    def find(self, target: Any, step: int | None = None, field: str | None = None) -> int:
        """The step of the checkpoint that `restore` would read, which process 0 chooses; raises what `restore` does."""
        self.wait_until_finished()
        if not is_first():
            chosen = broadcast_int(-1)
            if chosen < 0:
                raise RunError(f"process 0 can use no checkpoint in {self.folder}; its message names the reason")
            return chosen
        try:
            chosen = self._choose(target, step, field)
        except Exception:
            broadcast_int(-1)  # the others wait for an answer
            raise
        return broadcast_int(chosen)

    def _choose(self, target: Any, step: int | None, field: str | None) -> int:
        """The newest checkpoint that is intact and fits `target`, or `step` if it is."""
        wanted, stacked = arrays.leaves_by_path(target, field), arrays.names_with_layer_dim(target, field)
        steps = self.steps()
        if not steps:
            raise UsageError(f"{self.folder.parent} has no checkpoint; give a run that has saved one")
        if step is not None and step not in steps:
            raise UsageError(f"{self.folder.parent} has no checkpoint {step}; there are {', '.join(map(str, steps))}")
        unusable: dict[int, Unusable] = {}
        for candidate in [step] if step is not None else reversed(steps):
            folder = self.folder / str(candidate)
            try:
                manifest = folders.read_manifest(folder, self.on_notice)
                arrays.check_fits(candidate, manifest["arrays"], wanted, stacked, field)
                self._check(folder, manifest["files"], field)
            except Unusable as error:
                unusable[candidate] = error
                continue
            for other, error in unusable.items():
                self.on_notice(f"checkpoint {other} is {error.label}: {error}; using {candidate}")
            self._unusable |= {other: error.label for other, error in unusable.items()}
            return candidate
        problems = "; ".join(f"checkpoint {other} is {error.label}: {error}" for other, error in unusable.items())
        rest = ", ".join(str(other) for other in steps if other not in unusable)
        raise RunError(f"{self.folder}: {problems}; {f'there are also {rest}' if rest else 'there is no other'}")

    def _check(self, folder: Path, files: dict[str, list], field: str | None) -> None:
        """`check_files`, after fetching missing files from a store; damaged files are fetched again."""
        needed = folders.select_files(files, field)
        fetch_files(folder, needed, files, self.on_notice)
        try:
            folders.check_files(folder, files, field, self.on_notice)
        except Damaged:
            if not fetch_files(folder, needed, files, self.on_notice, again=True):
                raise
            folders.check_files(folder, files, field, self.on_notice)
