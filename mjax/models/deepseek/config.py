"""The config of DeepSeek-V2 and V3, and of models built like them: Moonlight, Kimi K2. No JAX is imported here."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mjax.config.bounds import Bounds, Count, NotNegative, Positive
from mjax.config.marks import FILE_ONLY, TUNING, WIDE, Synonyms
from mjax.config.model import Tuned, register
from mjax.models.parts.config import ExpertsConfig, RotaryConfig


@register
@dataclass(frozen=True)
class DeepSeekConfig(ExpertsConfig, RotaryConfig):
    """A mixture of experts with multi-head latent attention: DeepSeek-V2 and V3, Moonlight, Kimi K2."""

    kind: Literal["deepseek"] = "deepseek"
    """Architecture of the model."""
    q_lora_rank: Annotated[Count | None, WIDE] = None
    """Width of the latent of the queries (by default none: one matmul computes the queries)."""
    kv_lora_rank: Annotated[Count, WIDE] = 512
    """Width of the latent of keys and values, which a cache stores instead of them."""
    qk_nope_head_dim: Annotated[Count, Synonyms("qk-head-dim")] = 128
    """Dims of a head's queries and keys without positions."""
    qk_rope_head_dim: Annotated[Count, Synonyms("qk-pos-emb-head-dim")] = 64
    """Rotated dims of a head's queries and keys. All heads share those of a key."""
    v_head_dim: Count = 128
    """Dims of a head's values."""
    rope_mscale: Annotated[NotNegative, TUNING, Synonyms("mscale mscale-all-dim")] = 1.0
    """With YaRN, the scores are multiplied by (0.1 · rope_mscale · ln(rope_factor) + 1)²."""
    rope_beta_fast: Annotated[Positive, TUNING, Synonyms("beta-fast")] = 32.0
    """With YaRN, pairs of dims with more rotations over the original length keep their frequency (Kimi K2: 1)."""
    mtp_layers: Annotated[int, Bounds(ge=0, le=1), Synonyms("mtp-num-layers num-nextn-predict-layers")] = 0
    """1: a further layer predicts the token after the next one in training (multi-token prediction, DeepSeek-V3)."""
    mtp_loss_coef: Annotated[Tuned, Synonyms("mtp-loss-scaling-factor")] = 0.3
    """Coefficient of the loss of this prediction, λ (DeepSeek-V3: 0.3, later 0.1)."""
    norm_epsilon: Annotated[Tuned, FILE_ONLY] = 1e-6
    """Added to the mean square in RMSNorm."""
    latent_norm_epsilon: Annotated[Tuned, FILE_ONLY] = 1e-6
    """Added to the mean square in the norms of the latents (in Hugging Face always 1e-6, in Megatron norm_epsilon)."""

    title: ClassVar[str] = "a DeepSeek"
    module: ClassVar[str] = "mjax.models.deepseek.model:DeepSeek"
    families: ClassVar[str] = "mjax.models.deepseek.huggingface:FAMILIES"
    tie_embeddings = False

    @property
    def head_size(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        return self.v_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Factor of the scores: 1 / √head_size, times the square of YaRN's magnitude."""
        magnitude = 0.1 * self.rope_mscale * math.log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1
        return magnitude**2 / math.sqrt(self.head_size)

    @property
    def routers(self) -> int:
        return self.expert_layers + self.mtp_layers

    @property
    def has_router_bias(self) -> bool:
        return super().has_router_bias or self.router == "sigmoid"
