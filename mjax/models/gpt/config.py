"""The config of GPT-2 and BLOOM. No JAX is imported here."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mjax.config.bounds import Count
from mjax.config.marks import FILE_ONLY, TUNING, Synonyms
from mjax.config.model import AttentionDropout, HiddenDropout, Tuned, register
from mjax.errors import UsageError
from mjax.models.parts.config import MLPConfig


@dataclass(frozen=True)
class TransformerConfig(MLPConfig):
    """Fields shared by the transformers of GPT-2, BERT and Megatron-LM."""

    hidden_dropout: HiddenDropout = 0.1
    """Dropout rate on the embedding and on both residual branches of all layers."""
    attention_dropout: AttentionDropout = 0.1
    """Dropout rate on attention probabilities. Above 0 the cuDNN flash kernel cannot be used."""
    layernorm_epsilon: Annotated[Tuned, FILE_ONLY, Synonyms("norm-epsilon layer-norm-epsilon layer-norm-eps")] = 1e-5
    """Added to the variance in LayerNorm."""

    learned_positions: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """A decoder that predicts the next token: GPT-2 as Megatron trains it, and BLOOM."""

    kind: Literal["gpt"] = "gpt"
    """Architecture of the model."""
    positions: Annotated[Literal["learned", "alibi"], FILE_ONLY, Synonyms("position-embedding-type")] = "learned"
    """Position encoding. learned: learned positions, added to the embedding. alibi: a penalty on the distance between
    two tokens in attention, without weights (arXiv 2108.12409)."""
    embedding_layernorm: Annotated[bool, FILE_ONLY] = False
    """A LayerNorm after the embedding, as in BLOOM."""
    window: Annotated[Count | None, TUNING] = None
    """Number of tokens that a position attends to, itself included (sliding window, arXiv 2004.05150). By default all
    tokens before it."""

    title: ClassVar[str] = "a GPT"
    module: ClassVar[str] = "mjax.models.gpt.model:GPT"
    families: ClassVar[str] = "mjax.models.gpt.huggingface:FAMILIES"

    @property
    def learned_positions(self) -> bool:
        return self.positions == "learned"

    @property
    def biased_scores(self) -> bool:
        return self.positions == "alibi"

    def check(self, config) -> None:
        if self.positions == "alibi" and config.data.reset_positions:
            alibi = "--model.positions alibi (distances do not depend on where a document begins)"
            raise UsageError(f"--data.reset-positions is not supported with {alibi}; remove it")
