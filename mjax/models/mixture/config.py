"""The config of a mixture of experts: a Llama with experts instead of its MLPs. No JAX is imported here."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mjax.config.model import register
from mjax.errors import UsageError
from mjax.models.llama.config import LlamaConfig
from mjax.models.parts.config import ExpertsConfig


@register
@dataclass(frozen=True)
class MixtureConfig(ExpertsConfig, LlamaConfig):
    """A Llama with a mixture of experts instead of its MLPs: Mixtral, Qwen 3 MoE, OLMoE."""

    kind: Literal["mixture"] = "mixture"
    """Architecture of the model."""

    title: ClassVar[str] = "a mixture of experts"
    module: ClassVar[str] = "mjax.models.mixture.model:Mixture"
    families: ClassVar[str] = "mjax.models.mixture.huggingface:FAMILIES"

    def check(self, config) -> None:
        super().check(config)
        if self.norms == "post":
            raise UsageError("--model.norms post is not supported for a mixture of experts; remove it")
