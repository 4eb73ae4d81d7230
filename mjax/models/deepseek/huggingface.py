"""`DeepseekV3ForCausalLM` and `DeepseekV2ForCausalLM` of `transformers`. Moonlight and Kimi K2 are the first of them.

Files have a tensor for each matrix of each expert, like those of other mixtures. The layer of multi-token prediction
follows the last layer there. Published weights of V3 are in float8, which `interop/tensor_files.py` reads.
"""

from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.models.deepseek.config import DeepSeekConfig
from mjax.models.huggingface.family import SIZES
from mjax.models.llama.huggingface import LAYER, LLAMA
from mjax.models.mixture.huggingface import (
    FUSED,
    OF_TRAINING,
    OLMOE,
    OTHER_NAMES,
    ROUTED,
    SHARED,
    read_counts,
    write_counts,
)

ATTENTION = {
    "query": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj", "kv_down":
    "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "out": "o_proj",
}  # fmt: skip
BLOCK = {
    **{f"blocks.attention.{ours}": f"{LAYER}.self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    **{ours: theirs for ours, theirs in OLMOE.names.items() if ours.startswith("blocks.") and "attention." not in ours},
    **SHARED,
}
SAME_NAMES = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
YARN = "mscale", "mscale_all_dim", "beta_fast"
FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MTP = "model.layers.{3}"


def _to_mtp(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The names of a layer's tensors in the layer of multi-token prediction."""
    return names.replace(LAYER, MTP) if isinstance(names, str) else tuple(map(_to_mtp, names))


def _read(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of config.json that are in the table, and our fields for the others."""
    values = dict(values)
    quantized = values.pop("quantization_config", None) or FLOAT8
    if not isinstance(quantized, dict) or not FLOAT8.items() <= quantized.items():
        raise UsageError(f"{file}: quantization_config is {quantized!r}, and mjax reads {FLOAT8!r}; convert another")
    values, fields = _read_yarn(values, file)
    counts = {"first_k_dense_replace": 3, "n_shared_experts": 1, "num_nextn_predict_layers": 1}
    values, of_counts = read_counts(values, file, **{"moe_intermediate_size": 2048, **counts})
    if (predicted := of_counts["mtp_layers"]) > 1:
        raise UsageError(f"{file}: num_nextn_predict_layers is {predicted}, and mjax supports 0 and 1; convert another")
    return values, fields | of_counts


def _read_yarn(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings without positions, and our fields for them: those of YaRN that a Llama does not have, and others."""
    values, fields = dict(values), {}
    for spelling in ("rope_scaling", "rope_parameters"):
        rope = values.get(spelling)
        if isinstance(rope, dict) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            values[spelling] = rope = dict(rope)
            numbers = scale, over_all, fast = [rope.pop(name, 0) for name in YARN]
            if not all(type(x) in (int, float) and 0 <= x < 1e6 for x in numbers) or scale != over_all or not scale:
                given = ", ".join(f"{name} {number!r}" for name, number in zip(YARN, numbers, strict=True))
                raise UsageError(f"{file}: YaRN has {given}; mjax needs equal mscales above 0: convert another model")
            fields = {"rope_mscale": float(scale), "rope_beta_fast": float(fast or 32)}
    values, of_llama = LLAMA.read(values, file)
    return values, fields | of_llama


def _write(model: DeepSeekConfig) -> dict[str, Any]:
    """The settings of config.json that are not in the table."""
    values = LLAMA.write(model)
    if model.rope_scaling == "yarn":
        yarn = dict(zip(YARN, (model.rope_mscale, model.rope_mscale, model.rope_beta_fast), strict=True))
        values = {name: {**rope, **yarn} for name, rope in values.items()}
    return values | write_counts(model)


V3 = replace(
    LLAMA,
    model="DeepseekV3ForCausalLM",
    names={
        "embedding": LLAMA.names["embedding"],
        **BLOCK,
        **{ours.replace("blocks.", "mtp.block."): _to_mtp(theirs) for ours, theirs in BLOCK.items()},
        "mtp.embedding_norm": f"{MTP}.enorm",
        "mtp.hidden_norm": f"{MTP}.hnorm",
        "mtp.projection": f"{MTP}.eh_proj",
        "mtp.final_norm": f"{MTP}.shared_head.norm",
        "final_norm": LLAMA.names["final_norm"],
        "head": LLAMA.names["head"],
    },
    fused=FUSED,
    copies={},
    # Copies of the embedding and of the head, which transformers ignores, too.
    ignored=rf"{LLAMA.ignored}|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    optional={"mtp_layers": MTP},
    model_type="deepseek_v3",
    fixed={"kind": "deepseek", "router": "sigmoid"},
    fields={
        **SIZES,
        **{name: (name, default) for name, default in SAME_NAMES.items()},
        **ROUTED,
        "moe_intermediate_size": ("moe_ffn_hidden", 2048),
        "n_routed_experts": ("experts", 256),
        "n_group": ("router_n_groups", 8),
        "topk_group": ("router_topk_groups", 4),
        "routed_scaling_factor": ("router_scale", 2.5),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "rope_theta": ("rope_theta", 1e4),
    },
    nullable=frozenset({"q_lora_rank"}),
    same={"num_key_value_heads": ("num_attention_heads", None), "head_dim": ("qk_rope_head_dim", None)},
    only={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    other_names=OTHER_NAMES,
    read=_read,
    write=_write,
    read_fields=LLAMA.read_fields
    | OF_TRAINING
    | {"rope_mscale", "rope_beta_fast", "first_dense_layers", "shared_expert_ffn_hidden"}
    | {"mtp_layers", "mtp_loss_coef", "router_bias", "router_bias_update_rate"},
    without_effect=OLMOE.without_effect | {"aux_loss_alpha", "auto_map", "ep_size", "qk_head_dim", "seq_aux"},
)

KIMI_K2 = replace(V3, model_type="kimi_k2")


def _read_v2(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`_read` with the defaults of V2 and without MTP. The method `greedy` does not use groups of experts."""
    values = {"n_shared_experts": 2, "first_k_dense_replace": 0, "moe_intermediate_size": 1407, **values}
    method, groups = values.pop("topk_method", "greedy"), {name: values.pop(name, None) for name in GROUPS}
    values, fields = _read(values, file)
    del fields["mtp_layers"]
    if method == "greedy":
        return values, fields
    if method != "group_limited_greedy" or not all(type(n) is int and 0 < n < 2**31 for n in groups.values()):
        given = f"{file}: topk_method is {method!r} with {groups}"
        raise UsageError(f"{given}; mjax knows greedy and group_limited_greedy with numbers: convert another model")
    return values, fields | dict(zip(V2_GROUPS, (*groups.values(), 1), strict=True))


def _write_v2(model: DeepSeekConfig) -> dict[str, Any]:
    values = _write(model)
    if model.top_groups == model.router_n_groups:
        return {**values, "topk_method": "greedy"}
    if model.router_group_best != 1:
        best = f"--model.router-group-best {model.router_group_best}"
        raise UsageError(f"DeepseekV2ForCausalLM selects groups by their best expert, and the model has {best}")
    groups = dict(zip(GROUPS, (model.router_n_groups, model.top_groups), strict=True))
    return {**values, "topk_method": "group_limited_greedy", **groups}


GROUPS, V2_GROUPS = ("n_group", "topk_group"), ("router_n_groups", "router_topk_groups", "router_group_best")
V2 = replace(
    V3,
    model="DeepseekV2ForCausalLM",
    optional={},
    model_type="deepseek_v2",
    fixed={"kind": "deepseek", "router": "softmax", "router_normalized": False},
    fields={
        **{name: row for name, row in V3.fields.items() if name not in (*GROUPS, "norm_topk_prob")},
        "moe_intermediate_size": ("moe_ffn_hidden", 1407),
        "n_routed_experts": ("experts", 64),
        "num_experts_per_tok": ("experts_per_token", ...),
        "routed_scaling_factor": ("router_scale", 1.0),
    },
    only={name: value for name, value in V3.only.items() if name != "topk_method"}
    | {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False},
    other_names={"num_experts": "n_routed_experts"},
    read=_read_v2,
    write=_write_v2,
    read_fields=V3.read_fields.union(V2_GROUPS) - {"mtp_layers", "router_bias", "router_bias_update_rate"},
)
FAMILIES = (V3, KIMI_K2, V2)
