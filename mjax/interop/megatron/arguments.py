"""The model of a Megatron checkpoint as our `ModelConfig`.

Most of it follows from the shapes of the tensors. The rest is in the arguments of the run, which Megatron has stored in
its checkpoints since 2020: heads, rates, and whether the model computes anything that mjax does not, which is rejected
by name. The published 345M models have no arguments and need --heads and --activation.

A model is a GPT or a BERT, or one of megatron-core's decoders: RMSNorm, rotary positions, grouped queries, a gated MLP,
no biases, and with --num-experts a mixture of experts.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from mjax.config import BERTConfig, GPTConfig, LlamaConfig, MixtureConfig, ModelConfig
from mjax.errors import UsageError
from mjax.interop.megatron.harmless import HARMLESS
from mjax.interop.megatron.names import EMBEDDING, POSITIONS, QKV, TRUNKS
from mjax.interop.tensor_files import Tensors

Activation = Literal["gelu_tanh", "gelu_erf"]

ONLY: dict[str, Any] = {
    "position_embedding_type": "learned_absolute", "add_position_embedding": True, "normalization": "LayerNorm",
    "add_bias_linear": True, "softmax_type": "vanilla", "bert_binary_head": True, "mtp_num_layers": None,
    "retro_add_retriever": False,
}  # fmt: skip
"""Arguments that change what the model computes, and the only value of each that mjax supports. All others but
those in `HARMLESS` must be unset."""
DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02, "norm_epsilon": 1e-5,
    "bias_gelu_fusion": False,  # unknown to the versions of 2020 that lack it
    "rotary_base": 10_000, "rotary_percent": 1.0, "rope_scaling_factor": 8.0,
    "moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
"""Values of missing arguments that no shape determines."""
ACTIVATIONS: dict[str, Activation] = {"gpt": "gelu_tanh", "bert": "gelu_erf"}
"""Of models without arguments: the one of the published 345M."""

# --- Checks -----------------------------------------------------------------------------------------------------------


def _check_known(
    said: Mapping[str, Any], source: str, only: Mapping[str, Any] = ONLY, known: Collection[str] = ()
) -> None:
    """Reject arguments for which Megatron computes something that mjax does not, or may do so."""
    for name, supported in only.items():
        value = said.get(name)
        if value is None or (_is_unset(value) and not supported):
            continue
        if type(value) is not type(supported) or value != supported:
            raise UsageError(
                f"{source}: {name} is {reprlib.repr(value)}, but mjax supports only {supported!r}; "
                "convert another model"
            )
    unknown = [
        name
        for name, value in said.items()
        if not (_is_unset(value) or name in only or name in known or HARMLESS.fullmatch(name))
        and (said.get("num_experts") or not name.startswith("moe_"))
    ]
    if unknown:
        listed = " and ".join(f"{name} is {reprlib.repr(said[name])}" for name in unknown)
        raise UsageError(
            f"{source}: {listed}, but mjax supports only None, False or 0; convert another model, or add --ignore "
            f"{','.join(unknown)} if the model computes the same without"
        )


def _is_unset(value: Any) -> bool:
    """True for None, False, 0 and empty: the value of a feature that was not asked for."""
    return isinstance(value, type(None) | bool | int | float | str | list | tuple | dict) and not value


def _check_shapes(said: Mapping[str, Any], shapes: Mapping[str, int], source: str) -> None:
    """Reject arguments that contradict the shapes of the tensors."""
    for name, extent in shapes.items():
        if said.get(name) not in (None, extent):
            raise UsageError(
                f"{source}: {name} is {said[name]!r} among the arguments, and {extent} by the tensors; "
                "copy the whole checkpoint"
            )


def _count(said: Mapping[str, Any], name: str, source: str, default: int | None = None, least: int = 0) -> int:
    value = default if said.get(name) is None else said[name]
    if type(value) is not int or value < least:
        raise UsageError(f"{source}: {name} is {value!r}, not a whole number from {least} on; copy the files again")
    return value


def _number(said: Mapping[str, Any], name: str, source: str) -> float:
    value = DEFAULTS.get(name, 0.0) if said.get(name) is None else said[name]
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise UsageError(f"{source}: {name} is {value!r}, not a number from 0 on; copy the checkpoint again")
    return float(value)


def _numbers(said: Mapping[str, Any], source: str) -> dict[str, float]:
    """Rates, epsilon and the like by our names."""
    names = {
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "init_method_std",
        "layernorm_epsilon": _epsilon(said),
    }
    return {ours: _number(said, name, source) for ours, name in names.items()}


def _epsilon(said: Mapping[str, Any]) -> str:
    """The name of LayerNorm's epsilon, which changed in 2023."""
    old = said.get("norm_epsilon") is None and said.get("layernorm_epsilon") is not None
    return "layernorm_epsilon" if old else "norm_epsilon"


def assumed_arguments(said: Mapping[str, Any], kind: Literal["gpt", "bert", "decoder"]) -> dict[str, Any]:
    """The arguments that a checkpoint lacks and its model needs, with the `DEFAULTS` that the import assumes."""
    names = ["hidden_dropout", "attention_dropout", "init_method_std", _epsilon(said)]
    if kind == "decoder":
        names += ["position_embedding_type", "rotary_base", "rotary_percent"]
        names += ["rope_scaling_factor"] if said.get("use_rope_scaling") else []
        names += [name for name in DEFAULTS if name.startswith("moe_") and said.get("num_experts")]
    elif not said.get("openai_gelu"):
        names.append("bias_gelu_fusion")
    return {name: (ONLY_DECODER | DEFAULTS)[name] for name in names if said.get(name) is None}


def _shapes(tensors: Tensors, trunk: str, source: str, mlp: str = "mlp.linear_fc2") -> dict[str, int]:
    """The settings that follow from shapes, by argument name.

    Args:
      tensors: by current names.
      trunk: the prefix of the layers.
      source: the checkpoint, for messages.
      mlp: the second matrix of an MLP, for its width.
    """
    layers = {int(match[1]) for name in tensors.kinds if (match := re.match(rf"{trunk}\.layers\.(\d+)\.", name))}
    return {
        "num_layers": max(layers, default=-1) + 1,
        "hidden_size": _extent(tensors, EMBEDDING, 1, source),
        "ffn_hidden_size": _extent(tensors, f"{trunk}.layers.0.{mlp}.weight", 1, source),
        "padded_vocab_size": _extent(tensors, EMBEDDING, 0, source),
    }


def _extent(tensors: Tensors, name: str, dim: int, source: str) -> int:
    shape = tensors.kinds[name].shape if name in tensors.kinds else ()
    if len(shape) != 2:
        raise UsageError(
            f"{source} lacks the matrix {name}, without which mjax reads no model of Megatron; "
            "copy the whole checkpoint, or convert another model"
        )
    return shape[dim]


def without_ignored(said: Mapping[str, Any] | None, ignored: str, source: str) -> dict[str, Any] | None:
    """The arguments without those of `--ignore`, comma-separated.

    Raises:
      UsageError: there is no such argument.
    """
    names = [name for name in ignored.split(",") if name]
    if absent := [name for name in names if name not in (said or {})]:
        raise UsageError(f"--ignore {ignored}: {source} has no argument {absent[0]}; leave it out")
    return None if said is None else {name: value for name, value in said.items() if name not in names}


# --- GPT and BERT -----------------------------------------------------------------------------------------------------


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
    _check_known(said, source, known={"apply_residual_connection_post_layernorm"})
    if kind == "gpt" and arguments is None and POSITIONS not in tensors.kinds:
        raise UsageError(
            f"{source} has neither args nor {POSITIONS}: its positions are rotary or missing, and only args has the "
            "heads and the base of rotary ones; save it again with Megatron, which stores args"
        )
    shapes = _shapes(tensors, TRUNKS[kind], source)
    shapes["max_position_embeddings"] = _extent(tensors, POSITIONS, 0, source)
    _check_shapes(said, shapes, source)
    hidden, count = shapes["hidden_size"], _heads(said, heads, source)
    size = hidden / count if said.get("kv_channels") is None else said["kv_channels"]
    if size * count != hidden or hidden % count:
        raise UsageError(
            f"{source}: {count} heads of {size!r} numbers are not the {hidden} of hidden_size, and mjax knows no "
            "others; give the model's own --heads, or convert another model"
        )
    if arguments is not None and activation is not None:
        raise UsageError(f"{source} says itself which GELU its model has; leave out --activation")
    layernorm = "post" if said.get("apply_residual_connection_post_layernorm") else "pre"
    if layernorm == "post" and kind != "bert":
        raise UsageError(
            f"{source}: apply_residual_connection_post_layernorm is set, and mjax knows it of old BERT models only: "
            "a GPT has no such form; convert another model"
        )
    return (BERTConfig if kind == "bert" else GPTConfig)(
        layers=shapes["num_layers"],
        hidden=hidden,
        heads=count,
        feed_forward=None if shapes["ffn_hidden_size"] == 4 * hidden else shapes["ffn_hidden_size"],
        sequence=shapes["max_position_embeddings"],
        max_position_embeddings=shapes["max_position_embeddings"],
        vocabulary=shapes["padded_vocab_size"],
        **({"layernorm": layernorm} if kind == "bert" else {}),
        **_activations(kind, arguments, activation, source),
        **_numbers(said, source),
    )


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
    return {"activation": "gelu_tanh", **({"mlm_activation": "gelu_erf"} if kind == "bert" else {})}


# --- Decoders ---------------------------------------------------------------------------------------------------------

EITHER = {
    "qk_layernorm", "group_query_attention", "untie_embeddings_and_output_weights", "add_position_embedding",
    "use_rotary_position_embeddings", "moe_router_pre_softmax",
}  # fmt: skip
"""Arguments that may be set or not."""
ONLY_DECODER: dict[str, Any] = {name: ONLY[name] for name in ("softmax_type", "mtp_num_layers", "retro_add_retriever")}
ONLY_DECODER |= {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


def is_decoder(arguments: Mapping[str, Any] | None, names: list[str]) -> bool:
    """True if a checkpoint has no learned positions and says that it is a decoder with rotary ones."""
    said = arguments or {}
    return not any("position_embeddings" in name for name in names) and (
        said.get("position_embedding_type") not in (None, "learned_absolute") or said.get("normalization") == "RMSNorm"
    )


def decoder_config(said: Mapping[str, Any], tensors: Tensors, source: str, version: float) -> LlamaConfig:
    """The model, with every row of its embedding as a token; a `MixtureConfig` if it has experts.

    Args:
      said: the arguments of the run.
      tensors: by current names.
      source: the checkpoint, for messages.
      version: `checkpoint_version`.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, or contradict the tensors.
    """
    for name in EITHER:
        if not isinstance(said.get(name), bool | None):
            raise UsageError(f"{source}: {name} is {said[name]!r}, not true or false; copy the checkpoint again")
    _check_known(said, source, ONLY_DECODER, {*EITHER, *NOT_HERE, "num_experts"})
    if version < 2:
        raise UsageError(f"{source}: checkpoint_version is {version:g}, and decoders are read from 2 on; save it again")
    heads = _count(said, "num_attention_heads", source, least=1)
    sequence = _count(said, "max_position_embeddings", source, least=1)
    numbers = _numbers(said, source)
    routers = [name for name in tensors.kinds if name.endswith(".mlp.router.weight")]
    if routers and not said.get("num_experts"):
        rows = _extent(tensors, routers[0], 0, source)
        raise UsageError(
            f"{source}: num_experts is missing among the arguments, and {routers[0]} has {rows} rows; "
            f"set num_experts to {rows} in args and save the checkpoint again"
        )
    if said.get("num_experts"):
        _check_experts(said, source)
        shapes = _shapes(tensors, "decoder", source, "mlp.experts.0.linear_fc2")
        kind, of_mlp = MixtureConfig, _mixture_fields(said, tensors, shapes["ffn_hidden_size"], source)
    else:
        shapes = _shapes(tensors, "decoder", source)
        kind, of_mlp = LlamaConfig, {"feed_forward": shapes["ffn_hidden_size"]}
    head_dim = _count(said, "kv_channels", source, shapes["hidden_size"] // heads, 1)
    rows, expected = _extent(tensors, f"decoder.layers.0.{QKV}.weight", 0, source), 3 * heads * head_dim
    if said.get("group_query_attention") is None and rows != expected:
        raise UsageError(
            f"{source}: group_query_attention is missing among the arguments, and {QKV} has {rows} rows, not the "
            f"{expected} of {heads} heads; set it and num_query_groups in args and save the checkpoint again"
        )
    return kind(
        layers=shapes["num_layers"],
        hidden=shapes["hidden_size"],
        heads=heads,
        kv_heads=_count(said, "num_query_groups", source, least=1) if said.get("group_query_attention") else heads,
        head_dim=head_dim,
        **of_mlp,
        sequence=sequence,
        max_position_embeddings=sequence,
        vocabulary=shapes["padded_vocab_size"],
        qk_norm="head" if said.get("qk_layernorm") else "none",
        qkv_bias=f"decoder.layers.0.{QKV}.bias" in tensors.kinds,
        tied=not said.get("untie_embeddings_and_output_weights"),
        norm_epsilon=numbers.pop("layernorm_epsilon"),
        **numbers,
        **_rope(said, source),
    )


def _rope(said: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our fields for rotary positions; Llama 3's scaling has fixed frequencies and 8,192 positions there."""
    fields = {
        "rope_theta": _number(said, "rotary_base", source),
        "rope_share": _number(said, "rotary_percent", source),
    }
    factor = _number(said, "rotary_seq_len_interpolation_factor", source)
    if not said.get("use_rope_scaling"):
        return fields | ({"rope_scaling": "linear", "rope_factor": factor} if factor else {})
    if factor not in (0, 1):
        raise UsageError(
            f"{source}: use_rope_scaling and rotary_seq_len_interpolation_factor are both set, and mjax knows "
            "one of the two; convert another model"
        )
    factor = _number(said, "rope_scaling_factor", source)
    return fields | {"rope_scaling": "llama3", "rope_factor": factor, "rope_original": 8192}


# --- Mixtures of experts ----------------------------------------------------------------------------------------------

NOT_HERE = {
    "moe_router_enable_expert_bias": "mjax convert does not read the bias of a router",
    "moe_shared_expert_gate": "the shared expert of mjax has no gate",
    "moe_apply_probs_on_input": "mjax multiplies by the weight of an expert after its activation",
    "moe_latent_size": "the experts of mjax read the hidden size",
    "moe_input_jitter_eps": "mjax adds no noise to the router's input, which Megatron does in evaluation too",
    "moe_router_force_load_balancing": "the router of mjax does not choose at random",
    "moe_router_topk_limited_devices": "its groups depend on the ranks of the run; mjax reads moe_router_group_topk",
    "moe_token_dropping": "mjax drops no token",
    "moe_extended_tp": "it splits experts in another way",
}
"""Arguments that change what the model computes, or how its files are split; mjax reads models without them."""
OVER = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}
"""moe_router_load_balancing_type → our balance_over. Both are E / (k T²) · Σ_i (Σ_t p_ti)(tokens of expert i), of every
layer, with T the tokens of a micro-batch or of a sequence, and the mean over these. So the coefficients are ours."""
LOSSES = (*OVER, "global_aux_loss", "none")


def _mixture_fields(said: Mapping[str, Any], tensors: Tensors, width: int, source: str) -> dict[str, Any]:
    """The fields of a `MixtureConfig` that a Llama does not have, and the width of the MLP.

    Args:
      said: the arguments of the run, after `_check_experts`.
      tensors: by current names.
      width: of an expert, by its shape.
      source: the checkpoint, for messages.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, or contradict the tensors.
    """
    router = tensors.kinds.get("decoder.layers.0.mlp.router.weight")
    experts = router.shape[0] if router is not None and router.shape else 0
    _check_shapes(said, {"num_experts": experts, "moe_ffn_hidden_size": width}, source)
    score = said.get("moe_router_score_function") or DEFAULTS["moe_router_score_function"]
    chosen = _count(said, "moe_router_topk", source, DEFAULTS["moe_router_topk"])
    if score not in ("softmax", "sigmoid"):
        raise UsageError(
            f"{source}: moe_router_score_function is {score!r}, and mjax knows softmax and sigmoid; "
            "convert another model"
        )
    feed_forward = _count(said, "ffn_hidden_size", source, width)
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "feed_forward": feed_forward,
        "expert_width": None if feed_forward == width else width,
        "router": score,
        # A softmax after the choice is the one before it, divided by the sum of those chosen.
        "router_normalized": chosen > 1 if score == "sigmoid" else not said.get("moe_router_pre_softmax"),
        "router_scale": _number(said, "moe_router_topk_scaling_factor", source) or 1.0,
        "shared_width": _count(said, "moe_shared_expert_intermediate_size", source, 0),
        "z_loss": _number(said, "moe_z_loss_coeff", source),
        **_groups(said, score, chosen, source),
        **_balance(said, source)[0],
    }


def balance_left_out(said: Mapping[str, Any], source: str) -> str:
    """One line about a balance loss that mjax does not have; empty if there is none."""
    return _balance(said, source)[1]


def _check_experts(said: Mapping[str, Any], source: str) -> None:
    """Refuse arguments with which Megatron's experts compute something that those of mjax do not."""
    for name, reason in NOT_HERE.items():
        if said.get(name):
            raise UsageError(f"{source}: {name} is {said[name]!r}, and {reason}; convert a model without it")
    capacity = said.get("moe_expert_capacity_factor")
    if capacity is not None and not (type(capacity) in (int, float) and capacity < 0):
        raise UsageError(
            f"{source}: moe_expert_capacity_factor is {capacity!r}, with which Megatron drops tokens, and mjax drops "
            "none; convert a model without it"
        )
    frequency = said.get("moe_layer_freq")
    if any(type(each) is not int or each != 1 for each in _listed(1 if frequency is None else frequency)):
        raise UsageError(
            f"{source}: moe_layer_freq is {frequency!r}, and mjax convert reads those whose layers all have "
            "experts, as with 1; convert a model without dense layers"
        )


def _groups(said: Mapping[str, Any], score: str, chosen: int, source: str) -> dict[str, int]:
    """Groups of experts; Megatron scores one by the sum of its best moe_router_topk / moe_router_group_topk, mjax by
    that of its best two."""
    top = _count(said, "moe_router_group_topk", source, 0)
    groups = _count(said, "moe_router_num_groups", source, 1) or 1
    if top in (0, groups):  # every expert can be chosen
        return {}
    if chosen // top != 2:
        raise UsageError(
            f"{source}: moe_router_topk {chosen} and moe_router_group_topk {top} score a group by its best "
            f"{chosen // top} experts, and mjax by its best 2; convert another model"
        )
    if score == "softmax" and not said.get("moe_router_pre_softmax"):
        raise UsageError(
            f"{source}: moe_router_group_topk is {top} without moe_router_pre_softmax, which scores groups before the "
            "softmax, and mjax scores them after it; convert another model"
        )
    return {"router_groups": groups, "router_top_groups": top}


def _balance(said: Mapping[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Our fields for the balance loss, and one line about a loss that they cannot say."""
    kinds, name = _listed(said.get("moe_router_load_balancing_type") or "aux_loss"), "moe_aux_loss_coeff"
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in LOSSES]:
        raise UsageError(
            f"{source}: moe_router_load_balancing_type is {unknown[0]!r}, and mjax knows {', '.join(LOSSES)}; "
            "convert another model"
        )
    numbers = [_number({name: each}, name, source) for each in _listed(said.get(name) or DEFAULTS[name])]
    if len(numbers) != len(kinds):
        raise UsageError(
            f"{source}: {name} has {len(numbers)} numbers and moe_router_load_balancing_type {len(kinds)} losses; "
            "copy the checkpoint again"
        )
    losses = {kind: number for kind, number in zip(kinds, numbers, strict=True) if number and kind != "none"}
    if not losses:
        return {}, ""
    # Megatron's losses count the best experts of all groups, whichever a token takes.
    in_groups = said.get("moe_router_group_topk") not in (None, 0, said.get("moe_router_num_groups"))
    if len(losses) == 1 and losses.keys() <= OVER.keys() and not in_groups:
        ((kind, number),) = losses.items()
        return {"balance_loss": number, "balance_over": OVER[kind]}, ""
    listed = " and ".join(f"{kind} {number:g}" for kind, number in losses.items())
    return {}, (
        f"balance loss: mjax has no {listed}{' with groups of experts' if in_groups else ''}, so the run has none; to "
        "train on with the one of mjax, add --model.balance-loss"
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
