"""Mixtral, Qwen 3 MoE, OLMoE and GLM-4.5 of `transformers`: a Llama of each family with experts instead of its MLP.

Files have a tensor for each matrix of each expert, as they were published; transformers 5 holds, and may write, all
experts of a layer in one. Both are read, and the first is written. The weight of the router's losses is not part of the
model: it is a setting of training.
"""

from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.models.llama.huggingface import LAYER, LLAMA, MISTRAL, OLMO2, QWEN3
from mjax.models.mixture.config import MixtureConfig

OF_TRAINING = frozenset({"moe_kernel", "aux_loss_coef", "aux_loss_scope", "z_loss"})
"""Fields that change the training, and no result of a trained model."""


def _names(experts: str, router: str, gate: str, up: str, down: str) -> dict[str, Any]:
    """The rows of the table for a router and experts, and for layers without them, in the order of the files."""
    names = {ours: theirs for ours, theirs in LLAMA.names.items() if not ours.startswith("blocks.mlp.")}
    last = {name: names.pop(name) for name in ("final_norm", "head")}
    return {
        **names,
        "blocks.mlp.router": f"{LAYER}.{router}",
        "blocks.mlp.up": (f"{LAYER}.{experts}.{{2}}.{gate}", f"{LAYER}.{experts}.{{2}}.{up}"),
        "blocks.mlp.down": f"{LAYER}.{experts}.{{2}}.{down}",
        "blocks.mlp.up.kernel": LLAMA.names["blocks.mlp.up"],
        "blocks.mlp.down.kernel": LLAMA.names["blocks.mlp.down"],
        **last,
    }


FUSED = {
    "blocks.mlp.router": f"{LAYER}.mlp.gate",
    "blocks.mlp.up": f"{LAYER}.mlp.experts.gate_up_proj",
    "blocks.mlp.down": f"{LAYER}.mlp.experts.down_proj",
}
WITHOUT_EFFECT = frozenset({"router_aux_loss_coef", "output_router_logits"})

MIXTRAL = replace(
    MISTRAL,
    model="MixtralForCausalLM",
    names=_names("block_sparse_moe.experts", "block_sparse_moe.gate", "w1", "w3", "w2"),
    fused=FUSED,
    model_type="mixtral",
    fixed={**MISTRAL.fixed, "kind": "mixture", "router_normalized": True},
    fields={
        **MISTRAL.fields,
        "num_local_experts": ("experts", 8),
        "num_experts_per_tok": ("experts_per_token", 2),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "rope_theta": ("rope_theta", 1e6),
        "sliding_window": ("window", None),
    },
    only={"router_jitter_noise": 0.0},
    read_fields=MISTRAL.read_fields | OF_TRAINING | {"moe_ffn_hidden"},
    write=lambda model: {**MISTRAL.write(model), "intermediate_size": model.expert_width},
    without_effect=MISTRAL.without_effect | WITHOUT_EFFECT,
)

OLMOE = replace(
    LLAMA,
    model="OlmoeForCausalLM",
    names=_names("mlp.experts", "mlp.gate", "gate_proj", "up_proj", "down_proj"),
    fused=FUSED,
    model_type="olmoe",
    fixed={**LLAMA.fixed, "kind": "mixture", "qk_norm": "heads"},
    fields={
        **OLMO2.fields,
        "num_experts": ("experts", 64),
        "num_experts_per_tok": ("experts_per_token", 8),
        "norm_topk_prob": ("router_normalized", False),
    },
    only={"attention_bias": False, "clip_qkv": None},
    read_fields=LLAMA.read_fields | OF_TRAINING | {"moe_ffn_hidden"},
    write=lambda model: {**LLAMA.write(model), "intermediate_size": model.expert_width},
    without_effect=LLAMA.without_effect | WITHOUT_EFFECT,
)

# --- Layers without experts -------------------------------------------------------------------------------------------


def _read_qwen(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a Qwen 3, and which layers have experts: all but the first ones, or every n-th."""
    values, layers = dict(values), values.get("num_hidden_layers")
    every, dense = values.pop("decoder_sparse_step", 1), values.pop("mlp_only_layers", None) or []
    valid = type(every) is int and every > 0 and isinstance(dense, list) and dense == list(range(len(dense)))
    if not valid or (dense and every > 1) or (type(layers) is int and len(dense) >= layers):
        given = f"mlp_only_layers is {dense!r} and decoder_sparse_step {every!r}"
        known = "dense first layers, such as [0, 1], or experts in every n-th layer, such as 2, but not both"
        raise UsageError(f"{file}: {given}; mjax supports {known}: convert another model")
    values, fields = QWEN3.read(values, file)
    return values, fields | {"first_dense_layers": len(dense), "moe_layer_freq": every}


def _write_qwen(model: MixtureConfig) -> dict[str, Any]:
    dense = list(range(model.first_dense_layers))
    return {**QWEN3.write(model), "decoder_sparse_step": model.moe_layer_freq, "mlp_only_layers": dense}


QWEN3_MOE = replace(
    QWEN3,
    model="Qwen3MoeForCausalLM",
    names=OLMOE.names,
    fused=FUSED,
    model_type="qwen3_moe",
    fixed={**QWEN3.fixed, "kind": "mixture"},
    fields={
        **QWEN3.fields,
        "head_dim": ("head_dim", None),
        "moe_intermediate_size": ("moe_ffn_hidden", 768),
        "num_experts": ("experts", 128),
        "num_experts_per_tok": ("experts_per_token", 8),
        "norm_topk_prob": ("router_normalized", False),
    },
    only={"attention_bias": False},
    other_names={"num_local_experts": "num_experts"},  # as transformers 5 writes it
    read=_read_qwen,
    read_fields=QWEN3.read_fields | OF_TRAINING | {"first_dense_layers", "moe_layer_freq"},
    write=_write_qwen,
    without_effect=QWEN3.without_effect | WITHOUT_EFFECT,
)

# --- Dense first layers, shared experts and a bias of the router ------------------------------------------------------

SHARED = {
    "blocks.mlp.router.bias": f"{LAYER}.mlp.gate.e_score_correction_bias",
    "blocks.mlp.shared.up": (f"{LAYER}.mlp.shared_experts.gate_proj", f"{LAYER}.mlp.shared_experts.up_proj"),
    "blocks.mlp.shared.down": f"{LAYER}.mlp.shared_experts.down_proj",
}
ROUTED = {
    "n_routed_experts": ("experts", 128),
    "num_experts_per_tok": ("experts_per_token", 8),
    "moe_intermediate_size": ("moe_ffn_hidden", 1408),
    "n_group": ("router_n_groups", 1),
    "topk_group": ("router_topk_groups", 1),
    "norm_topk_prob": ("router_normalized", True),
    "routed_scaling_factor": ("router_scale", 1.0),
}
OTHER_NAMES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}


def read_counts(values: dict[str, Any], file: str, **defaults: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The settings without the numbers of dense layers, shared experts and layers of multi-token prediction; and our
    fields for these."""
    values, counts = {**defaults, **values}, []
    for name in ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers"):
        counts.append(count := values.pop(name))
        if type(count) is not int or not 0 <= count < 2**31:
            raise UsageError(f"{file}: {name} is {count!r}, not a whole number from 0 on; restore the file")
    (dense, shared, predicted), width = counts, values["moe_intermediate_size"]
    width = shared * width if type(width) is int else 0
    return values, {"first_dense_layers": dense, "shared_expert_ffn_hidden": width, "mtp_layers": predicted}


def write_counts(model: Any) -> dict[str, int]:
    """The inverse of `read_counts`."""
    shared, rest = divmod(model.shared_expert_ffn_hidden, model.expert_width)
    if rest:
        widths = f"{model.shared_expert_ffn_hidden} is not a multiple of --model.moe-ffn-hidden {model.expert_width}"
        raise UsageError(f"--model.shared-expert-ffn-hidden {widths}, as files need; train with another width")
    counts = {"first_k_dense_replace": model.first_dense_layers, "n_shared_experts": shared}
    return {**counts, "num_nextn_predict_layers": getattr(model, "mtp_layers", 0)}


def _read_glm(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings without counts, positions and norms; `partial_rotary_factor` is in one of two places."""
    defaults = {"first_k_dense_replace": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 0}
    values, fields = read_counts(values, file, moe_intermediate_size=1408, **defaults)
    del fields["mtp_layers"]
    if isinstance(rope := values.get("rope_parameters"), dict) and "partial_rotary_factor" in rope:
        values["rope_parameters"] = rope = dict(rope)
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if not isinstance(norm := values.pop("use_qk_norm", False), bool):
        raise UsageError(f"{file}: use_qk_norm is {norm!r}, not true or false; restore the file")
    values, of_llama = LLAMA.read(values, file)
    return values, fields | of_llama | {"qk_norm": "head" if norm else "none", "router_bias": True}


def _write_glm(model: MixtureConfig) -> dict[str, Any]:
    if model.qk_norm == "heads" or not model.has_router_bias:
        has = f"--model.qk-norm {model.qk_norm} and {'a' if model.has_router_bias else 'no'} bias of the router"
        raise UsageError(f"the model has {has}, and Glm4MoeForCausalLM head or none, and a bias; use another format")
    values = LLAMA.write(model) | write_counts(model)
    values["rope_parameters"] |= {"partial_rotary_factor": model.rotary_percent}
    return {**values, "use_qk_norm": model.qk_norm == "head"}


GLM4_MOE = replace(
    LLAMA,
    model="Glm4MoeForCausalLM",
    names={**OLMOE.names, **SHARED},
    fused=FUSED,
    # A layer of multi-token prediction, which transformers ignores, too.
    ignored=rf"{LLAMA.ignored}|model\.layers\.{{3}}\..*",
    model_type="glm4_moe",
    fixed={"kind": "mixture", "norms": "pre", "window": None, "router": "sigmoid"},
    fields={
        **LLAMA.fields,
        **ROUTED,
        "num_key_value_heads": ("kv_heads", 8),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "attention_bias": ("qkv_bias", False),
        "partial_rotary_factor": ("rotary_percent", 0.5),
    },
    only={},
    other_names=OTHER_NAMES,
    read=_read_glm,
    read_fields=LLAMA.read_fields
    | OF_TRAINING
    | {"router_bias", "router_bias_update_rate", "first_dense_layers", "shared_expert_ffn_hidden", "qk_norm"},
    write=_write_glm,
    without_effect=LLAMA.without_effect | WITHOUT_EFFECT,
)
FAMILIES = (MIXTRAL, QWEN3_MOE, OLMOE, GLM4_MOE)
