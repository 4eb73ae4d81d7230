"""An objective over pairs of rows, outside mjax: the same loss and gradients on every mesh."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import mjax
from mjax.config import DataConfig, LlamaConfig, OptimizerConfig, PrecisionConfig
from tests import reference
from tests.models.dpo_model import BETA, PairConfig
from tests.models.test_own_model import compare, config_of
from tests.small import batch_of

FIELDS = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "sequence": 16, "feed_forward": 24, "vocabulary": 60}
MODEL, LLAMA = (cls(**FIELDS, vocabulary_multiple=64, attention="xla") for cls in (PairConfig, LlamaConfig))


def pairs_of(config):
    twice = replace(config.train, global_batch=2 * config.train.global_batch)
    rows = batch_of(replace(config, model=LLAMA, train=twice))
    rows["loss_mask"] = np.arange(LLAMA.sequence) >= 5 + np.arange(twice.global_batch)[:, None] % 3
    rows["reference"] = np.linspace(-60, -40, twice.global_batch, dtype=np.float32)
    return {name: array.reshape(-1, 2, *array.shape[1:]) for name, array in rows.items()}


def pair_config(**mesh):
    config = config_of(MODEL, **mesh)
    return replace(config, data=DataConfig(mock=True), train=replace(config.train, micro_batch=2))


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "model": 2, "sequence_parallel": True},
        pytest.param({"pipe": 2, "model": 2}, marks=pytest.mark.ci),
        pytest.param({"context": 2, "data": 2, "zero": 3}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_pairs_on_a_mesh_equal_the_formula(mesh):
    config = pair_config(**mesh)
    batch = pairs_of(config)

    def total(weights):
        rows = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}
        scores = reference.next_token_scores(weights, LLAMA, reference.encoded(weights, LLAMA, rows)[0])
        answers = -(reference.cross_entropy(scores, rows["labels"]) * rows["loss_mask"]).sum(1)
        ratios = (answers - rows["reference"]).reshape(-1, 2)
        margin = BETA * (ratios[:, 0] - ratios[:, 1])
        loss = jnp.log1p(jnp.exp(-margin)).mean()
        return loss, jnp.stack([loss, (margin > 0).mean()])

    compare(config, total, ("loss", "preferred"), batch)


def test_training_prefers_the_chosen_answers(tmp_path, fewer_devices):
    config = replace(pair_config(), precision=PrecisionConfig(compute="fp32"))
    config = replace(config, train=replace(config.train, steps=20, eval_interval=0))
    config = replace(config, optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1))
    batch = pairs_of(config)
    seen = []

    class Preferred(mjax.Callback):
        def on_step(self, run, step, metrics):
            seen.append((metrics.loss, metrics.metrics["preferred"]))

    mjax.Trainer(config, tmp_path / "run", data=lambda step: batch, callbacks=[Preferred()]).train()
    (first, _), (last, preferred) = seen[0], seen[-1]
    assert last < first
    assert preferred == 1
