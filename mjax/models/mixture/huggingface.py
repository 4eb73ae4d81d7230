"""Mixtral, Qwen 3 MoE and OLMoE of `transformers`: a Llama of each family with experts instead of its MLP.

Files have a tensor for each matrix of each expert, as they were published; transformers 5 holds, and may write, all
experts of a layer in one. Both are read, and the first is written. The weight of the router's losses is not part of the
model: it is a setting of training.
"""

from __future__ import annotations

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
    known = type(every) is int and every > 0 and isinstance(dense, list) and dense == list(range(len(dense)))
    if not known or (dense and every > 1) or (type(layers) is int and len(dense) >= layers):
        raise UsageError(
            f"{file}: mlp_only_layers is {dense!r} and decoder_sparse_step {every!r}; mjax supports "
            "dense first layers, such as [0, 1], or experts in every n-th layer, such as 2, but not both: convert "
            "another model"
        )
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
FAMILIES = (MIXTRAL, QWEN3_MOE, OLMOE)
