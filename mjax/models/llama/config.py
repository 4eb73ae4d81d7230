"""The config of the decoders people train today: Llama, Mistral, Qwen and OLMo 2 are settings of one model. No JAX is
imported here."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mjax.config.bounds import Bounds
from mjax.config.marks import FILE_ONLY, TUNING, UNPLANNED, Synonyms
from mjax.config.model import HiddenDropout, Tuned, register
from mjax.errors import UsageError
from mjax.models.parts.config import GatedMLPConfig, GroupedQueryConfig, RotaryConfig


@dataclass(frozen=True)
class DecoderConfig(GroupedQueryConfig, RotaryConfig, GatedMLPConfig):
    """A decoder with RMSNorm, rotary positions and a gated MLP."""

    norm_epsilon: Annotated[Tuned, FILE_ONLY] = 1e-5
    """Added to the mean square in RMSNorm."""
    hidden_dropout: HiddenDropout = 0.0
    """Dropout rate on the embedding and on both residual branches of all layers."""


@register
@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """A decoder with RMSNorm, rotary positions and a gated MLP: Llama, Mistral, Qwen 2 and 3, OLMo 2."""

    kind: Literal["llama"] = "llama"
    """Architecture of the model."""
    activation: Annotated[
        Literal["silu", "gelu_tanh", "gelu_erf"], TUNING, UNPLANNED, Synonyms("activation-function swiglu=silu")
    ] = "silu"
    """Activation of the MLP's gate: silu makes it SwiGLU, GELU GeGLU (arXiv 2002.05202)."""
    norms: Literal["pre", "post"] = "pre"
    """RMSNorm before attention and MLP, or after them and before the residual sum, as in OLMo 2."""
    qk_norm: Annotated[Literal["none", "head", "heads"], Synonyms("qk-layernorm=head")] = "none"
    """RMSNorm of queries and keys before the rotation. head: each head, with one weight for all (Qwen 3). heads: all
    heads together (OLMo 2)."""
    qkv_bias: Annotated[bool, Synonyms("add-qkv-bias")] = False
    """Add a bias to queries, keys and values, as in Qwen 2."""
    tie_embeddings: Annotated[bool, Synonyms("tie-word-embeddings")] = False
    """Use the embedding as the output layer too."""
    rotary_percent: Annotated[float, Bounds(gt=0, le=1), Synonyms("partial-rotary-factor rotary-pct")] = 1.0
    """Fraction of the head's dims that are rotated by position."""

    title: ClassVar[str] = "a Llama"
    module: ClassVar[str] = "mjax.models.llama.model:Llama"
    families: ClassVar[str] = "mjax.models.llama.huggingface:FAMILIES"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_size * self.rotary_percent)

    def check(self, config) -> None:
        super().check(config)
        optimizer = config.optimizer
        if self.norms == "post" and optimizer.parametrization == "completep":
            undone = "--model.norms post, which undoes its scale of a layer's result"
            raise UsageError(f"--optimizer.parametrization completep is not supported with {undone}; use mup")
        if self.qk_norm != "none" and optimizer.base_head_size not in (None, self.head_size):
            undone = f"--model.qk-norm {self.qk_norm}, which undoes the scale of queries"
            size = f"optimizer.base_head_size {optimizer.base_head_size}"
            raise UsageError(f"{size} is not supported with {undone}; remove it")
