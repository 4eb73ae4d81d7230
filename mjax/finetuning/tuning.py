"""The seeds of a fine-tuning, one after the other, and their results.

    runs/bert_336m-mnli/
  request.json                settings; the folder is continued only with the same
  seed-1234/, seed-1235/, …   (`seed.py`)
  best                        → seed-N/best, the run folder of the seed with the highest metric
  report.json, report.png     of the finished seeds; the plot is redrawn after every epoch

All seeds share one compiled program. A finished seed is not trained again; an interrupted one continues from its last
checkpoint, with a bit-identical result.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.cluster.processes import is_first
from mjax.cluster.watchdog import Watchdog
from mjax.config import Config, save_config
from mjax.config.batch_size import BatchSizes
from mjax.data.batches import of_positions
from mjax.data.sources import TrainingData
from mjax.finetuning.seed import EvaluateTask, SeedGuard, Start, best_of, read_epochs
from mjax.parallel.mesh import make_mesh
from mjax.run.display import Display
from mjax.run.loop import PREEMPTED, Run, in_order
from mjax.run.metrics import Announced, MetricsLog
from mjax.run.start import write_environment
from mjax.step.step import build_program
from mjax.step.train_state import TrainState
from mjax.tasks.labelled import LabelledTask
from mjax.tasks.labelled_task import Batch, Examples
from mjax.tasks.scoring import TaskScorer
from mjax.utils.files import copy_whole, rename, write_whole


class Finetuning:
    """All seeds of one request.

    Attributes:
      epochs: results (`EvaluateTask.epochs`), by seed.
    """

    def __init__(
        self,
        config: Config,
        saved: Config,
        task: LabelledTask,
        request: dict[str, Any],
        output: Path,
        console: Console,
        watchdog: Watchdog,
    ):
        """Nothing is compiled or read before the first seed.

        Args:
          config: of `recipe.config_of`, with `model.attention` resolved to a kernel.
          saved: config of the pre-trained run.
          task: with its files read.
          request: of `recipe.request_of`.
          output: folder of the results.
          console: for progress and notices.
          watchdog: for the processes of this run.
        """
        self.config, self.task, self.request, self.output = config, task, request, output
        self.console, self.watchdog = console, watchdog
        self.mesh = make_mesh(config.mesh)
        self.program = build_program(config, self.mesh)
        self.scorer = TaskScorer(config, self.mesh)
        self.start = Start(Path(request["checkpoint"]), saved, config, self.mesh, self.program)
        self.epochs: dict[int, list[dict]] = {}
        self._steps_before = 0
        self._announced = Announced(self._say)
        if is_first():
            write_environment(config, output, self._say)
        self._say(f"new     {', '.join(self.start.new)}; all other weights are those of {request['checkpoint']}")
        count, steps = request["epochs"], config.train.eval_interval
        epochs = f"{count} epoch{'s' * (count > 1)} of {steps:,} step{'s' * (steps > 1)}"
        self._say(f"plan    {epochs} of {request['batch']} examples")

    def train(self, seed: int) -> int:
        """Train one seed to its end, or continue it. Returns the exit code, 75 if it was stopped."""
        folder, last = self.output / f"seed-{seed}", self.config.train.steps
        self._say(f"seed    {seed}")
        if (epochs := read_epochs(folder)) and epochs[-1]["step"] == last:
            self.epochs[seed] = epochs
            self._conclude()
            return 0
        with contextlib.ExitStack() as stack:
            checkpoints, best = (
                stack.enter_context(Checkpoints(run / "checkpoints", keep_last=2, on_notice=notice))
                for run, notice in ((folder, self._say), (folder / "best", lambda line: self._say(f"best: {line}")))
            )
            start, state = self._state(seed, checkpoints)
            log = None
            if is_first():
                self._lay_out(seed, folder)
                log = stack.enter_context(contextlib.closing(_Log(folder, start, self._redraw, self._say)))
            display = Display(last, self.console, shown=is_first())
            guard = SeedGuard(self.config, checkpoints, display.say)
            batches = EpochBatches(self.task.train, self.config.train.global_batch, seed)
            data = TrainingData(batches, None, None, "examples of the task")
            run = Run(self.config, self.mesh, self.program, checkpoints, data, display, self.watchdog, guard, log)
            evaluate = EvaluateTask(folder, self.task, self.scorer, best, start)
            run.callbacks = in_order(self.watchdog, guard, display, log, evaluate)
            run.state, run.steps_before = state, self._steps_before
            epochs = self.epochs[seed] = evaluate.epochs
            if start == (len(epochs) + 1) * self.config.train.eval_interval:  # stopped before it was evaluated
                evaluate.measure(run, start)
            if start < last:
                result = run.take_steps(state, start)
                self._steps_before += last
                if result.stopped:
                    if epochs and epochs[-1]["step"] == last:
                        self._conclude()
                    if not result.exit_code:  # in the last step or after it, which the loop treats as its end
                        self._say("stopped; run the same command again to continue")
                    return PREEMPTED
        self._conclude()
        return 0

    def report(self) -> dict[str, Any]:
        """The request and the results of all seeds."""
        return self.request | summary(self.task.metric, self.epochs)

    def print_report(self) -> None:
        """Print the report as a table on stdout, and where the rest of it is."""
        report = self.report()
        print_table(report, "{task}, fine-tuned from {checkpoint}, step {step}".format(**report))
        best = report["best"]
        chosen = f"seed {best['seed']}, epoch {best['epoch']}, with its predictions"
        self._say(f"\nbest    {self.output / 'best'}: {chosen}")
        self._say(f"report  {self.output / 'report.json'}, {self.output / 'report.png'}")

    # --- Parts of a seed ----------------------------------------------------------------------------------------------

    def _state(self, seed: int, checkpoints: Checkpoints) -> tuple[int, TrainState]:
        """The state to continue from: the seed's own last checkpoint, or the initial one."""
        if checkpoints.steps():
            start, state = checkpoints.restore(self.program.abstract_state)
            self._say(f"        continued after step {start}")
            return start, state
        checkpoints.try_save(self.mesh)
        step, state = self.start.state(seed, self.request["step"], self._say)
        self.request["step"] = step
        if is_first():
            write_whole(self.output / "request.json", json.dumps(self.request, indent=1) + "\n")
        return 0, state

    def _lay_out(self, seed: int, folder: Path) -> None:
        """Write the files of a run folder."""
        best = folder / "best"
        best.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, train=replace(self.config.train, seed=seed))
        for run in (folder, best):
            save_config(config, run / "config.json")
        source = Path(self.request["checkpoint"]) / "tokenizer"
        shutil.copytree(source, best / "tokenizer", dirs_exist_ok=True, copy_function=copy_whole)

    def _redraw(self) -> None:
        drawn = {seed: epochs for seed, epochs in self.epochs.items() if epochs}
        if not drawn:
            return
        title, metric = "{task} from {checkpoint}".format(**self.request), self.task.metric
        with self._announced("report.png"):
            from mjax.pictures.tasks import draw_seeds  # matplotlib takes a second to import

            curves = {
                seed: {epoch["epoch"]: epoch["figures"][metric] for epoch in epochs} for seed, epochs in drawn.items()
            }
            best = {seed["seed"]: seed["epoch"] for seed in summary(metric, drawn)["seeds"]}
            draw_seeds(metric, curves, best, self.output / "report.png", title)

    def _conclude(self) -> None:
        if not is_first():
            return
        report = self.report()
        write_whole(self.output / "report.json", json.dumps(report, indent=1) + "\n")
        link = self.output / "best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(f"seed-{report['best']['seed']}/best", target_is_directory=True)
        rename(link, self.output / "best")
        self._redraw()

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False)


class _Log(MetricsLog):
    """metrics.jsonl of a seed, which shares its plot with the others."""

    def __init__(self, folder: Path, step: int, draw: Callable[[], None], say: Callable[[str], None]):
        super().__init__(folder, step, tensorboard=False, say=say)
        self._draw = draw

    def draw(self, last: bool = True) -> None:
        """Redraw report.png, after every epoch."""
        self._draw()


# --- Batches of training examples, in a new order every epoch ---------------------------------------------------------
#     epoch 0   3 0 4 | 1 5 2 | 6        seven examples in batches of three: two steps an epoch,
#     epoch 1   5 6 1 | 0 3 4 | 2        and what is left over is dropped
#
# The order is a function of (seed, epoch) only, so a run that continues sees the same batches, on any mesh. The
# incomplete last batch of an epoch is dropped, as in Megatron-LM v1.0 without --keep-last: a smaller batch would give
# its examples more weight. The next epoch drops others.


class EpochBatches:
    """Training batches by step, like `data.batches.Batches`; stateless.

    Attributes:
      sizes: the same size at every step.
      steps: per epoch.
    """

    def __init__(self, examples: Examples, batch: int, seed: int):
        self.examples, self.seed = examples, seed
        self.sizes = BatchSizes.constant(batch)
        self.steps = len(examples) // batch
        self._order = lru_cache(maxsize=2)(self._draw)

    def at(self, step: int, rows: slice = slice(None), positions: slice = slice(None)) -> Batch:
        """The batch of `step` (from 0), or some of its rows and positions: the arrays of `Config.batch_arrays`."""
        epoch, position = divmod(step, self.steps)
        size = self.sizes.size(step)
        chosen = self._order(epoch)[position * size : (position + 1) * size][rows]
        batch = self.examples.batch(chosen) | {name: label[chosen] for name, label in self.examples.labels.items()}
        return of_positions(batch, positions)

    def _draw(self, epoch: int) -> np.ndarray:
        # The legacy generator, whose numbers NumPy guarantees never to change.
        return np.random.RandomState((self.seed, epoch)).permutation(len(self.examples))


# --- The results of all seeds: a table and report.json ----------------------------------------------------------------
# The metrics of a seed are those after its best epoch. The papers report their median over five seeds (arXiv
# 1909.08053, table 5): the variation between seeds can exceed the difference between two models.


Epochs = Mapping[int, list[dict]]  # `EvaluateTask.epochs`, by seed


def summary(metric: str, epochs: Epochs) -> dict[str, Any]:
    """The best epoch of each seed, the median of every metric over the seeds, and the best seed."""
    best = {seed: best_of(measured, metric) for seed, measured in epochs.items()}
    names = next(iter(best.values()))["figures"]
    values = {name: [epoch["figures"][name] for epoch in best.values()] for name in names}
    chosen = max(best, key=lambda seed: best[seed]["figures"][metric])
    return {
        "metric": metric,
        "seeds": [{"seed": seed, **epoch} for seed, epoch in best.items()],
        "median": {name: statistics.median(numbers) for name, numbers in values.items() if None not in numbers},
        "best": {"seed": chosen, **best[chosen]},
    }


def print_table(report: dict[str, Any], title: str) -> None:
    """Print a `summary` on stdout: one column per seed, then the median of several."""
    seeds, median = report["seeds"], [report["median"]] if len(report["seeds"]) > 1 else []
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for _ in [*seeds, *median]:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("seed", *(str(seed["seed"]) for seed in seeds), *["median" for _ in median], style="dim")
    table.add_row("best epoch", *(str(seed["epoch"]) for seed in seeds))
    table.add_row("loss", *(f"{seed['loss']:.4f}" for seed in seeds))
    for name, best in report["best"]["figures"].items():
        if isinstance(best, float):
            values = [figures[name] for figures in (*(seed["figures"] for seed in seeds), *median)]
            table.add_row(name.replace("_", " "), *(f"{value:.4f}" for value in values))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{title}\n", markup=False)
    console.print(table)
