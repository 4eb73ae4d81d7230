"""A family of foreign models as a table: names and layout of its tensors, and settings of its config.

A family is a row for each of our modules and a row for each setting. Shapes are in neither: they follow from our own
parameters (`weights.py`), so a family only states differences in layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Reader = Callable[[dict[str, Any], str], tuple[dict[str, Any], dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """Models of one class of `transformers`, or of Megatron.

    Attributes:
      model: name in messages, such as GPT2LMHeadModel.
      names: for each of our modules its name in the files, in the order of writing; {0} stands for the layer number and
        {1} for the next one, {2} for the number of an expert. Three names are those of queries, keys and values.
      fused: rows that replace those of `names` where files have these tensors: all experts in one.
      transposed: whether matrices are [out, in], as in `torch.nn.Linear`; else they are [in, out].
      qkv: the order of fused queries, keys and values along out: c the three of them, n heads, d head size.
      prefix: omitted at the beginning of names in some files.
      copies: tensors that are another one under a second name; if stored they must be equal to it.
      ignored: names of tensors that are not weights, such as stored masks.
      heads: heads that may be initialised at random if the files have none of their tensors: prefix of our weights'
        names, and a description.
      renamed: (expression, replacement) that turn names of old versions into those of `names`.
      described_by: source of the expected shapes, for messages.
      padded: whether the files have more rows than tokens.
      spelled: takes a name of `names`, gives the name in the files, for messages.
      model_type: in config.json, like everything below.
      generates: whether it generates text, and so has a generation_config.json.
      fixed: fields of `ModelConfig` with the same value in every model of the family, and in no model of another
        family. A field in neither this nor `fields` has its default.
      fields: transformers' name of a field → ours, and the default if config.json omits it. A float may be any number
        from 0 on, a text is an activation, and every other field a whole number above 0. A family without one for
        feed_forward has 4 × hidden.
      only: settings that change what the model computes, and the only supported value of each.
      same: settings for which mjax has one field shared with another setting; and the default if the first is omitted,
        None for the value of the other.
      other_names: names of a setting in old files → current name.
      read: takes config.json's settings and the file's name, gives the settings without those it has read and our
        fields they stand for; for what no table can say, such as the scaling of rotary positions.
      write: the same the other way: of a model the settings of config.json.
      read_fields: our fields that `read` gives, or that no file has.
      without_effect: settings that do not change what the model computes.
    """

    model: str
    names: Mapping[str, str | tuple[str, ...]]
    fused: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = True
    qkv: str = "cnd"
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: str = "(?!)"  # matches nothing
    heads: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    described_by: str = "config.json"
    padded: bool = False
    spelled: Callable[[str], str] = str

    model_type: str = ""
    generates: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, tuple[str, float | str | None]] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    read: Reader = lambda values, file: (values, {})
    write: Callable[[Any], dict[str, Any]] = lambda model: {}
    read_fields: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
