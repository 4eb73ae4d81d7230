"""A family of models of `transformers`: how its config.json and its tensors are written."""

from __future__ import annotations

from dataclasses import dataclass

from mjax.interop.settings import Settings
from mjax.interop.weights import Naming


@dataclass(frozen=True)
class Family:
    """What opens in one class of `transformers`, whose name is `naming.model`.

    Attributes:
      model_type: in config.json.
      settings: what else is in config.json.
      naming: of the tensors.
      generates: whether it writes text, and so has a generation_config.json.
    """

    model_type: str
    settings: Settings
    naming: Naming
    generates: bool = False
