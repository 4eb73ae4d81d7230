"""Messages before the first step of a run and after its last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax

from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.config.mixture import MixtureConfig
from mjax.config.model import is_own, kind_of
from mjax.config.model_file import file_of, run_flags
from mjax.data.sources import TrainingData
from mjax.models.build import count_parameters
from mjax.parallel import axes
from mjax.parallel.axes import PIPE
from mjax.parallel.schedules import schedule_of, slot_times
from mjax.run.display import Display, verdict
from mjax.step.step import TrainProgram
from mjax.trace.flops import peak_tflops
from mjax.utils.names import leaf_name


def what_runs(
    display: Display, config: Config, program: TrainProgram, data: TrainingData, folder: Path, start: int
) -> None:
    """Print what runs: model, mesh, data, steps and folder."""
    model, mesh, train = config.model, config.mesh, config.train
    kind = jax.devices()[0].device_kind
    batches = BatchSizes.of(config)
    tokens = batches.samples_before(train.steps) * model.sequence
    sizes = [size for first_step, _, size in batches.pieces if first_step < train.steps]
    size = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    parameters, compute = count_parameters(model), config.precision.compute
    unrolled = ", layers without a loop" if train.unroll == "on" else ""
    unrolled += f", over context by {config.across}" if config.across else ""
    unrolled += f", experts by {model.grouped}" if isinstance(model, MixtureConfig) else ""
    unrolled += f", loss in {train.loss_chunks} chunks" if train.loss_chunks > 1 else ""
    display.say(f"model   {parameters:,} parameters, {compute}, attention by {model.attention}{unrolled}")
    display.say(f"mesh    {describe_mesh(config)} on {mesh.devices} × {kind}")
    display.say(f"data    {data.summary}")
    for note in data.notes:
        display.say(f"        {note}")
    display.say(f"plan    {train.steps:,} steps of {size} × {model.sequence} tokens, {tokens:,} in total")
    display.say(f"run     {folder}" + (f", continued after step {start}" if start else ""))
    if kind != "cpu" and peak_tflops(kind, config.precision.compute) is None:
        display.say(
            f"mfu     not shown: no {config.precision.compute} peak is known for {kind}; "
            "mjax/cluster/hardware.py describes how to add it"
        )
    if mesh.pipe > 1 and (whole := replicated_on_stages(program)):
        display.say(
            f"replicated on every pipeline stage (no dim divisible by --mesh.pipe {mesh.pipe}): {', '.join(whole)}"
        )


def describe_mesh(config: Config) -> str:
    """`pipe 4 (1f1b, 2 chunks, bubble 18.8%) × data 2 × model 2, sequence parallel, ZeRO-1`."""
    mesh, words = config.mesh, ""
    if mesh.pipe > 1:
        bubble = schedule_of(config).bubble(*slot_times(config))
        chunks = f", {mesh.chunks} chunks" if mesh.chunks > 1 else ""
        words = f"pipe {mesh.pipe} ({mesh.schedule}{chunks}, bubble {bubble:.1%}) × "
    words += axes.in_words(replace(mesh, pipe=1))
    words += ", sequence parallel" if mesh.splits_tokens else ""
    return words + (f", ZeRO-{mesh.zero}" if mesh.zero else "")


def replicated_on_stages(program: TrainProgram) -> list[str]:
    """Names of the weights outside the layers that every pipeline stage stores, because no dim is divisible."""
    return [
        leaf_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(program.abstract_state.model)
        if PIPE not in str(leaf.sharding.spec)
    ]


def what_is_left(
    display: Display, step: int, loss: float | None, metrics: dict[str, float], folder: Path, config: Config
) -> None:
    """Print what a finished run has written, and what to type next."""
    if loss is not None:
        for line in verdict(loss, metrics, config.train.eval_batches * config.train.global_batch):
            display.say(line)
    display.say(f"curve       {folder / 'loss.png'}")
    if isinstance(config.model, MixtureConfig):
        display.say(f"experts     {folder / 'experts.png'}")
    display.say(f"checkpoint  {folder / 'checkpoints' / str(step)}")
    if not config.model.causal or not (folder / "tokenizer").is_dir():
        return
    if is_own(type(config.model)) and file_of(type(config.model)) is None:
        display.say(
            f'more text   mjax.generate({str(folder)!r}, "…") in Python, where {kind_of(config.model)!r} is defined'
        )
    else:
        display.say(f'more text   python -m mjax generate {run_flags(folder, config.model)} --prompt "…"')
