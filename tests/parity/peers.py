"""What comparisons with models of `transformers` share: a peer's weights in a run folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mjax import cli
from mjax.config import DataConfig, OptimizerConfig, PrecisionConfig, TrainConfig, read_config
from mjax.interop.convert import abstract_weights
from mjax.state.checkpoint import Checkpoints


def perturbed(peer, torch):
    """The peer with random biases and LayerNorm weights too, so that none can hide: they are 0 and 1 at first."""
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return peer


def imported(peer, folder: Path, *flags: str):
    """The run folder made of what `save_pretrained` writes: its config set up for float32, and its weights."""
    peer.save_pretrained(folder / "hf")
    assert cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "run"), *flags]) == 0
    config = read_config(folder / "run" / "config.json")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=4, weight_decay=0.1, clip_norm=1.0
        ),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(steps=20, global_batch=4, micro_batch=2),
    )
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        return config, checkpoints.restore(abstract_weights(config), field="model")[1]


def rate_of_megatron(step: int) -> float:
    """The learning rate of `imported` configs: linear from 0 over 4 steps, then a cosine to a tenth at step 20."""
    if step <= 4:
        return 1e-3 * step / 4
    return 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + np.cos(np.pi * (step - 4) / 16))
