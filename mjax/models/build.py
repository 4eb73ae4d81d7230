"""The model of a config: a GPT, a BERT, or a BERT with the head of a task."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mjax.config import ModelConfig
from mjax.models.bert import BERT
from mjax.models.gpt import GPT
from mjax.models.heads import TaskBERT

Model = GPT | BERT | TaskBERT


def build_model(seed: int | Array, config: ModelConfig, dtype=jnp.float32) -> Model:
    """The model whose weights are a function of `seed` and `config`, whatever the mesh it is sharded over."""
    kinds = {"gpt": GPT, "bert": BERT if config.head == "pretraining" else TaskBERT}
    return kinds[config.kind](jax.random.key(seed), config, dtype)
