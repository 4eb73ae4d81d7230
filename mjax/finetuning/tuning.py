"""The seeds of a fine-tuning, one after the other, and their results.

    runs/bert_336m-mnli/
  request.json                settings; the folder is continued only with the same
  seed-1234/, seed-1235/, …   (`EvaluateTask`)
  best                        → seed-N/best, the run folder of the seed with the highest metric
  report.json                 of the finished seeds

All seeds share one compiled program. A finished seed is not trained again; an interrupted one continues from its last
checkpoint, with a bit-identical result.
"""

import contextlib
import json
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from rich.console import Console

from mjax.checkpoint.arrays import leaves_by_path
from mjax.checkpoint.base import restore_weights
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.cluster.processes import is_first
from mjax.cluster.watchdog import Watchdog
from mjax.config import Config, save_config
from mjax.config.batch_size import BatchSizes
from mjax.config.plain_values import read_if_exists
from mjax.data.sources import TrainingData
from mjax.errors import UnhealthyError
from mjax.models.bert.model import HEAD
from mjax.models.build import build_model
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import split_into_virtual_stages
from mjax.run.display import Display
from mjax.run.health import Guard
from mjax.run.loop import PREEMPTED, Evaluate, Run
from mjax.run.metrics import MetricsLog
from mjax.run.start import write_environment
from mjax.step.layout import TrainState, build_layout
from mjax.step.optimizer import adamw
from mjax.step.precision import parameter_type
from mjax.step.step import TrainProgram, build_program, initial_state
from mjax.tasks.labelled import write_predictions
from mjax.tasks.labelled_task import Batch, Examples, LabelledTask
from mjax.tasks.scoring import TaskScorer
from mjax.utils.figures import format_table
from mjax.utils.files import copy_whole, rename, write_whole


@dataclass(eq=False)
class Finetuning:
    """All seeds of one request; nothing is compiled or read before the first.

    Attributes:
      config: of `recipe.finetuning_config`, with `model.attention` resolved to a kernel.
      saved: config of the pre-trained run.
      task: with its files read.
      request: of `recipe.make_request`.
      output: folder of the results.
      console: for progress and notices.
      watchdog: for the processes of this run.
      epochs: results (`EvaluateTask.epochs`), by seed.
    """

    config: Config
    saved: Config
    task: LabelledTask
    request: dict[str, Any]
    output: Path
    console: Console
    watchdog: Watchdog

    def __post_init__(self):
        config, request = self.config, self.request
        self.mesh = make_mesh(config.mesh)
        self.program = build_program(config, self.mesh)
        self.scorer = TaskScorer(config, self.mesh)
        self.start = FinetuningStart(Path(request["checkpoint"]), self.saved, config, self.mesh, self.program)
        self.epochs: dict[int, list[dict]] = {}
        self._steps_before = 0
        if is_first():
            write_environment(config, self.output, self._print_line)
        self._print_line(f"new     {', '.join(self.start.new)}; all other weights are those of {request['checkpoint']}")
        count, steps = request["epochs"], config.train.eval_interval
        epochs = f"{count} epoch{'s' * (count > 1)} of {steps:,} step{'s' * (steps > 1)}"
        self._print_line(f"plan    {epochs} of {request['batch']} examples")

    def train(self, seed: int) -> int:
        """Train one seed to its end, or continue it. Returns the exit code, 75 if it was stopped."""
        folder, last = self.output / f"seed-{seed}", self.config.train.steps
        self._print_line(f"seed    {seed}")
        if (epochs := read_epochs(folder)) and epochs[-1]["step"] == last:
            self.epochs[seed] = epochs
            self._write_report()
            return 0
        with contextlib.ExitStack() as stack:
            runs = {folder: self._print_line, folder / "best": lambda line: self._print_line(f"best: {line}")}
            checkpoints, best = (
                stack.enter_context(Checkpoints(run / "checkpoints", keep_last=2, on_notice=notice))
                for run, notice in runs.items()
            )
            start, state = self._initial_state(seed, checkpoints)
            log = None
            if is_first():
                self._write_run_folder(seed, folder)
                log = stack.enter_context(contextlib.closing(MetricsLog(folder, start, print_line=self._print_line)))
            display = Display(last, self.console, shown=is_first())
            guard = SeedGuard(self.config, checkpoints, display.print_line)
            batches = EpochBatches(self.task.train, self.config.train.global_batch, seed)
            data = TrainingData(batches, None, None, "examples of the task")
            run = Run(self.config, self.mesh, self.program, checkpoints, data, display, self.watchdog, guard, log)
            evaluate = EvaluateTask(folder, self.task, self.scorer, best, start)
            run.set_callbacks(evaluate)
            run.state, run.steps_before = state, self._steps_before
            epochs = self.epochs[seed] = evaluate.epochs
            if start == (len(epochs) + 1) * self.config.train.eval_interval:  # stopped before it was evaluated
                evaluate.measure(run, start)
            if start < last:
                result = run.take_steps(state, start)
                self._steps_before += last
                if result.stopped:
                    if epochs and epochs[-1]["step"] == last:
                        self._write_report()
                    if not result.exit_code:  # in the last step or after it, which the loop treats as its end
                        self._print_line("stopped; run the same command again to continue")
                    return PREEMPTED
        self._write_report()
        return 0

    def report(self) -> dict[str, Any]:
        """The request and the results of all seeds."""
        return self.request | summarize(self.task.metric, self.epochs)

    def print_report(self) -> None:
        """Print the report as a table on stdout, and the paths of its files."""
        report = self.report()
        print_table(report, "{task}, fine-tuned from {checkpoint}, step {step}".format(**report))
        best = report["best"]
        description = f"seed {best['seed']}, epoch {best['epoch']}, with its predictions"
        self._print_line(f"\nbest    {self.output / 'best'}: {description}")
        self._print_line(f"report  {self.output / 'report.json'}")

    # --- Parts of a seed ----------------------------------------------------------------------------------------------

    def _initial_state(self, seed: int, checkpoints: Checkpoints) -> tuple[int, TrainState]:
        """Restore the seed's last checkpoint, or build the initial state; returns the step too."""
        if checkpoints.steps():
            start, state = checkpoints.restore(self.program.abstract_state)
            self._print_line(f"        continued after step {start}")
            return start, state
        checkpoints.try_save(self.mesh)
        step, state = self.start.state(seed, self.request["step"], self._print_line)
        self.request["step"] = step
        if is_first():
            write_whole(self.output / "request.json", json.dumps(self.request, indent=1) + "\n")
        return 0, state

    def _write_run_folder(self, seed: int, folder: Path) -> None:
        """Write the files of a run folder."""
        best = folder / "best"
        best.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, train=replace(self.config.train, seed=seed))
        for run in (folder, best):
            save_config(config, run / "config.json")
        source = Path(self.request["checkpoint"]) / "tokenizer"
        shutil.copytree(source, best / "tokenizer", dirs_exist_ok=True, copy_function=copy_whole)

    def _write_report(self) -> None:
        if not is_first():
            return
        report = self.report()
        write_whole(self.output / "report.json", json.dumps(report, indent=1) + "\n")
        link = self.output / "best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(f"seed-{report['best']['seed']}/best", target_is_directory=True)
        rename(link, self.output / "best")

    def _print_line(self, line: str) -> None:
        self.console.print(line, markup=False)


# --- Batches of training examples, in a new order every epoch ---------------------------------------------------------
#     epoch 0   3 0 4 | 1 5 2 | 6        seven examples in batches of three: two steps an epoch,
#     epoch 1   5 6 1 | 0 3 4 | 2        and the rest is dropped
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

    def batch_at(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of `step` (from 0), or some of its rows: the arrays of `Config.batch_arrays`."""
        epoch, position = divmod(step, self.steps)
        size = self.sizes.size(step)
        indices = self._order(epoch)[position * size : (position + 1) * size][rows]
        return self.examples.batch(indices) | {name: label[indices] for name, label in self.examples.labels.items()}

    def _draw(self, epoch: int) -> np.ndarray:
        # The legacy generator, whose numbers NumPy guarantees never to change.
        return np.random.RandomState((self.seed, epoch)).permutation(len(self.examples))


# --- The results of all seeds: a table and report.json ----------------------------------------------------------------
# The metrics of a seed are those after its best epoch. The papers report their median over five seeds (arXiv
# 1909.08053, table 5): the variation between seeds can exceed the difference between two models.


Epochs = Mapping[int, list[dict]]  # `EvaluateTask.epochs`, by seed


def summarize(metric: str, epochs: Epochs) -> dict[str, Any]:
    """The best epoch of each seed, the median of every metric over the seeds, and the best seed."""
    best = {seed: find_best(measured, metric) for seed, measured in epochs.items()}
    names = next(iter(best.values()))["figures"]
    values = {name: [epoch["figures"][name] for epoch in best.values()] for name in names}
    best_seed = max(best, key=lambda seed: best[seed]["figures"][metric])
    return {
        "metric": metric,
        "seeds": [{"seed": seed, **epoch} for seed, epoch in best.items()],
        "median": {name: statistics.median(numbers) for name, numbers in values.items() if None not in numbers},
        "best": {"seed": best_seed, **best[best_seed]},
    }


def print_table(report: dict[str, Any], title: str) -> None:
    """Print a `summarize` on stdout: one column per seed, then the median of several."""
    seeds, medians = report["seeds"], [report["median"]] if len(report["seeds"]) > 1 else []
    names = [name for name, best in report["best"]["figures"].items() if isinstance(best, float)]
    rows = [
        ("best epoch", *(seed["epoch"] for seed in seeds), *("" for _ in medians)),
        ("loss", *(f"{seed['loss']:.4f}" for seed in seeds), *("" for _ in medians)),
    ]
    for name in names:
        values = [figures[name] for figures in (*(seed["figures"] for seed in seeds), *medians)]
        rows.append((name.replace("_", " "), *(f"{value:.4f}" for value in values)))
    header = ("seed", *(seed["seed"] for seed in seeds), *("median" for _ in medians))
    print("\n".join([title, "", *format_table(header, rows)]))


# --- One seed: a training run that the task evaluates after each epoch ------------------------------------------------
#     seed-1234/
#       config.json, metrics.jsonl, loss.png   as in any run
#       epochs.json                  loss and metrics of the validation files after each epoch
#       checkpoints/STEP/            the whole state after each of the last two epochs, to continue from
#       best/                        a run folder: config, tokenizer and the weights after the best epoch, and after the
#                                    previous best one, in case the newer ones are damaged
#         predictions/               of the validation files, in the task's official format
#
# The best epoch has the highest value of the task's metric, the first one in a tie.


class EpochResult(TypedDict):
    """An entry of epochs.json."""

    epoch: int
    step: int
    loss: float
    figures: dict[str, float]


class EvaluateTask(Evaluate):
    """The task's evaluation after each epoch, which saves the weights of the best one.

    Attributes:
      epochs: results so far, as in epochs.json: one dict per epoch with its number, its last step, loss and metrics.
    """

    def __init__(self, folder: Path, task: LabelledTask, scorer: TaskScorer, best: Checkpoints, start: int):
        """Load the folder's results of the epochs up to step `start`.

        Args:
          folder: seed-N.
          task: provides the validation files.
          scorer: of the run's config.
          best: checkpoints of the folder's best/.
          start: the step the run continues from.
        """
        self.folder, self.task, self.scorer, self.best = folder, task, scorer, best
        self.epochs = [epoch for epoch in read_epochs(folder) if epoch["step"] <= start]

    def measure(self, run: Run, step: int) -> tuple[float, dict[str, float]]:
        """Loss and metrics of the validation files; saves the results and, if it is the best, the weights of this
        epoch."""
        validation, model = self.task.validation, run.state.model
        scores = {name: self.scorer(model, examples) for name, examples in validation.items()}
        metrics = {metric.name: metric.value for metric in self.task.metrics(scores)}
        loss = mean_loss(scores, validation)
        epoch = {"epoch": step // run.config.train.eval_interval, "step": step, "loss": loss, "figures": metrics}
        self.epochs.append(epoch)
        is_best = find_best(self.epochs, self.task.metric) is epoch
        if is_best:
            self.best.save(step, {"model": model}, last=True)
        if is_first():
            if is_best:
                write_predictions(self.folder / "best" / "predictions", self.task, scores)
            write_whole(self.folder / "epochs.json", json.dumps(self.epochs, indent=1) + "\n")
        return loss, {name: value for name, value in metrics.items() if isinstance(value, float)}


class SeedGuard(Guard):
    """The health of a seed."""

    def give_up(self, problem: str) -> None:
        """End an unhealthy seed.

        Raises:
          UnhealthyError: always; the earlier seeds are intact.
        """
        raise UnhealthyError(f"{problem}; fine-tune with a lower --learning-rate, into another --output")


def read_epochs(folder: Path) -> list[dict]:
    """Read epochs.json of a seed; empty if it does not exist.

    Raises:
      UsageError: it is damaged.
    """
    fix = f"remove {folder}, to train this seed from scratch"
    return read_if_exists(list[EpochResult], folder / "epochs.json", fix) or []


def find_best(epochs: list[dict], metric: str) -> dict:
    """The epoch with the highest metric, the first one in a tie."""
    return max(epochs, key=lambda epoch: epoch["figures"][metric])


def mean_loss(scores: dict[str, np.ndarray], validation: dict[str, Examples]) -> float:
    """Mean cross entropy in nats over the examples with labels, as in `TaskBERT.loss`."""
    losses = []
    for name, examples in validation.items():
        if examples.labels:
            labels = np.stack(list(examples.labels.values()), axis=1)  # [N, 1], of a span [N, 2]
            logits = scores[name].reshape(*labels.shape, -1).astype(np.float64)
            of_labels = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
            losses += (np.logaddexp.reduce(logits, axis=-1) - of_labels).mean(1).tolist()
    return float(np.mean(losses))


# --- The initial state of fine-tuning: the trunk of a checkpoint, and a head initialized by the seed ------------------
# The checkpoint is of a pre-trained or a fine-tuned BERT. Every weight that the task's model also has, by name, is
# loaded; the heads for masked tokens and for the order are dropped, and weights that the checkpoint lacks, mainly the
# head, are initialized from N(0, init_std).


class FinetuningStart:
    """The initial state of fine-tuning from one checkpoint, for any seed."""

    def __init__(self, run: Path, saved: Config, config: Config, mesh: Mesh, program: TrainProgram):
        """Nothing is read before the first call of `state`.

        Args:
          run: folder of the trained run.
          saved: its config.
          config: of fine-tuning, with the task's head.
          mesh: of the shape `config.mesh`.
          program: of `config`.
        """
        self.run, self.config = run, config
        source = replace(config, model=replace(saved.model, attention=config.model.attention))
        self._source = build_layout(source, mesh).abstract_model
        names = leaves_by_path(program.abstract_state.model).keys()
        self._trunk = {name for name in names & leaves_by_path(self._source).keys() if not name.startswith(HEAD)}
        self.new = sorted(names - self._trunk)

        def first(seed: Array, first_step: Array, trunk: dict[str, Array]) -> TrainState:
            drawn = build_model(seed, config.model, parameter_type(config.precision.compute))
            weights = leaves_by_path(split_into_virtual_stages(drawn, config.mesh))
            leaves = [trunk.get(name, weight) for name, weight in weights.items()]
            model = jax.tree.unflatten(jax.tree.structure(program.abstract_state.model), leaves)
            return initial_state(config, adamw(config.optimizer), model, first_step)

        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
        self._first = jax.jit(first, out_shardings=shardings)

    def state(self, seed: int, step: int | None, on_notice: Callable[[str], None]) -> tuple[int, TrainState]:
        """The initial state for `seed`, and the step of the checkpoint of its trunk.

        Args:
          seed: initializes the head, and selects the dropout masks. One compiled program serves all seeds, and masks
            depend on the step number; so the step numbers of a seed begin at seed × steps.
          step: the checkpoint; None: the newest intact one.

        Raises:
          UsageError: there is no such checkpoint, or its model does not match its config.
          RunError: it is damaged.
        """
        step, model = restore_weights(self.run, self._source, step, on_notice)
        trunk = {name: weight for name, weight in leaves_by_path(model).items() if name in self._trunk}
        del model  # frees memory
        return step, self._first(np.uint32(seed), np.int32(seed * self.config.train.steps % 2**31), trunk)
