"""Checkpoints of Megatron of 2020 and later, written with torch or megatron-core and nothing of mjax."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from mjax.commands import cli
from mjax.config import GPTConfig
from mjax.config.model import convert_kind
from tests.interop.megatron_files import share
from tests.ports import free_port

GPT = GPTConfig(layers=2, hidden=24, heads=4, feed_forward=40, sequence=10, vocabulary=29, vocabulary_multiple=128)
BERT = replace(convert_kind(GPT, "bert"), activation="gelu_erf")
PADDED = 32
FLAGS = ("--heads", "4", "--vocabulary", "29")
"""What the checkpoints do not say."""


def tensors_of(tree, dtype):
    """Arrays in a nest of dictionaries as tensors of torch."""
    import torch

    if isinstance(tree, dict):
        return {name: tensors_of(value, dtype) for name, value in tree.items()}
    return torch.tensor(np.ascontiguousarray(tree), dtype=dtype)


def write(folder, weights, model, version=0, ranks=1, stages=1, legacy=False, dtype=None, **beside):
    """A checkpoint as Megatron wrote it; what is `beside` the model goes into every file."""
    import torch

    place = folder / "release"
    for stage in range(stages):
        for rank in range(ranks):
            name = f"mp_rank_{rank:02}" if stages == 1 else f"mp_rank_{rank:02}_{stage:03}"
            (place / name).mkdir(parents=True)
            held = share(weights, model, version, rank, ranks, stage, stages, PADDED)
            found = {"model": tensors_of(held, dtype)} | beside
            if version:
                found["checkpoint_version"] = version
            file = place / name / "model_optim_rng.pt"
            torch.save(found, file, _use_new_zipfile_serialization=not legacy)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def write_with_megatron_core(folder, *kinds, ranks=1, expert_ranks=1, stages=1):
    """Run `write_megatron_core.py` in a folder, in that many processes."""
    program = [sys.executable, str(Path(__file__).with_name("write_megatron_core.py")), str(folder), *kinds]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(ranks), "EXPERT_RANKS": str(expert_ranks), "PIPELINE_RANKS": str(stages)}
    processes = [
        subprocess.Popen(
            program, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-3000:]
    return folder


def convert(source, run, *flags):
    """`mjax convert from-megatron`; returns the exit code."""
    return cli.main(["convert", "from-megatron", str(source), str(run), *flags])
