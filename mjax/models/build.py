"""The model of a config: a GPT or a BERT."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mjax.config import ModelConfig
from mjax.models.bert import BERT
from mjax.models.gpt import GPT

Model = GPT | BERT


def build_model(seed: int, config: ModelConfig, dtype=jnp.float32) -> Model:
    """The model whose weights are a function of `seed` and `config`, whatever the mesh it is sharded over."""
    kinds = {"gpt": GPT, "bert": BERT}
    return kinds[config.kind](jax.random.key(seed), config, dtype)
