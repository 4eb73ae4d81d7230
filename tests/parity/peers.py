"""Shared by comparisons with models of `transformers`: a peer's weights in a run folder."""

from dataclasses import replace
from pathlib import Path

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands import cli
from mjax.config import DataConfig, PrecisionConfig, TrainConfig, read_config
from mjax.interop.convert import abstract_weights


def imported(peer, folder: Path, *flags: str):
    """The run folder made of what `save_pretrained` writes: its config set up for float32, and its weights."""
    peer.save_pretrained(folder / "hf")
    assert cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "run"), *flags]) == 0
    config = read_config(folder / "run" / "config.json")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        data=DataConfig(mock=True),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(global_batch=4, micro_batch=2),
    )
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        return config, checkpoints.restore(abstract_weights(config), field="model")[1]
