"""Longer sequences for a model with rotary positions, at its conversion: `mjax convert … --rope yarn:8`.

No weight changes. The frequencies of the rotary positions are lowered (`models/rotary.py` has the formulas), so that
positions which the model has never seen turn queries and keys by angles that it has:

    linear   every frequency by the factor (position interpolation, arXiv 2306.15595)
    llama3   only the slow ones, between two fixed wavelengths (Llama 3.1, arXiv 2407.21783)
    yarn     only the slow ones, by their turns over the original length, and a temperature of attention
             (arXiv 2309.00071)

A model with longer positions computes something else for short texts too. YaRN does least harm to them without further
training; all three are made for some hundred steps of training on long texts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from mjax.config.llama import LlamaConfig, RopeScaling
from mjax.config.model import ModelConfig
from mjax.errors import UsageError, either
from mjax.interop.carried_files import SETTINGS

SCALINGS = tuple(name for name in get_args(RopeScaling) if name != "none")
LONGEST = 2**31
"""Positions are int32."""


def extended(model: ModelConfig, given: str | None, source: str) -> ModelConfig:
    """The model with the positions of `--rope`; sequences are longer by the factor.

    Args:
      model: as it was trained, with `sequence` positions.
      given: KIND:FACTOR, such as `yarn:8`; None leaves the model as it is.
      source: where the model comes from, for messages.

    Raises:
      UsageError: the model has no rotary positions or longer ones already, or `given` is not a kind and a factor that
        gives a whole number of positions.
    """
    if given is None:
        return model
    if not isinstance(model, LlamaConfig):
        raise UsageError(f"--rope {given} is for rotary positions and {source} is {model.title} without; leave it out")
    if model.rope_scaling != "none":
        raise UsageError(
            f"--rope {given}: {source} already has rotary positions with {model.rope_scaling}:{model.rope_factor:g}, "
            f"{model.sequence:,} of them; leave --rope out, or convert the model that it was made from"
        )
    kind, factor = _parsed(given)
    sequence = model.sequence * factor
    if sequence >= LONGEST or sequence != int(sequence):
        raise UsageError(
            f"--rope {given} makes {sequence:,.10g} of the {model.sequence:,} positions of {source}; it must be a "
            f"whole number below 2^31: use a factor such as {kind}:{max(2, round(min(factor, 64)))}"
        )
    original = None if kind == "linear" else model.sequence
    return dataclasses.replace(
        model, sequence=int(sequence), rope_scaling=kind, rope_factor=factor, rope_original=original
    )


def _parsed(given: str) -> tuple[str, float]:
    """The kind and the factor in `yarn:8`."""
    kind, _, number = given.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind not in SCALINGS or not 1 < factor < math.inf:
        raise UsageError(
            f"--rope {given} is not a scaling and a factor above 1; the scalings are {either(SCALINGS)}: use --rope "
            f"{kind if kind in SCALINGS else 'yarn'}:8 for sequences eight times as long"
        )
    return kind, factor


@dataclass(frozen=True)
class Extension:
    """What a conversion says and does besides `extended`; without `--rope` nothing.

    Attributes:
      model: the result of `extended`.
      given: as there.
    """

    model: ModelConfig
    given: str | None

    @property
    def line(self) -> str:
        """What `extended` did."""
        before = round(self.model.sequence / self.model.rope_factor)
        return f"--rope {self.given}, {self.model.sequence:,} positions instead of {before:,}"

    def named(self, what: str) -> str:
        """The model as its card calls it."""
        return what if self.given is None else f"{what}, with {self.line}"

    def carried(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The `carried_files`, with a tokenizer whose limit does not cut off the longer texts."""
        return dict(files) if self.given is None else for_longer_texts(files, self.model.sequence)

    def announce(self) -> None:
        """Print what was done and what comes next."""
        if self.given is not None:
            print(f"{self.line}; evaluate it with --task positions and --task needle, and train it on long texts")


def for_longer_texts(carried: Mapping[str, bytes], positions: int) -> dict[str, bytes]:
    """The `carried_files` with a tokenizer whose limit does not cut off the texts of a model with so many positions.

    `transformers` truncates texts at `model_max_length` of tokenizer_config.json, the old length in published files.
    """
    settings = json.loads(carried.get(SETTINGS, b"{}"))
    limit = settings.get("model_max_length")
    if not isinstance(limit, int | float) or limit >= positions:
        return dict(carried)
    settings["model_max_length"] = positions
    return {**carried, SETTINGS: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()}
