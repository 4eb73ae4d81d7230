"""Mixtral, Qwen 3 MoE and OLMoE of `transformers`: a Llama of each family with experts in the place of its MLP.

Files have a tensor for each matrix of each expert, as they were published; transformers 5 holds, and may write, all
experts of a layer in one. Both are read, and the first is written. What the router's losses weigh is not part of the
model: it is a setting of training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mjax.config.mixture import MixtureConfig
from mjax.errors import UsageError
from mjax.interop.family import Family, Reader
from mjax.interop.llama import LAYER, LLAMA, MISTRAL, QWEN2, QWEN3, omitted

OF_TRAINING = frozenset({"grouped", "balance_loss", "balance_over", "z_loss"})
"""Fields that change what is learned, and no result."""


def _names(experts: str, router: str, gate: str, up: str, down: str, dense: dict | None = None) -> dict[str, Any]:
    """The rows of the table for a router and experts, and for `dense` layers, in the order of the files."""
    names = {ours: theirs for ours, theirs in LLAMA.names.items() if not ours.startswith("blocks.mlp.")}
    places = {
        "blocks.mlp.router": f"{LAYER}.{router}",
        "blocks.mlp.up": (f"{LAYER}.{experts}.{{2}}.{gate}", f"{LAYER}.{experts}.{{2}}.{up}"),
        "blocks.mlp.down": f"{LAYER}.{experts}.{{2}}.{down}",
    }
    last = {name: names.pop(name) for name in ("final_norm", "head")}
    return names | places | (dense or {}) | last


FUSED = {
    "blocks.mlp.router": f"{LAYER}.mlp.gate",
    "blocks.mlp.up": f"{LAYER}.mlp.experts.gate_up_proj",
    "blocks.mlp.down": f"{LAYER}.mlp.experts.down_proj",
}


def _read_normalized(read_others: Reader) -> Reader:
    """`read` of a family, and norm_topk_prob."""

    def read(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
        values, fields = read_others(values, file)
        normalized = values.pop("norm_topk_prob", False)
        if not isinstance(normalized, bool):
            raise UsageError(f"{file}: norm_topk_prob is {normalized!r}, not true or false; restore the file")
        return values, fields | {"router_normalized": normalized}

    return read


def _write_normalized(family: Family, width: str):
    """`write` of a family, norm_topk_prob and the setting named `width` of the experts' width."""

    def write(model: MixtureConfig) -> dict[str, Any]:
        return {**family.write(model), "norm_topk_prob": model.router_normalized, width: model.width_of_expert}

    return write


def _read_dense(read, file_layers: int):
    """`read`, and which layers have experts: all but the first ones, or every n-th."""

    def with_dense(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
        values, fields = read(values, file)
        every, dense = values.pop("decoder_sparse_step", 1), values.pop("mlp_only_layers", None) or []
        layers = values.get("num_hidden_layers", file_layers)
        known = type(every) is int and every > 0 and dense in ([], list(range(len(dense))))
        if not known or (dense and every > 1) or (type(layers) is int and len(dense) >= layers):
            raise UsageError(
                f"{file}: mlp_only_layers is {dense!r} and decoder_sparse_step {every!r}; mjax knows models whose "
                "first layers have no experts, such as [0, 1], or in which every n-th has, such as 2, but not both: "
                "convert another model"
            )
        return values, fields | {"dense_layers": len(dense), "expert_interval": every}

    return with_dense


def _write_dense(write):
    """`write`, and which layers have experts."""

    def with_dense(model: MixtureConfig) -> dict[str, Any]:
        dense = list(range(model.dense_layers))
        return {**write(model), "decoder_sparse_step": model.expert_interval, "mlp_only_layers": dense}

    return with_dense


DENSE = {
    "blocks.mlp.up.kernel": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    "blocks.mlp.down.kernel": f"{LAYER}.mlp.down_proj",
}
"""Rows of the MLP of layers without experts."""

MIXTRAL = replace(
    MISTRAL,
    model="MixtralForCausalLM",
    names=_names("block_sparse_moe.experts", "block_sparse_moe.gate", "w1", "w3", "w2"),
    fused=FUSED,
    model_type="mixtral",
    fixed={**MISTRAL.fixed, "kind": "mixture", "router_normalized": True},
    fields={
        **MISTRAL.fields,
        "intermediate_size": ("feed_forward", 14336),
        "num_local_experts": ("experts", 8),
        "num_experts_per_tok": ("experts_per_token", 2),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
    },
    only={"router_jitter_noise": 0.0},
    read=omitted(MISTRAL.read, sliding_window=None, rope_theta=1e6),
    read_fields=MISTRAL.read_fields | OF_TRAINING | {"expert_width"},
    write=lambda model: {**MISTRAL.write(model), "intermediate_size": model.width_of_expert},
    without_effect=MISTRAL.without_effect | {"router_aux_loss_coef", "output_router_logits"},
)

QWEN3_MOE = replace(
    QWEN3,
    model="Qwen3MoeForCausalLM",
    names=_names("mlp.experts", "mlp.gate", "gate_proj", "up_proj", "down_proj", DENSE),
    fused=FUSED,
    model_type="qwen3_moe",
    fixed={**QWEN3.fixed, "kind": "mixture"},
    fields={
        **QWEN3.fields,
        "num_hidden_layers": ("layers", 24),
        "hidden_size": ("hidden", 2048),
        "intermediate_size": ("feed_forward", 6144),
        "moe_intermediate_size": ("expert_width", 768),
        "num_experts": ("experts", 128),
        "num_experts_per_tok": ("experts_per_token", 8),
    },
    only={"attention_bias": False},
    other_names={"num_local_experts": "num_experts"},  # as transformers 5 writes it
    read=_read_dense(_read_normalized(omitted(QWEN2.read, num_key_value_heads=4)), 24),
    read_fields=QWEN3.read_fields | OF_TRAINING | {"router_normalized", "dense_layers", "expert_interval"},
    write=_write_dense(_write_normalized(QWEN3, "moe_intermediate_size")),
    without_effect=QWEN3.without_effect | {"router_aux_loss_coef", "output_router_logits"},
)

OLMOE = replace(
    LLAMA,
    model="OlmoeForCausalLM",
    names=_names("mlp.experts", "mlp.gate", "gate_proj", "up_proj", "down_proj"),
    fused=FUSED,
    model_type="olmoe",
    fixed={**LLAMA.fixed, "kind": "mixture", "qk_norm": "heads"},
    fields={
        **LLAMA.fields,
        "intermediate_size": ("feed_forward", 2048),
        "num_experts": ("experts", 64),
        "num_experts_per_tok": ("experts_per_token", 8),
        "num_hidden_layers": ("layers", 16),
        "hidden_size": ("hidden", 2048),
        "num_attention_heads": ("heads", 16),
        "max_position_embeddings": ("sequence", 4096),
        "vocab_size": ("vocabulary", 50304),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
    },
    only={"attention_bias": False, "clip_qkv": None},
    read=_read_normalized(LLAMA.read),
    read_fields=LLAMA.read_fields | OF_TRAINING | {"router_normalized", "expert_width"},
    write=_write_normalized(LLAMA, "intermediate_size"),
    without_effect=LLAMA.without_effect | {"router_aux_loss_coef", "output_router_logits"},
)
