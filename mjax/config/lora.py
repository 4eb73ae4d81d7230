"""The fields of LoRA in the config of every model. No JAX is imported here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Self

import tyro

from mjax.config.bounds import CountOrZero, Positive, Share
from mjax.config.marks import TUNING, UNPLANNED, Synonyms


def lora_flag(name: str):
    """Mark of a LoRA field, whose flag is in the section `lora`: --lora.rank."""
    return tyro.conf.arg(name=f"lora.{name}", prefix_name=False)


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters that are trained while the weights of the model are frozen."""

    lora_rank: Annotated[CountOrZero, lora_flag("rank"), Synonyms("lora-r lora-rank")] = 0
    """Rank r of LoRA's adapters (0: no adapters). Adapters are trained, weights are frozen (arXiv 2106.09685)."""
    lora_alpha: Annotated[Positive | None, lora_flag("alpha"), UNPLANNED, Synonyms("lora-alpha")] = None
    """Adapters are multiplied by alpha / r (by default alpha = 2 r). rsLoRA (arXiv 2312.03732) is another alpha."""
    lora_targets: Annotated[tuple[str, ...], lora_flag("targets"), Synonyms("lora-target-modules")] = ("all",)
    """Linear layers with an adapter: all, or some of q, k, v, out, gate, up, down. For example, q v as in the paper. A
    custom model uses its layer names."""
    lora_dropout: Annotated[Share, TUNING, lora_flag("dropout"), UNPLANNED] = 0.0
    """Dropout rate on the input of adapters."""

    @property
    def adapter_alpha(self) -> float:
        """The alpha in use."""
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def lora_scale(self) -> float:
        """The factor of adapters: alpha / r."""
        return self.adapter_alpha / self.lora_rank

    def without_lora(self) -> Self:
        """The base model, without adapters."""
        return dataclasses.replace(self, **{field.name: field.default for field in dataclasses.fields(LoRAConfig)})

    def lora_settings(self) -> dict[str, Any]:
        """Adapter settings that are not at their defaults, by field."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(LoRAConfig)}
        return {field.name: value for field, value in values.items() if value != field.default}
