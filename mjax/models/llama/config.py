"""The config of the decoders people train today: Llama, Mistral, Qwen and OLMo 2 are settings of one model.

As in `model_config.py`, no JAX is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mjax.config.bounds import Bounds, Count, Positive
from mjax.config.marks import ANY_FAMILY, FILE_ONLY, NEW_RUN, TUNING, UNPLANNED, By, Elsewhere
from mjax.config.model import ModelConfig, Rate, Tuned, register
from mjax.config.pattern import LayerKind, Pattern
from mjax.errors import UsageError

RopeScaling = Literal["none", "linear", "llama3", "yarn"]


@register
@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """A decoder with RMSNorm, rotary positions and a gated MLP: Llama, Mistral, Qwen 2 and 3, OLMo 2."""

    kind: Literal["llama"] = "llama"
    """Architecture of the model."""
    feed_forward: Annotated[
        Count | None, By("mlp_width"), ANY_FAMILY, Elsewhere("ffn-hidden-size intermediate-size")
    ] = None
    """Width of the MLP, f; 8/3 × hidden, rounded up to a multiple of 256, when not given."""
    kv_heads: Annotated[Count | None, By("groups")] = None
    """Heads of keys and values, k, each for heads / kv_heads neighbouring heads of queries (grouped-query attention,
    arXiv 2305.13245); as many as heads when not given."""
    head_dim: Annotated[Count | None, By("head_size")] = None
    """Width of an attention head, d; hidden / heads when not given."""
    activation: Annotated[
        Literal["silu", "gelu_tanh", "gelu_erf"], TUNING, UNPLANNED, Elsewhere("activation-function")
    ] = "silu"
    """Activation of the MLP's gate: silu makes it SwiGLU, GELU GeGLU (arXiv 2002.05202)."""
    norms: Literal["pre", "post"] = "pre"
    """RMSNorm before attention and MLP, or after each and before it is added to the stream, as in OLMo 2."""
    qk_norm: Literal["none", "head", "heads"] = "none"
    """RMSNorm of queries and keys before they are turned: of each head by itself with one weight for all (Qwen 3), or
    of all heads together (OLMo 2)."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen 2."""
    tied: bool = False
    """Whether the embedding is the output layer too."""
    rope_theta: Annotated[Positive, NEW_RUN] = 10_000.0
    """Base of the rotary frequencies, θ (arXiv 2104.09864)."""
    rope_share: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    """Share of a head that is turned; the rest knows no positions."""
    rope_scaling: Annotated[RopeScaling, TUNING] = "none"
    """How frequencies are lowered for sequences longer than those of pretraining: all equally, as Llama 3.1 does, or by
    YaRN (arXiv 2309.00071)."""
    rope_factor: Annotated[float, Bounds(ge=1), TUNING] = 1.0
    """By how much: the new length over the old one."""
    rope_original: Annotated[Count | None, TUNING] = None
    """Positions of pretraining, which llama3 and yarn need."""
    norm_epsilon: Annotated[Tuned, FILE_ONLY] = 1e-5
    """Added to the mean square in RMSNorm."""
    window: Annotated[Count | None, TUNING] = None
    """Tokens that a position sees in attention, itself included (sliding window); all before it when not given."""
    full_attention_every: Annotated[Count | None, TUNING] = None
    """Of so many layers the last sees everything despite the window: 2 alternates, 4 is OLMo 3; no layer does when not
    given."""
    hidden_dropout: Annotated[Rate, UNPLANNED, Elsewhere("dropout resid-pdrop embd-pdrop")] = 0.0
    """Dropout rate on the embedding and on both residual branches of a layer."""
    attention_dropout: Annotated[Rate, Elsewhere("dropout attn-pdrop")] = 0.0
    """Dropout rate on attention probabilities; above 0 the cuDNN flash kernel cannot be used."""

    title: ClassVar[str] = "a Llama"
    module: ClassVar[str] = "mjax.models.llama.model:Llama"
    families: ClassVar[str] = "mjax.models.llama.huggingface:FAMILIES"

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, f."""
        return -(-8 * self.hidden // 768) * 256 if self.feed_forward is None else self.feed_forward

    @property
    def groups(self) -> int:
        """Heads of keys and values, k."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def unscaled_sequence(self) -> int:
        return self.rope_original or round(self.max_positions / self.rope_factor)

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rotary positions turn."""
        return int(self.head_size * self.rope_share)

    @property
    def pattern(self) -> Pattern:
        if self.full_attention_every is None:
            return super().pattern
        return Pattern((LayerKind(self.window),) * (self.full_attention_every - 1) + (LayerKind(),))

    def columns(self) -> dict[str, int]:
        return {**super().columns(), "feed-forward width": self.mlp_width}

    def shared_columns(self) -> dict[str, int]:
        return {"key-value heads": self.groups}

    def check(self, config) -> None:
        if self.full_attention_every is not None and self.window is None:
            raise UsageError(
                f"--model.full-attention-every {self.full_attention_every} does nothing without a window; "
                "add --model.window, such as 4096"
            )
        if self.heads % self.groups:
            raise UsageError(
                f"--model.kv-heads {self.groups} does not divide --model.heads {self.heads}; use one of "
                f"{', '.join(str(number) for number in range(1, self.heads + 1) if self.heads % number == 0)}"
            )
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise UsageError(
                f"rotary positions turn pairs of dims, and with --model.rope-share {self.rope_share:g} they turn "
                f"{self.rotary_dim} of a head's {self.head_size}; choose --model.head-dim and --model.rope-share so "
                "that it is an even number"
            )
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise UsageError(
                f"--model.rope-factor {self.rope_factor:g} does nothing with --model.rope-scaling none; add "
                "--model.rope-scaling yarn, llama3 or linear"
            )
        if self.rope_scaling in ("llama3", "yarn") and self.rope_original is None:
            raise UsageError(
                f"--model.rope-scaling {self.rope_scaling} needs the length of pretraining; add "
                "--model.rope-original, such as 8192"
            )
