"""Configs of models: common fields, and the registry of architectures.

A config.json names the dataclass of its model in `model.kind`. A custom model derives its config from `ModelConfig` and
registers it:

    @register
    @dataclass(frozen=True)
    class TwinConfig(ModelConfig):
        kind: Literal["twin"] = "twin"
        module: ClassVar[str] = f"{__name__}:Twin"

This module imports no JAX, so that `--help` answers at once; the model is imported when it is built.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import tyro

from mjax.config.bounds import Count, CountOrZero, NotNegative, Positive, Share
from mjax.config.marks import (
    ANY_FAMILY,
    FILE_ONLY,
    FREE,
    HEADS,
    NEW_RUN,
    TUNING,
    UNPLANNED,
    WIDE,
    By,
    Metric,
    Synonyms,
    effective_value,
    names_with,
)
from mjax.config.pattern import LayerKind, Pattern
from mjax.errors import UsageError, either, suggestion

C = TypeVar("C", bound="type[ModelConfig]")
Arrays = dict[str, tuple[tuple[int, ...], str]]
"""Arrays of a batch by name: the shape of one sample, [s] or [], and the dtype."""


Tuned = Annotated[NotNegative, TUNING]
Rate = Annotated[Share, TUNING]
HiddenDropout = Annotated[Rate, UNPLANNED, Synonyms("dropout resid-pdrop embd-pdrop")]
AttentionDropout = Annotated[Rate, Synonyms("dropout attn-pdrop")]
FeedForward = Annotated[Count | None, By("mlp_width"), WIDE, ANY_FAMILY, Synonyms("ffn-hidden intermediate")]
Gelu = Literal["gelu_tanh", "gelu_erf"]
Kernels = Literal["auto", "cudnn", "flash", "xla", "xla_blocks"]
Attention = Annotated[Kernels, Synonyms("attn-implementation~ attention-backend~ flash-attn~")]


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


@dataclass(frozen=True)
class ModelConfig(LoRAConfig):
    """Fields of every model. Dimension letters: s sequence, h hidden, n heads, d head size, f feed-forward, v
    vocabulary.

    Attributes:
      title: the model in a sentence.
      module: MODULE:CLASS of the model (`models/protocol.py`), imported when the model is built.
      families: MODULE:NAME of its tables for Hugging Face (`models.huggingface.family.Family`), imported when a model
        is converted; empty for none.
      metrics: labels of the means that the model reports, in the order of the progress line; other means have their
        names, after the loss.
      samples: training data: text, pairs of texts, or None for examples of a task.
      sequences: sequences of a sample, c.
      causal: True if a position attends to no later one; such a model can continue a text.
      learned_positions: True if positions have weights, one row each.
      head_dim: width of an attention head, d; None: hidden / heads.
      biased_scores: True if attention adds something other than a document mask to the scores.
      attention_dropout: dropout rate on attention probabilities.
      hidden_dropout: dropout rate on the embedding and on both residual branches of all layers.
      norm_epsilon: added to the mean square in RMSNorm.
      tie_embeddings: True if the embedding is the output layer too.
      window: tokens that a position attends to, including itself; None: all tokens up to the position.
      experts: experts of a sparse layer, a multiple of `mesh.expert`; 0 for a dense model.
      experts_per_token: experts each token is routed to.
      moe_kernel: kernel of the grouped matmuls of experts.
    """

    kind: str = ""
    """Architecture of the model."""
    layers: Annotated[Count, Synonyms("layers n-layer n-layers hidden-layers")] = 24
    """Transformer layers."""
    hidden: Annotated[Count, WIDE, Synonyms("hidden n-embd d-model")] = 1024
    """Width of the residual stream, h."""
    heads: Annotated[Count, HEADS, Synonyms("attention-heads n-head n-heads heads")] = 16
    """Attention heads, n. The head size is hidden / heads."""
    sequence: Annotated[Count, Synonyms("seq-length seq-len max-seq-length block context-length")] = 1024
    """Tokens in a sample, s."""
    max_position_embeddings: Annotated[Count | None, By("max_positions"), ANY_FAMILY, Synonyms("n-positions")] = None
    """Positions of the model, also if its samples are shorter (by default sequence). Rows of learned positions, and
    positions in exports."""
    vocabulary: Annotated[Count, NEW_RUN, Synonyms("vocab padded-vocab")] = 50257
    """Token ids the tokenizer can produce."""
    vocabulary_multiple: Annotated[Count, FILE_ONLY, NEW_RUN, ANY_FAMILY, Synonyms("make-vocab-size-divisible-by")] = (
        1024
    )
    """The rows of the embedding are vocabulary rounded up to this multiple (50,257 → 51,200), on any mesh."""
    init_std: Annotated[Tuned, FILE_ONLY, Synonyms("init-method-std initializer-range")] = 0.02
    """Standard deviation of initial weights. Projections into the residual stream use init_std / √(2 × layers)."""
    attention: Annotated[Attention, FREE, NEW_RUN, ANY_FAMILY] = "auto"
    """Attention kernel. auto: cudnn on an NVIDIA GPU (xla with attention dropout), xla_blocks on a CPU. flash: supports
    dropout and stores no scores (never run on a GPU)."""

    title: ClassVar[str] = "a language model"
    module: ClassVar[str] = ""
    families: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    samples: ClassVar[Literal["text", "pairs"] | None] = "text"
    sequences: ClassVar[int] = 1
    causal: ClassVar[bool] = True
    learned_positions: ClassVar[bool] = False
    biased_scores: ClassVar[bool] = False
    # Fields of some models. A ClassVar would hide the field if a config derives from several parts.
    head_dim = window = moe_kernel = None
    attention_dropout = hidden_dropout = 0.0
    norm_epsilon, tie_embeddings = 1e-6, True
    experts = experts_per_token = 0

    @property
    def head_size(self) -> int:
        """Width of one attention head, d."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Width of a head's values, e."""
        return self.head_size

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding: `vocabulary` rounded up to `vocabulary_multiple`."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of projections into the residual stream: init_std / √(2 L)."""
        return self.init_std / (2 * self.layers) ** 0.5

    def build(self, key, dtype):
        """Build the model with weights initialized from `key`, a key of `jax.random`, in `dtype`."""
        return import_object(self.module)(key, self, dtype)

    def batch(self, data) -> Arrays:
        """The arrays of a batch with this `DataConfig`; by default for next-token prediction."""
        return {name: ((self.sequence,), dtype) for name, dtype in data.batch_types().items()}

    def limits(self) -> dict[str, int]:
        """Exclusive upper bound of each integer array of a batch, by name; the lower bound is 0."""
        return {"tokens": self.vocabulary, "labels": self.vocabulary, "positions": self.max_positions}

    def check_values(self, batch: Mapping[str, Any], label: str) -> None:
        """Check that no value is out of bounds: a lookup on the device would clip it silently.

        Args:
          batch: NumPy arrays by name.
          label: the batch in messages, such as "step 3".

        Raises:
          UsageError: a value is outside its `limits`.
        """
        for name, limit in self.limits().items():
            low, high = (batch[name].min(), batch[name].max()) if name in batch else (0, 0)
            if low >= 0 and high < limit:
                continue
            fix = f"give values from 0 to {limit - 1:,}"
            if name == "labels" and low < 0:
                fix = 'for ignored labels give an array "loss_mask" that is False there, such as labels >= 0'
            raise UsageError(f"{name} of {label} contains {low if low < 0 else high}; {fix}")

    @property
    def max_positions(self) -> int:
        """Positions of the model: the larger of `max_position_embeddings` and `sequence`."""
        return max(self.sequence, self.max_position_embeddings or 0)

    @property
    def unscaled_sequence(self) -> int:
        """Positions before rotary scaling; all positions without it."""
        return self.max_positions

    @property
    def groups(self) -> int:
        """Heads of keys and values, k."""
        return self.heads

    @property
    def pattern(self) -> Pattern:
        """The kinds of the layers."""
        return Pattern((LayerKind(self.window),))

    def columns(self) -> dict[str, int]:
        """The sizes that `mesh.model` must divide, by name."""
        return {"heads": self.heads, "padded vocabulary": self.padded_vocabulary}

    def column_sizes(self) -> dict[str, int]:
        """The sizes that `mesh.model` must divide or be a multiple of: several ranks may share a part."""
        return {}

    def splits(self, ranks: int) -> bool:
        """True if the model can be split over `ranks` ranks of `model`."""
        shared = all(size % ranks == 0 or ranks % size == 0 for size in self.column_sizes().values())
        return shared and all(size % ranks == 0 for size in self.columns().values())

    def check(self, config) -> None:
        """Check the settings of a run, a `Config`, for this model.

        Raises:
          UsageError: the model does not support a setting; the sentence contains the line to type.
        """

    def resize(self, hidden: int, layers: int, more_heads: bool = True) -> Self:
        """Return the same config of another width and depth. Sizes marked WIDE are in proportion, and either those
        marked HEADS or the head size."""
        names = names_with(WIDE, type(self)) + (names_with(HEADS, type(self)) if more_heads else ())
        sizes = {name: effective_value(self, name) for name in names}
        wide = {name: max(1, round(size * hidden / self.hidden)) for name, size in sizes.items() if size}
        if not more_heads and self.head_dim:
            wide["head_dim"] = round(self.head_dim * hidden / self.hidden)
        return dataclasses.replace(self, **wide, layers=layers)

    def without_dropout(self) -> ModelConfig:
        """The same config with all dropout rates 0."""
        rates = (name for name in _names(type(self)) if name.endswith("_dropout"))
        return dataclasses.replace(self, **dict.fromkeys(rates, 0.0))


# --- The registry -----------------------------------------------------------------------------------------------------

REGISTRY: dict[str, type[ModelConfig]] = {}
KIND_FLAG = "--model.kind"


def register(config: C) -> C:
    """Register a config under the default of its field `kind`; a decorator.

    Raises:
      ValueError: the name is taken.
    """
    name = next(field.default for field in dataclasses.fields(config) if field.name == "kind")
    if not name or REGISTRY.setdefault(name, config).__qualname__ != config.__qualname__:
        raise ValueError(f"{config.__name__} has the kind {name!r}, which is taken or empty; give it another")
    REGISTRY[name] = config
    return config


def register_folders() -> None:
    """Import `config.py` of every folder in mjax/models, which registers an architecture."""
    for file in sorted((Path(__file__).parent.parent / "models").glob("*/config.py")):
        importlib.import_module(f"mjax.models.{file.parent.name}.config")


def import_object(name: str) -> Any:
    """Import the object that MODULE:NAME names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def config_class(kind: Any, source: str) -> type[ModelConfig]:
    """The registered dataclass of `kind`.

    Raises:
      UsageError: there is none; `source` is where the name comes from.
    """
    if not isinstance(kind, str) or kind not in REGISTRY:
        custom = f"use {either(REGISTRY)}, or for a custom model --config FILE.py, the file that registers it"
        raise UsageError(f"{source}: there is no model {kind!r}; {suggestion(str(kind), REGISTRY, custom)}")
    return REGISTRY[kind]


def is_user_defined(cls: type[ModelConfig]) -> bool:
    """True for a class of yours, False for one of mjax."""
    return not cls.__module__.startswith("mjax.")


def placeholder_class(values: Mapping[str, Any], source: str) -> type[ModelConfig]:
    """The dataclass of a model with these `values`; for a custom model a class with these fields, which can be shown
    and compared, not built.

    Raises:
      UsageError: the kind is unknown, or a name is not a valid field name; `source` is where the values come from.
    """
    kind = values["kind"]
    if not isinstance(kind, str) or (kind in REGISTRY and not is_user_defined(REGISTRY[kind])):
        return config_class(kind, source)
    fields = [(name, object, None) for name in values if name not in _names(ModelConfig)]
    title = {"title": f"{kind!r}, a custom model"}
    try:
        cls = dataclasses.make_dataclass("StandIn", fields, bases=(ModelConfig,), namespace=title, frozen=True)
    except TypeError as error:  # an invalid name
        raise UsageError(f"{source}: {error}; restore the file") from None
    cls.__module__ = "yours"
    return cls


def convert_kind(model: ModelConfig, kind: str) -> ModelConfig:
    """Return a config of another architecture with the common fields of `model` that are not at their defaults."""
    cls = config_class(kind, KIND_FLAG)
    shared = (field for field in dataclasses.fields(model) if field.name in _names(cls) - {"kind"})
    return cls(**{field.name: value for field in shared if (value := getattr(model, field.name)) != field.default})


def _names(cls: type[ModelConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}
