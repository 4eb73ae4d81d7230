"""A family of foreign models as a table: names and layout of its tensors, and settings of its config.json.

A family is a row for each of our modules and a row for each setting. Shapes are in neither: they follow from our
weights (`weights.py`), so a family only states differences in layout.

A config.json setting is one of four things: a field of `ModelConfig`, a setting with a single supported value, a
setting without effect on the computation, or unknown. Unknown settings are rejected by name, because ignoring one could
silently change the model.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from mjax.config.bounds import section_fields
from mjax.config.marks import ANY_FAMILY, effective_value
from mjax.config.model import ModelConfig, config_class
from mjax.errors import UsageError

Reader = Callable[[dict[str, Any], str], tuple[dict[str, Any], dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """Models of one class of `transformers`, or of Megatron.

    Attributes:
      model: name in messages, such as GPT2LMHeadModel.
      names: for each of our modules its name in the files, in the order of writing; {0} stands for the layer number and
        {1} for the next one, {2} for the number of an expert, {3} for the number of layers. Three names are queries,
        keys and values. A name that ends with `_bias` is complete; others continue with .weight or .bias.
      fused: rows that replace those of `names` where files have these tensors: all experts in one.
      transposed: True if matrices are [out, in], as in `torch.nn.Linear`; else they are [in, out].
      qkv: the order of fused queries, keys and values along out: c the three of them, n heads, d head size.
      prefix: omitted at the beginning of names in some files.
      copies: tensors that are another one under a second name; if stored they must be equal to it.
      ignored: names of tensors that are not weights, such as stored masks; {3} stands for the number of layers.
      heads: heads that may be initialized at random if the files have none of their tensors: prefix of our weights'
        names, and a description.
      optional: fields that are 0 if the files have no tensor whose name begins with this.
      renamed: (expression, replacement) that turn names of old versions into the current `names`.
      described_by: source of the expected shapes, for messages.
      padded: True if the files have more rows than tokens.
      spelled: function from a name in `names` to the name in the files, for messages.
      model_type: in config.json, like everything below.
      written_only: True if no folder of it is read.
      generates: True if it generates text; its folders then have a generation_config.json.
      fixed: fields of `ModelConfig` with the same value in every model of the family, and in no model of another
        family. A field in neither this nor `fields` has its default.
      fields: transformers' name of a field → ours, and the default if config.json omits it; … for a size that it must
        have. A float may be any number from 0 on, a text is an activation, a bool true or false, and every other field
        a whole number above 0. A family without a row for feed_forward has 4 × hidden.
      nullable: settings of `fields` that may be null although their default is a value.
      only: settings that change what the model computes, and the only supported value of each.
      same: settings for which mjax has one field shared with another setting; and the default if the first is omitted,
        None for the value of the other.
      other_names: names of a setting in old files → current name.
      read: takes config.json's settings and the file's name, returns the settings it has not read and the fields they
        set; for settings that no table row can express, such as rotary scaling.
      write: the inverse: of a model the settings of config.json.
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
    optional: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    described_by: str = "config.json"
    padded: bool = False
    spelled: Callable[[str], str] = str

    model_type: str = ""
    written_only: bool = False
    generates: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, tuple[str, float | str | EllipsisType | None]] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset()
    only: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    read: Reader = lambda values, file: (values, {})
    write: Callable[[Any], dict[str, Any]] = lambda model: {}
    read_fields: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()


# --- config.json ------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}
"""transformers' name → ours; the first of each is written."""
SIZES = {
    "num_hidden_layers": ("layers", ...),
    "hidden_size": ("hidden", ...),
    "num_attention_heads": ("heads", ...),
    "intermediate_size": ("feed_forward", ...),
    "max_position_embeddings": ("sequence", ...),
    "vocab_size": ("vocabulary", ...),
    "initializer_range": ("init_std", 0.02),
}
"""Rows of most families."""
GATES = {"silu": "silu", "swish": "silu", **ACTIVATIONS}  # the activations of a gated MLP
MAX_WHOLE_NUMBER, MAX_NUMBER = 2**31, 1e30  # above any meaningful number in a config.json
ONLY = {"add_cross_attention": False, "is_encoder_decoder": False, "tie_word_embeddings": True}
"""Settings of every family that change what the model computes, and the only supported value of each."""
# In every family: who wrote and stored it; heads of other tasks; kernels; how to generate and what to return.
WITHOUT_EFFECT = {
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "_name_or_path", "_num_labels",
    "architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder",
    "label2id", "length_penalty", "mask_token_id", "max_length", "max_sequence_length", "min_length",
    "model_max_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_past", "output_scores", "pad_token_id",
    "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
}  # fmt: skip


def unlike(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the fields in which a model differs from this family, with the family's values; empty if it fits.

    A field that the family does not mention must have its default, so a new option of a model is rejected until a
    family supports it.
    """
    rows = {ours for ours, _ in family.fields.values()}
    expected = dict(family.fixed)
    for option, (_, _, _, marks) in zip(dataclasses.fields(model), section_fields(type(model)), strict=True):
        if option.name not in rows | family.read_fields and ANY_FAMILY not in marks:
            expected.setdefault(option.name, option.default)
    if "feed_forward" not in rows and getattr(model, "mlp_width", None) != 4 * model.hidden:
        expected["feed_forward"] = 4 * model.hidden
    return {name: value for name, value in expected.items() if getattr(model, name, None) != value}


def model_config(family: Family, values: dict[str, Any], file: str, vocabulary_multiple: int) -> ModelConfig:
    """The model of a config.json; omitted settings are as in `transformers`.

    Args:
      family: of the config.json.
      values: contents of the file.
      file: its name, for messages.
      vocabulary_multiple: as in `ModelConfig`.

    Raises:
      UsageError: a setting is unknown or not supported; the message names it.
    """
    values = {name: value for name, value in values.items() if value is not None or name not in family.other_names}
    for old, new in family.other_names.items():
        if old in values and values.get(new, values[old]) != values[old]:
            raise UsageError(f"{file}: {old} is {values[old]!r} and {new} {values[new]!r}; remove the wrong one")
    values = {family.other_names.get(name, name): value for name, value in values.items()}
    values, more = family.read(values, file)
    _check_known(family, values, file)

    fields = {ours: _read(family, values, name, file) for name, (ours, _) in family.fields.items()}
    for name, (other, default) in family.same.items():
        shared = fields[family.fields[other][0]]
        value = values.get(name, shared if default is None else default)
        if value != shared:
            problem = f"{name} is {value!r} and {other} {shared}, but mjax has one number for both"
            raise UsageError(f"{file}: {problem}; make them equal, if the model is the same then")
    if fields["hidden"] % fields["heads"] and not fields.get("head_dim"):
        sizes = f"{fields['heads']} heads do not divide the hidden size {fields['hidden']}"
        raise UsageError(f"{file}: {sizes}; restore the file")
    more |= {"vocabulary_multiple": vocabulary_multiple, "max_position_embeddings": fields["sequence"]}
    return config_class(family.fixed["kind"], file)(**family.fixed, **fields, **more)


def _read(family: Family, values: dict[str, Any], name: str, file: str) -> Any:
    """The value of a setting, of the same type as its default."""
    default = family.fields[name][1]
    value = values.get(name, default)
    if value is None and (default is None or name in family.nullable):
        return None
    if value is ...:
        raise UsageError(f"{file} lacks {name}; restore the file")
    if isinstance(default, str):
        known = ACTIVATIONS if default in ACTIVATIONS else GATES
        if not isinstance(value, str) or value not in known:
            raise UsageError(f"{file}: {name} is {value!r}; mjax supports {', '.join(known)}: convert another model")
        return known[value]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{file}: {name} is {value!r}, not true or false; restore the file")
        return value
    types, least, most, kind = (int,), 1, MAX_WHOLE_NUMBER, "a whole number above 0"
    if isinstance(default, float):
        types, least, most, kind = (int, float), 0, MAX_NUMBER, "a number from 0 on"
    if type(value) not in types or not least <= value < most:
        raise UsageError(f"{file}: {name} is {value!r}, which is not {kind}; restore the file")
    return float(value) if isinstance(default, float) else value


def _check_known(family: Family, values: dict[str, Any], file: str) -> None:
    """Reject settings, or values, that mjax does not support; false may not be the default: `is_causal` is true."""
    only = {name: value for name, value in {**ONLY, **family.only}.items() if name not in family.fields}
    known = {"model_type", *only, *family.fields, *family.same} | WITHOUT_EFFECT | family.without_effect
    for name, value in values.items():
        problem = f"{file}: {name} is {value!r}"
        if name in only and value != only[name]:
            raise UsageError(f"{problem}, but mjax supports only {only[name]!r}; convert another model")
        if value not in (None, {}, []) and name not in known:
            raise UsageError(f"{problem}, which mjax does not know; remove it if it does not change the model")


def config_values(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The settings of an export of `model`."""
    values: dict[str, Any] = {**ONLY, **family.only}
    for name, (ours, default) in family.fields.items():
        values[name] = model.max_positions if ours == "sequence" else effective_value(model, ours)
        if ours == "feed_forward" and default is None:
            values[name] = model.feed_forward
        elif ours == "activation":
            values[name] = next(theirs for theirs, known in GATES.items() if known == model.activation)
    values |= family.write(model)
    return values | {name: values[other] for name, (other, _) in family.same.items()}
