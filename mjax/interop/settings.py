"""config.json of `transformers` and our `ModelConfig`, by the table of each family.

A setting of config.json is one of four things: it is a field of `ModelConfig`; it changes what the model computes, and
mjax supports one value of it; it has no effect on what the model computes; or it is unknown, and refused by name,
because ignoring it could silently change the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mjax.config.model import ModelConfig, config_class
from mjax.errors import UsageError
from mjax.interop.family import Family

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}
"""transformers' name → ours; the first of each is written."""
GATES = {"silu": "silu", "swish": "silu", **ACTIVATIONS}
"""The same of a gated MLP."""
MOST_WHOLE, MOST = 2**31, 1e30
"""Above any meaningful number in a config.json."""
ONLY = {"add_cross_attention": False, "is_encoder_decoder": False, "tie_word_embeddings": True}
"""Settings of every family that change what the model computes, and the only supported value of each."""
# In every family: who wrote it and how it was stored; heads of other tasks; how to generate and what to return.
WITHOUT_EFFECT = {
    "_name_or_path", "_num_labels", "architectures", "bos_token_id", "chunk_size_feed_forward",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "is_decoder", "label2id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
}  # fmt: skip

TOLD_ELSEWHERE = {"attention", "vocabulary_multiple", "feed_forward", "mlm_activation", "answers"}
"""Fields of our configs that do not change what a model computes, or have more than one rule."""


def fits(family: Family, model: ModelConfig) -> bool:
    """Whether a model belongs to this family."""
    return not unlike(family, model)


def unlike(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The fields in which a model differs from this family, and the family's values.

    A field that the family does not mention must have its default, so a new option of a model is refused until a family
    supports it.
    """
    told = {ours for ours, _ in family.fields.values()}
    expected = dict(family.fixed)
    for field in dataclasses.fields(model):
        if field.name not in told | family.read_fields | TOLD_ELSEWHERE:
            expected.setdefault(field.name, field.default)
    if "feed_forward" not in told and getattr(model, "mlp_width", None) != 4 * model.hidden:
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

    found = {ours: _read(values, name, default, file) for name, (ours, default) in family.fields.items()}
    for name, (other, default) in family.same.items():
        ours, _ = family.fields[other]
        value = values.get(name, found[ours] if default is None else default)
        if value != found[ours]:
            raise UsageError(
                f"{file}: {name} is {value!r} and {other} {found[ours]}, but mjax has one number for both; "
                "make them equal, if the model is the same then"
            )
    if found["hidden"] % found["heads"] and not found.get("head_dim"):
        theirs = {ours: name for name, (ours, _) in family.fields.items()}
        raise UsageError(
            f"{file}: {theirs['heads']} {found['heads']} does not divide {theirs['hidden']} {found['hidden']}; "
            "restore the file"
        )
    return config_class(family.fixed["kind"], file)(
        **family.fixed, **found, **more, vocabulary_multiple=vocabulary_multiple
    )


def _read(values: dict[str, Any], name: str, default: Any, file: str) -> Any:
    """The value of a setting, of the same type as its default."""
    value = values.get(name, default)
    if value is None and default is None:
        return None
    if isinstance(default, str):
        known = ACTIVATIONS if default in ACTIVATIONS else GATES
        if not isinstance(value, str) or value not in known:
            raise UsageError(f"{file}: {name} is {value!r}; mjax supports {', '.join(known)}: convert another model")
        return known[value]
    kinds, least, most, kind = (int,), 1, MOST_WHOLE, "a whole number above 0"
    if isinstance(default, float):
        kinds, least, most, kind = (int, float), 0, MOST, "a number from 0 on"
    if type(value) not in kinds or not least <= value < most:
        raise UsageError(f"{file}: {name} is {value!r}, which is not {kind}; restore the file")
    return value


def _check_known(family: Family, values: dict[str, Any], file: str) -> None:
    """Refuse settings, or values, that mjax does not support."""
    only = {**ONLY, **family.only}
    known = {"model_type", *only, *family.fields, *family.same} | WITHOUT_EFFECT | family.without_effect
    for name, value in values.items():
        if name in only and value != only[name]:
            raise UsageError(
                f"{file}: {name} is {value!r}, but mjax supports only {only[name]!r}; convert another model"
            )
        said = value not in (None, {}, [])
        if said and name not in known:
            raise UsageError(
                f"{file}: {name} is {value!r}, which mjax does not know; remove it if it does not change the model"
            )


def config_values(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The settings of an export of `model`."""
    values: dict[str, Any] = {**ONLY, **family.only}
    for name, (ours, default) in family.fields.items():
        values[name] = getattr(model, ours)
        if ours == "feed_forward" and default is not None:
            values[name] = model.mlp_width
        elif ours == "activation":
            values[name] = next(theirs for theirs, known in GATES.items() if known == model.activation)
    values |= family.write(model)
    return values | {name: values[other] for name, (other, _) in family.same.items()}
