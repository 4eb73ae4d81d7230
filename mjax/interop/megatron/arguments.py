"""The model of a Megatron checkpoint as our `ModelConfig`.

Most of it follows from the shapes of the tensors. The rest is in the arguments of the run, which Megatron has stored in
its checkpoints since 2020: heads, rates, and whether the model computes anything that mjax does not, which is refused
by name. The published 345M models have no arguments and need --heads and --activation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from mjax.config.model import ModelConfig, config_class
from mjax.errors import UsageError
from mjax.interop.megatron.names import EMBEDDING, POSITIONS, TRUNKS
from mjax.interop.megatron.pickles import StandIn
from mjax.interop.tensor_files import Tensors

Activation = Literal["gelu_tanh", "gelu_erf"]

ONLY: dict[str, Any] = {
    # Positions and LayerNorms.
    "position_embedding_type": "learned_absolute", "add_position_embedding": True,
    "use_rotary_position_embeddings": False, "normalization": "LayerNorm", "apply_layernorm_1p": False,
    "qk_layernorm": False,
    # The MLP.
    "swiglu": False, "squared_relu": False, "quick_geglu": False, "add_bias_linear": True, "num_experts": None,
    # Attention.
    "group_query_attention": False, "multi_latent_attention": False, "attention_output_gate": False,
    "experimental_attention_variant": None, "softmax_type": "vanilla", "window_size": None,
    # The rest.
    "untie_embeddings_and_output_weights": False, "mtp_num_layers": None, "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None, "retro_add_retriever": False, "use_mup": False, "bert_binary_head": True,
}  # fmt: skip
"""Arguments that change what the model computes, and the only value of each that mjax supports. No version of Megatron
has all of them; None is the value of an argument that was not given."""
NUMBERS = {
    "hidden_dropout": ("hidden_dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "init_method_std": ("init_std", 0.02),
    "layernorm_epsilon": ("layernorm_epsilon", 1e-5),
    "norm_epsilon": ("layernorm_epsilon", 1e-5),
}
"""Megatron's name → ours, and the default without arguments."""
PLAIN = (type(None), bool, int, float, str, list, tuple, StandIn)
"""Types of arguments that are compared with others."""
ACTIVATIONS: dict[str, Activation] = {"gpt": "gelu_tanh", "bert": "gelu_erf"}
"""Of models without arguments: the one of the published 345M."""


def model_config(
    arguments: Mapping[str, Any] | None,
    tensors: Tensors,
    kind: Literal["gpt", "bert"],
    source: str,
    heads: int | None = None,
    activation: Activation | None = None,
) -> ModelConfig:
    """The model, with every row of its embedding as a token: rows that pad the vocabulary cannot be recognised here.

    Args:
      arguments: of the run; None if the checkpoint has none.
      tensors: by current names.
      kind: `gpt` or `bert`.
      source: the checkpoint, for messages.
      heads, activation: given by the user if there are no arguments.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, contradict the tensors or the user, or are missing
        and needed.
    """
    said = {} if arguments is None else arguments
    check_known(said, source)
    if kind == "gpt" and arguments is None and POSITIONS not in tensors.kinds:
        raise UsageError(
            f"{source} has neither args nor {POSITIONS}: its positions are rotary or missing, and only args has the "
            "heads and the base of rotary ones; save it again with Megatron, which stores args"
        )
    shapes = shapes_of(tensors, TRUNKS[kind], source)
    shapes["max_position_embeddings"] = _extent(tensors, POSITIONS, 0, source)
    for name, known in shapes.items():
        if said.get(name, known) not in (None, known):
            raise UsageError(
                f"{source}: {name} is {said[name]!r} among the arguments, and {known} by the tensors; "
                "copy the whole checkpoint"
            )
    hidden, count = shapes["hidden_size"], _heads(said, heads, source)
    size = hidden / count if said.get("kv_channels") is None else said["kv_channels"]
    if size * count != hidden or hidden % count:
        raise UsageError(
            f"{source}: {count} heads of {size!r} numbers are not the {hidden} of hidden_size, and mjax knows no "
            "others; give the model's own --heads, or convert another model"
        )
    numbers = numbers_of(said, source)
    if arguments is not None and activation is not None:
        raise UsageError(f"{source} says itself which GELU its model has; leave out --activation")
    layernorm = "post" if said.get("apply_residual_connection_post_layernorm") else "pre"
    if layernorm == "post" and kind != "bert":
        raise UsageError(
            f"{source}: apply_residual_connection_post_layernorm is set, and mjax knows it of old BERT models only: "
            "a GPT has no such form; convert another model"
        )
    return config_class(kind, source)(
        layers=shapes["num_layers"],
        hidden=hidden,
        heads=count,
        feed_forward=None if shapes["ffn_hidden_size"] == 4 * hidden else shapes["ffn_hidden_size"],
        sequence=shapes["max_position_embeddings"],
        vocabulary=shapes["padded_vocab_size"],
        **{"gpt": {}, "bert": {"layernorm": layernorm}}[kind],
        **_activations(kind, arguments, activation, source),
        **numbers,
    )


def numbers_of(said: Mapping[str, Any], source: str) -> dict[str, float]:
    """Rates, epsilon and the like by our names."""
    numbers = dict(NUMBERS.values())
    for name, (ours, _) in NUMBERS.items():
        value = said.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise UsageError(f"{source}: {name} is {value!r}, which is not a number; copy the checkpoint again")
        numbers[ours] = float(value)
    return numbers


def check_known(said: Mapping[str, Any], source: str, only: Mapping[str, Any] = ONLY) -> None:
    """Refuse arguments for which Megatron computes something that mjax does not."""
    for name, known in only.items():
        value = said.get(name)
        if not isinstance(value, PLAIN):
            raise UsageError(f"{source}: {name} is a {type(value).__name__}; restore the checkpoint")
        if value not in (None, known) and (value or known is not None):
            raise UsageError(f"{source}: {name} is {value!r}, but mjax supports only {known!r}; convert another model")


def _extent(tensors: Tensors, name: str, dim: int, source: str) -> int:
    shape = tensors.kinds[name].shape if name in tensors.kinds else ()
    if len(shape) != 2:
        raise UsageError(
            f"{source} lacks the matrix {name}, without which mjax reads no model of Megatron; "
            "copy the whole checkpoint, or convert another model"
        )
    return shape[dim]


def shapes_of(tensors: Tensors, trunk: str, source: str, mlp: str = "mlp.linear_fc2") -> dict[str, int]:
    """The settings that follow from shapes, by argument name.

    Args:
      tensors: by current names.
      trunk: the prefix of the layers.
      source: the checkpoint, for messages.
      mlp: the second matrix of an MLP, for its width.
    """
    layers = {int(found[1]) for name in tensors.kinds if (found := re.match(rf"{trunk}\.layers\.(\d+)\.", name))}
    return {
        "num_layers": max(layers, default=-1) + 1,
        "hidden_size": _extent(tensors, EMBEDDING, 1, source),
        "ffn_hidden_size": _extent(tensors, f"{trunk}.layers.0.{mlp}.weight", 1, source),
        "padded_vocab_size": _extent(tensors, EMBEDDING, 0, source),
    }


def _heads(said: Mapping[str, Any], heads: int | None, source: str) -> int:
    theirs = said.get("num_attention_heads")
    if theirs is None and heads is None:
        raise UsageError(
            f"{source} does not say how many attention heads its model has; add --heads, 16 for the published 345M"
        )
    if theirs is not None and heads not in (None, theirs):
        raise UsageError(f"{source}: the model has {theirs} attention heads and --heads is {heads}; leave it out")
    count = heads if theirs is None else theirs
    if type(count) is not int or count < 1:
        raise UsageError(f"{count!r} attention heads is not a whole number above 0; give the model's own with --heads")
    return count


def _activations(
    kind: str, arguments: Mapping[str, Any] | None, activation: Activation | None, source: str
) -> dict[str, Activation]:
    """GELU of the MLP, and of a BERT's MLM head, which Megatron's fused kernel (tanh) does not replace."""
    if arguments is None:
        return {"activation": activation or ACTIVATIONS[kind]}
    if arguments.get("openai_gelu"):
        return {"activation": "gelu_tanh"}
    if arguments.get("bias_gelu_fusion") and arguments.get("onnx_safe"):
        raise UsageError(
            f"{source}: bias_gelu_fusion and onnx_safe are both set, which versions of Megatron compute differently; "
            "convert another model"
        )
    if not arguments.get("bias_gelu_fusion"):
        return {"activation": "gelu_erf"}
    of_head = {"gpt": {}, "bert": {"mlm_activation": "gelu_erf"}}
    return {"activation": "gelu_tanh", **of_head[kind]}
