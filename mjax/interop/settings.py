"""config.json of `transformers` and our `ModelConfig`, as a table for each family says.

A setting of config.json is one of four things: it has a place in `ModelConfig`; it changes what the model computes, and
mjax knows one value of it; it has no effect on what the model computes; or it is unknown, and refused by name, because
passing over it could change the model in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mjax.config import ModelConfig
from mjax.errors import UsageError

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}
"""transformers' name → ours; the first of each is written."""
MOST_WHOLE, MOST = 2**31, 1e30
"""Above any number in a config.json that means something."""
ONLY = {"add_cross_attention": False, "is_encoder_decoder": False, "tie_word_embeddings": True}
"""Settings of every family that change what the model computes, and the only value of each that mjax knows."""
# Of every family: who wrote it and how it was stored; heads of other tasks; how to generate and what to return.
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


@dataclass(frozen=True)
class Settings:
    """What the settings of a family mean.

    Attributes:
      fixed: fields of `ModelConfig` that every model of the family has so, and no model of another family.
      counts: whole numbers: transformers' name → ours, and what holds where config.json leaves it out. A family without
        one for feed_forward has 4 × hidden.
      numbers: the same for other numbers.
      activation: transformers' name of the activation and what holds where it is left out; None: it is fixed.
      only: settings that change what the model computes, and the only value of each that mjax knows.
      same: settings for which mjax has one field with another setting; and what holds where the first is left out, None
        for the value of the other.
      other_names: under which old files have a setting, → today's name.
      without_effect: settings that do not change what the model computes.
    """

    fixed: Mapping[str, Any]
    counts: Mapping[str, tuple[str, int | None]]
    numbers: Mapping[str, tuple[str, float]]
    activation: tuple[str, str] | None = None
    only: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()

    def fits(self, model: ModelConfig) -> bool:
        """Whether a model is of this family."""
        usual_width = model.mlp_width == 4 * model.hidden
        any_width = any(ours == "feed_forward" for ours, _ in self.counts.values())
        return (usual_width or any_width) and all(getattr(model, name) == value for name, value in self.fixed.items())


def model_config(settings: Settings, values: dict[str, Any], file: str, vocabulary_multiple: int) -> ModelConfig:
    """The model that a config.json describes; what it leaves out is as in `transformers`.

    Args:
      settings: of the family.
      values: what is in the file.
      file: its name, for messages.
      vocabulary_multiple: as in `ModelConfig`.

    Raises:
      UsageError: something in it is unknown, or is not what mjax computes; the sentence names it.
    """
    values = {name: value for name, value in values.items() if value is not None or name not in settings.other_names}
    for old, new in settings.other_names.items():
        if old in values and values.get(new, values[old]) != values[old]:
            raise UsageError(f"{file}: {old} is {values[old]!r} and {new} {values[new]!r}; take out the wrong one")
    values = {settings.other_names.get(name, name): value for name, value in values.items()}
    _check_known(settings, values, file)

    def number(name: str, default: float | None, whole: bool) -> Any:
        value = values.get(name, default)
        if value is None and default is None:
            return None
        kinds, least, most = ((int,), 1, MOST_WHOLE) if whole else ((int, float), 0, MOST)
        if type(value) not in kinds or not least <= value < most:
            kind = "a whole number above 0" if whole else "a number from 0 on"
            raise UsageError(f"{file}: {name} is {value!r}, which is not {kind}; restore the file")
        return value

    found = {ours: number(name, default, True) for name, (ours, default) in settings.counts.items()}
    found |= {ours: number(name, default, False) for name, (ours, default) in settings.numbers.items()}
    for name, (other, default) in settings.same.items():
        ours, _ = {**settings.counts, **settings.numbers}[other]
        value = values.get(name, found[ours] if default is None else default)
        if value != found[ours]:
            raise UsageError(
                f"{file}: {name} is {value!r} and {other} {found[ours]}, and mjax has one number for both; "
                "make them equal, if the model is the same then"
            )
    if settings.activation is not None:
        name, default = settings.activation
        activation = values.get(name, default)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise UsageError(
                f"{file}: {name} is {activation!r}; mjax knows {', '.join(ACTIVATIONS)}: convert another model"
            )
        found["activation"] = ACTIVATIONS[activation]
    if found["hidden"] % found["heads"]:
        theirs = {ours: name for name, (ours, _) in settings.counts.items()}
        raise UsageError(
            f"{file}: {theirs['heads']} {found['heads']} does not divide {theirs['hidden']} {found['hidden']}; "
            "restore the file"
        )
    return ModelConfig(**settings.fixed, **found, vocabulary_multiple=vocabulary_multiple)


def _check_known(settings: Settings, values: dict[str, Any], file: str) -> None:
    """Refuse settings that mjax does not know, or not so."""
    only = {**ONLY, **settings.only}
    mapped = {*settings.counts, *settings.numbers, *settings.same, *(settings.activation or ())[:1]}
    for name, value in values.items():
        if name in only and value != only[name]:
            raise UsageError(f"{file}: {name} is {value!r}, and mjax knows only {only[name]!r}; convert another model")
        said = value not in (None, {}, [])
        if said and name not in {"model_type", *only, *mapped} | WITHOUT_EFFECT | settings.without_effect:
            raise UsageError(
                f"{file}: {name} is {value!r}, which mjax does not know; take it out if the model is the same without"
            )


def config_values(settings: Settings, model: ModelConfig) -> dict[str, Any]:
    """The settings of an export of `model`."""
    ours = dataclasses.asdict(model)
    values: dict[str, Any] = {**ONLY, **settings.only}
    for name, (field_name, default) in {**settings.counts, **settings.numbers}.items():
        values[name] = ours[field_name]
        if field_name == "feed_forward" and default is not None:
            values[name] = model.mlp_width
    values |= {name: values[other] for name, (other, _) in settings.same.items()}
    if settings.activation is not None:
        values[settings.activation[0]] = next(name for name, known in ACTIVATIONS.items() if known == model.activation)
    return values
