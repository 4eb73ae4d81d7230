"""`mjax runs`: list the folder of runs, compare runs, remove them.

    mjax runs                        one line for each run
    mjax runs compare NAME NAME …    results, settings that differ, and a figure of the curves
    mjax runs remove NAME …          asks first

A run is given by its folder, or by its name in --runs.
"""

import contextlib
import json
import math
import re
import shutil
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import tyro
from rich import filesize
from rich.console import Console
from rich.prompt import Confirm

from mjax.checkpoint import mirror
from mjax.checkpoint.folders import (
    BASE,
    GOOD,
    MANIFEST,
    Unusable,
    checkpoint_steps,
    find_adapters_of,
    lock_folder,
    read_manifest,
)
from mjax.config import Config, differing_fields, read_settings
from mjax.config.batch_size import BatchSizes
from mjax.config.model import is_user_defined
from mjax.config.model_file import MODEL_FILE, read_model_file
from mjax.config.plain_values import read_if_exists
from mjax.errors import UsageError, check_picture, one_sentence, suggestion
from mjax.pictures.runs import Curve, draw_runs, smooth, smoothing_window
from mjax.run.callbacks import KINDS, read_goodput, sum_activities
from mjax.run.continuing import ORIGIN, read_origin
from mjax.run.metrics import TRACKING_ID, MetricsEnd, finite_or_none, read_end, read_lines
from mjax.utils.figures import duration, format_table
from mjax.utils.files import path_below, rename, resolve_parents
from mjax.utils.stores import find_address, with_addresses

T = TypeVar("T")
TAIL = 2**20  # bytes read from the end of metrics.jsonl for the list, at most: three thousand steps
OF_A_RUN = {
    ".lock", mirror.INDEX, "README.md", BASE, "checkpoints", "config.json", "data.json", "environment.json",
    "experts.json", "experts.png", "forecast.json", "goodput.json", "loss.png", "metrics.jsonl", MODEL_FILE, ORIGIN,
    "passed_over.json", "profile", "samples.jsonl", "tensorboard", "tokenizer", TRACKING_ID, "unhealthy.json", "wandb",
}  # fmt: skip
"""Files that training leaves in a run folder."""
LEFT_BY_A_RUN = re.compile(r"\.tmp(\.png)?$|\.damaged(\.\d+)?$|^\.shared-")
"""Temporary files, files set aside, and leftovers of a start that was killed."""


@dataclass(frozen=True, kw_only=True)
class _RunsArguments:
    runs: Path = Path("runs")
    """Folder that contains the run folders."""


@dataclass(frozen=True, kw_only=True)
class ListArguments(_RunsArguments):
    """Show one line per run: model, parameters, steps, losses, date and state."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per run, each on a line."""
    goodput: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show where each run's hours went, over all its starts."""


@dataclass(frozen=True, kw_only=True)
class CompareArguments(_RunsArguments):
    """Compare runs: results, settings that differ, and a figure of their curves."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN …")]
    """Names or folders of two or more runs."""
    figure: Path | None = None
    """Output file for the figure: .png, .pdf or .svg (by default compare.png in the folder of runs)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True)
class RemoveArguments(_RunsArguments):
    """Remove runs with their checkpoints, after asking. Refuses runs in use, links and other folders."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN …")]
    """Names or folders of runs."""
    yes: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not ask."""


# --- Listing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A run in the list; None for unknown values.

    Attributes:
      state: running, done, stopped, imported or no checkpoint; and how many of the last steps were skipped.
      init: folder and checkpoint whose weights it started from, with `train.py --init`.
      date: of the last step, or of the last start.
    """

    name: str
    model: str | None = None
    parameters: int | None = None
    step: int | None = None
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    init: str | None = None
    date: str | None = None
    state: str = ""


def list_runs(arguments: ListArguments) -> None:
    """`mjax runs`.

    Raises:
      UsageError: there is no such folder.
    """
    if not arguments.runs.is_dir() and find_address(arguments.runs) is None:
        raise UsageError(f"there is no folder {arguments.runs}; train a model first, or give another with --runs")
    if arguments.goodput:
        return show_goodput(arguments)
    rows = [run_row(folder) for folder in _run_folders(arguments.runs)]
    if arguments.json:
        for row in rows:
            print(json.dumps(asdict(row), ensure_ascii=False))
    elif rows:
        width = Console().width
        columns = [column for column in COLUMNS if width >= column[1] and any(column[2](row) for row in rows)]
        cells = [[one_sentence(cell(row)) for _, _, cell in columns] for row in rows]
        print("\n".join(format_table([title for title, _, _ in columns], cells, LEFT)))
    else:
        print(with_addresses(f"no runs in {arguments.runs}"))


def show_goodput(arguments: ListArguments) -> None:
    """`mjax runs --goodput`: shares of the time in which each run existed, and hours."""
    records, rows, unknown = [], [], []
    for folder in _run_folders(arguments.runs):
        try:
            starts = read_goodput(folder)
            seconds = sum_activities(starts)
        except UsageError as error:
            records.append({"name": folder.name, "problem": str(error)})
            continue
        records.append({"name": folder.name, "starts": len(starts), "seconds": seconds})
        if total := sum(seconds[kind] for kind in KINDS):
            shares = [f"{seconds[kind] / total:.1%}" if seconds[kind] else "-" for kind in KINDS]
            between = duration(seconds["between"]) if len(starts) > 1 else "-"
            rows.append([folder.name, len(starts), duration(total), *shares, between])
        else:
            unknown.append(folder.name)
    if arguments.json:
        for record in records:
            print(json.dumps(record, ensure_ascii=False))
        return
    if rows:
        print("\n".join(format_table(("run", "starts", "time", *KINDS.values(), "between"), rows)))
    if unknown or not records:
        print(with_addresses(f"no goodput.json, which training writes: {', '.join(unknown) or arguments.runs}"))
    for record in records:
        if "problem" in record:
            print(f"{record['name']}: {record['problem']}")


COLUMNS = (
    ("run", 0, lambda row: row.name),
    ("model", 110, lambda row: row.model or ""),
    ("parameters", 100, lambda row: "" if row.parameters is None else f"{row.parameters:,}"),
    ("step", 0, lambda row: "" if row.steps is None else f"{row.step}/{row.steps}"),
    ("tokens", 170, lambda row: "" if row.tokens is None else f"{row.tokens:,}"),
    ("loss", 0, lambda row: "" if row.loss is None else f"{row.loss:.4f}"),
    ("val loss", 60, lambda row: "" if row.val_loss is None else f"{row.val_loss:.4f}"),
    ("from", 120, lambda row: row.init or ""),
    ("last step", 80, lambda row: (row.date or "")[:16].replace("T", " ")),
    ("state", 0, lambda row: row.state),
)
"""Columns of the list: title, minimum terminal width for it, and the cell of a `Row`."""
LEFT = {"run", "model", "from", "last step", "state"}  # titles of columns that are aligned at the left


def _run_folders(runs: Path) -> list[Path]:
    if (fetched := mirror.fetch_runs(runs)) is not None:
        return fetched
    return sorted(file.parent for file in runs.glob("*/config.json") if file.is_file() and file.parent.name[0] != ".")


def run_row(folder: Path) -> Row:
    """The line of the list for the run in `folder`; its state names problems with its files."""
    problems: list[str] = []

    def attempt(read: Callable[..., T], *arguments: Any, default: T) -> T:
        try:
            return read(*arguments)
        except (UsageError, OSError) as error:
            problems.append(str(error))
            return default

    config = attempt(read_settings, folder / "config.json", default=None)
    if config is None:
        return Row(folder.name, state=f"cannot be read: {problems[0]}")
    checkpoints = attempt(checkpoint_steps, folder, default=[])
    end = attempt(read_end, folder / "metrics.jsonl", TAIL, default=MetricsEnd())
    origin = attempt(read_origin, folder, default=None)
    step = max([end.last.get("step", 0), *checkpoints])
    state = ("done" if step >= config.train.steps else "stopped") if checkpoints else "no checkpoint"
    if checkpoints == [0] and not end.last:
        state = "imported"
    state = "running" if _is_running(folder) else state
    if end.skipped:
        state += f", {end.skipped} of the last {end.steps} steps skipped"
    parameters = attempt(_parameters, folder, config, default=None)
    file = next(file for name in ("metrics.jsonl", "config.json") if (file := folder / name).is_file())
    return Row(
        name=folder.name,
        model=f"{config.model.kind} {config.model.layers} × {config.model.hidden}",
        parameters=parameters,
        step=step,
        steps=config.train.steps,
        tokens=end.last.get("tokens"),
        loss=end.loss,
        val_loss=end.val_loss,
        init=f"{Path(origin.run).name} {origin.step}" if origin else None,
        date=datetime.fromtimestamp(file.stat().st_mtime).astimezone().isoformat(timespec="seconds"),
        state="; ".join([state, *filter(None, [end.problem]), *problems]),
    )


class _StartRecord(TypedDict, total=False):
    parameters: int


def _parameters(folder: Path, config: Config) -> int | None:
    """The number of the model's parameters, recorded or counted in a checkpoint; None without either."""
    if is_user_defined(type(config.model)):
        recorded = read_model_file(folder)
        return recorded and recorded.parameters
    fix = "remove it, and the next start writes another"
    starts = read_if_exists(list[_StartRecord], folder / "environment.json", fix)
    if starts and "parameters" in starts[-1]:
        return starts[-1]["parameters"]
    steps = [] if config.model.lora_rank else checkpoint_steps(folder)  # of adapters, without the weights below them
    with contextlib.suppress(Unusable, IndexError):
        arrays = read_manifest(folder / "checkpoints" / str(steps[-1]), lambda line: None)["arrays"]
        return sum(math.prod(shape) for name, (_, shape) in arrays.items() if name.startswith("model."))
    return None


def _is_running(folder: Path) -> bool:
    """True if a process trains the run; nothing is written to find out."""
    return mirror.is_locked(folder) or mirror.is_running_on_another_machine(folder)


# --- Comparing --------------------------------------------------------------------------------------------------------


def compare_runs(arguments: CompareArguments) -> None:
    """`mjax runs compare`.

    Raises:
      UsageError: a name is not a run, there are fewer than two, or the figure cannot be written.
    """
    folders = [_run_folder(name, arguments.runs) for name in arguments.names]
    if len(set(folders)) < 2:
        raise UsageError("mjax runs compare needs two or more runs; type mjax runs compare one two")
    figure = arguments.figure or folders[0].parent / "compare.png"
    check_picture("--figure", figure)
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):  # two runs with one name differ in their folders
        names = [str(folder) for folder in folders]
    runs = dict(zip(names, folders, strict=True))
    configs = {name: read_settings(folder / "config.json") for name, folder in runs.items()}
    settings = _different_settings(configs)
    tokens_of_steps = {(BatchSizes.from_config(config).pieces, config.model.sequence) for config in configs.values()}
    x = "tokens" if len(tokens_of_steps) > 1 else "step"
    histories = {name: History(folder / "metrics.jsonl", x) for name, folder in runs.items()}
    if empty := [name for name in names if not histories[name].steps]:
        raise UsageError(f"{empty[0]} has no losses to compare; leave it out, or train it first")

    common = min(history.last["step"] for history in histories.values())
    results = {
        name: {"parameters": _parameters(folder, configs[name]), **read_results(histories[name], common)}
        for name, folder in runs.items()
    }
    draw_runs({name: (history.losses, history.validation) for name, history in histories.items()}, figure, x)
    if arguments.json:
        print(json.dumps({"runs": results, "settings": settings, "figure": str(figure)}, ensure_ascii=False))
    else:
        _print_comparison(names, results, settings, figure)


def _print_comparison(names: list[str], results: dict[str, dict], settings: dict[str, dict], figure: Path) -> None:
    """Print a column for each run: its results, by run, then the settings that differ, by setting."""
    rows = [(result, *(_format_value(results[name][result]) for name in names)) for result in results[names[0]]]
    rows += [(setting, *(_format_value(values[name]) for name in names)) for setting, values in settings.items()]
    print(*format_table(("", *names), rows), "", f"settings that differ: {len(settings)}; curves in {figure}", sep="\n")


class History:
    """The metrics of a run in a comparison, a few bytes per step.

    Attributes:
      last: the last record.
      losses, validation: in training and in validation, over steps or tokens.
      steps: step numbers of the losses in training.
      speeds: tokens per second.
      skipped: number of steps that were skipped.
    """

    def __init__(self, file: Path, x: str = "step"):
        """Read a metrics.jsonl, with curves over `x`, step or tokens; damaged lines are reported on stderr.

        Raises:
          UsageError: the file cannot be read.
        """
        self.last, self.skipped, self.losses, self.validation = {}, 0, Curve(), Curve()
        self.steps, self.speeds, damaged = array("q"), array("d"), []
        for _, record in read_lines(file, damaged):
            self.last, at = record, record.get(x)
            self.skipped += bool(record.get("skipped"))
            if (speed := record.get("tokens_per_second")) is not None:
                self.speeds.append(speed)
            if (loss := record.get("loss")) is not None and at is not None:
                self.steps.append(record["step"])
                self.losses.add(at, loss)
            if (loss := record.get("val_loss")) is not None and at is not None:
                self.validation.add(at, loss)
        if damaged:
            lines = "line" if len(damaged) == 1 else f"{len(damaged)} lines, the first is"
            print(f"note: {file} cannot be read in {lines} {damaged[0]}, which is left out", file=sys.stderr)


def read_results(history: History, common: int) -> dict[str, float | int | None]:
    """The results of a run in a comparison; losses are smoothed like the curve.

    Args:
      history: with a loss.
      common: the last step that every run has reached.
    """
    averaged = smooth(history.losses.values, smoothing_window(len(history.steps)))
    speeds, validation = sorted(history.speeds[1:] or history.speeds), history.validation.values
    reached = bisect_right(history.steps, common)
    return {
        "steps": history.last["step"],
        "tokens": history.last.get("tokens"),
        f"loss at step {common}": finite_or_none(float(averaged[reached - 1])) if reached else None,
        "loss": finite_or_none(float(averaged[-1])),
        "val loss": validation[-1] if validation else None,
        "best val loss": min(validation, default=None),
        "tokens/s": speeds[len(speeds) // 2] if speeds else None,
        "skipped steps": history.skipped,
    }


def _different_settings(configs: dict[str, Config]) -> dict[str, dict[str, Any]]:
    """The fields in which the runs differ, with the value of each run; None if its model does not have the field."""
    first, *rest = configs.values()
    settings = {}
    for field in sorted({field for config in rest for field in differing_fields(first, config)}):
        section, _, key = field.partition(".")
        settings[field] = {name: getattr(getattr(config, section), key, None) for name, config in configs.items()}
    return settings


def _format_value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


# --- Removing ---------------------------------------------------------------------------------------------------------


def remove_runs(arguments: RemoveArguments) -> None:
    """`mjax runs remove`.

    Raises:
      UsageError: a name is not a run, is a link, is in use, is the base of another run's adapters, or is a folder with
        other files too; nothing was removed. Or stdin is not a terminal.
    """
    folders = list(dict.fromkeys(_run_folder(name, arguments.runs) for name in arguments.names))
    if not folders:
        raise UsageError("mjax runs remove needs names of runs; type mjax runs remove try1")
    resolve = lambda folder: folder.resolve() if find_address(folder) is None else folder  # noqa: E731
    removed = set(map(resolve, folders))
    siblings = {resolve(other) for runs in {folder.parent for folder in removed} for other in _run_folders(runs)}
    for folder in folders:
        _check_removable(folder)
        for other in find_adapters_of(folder, siblings - removed):
            fix = f"remove that run too: mjax runs remove {folder.name} {other.name}"
            raise UsageError(f"{folder} holds the weights that the adapters of {other.name} belong to; {fix}")
    for folder in folders:
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise UsageError(f"cannot ask before removing {folder}: stdin is not a terminal; add --yes")
            row = run_row(folder)
            local = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
            size = filesize.decimal(mirror.remove_remote(folder, dry=True) or local)
            about = f"step {row.step}/{row.steps}, {len(checkpoint_steps(folder))} checkpoints, {size}"
            if not Confirm.ask(with_addresses(f"remove {folder} ({about})?"), default=False):
                print(f"{folder} stays")
                continue
        with lock_folder(folder, print):
            mirror.remove_remote(folder)
            for local in mirror.run_copies(folder):
                # Renamed first: whatever ends this process, a half-removed run is never taken for a run.
                gone = local.with_name(f".{local.name}.removed")
                rename(local, gone)
                shutil.rmtree(gone)  # removes a link inside, but not its target
        print(with_addresses(f"removed {folder}"))


def _check_removable(folder: Path) -> None:
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link to {folder.readlink()}; give that folder, or remove the link with rm")
    names = [entry.name for entry in folder.iterdir()]
    foreign = [name for name in names if name not in OF_A_RUN and not LEFT_BY_A_RUN.search(name)]
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir() and not checkpoints.is_symlink():
        foreign += [f"checkpoints/{entry.name}" for entry in checkpoints.iterdir() if not _is_save_file(entry)]
    if foreign:
        raise UsageError(f"{folder} contains {foreign[0]}, which no run writes; move it away, or use rm")
    if _is_running(folder):
        raise UsageError(f"{folder} is in use by another process; stop it first")


def _is_save_file(entry: Path) -> bool:
    """True for a checkpoint, also a damaged or partial one; False for a user's folder."""
    if entry.name.isdigit():
        return (entry / MANIFEST).is_file()
    return entry.name.startswith(GOOD) or re.fullmatch(r"[0-9]+\.(writing|deleting|damaged).*", entry.name) is not None


# --- Names ------------------------------------------------------------------------------------------------------------


def _run_folder(name: str, runs: Path) -> Path:
    """The run folder with this name in `runs`, or at this path."""
    below = []
    with contextlib.suppress(UsageError):  # a path such as ../runs/one
        below.append(path_below(runs, name))
    for folder in (*map(mirror.local_run, below), Path(name)):
        if (folder / "config.json").is_file():
            return resolve_parents(folder) if folder.name else folder.resolve()
    known = [folder.name for folder in _run_folders(runs)] if runs.is_dir() else []
    folder = runs / name if (runs / name).exists() or not Path(name).exists() else Path(name)
    problem = "is not a run folder: it has no config.json" if folder.exists() else "does not exist"
    raise UsageError(f"{folder} {problem}; {suggestion(name, known, '`mjax runs` lists the runs')}")
