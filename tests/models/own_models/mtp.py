"""Multi-token prediction (arXiv 2412.19437, 2.2) on a model of one's own: a further layer predicts one more token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config import Config, PrecisionConfig, TrainConfig
from mjax.config.axes import CONTEXT
from mjax.config.bounds import CountOrZero, NotNegative
from mjax.config.model import register
from mjax.models.causal import Output
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm
from mjax.parallel import mappings
from mjax.parallel.layers import ReplicatedLinear
from tests.models.own_models.mla import Latent, LatentConfig, layer


@register
@dataclass(frozen=True)
class PredictingConfig(LatentConfig):
    kind: Literal["latent_mtp"] = "latent_mtp"
    predict: CountOrZero = 1
    """Further tokens predicted (MTP): 0 or 1."""
    mtp_loss: NotNegative = 0.3

    families: ClassVar[str] = ""

    def build(self, key, dtype):
        return Predicting(key, self, dtype)


class Predicting(Latent):
    mixes_positions = False

    def __init__(self, key, config, dtype=jnp.float32):
        super().__init__(key, config, dtype)
        if config.predict:
            join, block = jax.random.split(jax.random.fold_in(key, 1))
            self.mtp_norms = nnx.List([RMSNorm(config.hidden, config.norm_epsilon, dtype) for _ in range(3)])
            self.mtp_join = ReplicatedLinear(join, 2 * config.hidden, config.hidden, config.init_std, dtype)
            self.mtp_block = layer(block, config, dtype, GatedMLP)
            self.loss_weights = self.loss_weights | {"mtp": config.mtp_loss}

    def counts(self, batch):
        rows, positions = batch["tokens"].shape
        labels = rows * (positions * mappings.size(CONTEXT) - 1)
        more = {"mtp": mappings.mask_count_to_first_context_rank(labels)} if self.config.predict else {}
        return super().counts(batch) | more

    def loss(self, x, batch, context):
        sums, tokens = super().loss(x, batch, context), context.tokens
        if not self.config.predict:
            return sums
        of_stream, of_token, last = self.mtp_norms
        after = self.embedding(batch["labels"], tokens)  # of the next token
        y = self.mtp_join(jnp.concatenate([of_stream(x), of_token(after)], axis=-1), tokens)
        y = self.mtp_block(y, context.with_layer(self.config.layers + 1))
        labels = jnp.pad(tokens.gather_positions(batch["labels"])[:, 1:], [(0, 0), (0, 1)])[:, tokens.position_ids()]
        has_label = jnp.broadcast_to(tokens.position_ids() < tokens.global_positions - 1, labels.shape)
        losses = Output(self.head, last(y)).cross_entropy(labels, context)
        return sums | {"mtp": losses.sum(where=has_label.reshape(-1))}


SIZES = {"layers": 3, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 60, "vocabulary_multiple": 64}
LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SPARSE = {"experts": 4, "moe_ffn_hidden": 16, "first_dense_layers": 1, "shared_expert_ffn_hidden": 16}
ROUTER = {"router": "sigmoid", "router_bias_update_rate": 1e-3}
config = Config(
    model=PredictingConfig(**SIZES, **LATENTS, **SPARSE, **ROUTER, feed_forward=48, attention="xla"),
    precision=PrecisionConfig(compute="fp64"),
    train=TrainConfig(steps=20, global_batch=8, micro_batch=2, recompute="selective"),
)
