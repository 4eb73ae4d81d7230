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
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Literal, NoReturn

from mjax.config import BERTConfig, GPTConfig, LlamaConfig, MixtureConfig, ModelConfig
from mjax.errors import UsageError
from mjax.interop.megatron.tensors import EMBEDDING, POSITIONS, QKV, TRUNKS
from mjax.interop.tensor_files import Tensors

Activation = Literal["gelu_tanh", "gelu_erf"]

ONLY: dict[str, Any] = {
    "position_embedding_type": "learned_absolute", "add_position_embedding": True, "normalization": "LayerNorm",
    "add_bias_linear": True, "softmax_type": "vanilla", "bert_binary_head": True, "mtp_num_layers": None,
    "retro_add_retriever": False,
}  # fmt: skip
"""Arguments that change what the model computes, and the only value of each that mjax supports. All others but
those in `HARMLESS` must be unset."""
ONLY_DECODER: dict[str, Any] = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "softmax_type": "vanilla", "mtp_num_layers": None, "retro_add_retriever": False,
}  # fmt: skip
EITHER = {
    "qk_layernorm", "group_query_attention", "untie_embeddings_and_output_weights", "add_position_embedding",
    "use_rotary_position_embeddings", "moe_router_pre_softmax",
}  # fmt: skip
"""Arguments of a decoder that may be set or not."""
DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02, "norm_epsilon": 1e-5,
    "bias_gelu_fusion": False,  # unknown to the versions of 2020 that lack it
    "rotary_base": 10_000, "rotary_percent": 1.0, "rope_scaling_factor": 8.0,
    "moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
"""Values of missing arguments that no shape determines."""
NUMBERS = {"hidden_dropout": "hidden_dropout", "attention_dropout": "attention_dropout", "init_std": "init_method_std"}
"""Our field → Megatron's argument, of every model."""
OF_SHAPES = {"layers": "num_layers", "hidden": "hidden_size", "vocabulary": "padded_vocab_size"}
OF_ROPE = {"rope_theta": "rotary_base", "rotary_percent": "rotary_percent"}
ACTIVATIONS: dict[str, Activation] = {"gpt": "gelu_tanh", "bert": "gelu_erf"}
"""Of models without arguments: the one of the published 345M."""

# --- Arguments and shapes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """Arguments of a run by name, or their `DEFAULTS`; `source` is the checkpoint, for messages."""

    given: Mapping[str, Any]
    source: str

    def __getitem__(self, name: str) -> Any:
        value = self.given.get(name)
        return DEFAULTS.get(name) if value is None else value

    def reject(self, problem: str, remedy: str = "convert another model") -> NoReturn:
        """Raise the error about arguments that no model of mjax has."""
        raise UsageError(f"{self.source}: {problem}; {remedy}")

    def count(self, name: str, default: int | None = None, least: int = 0) -> int:
        """A whole number."""
        value = default if self[name] is None else self[name]
        if type(value) is not int or value < least:
            self.reject(f"{name} is {value!r}, not a whole number from {least} on", "copy the files again")
        return value

    def number(self, name: str, *of_several: Any) -> float:
        """The argument, or one of its several values, as a number; 0 without the argument and a default."""
        (value,) = of_several or (0.0 if self[name] is None else self[name],)
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            self.reject(f"{name} is {value!r}, not a number from 0 on", "copy the checkpoint again")
        return float(value)

    def numbers(self, fields: Mapping[str, str]) -> dict[str, float]:
        """Numbers by our fields."""
        return {ours: self.number(theirs) for ours, theirs in fields.items()}

    @property
    def epsilon(self) -> str:
        """The name of LayerNorm's epsilon, which changed in 2023."""
        old = self.given.get("norm_epsilon") is None and self["layernorm_epsilon"] is not None
        return "layernorm_epsilon" if old else "norm_epsilon"

    def check_known(self, only: Mapping[str, Any], known: set[str]) -> None:
        """Reject arguments for which Megatron computes something that mjax does not, or may do so."""
        for name, supported in only.items():
            value = self.given.get(name)
            if not (value is None or (_is_unset(value) and not supported)) and (
                type(value) is not type(supported) or value != supported
            ):
                self.reject(f"{name} is {reprlib.repr(value)}, but mjax supports only {supported!r}")
        unknown = [
            name
            for name, value in self.given.items()
            if not (_is_unset(value) or name in {*only, *known, *DEFAULTS} or HARMLESS.fullmatch(name))
            and (self["num_experts"] or not name.startswith("moe_"))
        ]
        if unknown:
            listed = " and ".join(f"{name} is {reprlib.repr(self[name])}" for name in unknown)
            ignored = f"add --ignore {','.join(unknown)} if the model computes the same without"
            self.reject(f"{listed}, but mjax supports only None, False or 0", f"convert another model, or {ignored}")

    def check_shapes(self, shapes: Mapping[str, int]) -> None:
        """Reject arguments that contradict the shapes of the tensors."""
        for name, extent in shapes.items():
            if self.given.get(name) not in (None, extent):
                problem = f"{name} is {self[name]!r} among the arguments, and {extent} by the tensors"
                self.reject(problem, "copy the whole checkpoint")


def _is_unset(value: Any) -> bool:
    """True for None, False, 0 and empty: the value of a feature that was not asked for."""
    return isinstance(value, type(None) | bool | int | float | str | list | tuple | dict) and not value


def assume_arguments(arguments: Mapping[str, Any], kind: Literal["gpt", "bert", "decoder"]) -> dict[str, Any]:
    """The arguments that a checkpoint lacks and its model needs, with the `DEFAULTS` that the import assumes."""
    names = [*NUMBERS.values(), Arguments(arguments, "").epsilon]
    if kind == "decoder":
        names += ["position_embedding_type", *OF_ROPE.values()]
        names += ["rope_scaling_factor"] if arguments.get("use_rope_scaling") else []
        names += [name for name in DEFAULTS if name.startswith("moe_") and arguments.get("num_experts")]
    elif not arguments.get("openai_gelu"):
        names.append("bias_gelu_fusion")
    return {name: (ONLY_DECODER | DEFAULTS)[name] for name in names if arguments.get(name) is None}


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
        raise UsageError(f"{source} lacks the matrix {name}; copy the whole checkpoint, or convert another model")
    return shape[dim]


def drop_ignored(arguments: Mapping[str, Any] | None, ignored: str, source: str) -> dict[str, Any] | None:
    """The arguments without those of `--ignore`, comma-separated.

    Raises:
      UsageError: there is no such argument.
    """
    names = [name for name in ignored.split(",") if name]
    if absent := [name for name in names if name not in (arguments or {})]:
        raise UsageError(f"--ignore {ignored}: {source} has no argument {absent[0]}; remove it")
    return None if arguments is None else {name: value for name, value in arguments.items() if name not in names}


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
    said = Arguments(arguments or {}, source)
    said.check_known(ONLY, {"apply_residual_connection_post_layernorm"})
    if kind == "gpt" and arguments is None and POSITIONS not in tensors.kinds:
        problem = f"neither args nor {POSITIONS}: its positions are rotary or missing, and args would describe them"
        raise UsageError(f"{source} has {problem}; save it again with Megatron, which stores args")
    shapes = _shapes(tensors, TRUNKS[kind], source)
    shapes["max_position_embeddings"] = _extent(tensors, POSITIONS, 0, source)
    said.check_shapes(shapes)
    hidden, count = shapes["hidden_size"], _heads(said, heads)
    size = hidden / count if said["kv_channels"] is None else said["kv_channels"]
    if size * count != hidden or hidden % count:
        problem = f"{count} heads of {size!r} numbers are not the {hidden} of hidden_size"
        said.reject(problem, "give the model's own --heads, or convert another model")
    if arguments is not None and activation is not None:
        said.reject("its arguments say which GELU the model has", "leave out --activation")
    layernorm = "post" if said["apply_residual_connection_post_layernorm"] else "pre"
    if layernorm == "post" and kind != "bert":
        said.reject("apply_residual_connection_post_layernorm is set: a GPT has no such form, only old BERT models")
    return (BERTConfig if kind == "bert" else GPTConfig)(
        heads=count,
        feed_forward=None if shapes["ffn_hidden_size"] == 4 * hidden else shapes["ffn_hidden_size"],
        sequence=shapes["max_position_embeddings"],
        max_position_embeddings=shapes["max_position_embeddings"],
        **{ours: shapes[theirs] for ours, theirs in OF_SHAPES.items()},
        **({"layernorm": layernorm} if kind == "bert" else {}),
        **({"activation": activation or ACTIVATIONS[kind]} if arguments is None else _activations(kind, said)),
        **said.numbers({**NUMBERS, "layernorm_epsilon": said.epsilon}),
    )


def _heads(arguments: Arguments, heads: int | None) -> int:
    theirs = arguments["num_attention_heads"]
    if theirs is None and heads is None:
        arguments.reject("it has no number of attention heads", "add --heads, 16 for the published 345M")
    if theirs is not None and heads not in (None, theirs):
        arguments.reject(f"the model has {theirs} attention heads and --heads is {heads}", "remove it")
    return heads if theirs is None else arguments.count("num_attention_heads", least=1)


def _activations(kind: str, arguments: Arguments) -> dict[str, Activation]:
    """GELU of the MLP, and of a BERT's MLM head, which Megatron's fused kernel (tanh) does not replace."""
    fused = arguments["bias_gelu_fusion"] and not arguments["openai_gelu"]
    if fused and arguments["onnx_safe"]:
        arguments.reject("bias_gelu_fusion and onnx_safe are both set, which versions of Megatron compute differently")
    mlm: dict[str, Activation] = {"mlm_activation": "gelu_erf"} if fused and kind == "bert" else {}
    return {"activation": "gelu_tanh" if fused or arguments["openai_gelu"] else "gelu_erf", **mlm}


# --- Decoders ---------------------------------------------------------------------------------------------------------


def is_decoder(arguments: Mapping[str, Any] | None, names: list[str]) -> bool:
    """True if a checkpoint has no learned positions and says that it is a decoder with rotary ones."""
    said = arguments or {}
    return not any("position_embeddings" in name for name in names) and (
        said.get("position_embedding_type") not in (None, "learned_absolute") or said.get("normalization") == "RMSNorm"
    )


def decoder_config(arguments: Mapping[str, Any], tensors: Tensors, source: str, version: float) -> LlamaConfig:
    """The model, with every row of its embedding as a token; a `MixtureConfig` if it has experts.

    Args:
      arguments: of the run.
      tensors: by current names.
      source: the checkpoint, for messages.
      version: `checkpoint_version`.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, or contradict the tensors.
    """
    said, layer = Arguments(arguments, source), "decoder.layers.0"
    for name in EITHER:
        if not isinstance(said[name], bool | None):
            said.reject(f"{name} is {said[name]!r}, not true or false", "copy the checkpoint again")
    said.check_known(ONLY_DECODER, EITHER | {"num_experts"})
    if version < 2:
        said.reject(f"checkpoint_version is {version:g}, and decoders are read from 2 on", "save it again")
    heads = said.count("num_attention_heads", least=1)
    sequence = said.count("max_position_embeddings", least=1)
    experts = bool(said["num_experts"])
    routers = [name for name in tensors.kinds if name.endswith(".mlp.router.weight")]
    if routers and not experts:
        rows = _extent(tensors, routers[0], 0, source)
        problem = f"num_experts is missing among the arguments, and {routers[0]} has {rows} rows"
        said.reject(problem, f"set num_experts to {rows} in args and save the checkpoint again")
    shapes = _shapes(tensors, "decoder", source, "mlp.experts.0.linear_fc2" if experts else "mlp.linear_fc2")
    width = shapes["ffn_hidden_size"]
    head_dim = said.count("kv_channels", shapes["hidden_size"] // heads, 1)
    rows, expected = _extent(tensors, f"{layer}.{QKV}.weight", 0, source), 3 * heads * head_dim
    if said["group_query_attention"] is None and rows != expected:
        problem = f"group_query_attention is missing among the arguments, and {QKV} has {rows} rows, not {expected}"
        said.reject(problem, "set it and num_query_groups in args and save the checkpoint again")
    return (MixtureConfig if experts else LlamaConfig)(
        heads=heads,
        kv_heads=said.count("num_query_groups", least=1) if said["group_query_attention"] else heads,
        head_dim=head_dim,
        sequence=sequence,
        max_position_embeddings=sequence,
        **{ours: shapes[theirs] for ours, theirs in OF_SHAPES.items()},
        qk_norm="head" if said["qk_layernorm"] else "none",
        qkv_bias=f"{layer}.{QKV}.bias" in tensors.kinds,
        tie_embeddings=not said["untie_embeddings_and_output_weights"],
        **(_mixture_fields(said, tensors, width) if experts else {"feed_forward": width}),
        **said.numbers({**NUMBERS, **OF_ROPE, "norm_epsilon": said.epsilon}),
        **_scaling(said),
    )


def _scaling(arguments: Arguments) -> dict[str, Any]:
    """Our fields for scaled positions; Llama 3's scaling has fixed frequencies and 8,192 positions there."""
    factor = arguments.number("rotary_seq_len_interpolation_factor")
    if not arguments["use_rope_scaling"]:
        return {"rope_scaling": "linear", "rope_factor": factor} if factor else {}
    if factor not in (0, 1):
        arguments.reject(
            "use_rope_scaling and rotary_seq_len_interpolation_factor are both set; mjax knows one of the two"
        )
    return {
        "rope_scaling": "llama3",
        "rope_factor": arguments.number("rope_scaling_factor"),
        "rope_original_length": 8192,
    }


# --- Mixtures of experts ----------------------------------------------------------------------------------------------

OVER = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}
"""moe_router_load_balancing_type → our aux_loss_scope. Both are E / (k T²) · Σ_i (Σ_t p_ti)(tokens of expert i) per
layer, with T the tokens of a micro-batch or of a sequence, and the mean over these: the coefficients are equal."""
LOSSES = (*OVER, "global_aux_loss", "none")


def _mixture_fields(arguments: Arguments, tensors: Tensors, width: int) -> dict[str, Any]:
    """The fields of a `MixtureConfig` that a Llama does not have, and the width of the MLP.

    Args:
      said: the arguments of the run.
      tensors: by current names.
      width: of an expert, by its shape.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, or contradict the tensors.
    """
    capacity, frequency = arguments["moe_expert_capacity_factor"], arguments["moe_layer_freq"]
    if capacity is not None and not (type(capacity) in (int, float) and capacity < 0):
        arguments.reject(f"moe_expert_capacity_factor is {capacity!r}, with which Megatron drops tokens and mjax none")
    if frequency is not None and any(type(each) is not int or each != 1 for each in _to_list(frequency)):
        arguments.reject(f"moe_layer_freq is {frequency!r}, and mjax convert reads 1: all layers have experts")
    router = tensors.kinds.get("decoder.layers.0.mlp.router.weight")
    experts = router.shape[0] if router is not None and router.shape else 0
    arguments.check_shapes({"num_experts": experts, "moe_ffn_hidden_size": width})
    score, chosen = arguments["moe_router_score_function"], arguments.count("moe_router_topk")
    if score not in ("softmax", "sigmoid"):
        arguments.reject(f"moe_router_score_function is {score!r}, and mjax knows softmax and sigmoid")
    feed_forward = arguments.count("ffn_hidden_size", width)
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "feed_forward": feed_forward,
        "moe_ffn_hidden": None if feed_forward == width else width,
        "router": score,
        # A softmax after the choice is the one before it, divided by the sum of those chosen.
        "router_normalized": chosen > 1 if score == "sigmoid" else not arguments["moe_router_pre_softmax"],
        "router_scale": arguments.number("moe_router_topk_scaling_factor") or 1.0,
        "shared_expert_ffn_hidden": arguments.count("moe_shared_expert_intermediate_size", 0),
        "z_loss": arguments.number("moe_z_loss_coeff"),
        **_groups(arguments, score, chosen),
        **_balance(arguments)[0],
    }


def _groups(arguments: Arguments, score: str, chosen: int) -> dict[str, int]:
    """Groups of experts; Megatron scores one by the sum of its best moe_router_topk / moe_router_group_topk, mjax by
    that of its best two."""
    top, groups = arguments.count("moe_router_group_topk", 0), arguments.count("moe_router_num_groups", 1) or 1
    if top in (0, groups):  # every expert can be chosen
        return {}
    if chosen // top != 2:
        best = f"score a group by its best {chosen // top} experts, and mjax by its best 2"
        arguments.reject(f"moe_router_topk {chosen} and moe_router_group_topk {top} {best}")
    if score == "softmax" and not arguments["moe_router_pre_softmax"]:
        arguments.reject(
            f"moe_router_group_topk is {top} without moe_router_pre_softmax, and mjax has groups with it only"
        )
    return {"router_n_groups": groups, "router_topk_groups": top}


def balance_left_out(arguments: Mapping[str, Any], source: str) -> str:
    """One line about a balance loss that mjax does not have; empty if there is none."""
    return _balance(Arguments(arguments, source))[1]


def _balance(arguments: Arguments) -> tuple[dict[str, Any], str]:
    """Our fields for the balance loss, and one line about a loss that they cannot say."""
    kinds, name = _to_list(arguments["moe_router_load_balancing_type"] or "aux_loss"), "moe_aux_loss_coeff"
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in LOSSES]:
        arguments.reject(f"moe_router_load_balancing_type is {unknown[0]!r}, and mjax knows {', '.join(LOSSES)}")
    numbers = [arguments.number(name, each) for each in _to_list(arguments[name])]
    if len(numbers) != len(kinds):
        arguments.reject(f"{name} has {len(numbers)} numbers and moe_router_load_balancing_type {len(kinds)} losses")
    losses = {kind: number for kind, number in zip(kinds, numbers, strict=True) if number and kind != "none"}
    if not losses:
        return {}, ""
    # Megatron's losses count the best experts of all groups, whichever a token takes.
    in_groups = arguments["moe_router_group_topk"] not in (None, 0, arguments["moe_router_num_groups"])
    if len(losses) == 1 and losses.keys() <= OVER.keys() and not in_groups:
        ((kind, number),) = losses.items()
        return {"aux_loss_coef": number, "aux_loss_scope": OVER[kind]}, ""
    listed = " and ".join(f"{kind} {number:g}" for kind, number in losses.items())
    return {}, (
        f"balance loss: mjax has no {listed}{' with groups of experts' if in_groups else ''}, so it is left out; to "
        "train on with the one of mjax, add --model.aux-loss-coef"
    )


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- Arguments that mjax reads, or that do not change what a trained model computes -----------------------------------
# The names are from the versions of 2020 to megatron-core 0.19; * stands for any characters. Names of absent parts,
# such as `mamba_*`, are harmless because a check above rejects the switch of the part, which no pattern may match.


HARMLESS = re.compile(
    "|".join(
        translate(name)
        for name in """
        num_layers hidden_size ffn_hidden_size padded_vocab_size max_position_embeddings num_attention_heads kv_channels
        num_query_groups layernorm_epsilon openai_gelu onnx_safe use_rope_scaling rotary_seq_len_interpolation_factor
        add_qkv_bias encoder_num_layers moe_ffn_hidden_size moe_router_topk_scaling_factor moe_router_num_groups
        moe_router_group_topk moe_router_load_balancing_type moe_shared_expert_intermediate_size moe_z_loss_coeff
        moe_expert_capacity_factor moe_layer_freq
        *parallel_size* *pipeline* *process_group* *overlap* *_ddp *ddp_* *fsdp* *_dp_sharding_strategy DDP_impl rank
        local_rank world_size data_parallel_* distributed_* nccl_* tp_comm_* cp_comm_type delay_* align_*
        sequence_parallel async_tensor_model_parallel_allreduce standalone_embedding_stage microbatch_group_size_*
        *_p2p_* variable_seq_lengths
        fp8* fp16 bf16 fp4_* fp32_allreduce fp32_residual_connection fp16_lm_cross_entropy *_dtype
        num_layers_at_*_in_bf16 grad_* gradient_* accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32
        apply_query_key_layer_scaling use_te_rng_tracker kitchen_*
        *optimizer* *weight_decay* *loss_scale* use_layer_wise_* adam_* muon_* lion_* sgd_momentum lr lr_* min_lr
        decoupled_* head_lr_mult warmup clip_grad qk_clip* override_* min_scale hysteresis *batch_size* train_* seed
        exit_* skip_train skipped_* eval_* iteration curr_iteration consumed_* do_train do_valid do_test finetune
        manual_gc* rerun_mode error_injection_* inprocess_* ft_* adlr_* straggler_* check_* eod_mask_loss
        cross_entropy_* calculate_per_token_loss mask_prob mask_factor mask_type short_seq_prob
        num_floating_point_operations_so_far perform_initialization use_cpu_initialization
        *ckpt* *checkpoint* save save_* load load_* no_save_* no_load_* async_* non_persistent_* replication_*
        strict_fsdp_*
        *tokenizer* data_* *_data_path num_dataset_builder_threads mid_level_dataset_surplus dataloader_* split
        seq_length *_seq_length reset_position_ids reset_attention_mask create_attention_mask_in_dataloader num_workers
        mmap_* mock_data sft_* fim_* vocab_size vocab_file pad_vocab_size make_vocab_size_divisible_by merge_file
        tiktoken_* use_pin_memory logits_save_* logits_load_* sample_rate offset_sampling_seed_by_dp_rank
        *_fusion *_fusion_impl use_flash_attn attention_backend transformer_impl *cuda_graph* recompute_* *_activations
        *offload* deterministic_mode persist_layer_norm no_persist_layer_norm clone_scatter_output_in_embedding
        mlp_chunks_for_* pin_* use_legacy_models use_mcore_models *deprecated* model_type mamba_* use_mamba_mem_eff_path
        profile profile_* log_* logging_level tensorboard_* wandb_* *one_logger* timing_log_* memory_snapshot_path
        app_tag_* barrier_with_L1_time flight_recorder_* inference_* refit_method max_tokens_to_oom rl_* grpo_*
        bert_* indexer_* retriever_* query_in_block_prob vision_* dino_* swin_* img_* patch_dim num_channels num_classes
        classes_fraction iter_per_epoch retro_* dsa_* linear_num_* linear_key_* linear_value_* linear_conv_* mtp_* mup_*
        relative_attention_* q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale
        rotary_scaling_factor rope_type original_max_position_embeddings beta_fast beta_slow moe_token_dispatcher_type
        moe_token_drop_policy moe_flex_* moe_enable_deepep moe_deepep_* moe_hybridep_* moe_paged_stash*
        moe_permute_fusion moe_per_layer_logging moe_upcycling_* moe_layer_recompute moe_router_dtype
        moe_router_padding_* moe_grouped_gemm moe_use_legacy_grouped_gemm moe_router_bias_update_rate
        """.split()  # noqa: SIM905
    )
)
