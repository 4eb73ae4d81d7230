"""A family of models of others as a table: what its tensors are called and how they lie, and what its config says.

A family is a row for each module of ours and a row for each setting. Shapes are in neither: they follow from our own
parameters (`weights.py`), so that a family says only what is different there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What opens in one class of `transformers`, or of Megatron.

    Attributes:
      model: what messages call it, such as GPT2LMHeadModel.
      names: for each of our modules its name in the files, in the order in which tensors are written; {0} stands for
        the number of the layer and {1} for the next one. Three names are those of queries, keys and values.
      transposed: whether matrices are [out, in], as in `torch.nn.Linear`; else they are [in, out].
      qkv: the order of fused queries, keys and values along out: c the three of them, n heads, d head size.
      prefix: what some files leave out at the beginning of a name.
      copies: tensors that are another one under a second name; where they are stored they must be equal to it.
      ignored: names of tensors that are no weights, such as stored masks.
      heads: what may be drawn at random where the files hold nothing of it: how the names of our weights begin, and a
        word for it.
      renamed: (expression, replacement) that turn names of old versions into those of `names`.
      described_by: what says how large the tensors must be.
      padded: whether the files have more rows than there are tokens.
      model_type: in config.json, as everything below.
      generates: whether it writes text, and so has a generation_config.json.
      fixed: fields of `ModelConfig` that every model of the family has so, and no model of another family. A field that
        is in neither this nor `fields` has its default.
      fields: transformers' name of a field → ours, and what holds where config.json leaves it out. A float may be any
        number from 0 on, a text is an activation, and every other field a whole number above 0. A family without one
        for feed_forward has 4 × hidden.
      only: settings that change what the model computes, and the only value of each that mjax knows.
      same: settings for which mjax has one field with another setting; and what holds where the first is left out, None
        for the value of the other.
      other_names: under which old files have a setting, → today's name.
      without_effect: settings that do not change what the model computes.
    """

    model: str
    names: Mapping[str, str | tuple[str, ...]]
    transposed: bool = True
    qkv: str = "cnd"
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: str = "(?!)"  # matches nothing
    heads: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    described_by: str = "config.json"
    padded: bool = False

    model_type: str = ""
    generates: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, tuple[str, float | str | None]] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
