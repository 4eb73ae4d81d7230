"""The best learning rate of Llamas of several widths and depths, in the standard parametrization and in completep.

    mjax prepare --demo --vocabulary 512 --output data/demo
    python benchmarks/learning_rates.py data/demo --output FOLDER

Each model is trained with rates a factor of 2 apart, until the best one has a higher loss on both sides, and then with
the two between. The minimum of a parabola through these five losses is the best rate, of which several seeds give a
mean. The first model is the base, in which both parametrizations are the same. mup is completep along the width, and
standard along the depth.

FOLDER/runs.jsonl has a line for each run, and the same command continues there. The table and the picture
FOLDER/learning_rates.png are made of all runs so far.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from benchmarks.command import check_counts, in_one_sentence
from benchmarks.scaling_figure import GREY
from mjax.config import Config, DataConfig, LlamaConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from mjax.config.checks import validate
from mjax.data.sources import open_data
from mjax.parallel.mesh import make_mesh
from mjax.pictures.figures import save
from mjax.step.layout import build_layout
from mjax.step.optimizer import make_optimizer
from mjax.step.step import build_program
from mjax.utils.figures import format_table

BASE = 64, 2
SEEDS = {BASE: 4, (128, 2): 3, (64, 4): 3, (64, 8): 3, (256, 2): 2, (64, 16): 2, (512, 2): 1}  # of (width, depth)
PARAMETRIZATIONS = "standard", "completep"
INIT_STD = 0.1  # of the base, about 1 / √width
FIRST = -7  # log₂ of the first rate


class Model(NamedTuple):
    """A model that is trained with several rates."""

    parametrization: str
    width: int
    depth: int
    seed: int


Losses = dict[float, float]  # of the validation, by log₂ of the rate


def config_of(model: Model, data: str, steps: int) -> Config:
    """The config of a run with rate 1."""
    base = {"base_width": BASE[0], "base_depth": BASE[1]} if model.parametrization == "completep" else {}
    sizes = {"hidden": model.width, "layers": model.depth, "heads": model.width // 32, "feed_forward": 3 * model.width}
    tokens = {"sequence": 32, "vocabulary": 512, "vocabulary_multiple": 1, "init_std": INIT_STD}
    rates = {"learning_rate": 1.0, "min_learning_rate": 0.0, "warmup_steps": steps // 10, "beta2": 0.99}
    batches = {"global_batch": 8, "micro_batch": 8, "eval_interval": steps, "eval_batches": 32}
    config = Config(
        model=LlamaConfig(**sizes, **tokens, attention="xla"),
        data=DataConfig(path=(data,)),
        optimizer=OptimizerConfig(**rates, parametrization=model.parametrization, **base),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(steps=steps, seed=model.seed, **batches),
    )
    validate(config)
    return config


def with_rate(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer times a rate in its state, so that one program has every rate."""

    def update(gradients, state, model):
        rate, state = state
        updates, state = transform.update(gradients, state, model)
        return jax.tree.map(lambda x: rate * x, updates), (rate, state)

    return optax.GradientTransformation(lambda model: (jnp.float32(1), transform.init(model)), update)


def build_run(config: Config) -> Callable[[float], float]:
    """A function from log₂ of the rate to the validation loss."""
    mesh, data = make_mesh(config.mesh), open_data(config)
    program = build_program(config, mesh, optimizer=with_rate(make_optimizer(config, build_layout(config, mesh))))
    batches = [data.validation.batch_at(i) for i in range(config.train.eval_batches)]

    def run(log2_rate: float) -> float:
        state = program.initialize()
        state = replace(state, optimizer=(jnp.float32(2.0**log2_rate), state.optimizer[1]))
        for step in range(config.train.steps):
            state, _ = program.train_step(state, data.training.batch_at(step))
        return float(np.mean([program.eval_step(state.model, batch).loss for batch in batches]))

    return run


def search(losses: Losses, first: int, run: Callable[[float], float]) -> None:
    """Add the losses of the runs that `fit` needs, from the rate `first` on."""

    def add(*points: float) -> None:
        for x in points:
            losses[x] = losses[x] if x in losses else run(x)

    add(first)
    while not {best := best_octave(losses), best - 1, best + 1} <= losses.keys():
        add(best - 1, best + 1)
    add(best - 0.5, best + 0.5)


def best_octave(losses: Losses) -> float:
    return min((x for x in losses if x % 1 == 0), key=losses.__getitem__)


def fit(losses: Losses) -> float:
    """log₂ of the best rate."""
    best = best_octave(losses)
    near = [x for x in losses if abs(x - best) <= 1]
    square, slope, _ = np.polyfit(near, [losses[x] for x in near], 2)
    return -slope / square / 2


def read(file: Path) -> dict[Model, Losses]:
    runs = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        *model, log2_rate, loss, _ = json.loads(line).values()
        runs.setdefault(Model(*model), {})[log2_rate] = loss
    return runs


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="prefix of a dataset with at most 512 tokens")
    parser.add_argument("--output", type=Path, required=True, help="folder of runs.jsonl and the picture")
    parser.add_argument("--steps", type=int, default=300, help="of a run (default: 300)")
    arguments = parser.parse_args()
    check_counts(arguments, "steps")
    arguments.output.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(arguments.output / "compiled"))
    file = arguments.output / "runs.jsonl"
    runs = read(file)
    for seed, shape, name in product(range(max(SEEDS.values())), SEEDS, PARAMETRIZATIONS):
        model = Model(name, *shape, seed)
        if seed < SEEDS[shape] and model[:3] != ("completep", *BASE):
            first = FIRST if shape == BASE else round(fit(runs[Model("standard", *BASE, seed)]))
            search(runs.setdefault(model, {}), first, partial(measure, model, arguments.data, arguments.steps, file))
            print(f"{model}: 2^{fit(runs[model]):.2f}", flush=True)
    columns = "", "width", "depth", "seeds", "best rate", "/ base", "loss", "with base's rate"
    print("\n".join(format_table(columns, [*rows(runs)])))
    draw(runs, arguments.output / "learning_rates.png")
    return 0


@lru_cache(maxsize=1)
def build_model(model: Model, data: str, steps: int) -> Callable[[float], float]:
    return build_run(config_of(model, data, steps))


def measure(model: Model, data: str, steps: int, file: Path, log2_rate: float) -> float:
    """Train, add a line to the file, and return the loss."""
    began = time.process_time()
    loss = build_model(model, data, steps)(log2_rate)
    seconds = round(time.process_time() - began, 1)
    with file.open("a") as stream:
        stream.write(json.dumps({**model._asdict(), "log2_rate": log2_rate, "loss": loss, "cpu_s": seconds}) + "\n")
    return loss


def of_seeds(runs: dict[Model, Losses], name: str, shape: tuple[int, int]) -> list[Losses]:
    """The losses of each seed."""
    name = "standard" if shape == BASE else name
    return [losses for model, losses in runs.items() if model[:3] == (name, *shape)]


def best_rate(runs: dict[Model, Losses], name: str, shape: tuple[int, int]) -> float:
    """log₂ of the best rate, as a mean over the seeds."""
    return float(np.mean([fit(losses) for losses in of_seeds(runs, name, shape)]))


def rows(runs: dict[Model, Losses]) -> Iterator[tuple]:
    """Yield the best rate of each model, its ratio to that of the base, the loss, and the loss with the base's rate."""
    base = best_rate(runs, "standard", BASE)
    for shape, name in product(sorted(SEEDS), PARAMETRIZATIONS):
        best, seeds = best_rate(runs, name, shape), of_seeds(runs, name, shape)
        losses = np.mean([min(losses.values()) for losses in seeds]), np.mean([losses[round(base)] for losses in seeds])
        yield name, *shape, len(seeds), f"{2**best:.4f}", f"{2 ** (best - base):.2f}", *(f"{x:.3f}" for x in losses)


def draw(runs: dict[Model, Losses], file: Path) -> None:
    """Draw the mean loss by rate: widths above, depths below, a column for each parametrization, and the best rate of
    the base as a line."""
    base = best_rate(runs, "standard", BASE)
    figure = Figure(figsize=(8, 7), dpi=160, layout="constrained")
    figure.patch.set_alpha(0)
    for row, along in zip(figure.subplots(2, 2, sharex=True, sharey="row"), ("width", "depth"), strict=True):
        shapes = sorted(shape for shape in SEEDS if shape[along == "width"] == BASE[along == "width"])
        for axes, name in zip(row, PARAMETRIZATIONS, strict=True):
            axes.axvline(2**base, color=GREY, linestyle=":")
            for shape, color in zip(shapes, ("#56B4E9", "#009E73", "#E69F00", "#D55E00"), strict=True):
                seeds = of_seeds(runs, name, shape)
                points = sorted(set.intersection(*map(set, seeds)))
                losses = [np.mean([seed[x] for seed in seeds]) for x in points]
                axes.plot(np.exp2(points), losses, "o-", color=color, label=f"{along} {shape[along == 'depth']}")
            axes.patch.set_alpha(0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["bottom", "left"]].set_color(GREY)
            axes.tick_params(colors=GREY, labelsize=11)
            axes.set_xscale("log", base=2)
            axes.legend(frameon=False, labelcolor=GREY, fontsize=11)
        row[0].set_ylabel("validation loss", color=GREY, fontsize=12)
    for axes, name in zip(figure.axes, PARAMETRIZATIONS, strict=False):
        axes.set_title(name, color=GREY)
    figure.supxlabel("learning rate", color=GREY, fontsize=12)
    save(figure, file)


if __name__ == "__main__":
    sys.exit(main())
