"""Checkpoints of Megatron of 2020 and later, written with torch or megatron-core and nothing of mjax; and what becomes
of them here."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.base import restore_weights
from mjax.commands import cli
from mjax.config import DataConfig, GPTConfig, MeshConfig, PrecisionConfig, TrainConfig, read_config
from mjax.config.axes import MODEL
from mjax.config.model import as_kind
from mjax.interop.convert import abstract_weights
from mjax.models.protocol import Context
from mjax.models.stack import run_blocks
from mjax.parallel.mesh import make_mesh
from mjax.parallel.tokens import Tokens
from tests.interop.megatron_files import share
from tests.ports import free_port

GPT = GPTConfig(layers=2, hidden=24, heads=4, feed_forward=40, sequence=10, vocabulary=29, vocabulary_multiple=128)
BERT = replace(as_kind(GPT, "bert"), activation="gelu_erf")
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


def write_with_megatron_core(folder, *kinds, ranks=1, expert_ranks=1):
    """Run `write_megatron_core.py` in a folder, in that many processes."""
    program = [sys.executable, str(Path(__file__).with_name("write_megatron_core.py")), str(folder), *kinds]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(ranks), "EXPERT_RANKS": str(expert_ranks)}
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


def opened(run):
    """The config of a run folder, set up for float32, and its weights."""
    config = read_config(run / "config.json")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        data=DataConfig(mock=True),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(global_batch=3, micro_batch=3),
    )
    return config, restore_weights(run, abstract_weights(config), None, print)[1]


def outputs_of(model, ids, *arrays):
    """Scores of the next token; or a BERT's, of the tokens and of the order of the segments."""
    if model.config.causal:
        return model(ids)
    token_types, documents = arrays
    context = Context(Tokens(*ids.shape), documents=documents)
    x = model.embed({"tokens": ids, "token_types": token_types}, context)
    x = model.normed(run_blocks(model.blocks, x, context)[0])
    scores = context.tokens.by_sequence(model.output(x).logits(context.tokens))
    return scores, model.order(model.pooled(x, context.tokens)[0])


def scores_of(run, *arrays):
    """The config of a run folder, and what its model says in float32 to the arrays that it takes."""
    config, weights = opened(run)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_weights(config))
    whole = P(None, None, MODEL)
    forward = jax.shard_map(
        outputs_of,
        mesh=make_mesh(MeshConfig()),
        in_specs=(specs, *(P() for _ in arrays)),
        out_specs=whole if config.model.causal else (whole, P()),
    )
    found = jax.jit(forward)(weights, *(array.astype(np.int32) for array in arrays))
    return config, jax.tree.map(np.asarray, found)
