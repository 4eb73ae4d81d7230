"""What a field of a config says of itself, beside its type and bounds: marks in its `Annotated` type.

    steps: Annotated[Count, FREE] = 300_000      or for a whole section of the config: mesh: Annotated[MeshConfig, FREE]

A run folder holds one experiment. A field without a mark is part of it: to continue with another value needs
--allow-change, and another value of an unmarked field of the model is another model. This module imports no JAX.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import tyro

from mjax.config.bounds import section_fields


@dataclass(frozen=True)
class Mark:
    """A mark of fields, by its name."""

    name: str


@dataclass(frozen=True)
class Only:
    """A field is for some values of another: `Only("optimizer.schedule", "wsd")`, or of `Config.samples`."""

    field: str
    values: str


@dataclass(frozen=True)
class By:
    """None stands for the value of this property, which the field has by default."""

    property: str


@dataclass(frozen=True)
class Synonyms:
    """Names that a field has in Megatron-LM, torchtitan, nanoGPT or Hugging Face, as `short_name` has them: `fp16=fp16`
    is a switch for one value of it, and the value of `epochs~` means something else."""

    names: str

    def value(self, name: str, given: str) -> str | None:
        """The value to type for `name` with a `given` one: empty where it means something else; None: no such name."""
        for known in self.names.split():
            known, equals, value = known.partition("=")
            if short_name(known.rstrip("~")) == short_name(name):
                return value if equals else "" if known.endswith("~") else given
        return None


def short_name(name: str) -> str:
    """A name without the parts in which other programs differ: 'tensor-model-parallel-size' → 'tensor-parallel'."""
    return re.sub("^(use|enable|num|lr)-|-model(?=-parallel)|-(size|degree)$", "", name)


FREE = Mark("free")
"""Changes how long, on which devices or in which portions a run trains, or what is saved, shown and watched."""
TUNING = Mark("tuning")
"""Of a model: its weights stay what they are, what is learned changes; --allow-change continues with it."""
RATE = Mark("rate")
"""Of the learning rate: may change if the rates of the steps taken do not."""
NEW_RUN = Mark("new run")
"""Of a model: may differ where a new run starts from weights of another (--init), if these have the same shapes."""
BLEND = Mark("blend")
"""Datasets, which are compared by their contents."""
PER_PROCESS = Mark("per process")
"""Processes of a run need not agree on it."""
ANY_FAMILY = Mark("any family")
"""Of a model: it changes nothing that the model computes, or a Hugging Face family has its own rule for it."""
UNPLANNED, PLANNED = Mark("unplanned"), Mark("planned")
"""No plan depends on it: it is no flag of `mjax plan`; and the exceptions in such a section."""
SEARCHED = Mark("searched")
"""`mjax plan --devices` finds its fastest value."""
FILE_ONLY = tyro.conf.Fixed
"""Set in a config file or in Python: it is no flag of any command."""


def effective_value(settings: Any, name: str) -> Any:
    """The value of a field, or of the property that it follows by default (`By`)."""
    value = getattr(settings, name)
    sources = [mark.property for mark in _marks(type(settings))[name] if isinstance(mark, By)]
    return getattr(settings, sources[0]) if value is None and sources else value


def field_marks(config: Any, name: str) -> frozenset[Mark | Only]:
    """The marks of the field `name` of a config, such as 'train.steps', and those of its section."""
    section, knob = name.split(".")
    marks = *_marks(type(config))[section], *_marks(type(getattr(config, section)))[knob]
    return frozenset(mark for mark in marks if isinstance(mark, Mark | Only))


def names_with(mark: Any, cls: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass with this mark."""
    return tuple(name for name, marks in _marks(cls).items() if mark in marks)


def fields_with(mark: Mark, config: Any) -> tuple[str, ...]:
    """Dotted names of the fields of a config that have this mark, or whose section has it."""
    sections = ((section.name, getattr(config, section.name)) for section in fields(config))
    names = [f"{section}.{field.name}" for section, values in sections for field in fields(values)]
    return tuple(name for name in names if mark in field_marks(config, name))


def _marks(cls: type) -> dict[str, tuple[Any, ...]]:
    return {name: marks for name, _, _, marks in section_fields(cls)}


DTYPES = Synonyms(
    "bf16=bf16 fp8=fp8 fp16=fp16 fp32=fp32 bfloat16=bf16 float8=fp8 float16=fp16 half=fp16 float32=fp32 float64=fp64"
)
RUN_SYNONYMS = Synonyms("load ckpt checkpoint-path resume-from-checkpoint checkpoint resume pretrained init-from")


@dataclass(frozen=True)
class Metric:
    """The labels under which a run shows one mean of a model.

    Attributes:
      name: of the mean, as in metrics.jsonl.
      line: its text on the progress line, a format of {value} and {perplexity}.
      verdict: its text after the last evaluation, a format also of {guess}, {guess_perplexity}, {sequences} and
        {error}, the standard error of a share; empty for none.
      axis: label of the axis of its panel in loss.png; empty if it has no panel.
      title: of the panel.
      guess: the value of a model that guesses; a name adds to evaluations, under it, the entropy of their labels.
      guess_label: its text in the panel, a format of {guess}.
      share: True for a share, False for nats per token, which have a perplexity.
    """

    name: str
    line: str
    verdict: str = ""
    axis: str = ""
    title: str = ""
    guess: str | float | None = None
    guess_label: str = ""
    share: bool = False
