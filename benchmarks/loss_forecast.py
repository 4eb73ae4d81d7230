"""The loss of a run with ten times the compute, forecast by `mjax scale` from five small ones, for three families.

    mjax prepare --demo --tokenizer bytes --output data/demo_bytes
    python benchmarks/loss_forecast.py data/demo_bytes --output FOLDER

For each family FOLDER/FAMILY has the config, the ladder, forecast.json, which is written before the large run begins,
and that run. The same command continues.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Figure, check_counts, collect, in_one_sentence
from mjax.commands.scale import SCALING, list_sizes, make_run, run_config
from mjax.config import (
    Config,
    DataConfig,
    GPTConfig,
    LlamaConfig,
    LogConfig,
    MixtureConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    differing_fields,
    to_flag,
)
from mjax.config.run import write_config
from mjax.planner.scaling import Point, read_scaling
from mjax.run.metrics import read_metrics
from mjax.utils.figures import format_table

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"layers": 4, "hidden": 96, "heads": 12, "init_std": 0.1, "vocabulary": 257, "vocabulary_multiple": 1}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attention": "xla"}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, **NO_DROPOUT, feed_forward=256, sequence=128, tie_embeddings=True),
    "mixture": MixtureConfig(
        **SIZES,
        **NO_DROPOUT,
        sequence=128,
        tie_embeddings=True,
        experts=4,
        experts_per_token=2,
        feed_forward=128,
        aux_loss_coef=0.01,
    ),
    "gpt": GPTConfig(**SIZES, **NO_DROPOUT, sequence=64),
}
TOKENS_PER_PARAMETER = {"llama": 20, "mixture": 20, "gpt": 40}
"""A GPT learns its positions, and for some hundred steps no more than pairs of bytes: a law fits no shorter runs."""
BATCH = 1024  # tokens
MORE_COMPUTE = 10
LIMIT = 0.01  # relative error of the forecast


def make_config(family: str, data: str) -> Config:
    """The config whose sizes are trained, in completep."""
    rates = {"learning_rate": 2.0**-7, "min_learning_rate": 0.0, "warmup_steps": 100, "beta2": 0.99}
    model = FAMILIES[family]
    batch = dict.fromkeys(("global_batch", "micro_batch"), BATCH // model.sequence)
    return Config(
        model=model,
        data=DataConfig(path=(data,), split="95,5,0"),
        optimizer=OptimizerConfig(**rates, weight_decay=0.01, parametrization="completep", base_width=64, base_depth=4),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(steps=1000, **batch, eval_interval=100, eval_batches=100),
        log=LogConfig(sample_tokens=0),
    )


def run(*words: object) -> float:
    """Run a command of mjax, and return its CPU seconds."""
    began = os.times()
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)
    ended = os.times()
    return ended.children_user + ended.children_system - began.children_user - began.children_system


def once(file: Path, make: Callable[[], dict]) -> dict:
    """Read the file; if there is none, write the result of `make` into it first."""
    if not file.exists():
        file.write_text(json.dumps(make(), indent=1) + "\n")
    return json.loads(file.read_text())


def choose_large(config: Config, largest: Point) -> Point:
    """The run with `MORE_COMPUTE` times the compute of the ladder's largest, and its tokens per parameter."""
    flops = MORE_COMPUTE * largest["flops"]
    wanted = largest["parameters"] * MORE_COMPUTE**0.5
    size = min(list_sizes(config), key=lambda size: abs(size.parameters - wanted))
    return make_run(config, size, flops / (6 * size.parameters**2))


def measure(family: str, data: str, minutes: int, folder: Path) -> tuple[tuple, float]:
    """A row of the table, and the error of the forecast."""
    folder.mkdir(parents=True, exist_ok=True)
    config, file, ladder = make_config(family, data), folder / "config.py", folder / "ladder"
    if not file.exists():
        write_config(config, file, f"{family} on bytes, whose smaller sizes forecast a larger one.")

    def scale() -> dict:
        flags = "--minutes", minutes, "--tokens-per-parameter", TOKENS_PER_PARAMETER[family], "--output", ladder
        return {"cpu_s": run("-m", "mjax", "scale", "--config", file, *flags)}

    def forecast() -> dict:
        law = read_scaling(ladder / SCALING, config)
        point = choose_large(config, max(law.runs, key=lambda point: point["parameters"] * (point["name"] in lengths)))
        forecast = law.predict(point["parameters"], point["tokens"])
        return {"written": time.strftime("%F %T"), **point, **forecast._asdict()}

    cpu_s = once(folder / "ladder_time.json", scale)["cpu_s"]
    lengths = {point["name"] for point in json.loads((ladder / "ladder.json").read_text())["runs"][:-1]}
    predicted = once(folder / "forecast.json", forecast)
    print(f"{family}: {predicted}", flush=True)
    changes = differing_fields(config, run_config(config, predicted)).items()
    flags = [word for name, (_, new) in changes for word in to_flag(name, new).split()]
    name = predicted["name"]
    large = once(
        folder / "large_time.json",
        lambda: {
            "cpu_s": run(
                *("train.py", "--config", file, "--name", name, "--runs", folder, *flags),
                *("--log.scaling", ladder / SCALING),
            )
        },
    )
    loss = [line["val_loss"] for line in read_metrics(folder / name / "metrics.jsonl") if "val_loss" in line][-1]
    error = predicted["loss"] / loss - 1
    interval = f"{predicted['low']:.4f} to {predicted['high']:.4f}"
    row = family, name, f"{cpu_s / 60:.0f}", f"{large['cpu_s'] / 60:.0f}"
    return (*row, f"{predicted['loss']:.4f}", interval, f"{loss:.4f}", f"{error:+.2%}"), error


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="prefix of a dataset in bytes")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--minutes", type=int, default=10, help="for the runs of a ladder (default: 10)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all three")
    arguments = parser.parse_args()
    check_counts(arguments, "minutes")
    output, data = arguments.output.resolve(), str(Path(arguments.data).resolve())
    rows = [measure(family, data, arguments.minutes, output / family) for family in arguments.families]
    columns = "family", "large run", "CPU min, ladder", "CPU min", "forecast", "95%", "loss", "error"
    print("\n".join(format_table(columns, [row for row, _ in rows])))
    for (family, *_), error in rows:
        collect(Figure(f"error of the forecast, {family}", 100 * abs(error), "%", 100 * LIMIT))
    return int(any(abs(error) > LIMIT for _, error in rows))


if __name__ == "__main__":
    sys.exit(main())
