"""Marks of config fields, in their `Annotated` types next to bounds.

    steps: Annotated[Count, FREE] = 300_000      or for a whole section of the config: mesh: Annotated[MeshConfig, FREE]

A run folder contains one experiment. A field without a mark is part of it: a run continues with another value only with
--allow-change, and never with another value of an unmarked model field. This module imports no JAX.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

import tyro

from mjax.config.bounds import section_fields


@dataclass(frozen=True)
class Mark:
    """A mark without values."""

    name: str


@dataclass(frozen=True)
class Only:
    """Supported for some values of another field, or of `Config.samples`: `Only("optimizer.schedule", "wsd")`."""

    field: str
    values: str


@dataclass(frozen=True)
class By:
    """The property that supplies the value of an unset field."""

    property: str


@dataclass(frozen=True)
class Synonyms:
    """Names of the field in Megatron-LM, torchtitan, nanoGPT or Hugging Face, compared by `short_name`: `fp16=fp16` is
    a switch for one value, and values of `epochs~` have another meaning."""

    names: str

    def value(self, name: str, typed: str) -> str | None:
        """The value for the field in place of `--name typed`: empty if it has another meaning; None: no such name."""
        for known in self.names.split():
            known, equals, value = known.partition("=")
            if short_name(known.rstrip("~")) == short_name(name):
                return value if equals else "" if known.endswith("~") else typed
        return None


def short_name(name: str) -> str:
    """Remove affixes in which programs differ: 'tensor-model-parallel-size' → 'tensor-parallel'."""
    return re.sub("^(use|enable|num|lr)-|-model(?=-parallel)|-(size|degree)$", "", name)


FREE = Mark("free")  # length, devices, micro-batches, checkpoints and display of a run: may change
TUNING = Mark("tuning")  # of a model: changes the training but no weights; --allow-change continues with another value
RATE = Mark("rate")  # of the learning rate: may change if the learning rates of earlier steps do not
NEW_RUN = Mark("new run")  # of a model: may differ from the model of --init if the shapes of the weights do not
BLEND = Mark("blend")  # datasets, compared by contents
PER_PROCESS = Mark("per process")  # may differ between processes of a run
ANY_FAMILY = Mark("any family")  # of a model: exports to Hugging Face ignore it, or a family has a rule for it
WIDE, HEADS = Mark("wide"), Mark("heads")
"""Of a model: a size that grows with `hidden`, and one that does if the head size stays the same."""
UNPLANNED, PLANNED = Mark("unplanned"), Mark("planned")
"""Not a flag of `mjax plan`, which does not depend on it; and the exceptions in such a section."""
SEARCHED = Mark("searched")  # `mjax plan --devices` searches its fastest value
FILE_ONLY = tyro.conf.Fixed  # set in a config file or in Python, not by a flag


def effective_value(settings: Any, name: str) -> Any:
    """The value of a field, or of its property (`By`) while the field is unset."""
    value = getattr(settings, name)
    sources = [mark.property for mark in _marks(type(settings)).get(name, ()) if isinstance(mark, By)]
    return getattr(settings, sources[0]) if value is None and sources else value


def field_marks(config: Any, name: str) -> frozenset[Mark | Only]:
    """The marks of the config field `name`, such as 'train.steps', and of its section."""
    section, knob = name.split(".")
    marks = *_marks(type(config))[section], *_marks(type(getattr(config, section)))[knob]
    return frozenset(mark for mark in marks if isinstance(mark, Mark | Only))


def names_with(mark: Any, cls: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass with this mark."""
    return tuple(name for name, marks in _marks(cls).items() if mark in marks)


def fields_with(mark: Mark, config: Any) -> tuple[str, ...]:
    """Dotted names of the config fields that have this mark, or whose section has it."""
    sections = ((section.name, getattr(config, section.name)) for section in fields(config))
    names = [f"{section}.{field.name}" for section, values in sections for field in fields(values)]
    return tuple(name for name in names if mark in field_marks(config, name))


def _marks(cls: type) -> dict[str, tuple[Any, ...]]:
    return {name: marks for name, _, _, marks in section_fields(cls)}


DTYPES = Synonyms(
    "bf16=bf16 fp8=fp8 fp16=fp16 fp32=fp32 bfloat16=bf16 float8=fp8 float16=fp16 half=fp16 float32=fp32 float64=fp64 "
    "dtype torch-dtype mixed-precision mixed-precision-param~ fp8-format=fp8"
)
RUN_SYNONYMS = Synonyms("load ckpt checkpoint-path resume-from-checkpoint checkpoint resume pretrained init-from")


@dataclass(frozen=True)
class Metric:
    """Labels of a model's metric.

    Attributes:
      name: name of the mean in metrics.jsonl.
      line: text on the progress line, a format of {value} and {perplexity}.
      verdict: text after the last evaluation, a format also of {guess}, {guess_perplexity}, {sequences} and {error},
        the standard error of a share; empty: no text.
      axis: axis label of its panel in loss.png; empty: no panel.
      title: title of the panel.
      guess: the value of a guessing model; a name adds the entropy of the labels to evaluations under this name.
      guess_label: text in the panel, a format of {guess}.
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
