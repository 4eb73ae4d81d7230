"""Runs made of models of others: their configs and weights, and what they compute in float32."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.base import restore_weights
from mjax.commands import cli
from mjax.config import DataConfig, MeshConfig, PrecisionConfig, TrainConfig, read_config
from mjax.config.axes import MODEL
from mjax.interop.convert import abstract_model
from mjax.models.protocol import ForwardContext
from mjax.models.stack import run_blocks
from mjax.parallel.mesh import make_mesh
from mjax.parallel.token_layout import TokenLayout


def imported(peer, folder: Path, *flags: str):
    """`opened`, of the run folder made of what `save_pretrained` writes."""
    peer.save_pretrained(folder / "hf")
    assert cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "run"), *flags]) == 0
    return opened(folder / "run", global_batch=4, micro_batch=2)


def opened(run, global_batch=3, micro_batch=3):
    """The config of a run folder, set up for float32, and its weights."""
    config = read_config(run / "config.json")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        data=DataConfig(mock=True),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(global_batch=global_batch, micro_batch=micro_batch),
    )
    return config, restore_weights(run, abstract_model(config), None, print)[1]


def outputs_of(model, ids, *arrays):
    """Scores of the next token; or a BERT's, of the tokens and of the order of the segments."""
    if model.config.causal:
        return model(ids)
    token_types, documents = arrays
    context = ForwardContext(TokenLayout(*ids.shape), documents=documents)
    x = model.embed({"tokens": ids, "token_types": token_types}, context)
    x = model.head_input(run_blocks(model.blocks, x, context)[0])
    scores = context.tokens.split_sequences(model.output(x).logits(context.tokens))
    return scores, model.order(model.pool(x, context.tokens)[0])


def scores_of(run, *arrays):
    """The config of a run folder, and what its model says in float32 to the arrays that it takes."""
    config, weights = opened(run)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_model(config))
    whole = P(None, None, MODEL)
    forward = jax.shard_map(
        outputs_of,
        mesh=make_mesh(MeshConfig()),
        in_specs=(specs, *(P() for _ in arrays)),
        out_specs=whole if config.model.causal else (whole, P()),
    )
    found = jax.jit(forward)(weights, *(array.astype(np.int32) for array in arrays))
    return config, jax.tree.map(np.asarray, found)
