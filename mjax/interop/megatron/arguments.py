"""The `ModelConfig` of a Megatron checkpoint.

Most fields follow from the shapes of the tensors. The rest is in the arguments of the run, which Megatron has stored in
its checkpoints since 2020: heads, rates, and features that mjax does not support, which are rejected by name. The
published 345M models have no arguments and need --heads and --activation.

A model is a GPT or a BERT, or one of megatron-core's decoders: RMSNorm, rotary positions, grouped queries, a gated MLP,
no biases, and with --num-experts a mixture of experts, which may have latent attention.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from mjax.config import BERTConfig, DeepSeekConfig, GPTConfig, LlamaConfig, MixtureConfig, ModelConfig
from mjax.errors import UsageError
from mjax.interop.megatron.tensors import EMBEDDING, POSITIONS, QKV, TRUNKS
from mjax.interop.tensor_files import LazyTensor, Tensors

Activation = Literal["gelu_tanh", "gelu_erf"]

SUPPORTED_VALUES: dict[str, Any] = {
    "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True,
}  # fmt: skip
"""Arguments of a GPT or BERT with the only value that mjax supports."""
DECODER_VALUES: dict[str, Any] = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
}  # fmt: skip
DECODER_SWITCHES = {
    "qk_layernorm", "group_query_attention", "untie_embeddings_and_output_weights", "add_position_embedding",
    "use_rotary_position_embeddings", "moe_router_pre_softmax", "moe_router_enable_expert_bias",
    "multi_latent_attention",
}  # fmt: skip
"""Boolean arguments of a decoder with any value."""
DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02, "norm_epsilon": 1e-5,
    "bias_gelu_fusion": False,  # versions of 2020 lack it
    "rotary_base": 10_000, "rotary_percent": 1.0, "rope_scaling_factor": 8.0,
    "moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    "moe_aux_loss_coeff": 0.0,
    "rope_type": "yarn", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 4096,  # of latent attention
    "mtp_loss_scaling_factor": 0.1,
}  # fmt: skip
"""Values of missing arguments that no shape determines."""
FIELDS = {"hidden_dropout": "hidden_dropout", "attention_dropout": "attention_dropout", "init_std": "init_method_std"}
"""mjax's field → Megatron's argument, of every model."""
SHAPE_FIELDS = {"layers": "num_layers", "hidden": "hidden_size", "vocabulary": "padded_vocab_size"}
LATENT_FIELDS = {
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip
ACTIVATIONS: dict[str, Activation] = {"gpt": "gelu_tanh", "bert": "gelu_erf"}
"""Activations of models without arguments, as in the published 345M."""


class Setting(NamedTuple):
    """A row of settings.tsv: the class of a setting, and its defaults in versions of Megatron."""

    kind: str = "refused"
    defaults: Sequence[Any] = (None, False)

    def allows(self, value: Any) -> bool:
        """True if the model does not depend on the setting, or mjax reads it, or its value is a default."""
        irrelevant = value is None or self.kind in ("reproduced", "no effect")
        default = isinstance(value, str | int | float) and value in self.defaults  # 0 is not None
        off = isinstance(value, bool | str | list | tuple | dict) and not value and not all(self.defaults)
        return irrelevant or default or off


_ROWS = Path(__file__).with_name("settings.tsv").read_text(encoding="utf-8").splitlines()[1:]
SETTINGS = {
    name: Setting(kind, [value for cell in cells if cell for value in json.loads(cell).values()] or [None, False])
    for name, kind, *cells, _ in (row.split("\t") for row in _ROWS)
}
"""Settings by name; scripts/make_megatron_settings.py writes the table."""

# --- Arguments and shapes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MegatronArguments:
    """Arguments of a run by name, or their `DEFAULTS`; `source` is the checkpoint, for messages."""

    values: Mapping[str, Any]
    source: str

    def __getitem__(self, name: str) -> Any:
        value = self.values.get(name)
        return DEFAULTS.get(name) if value is None else value

    def reject(self, problem: str, remedy: str = "convert another model") -> NoReturn:
        """Raise the error about unsupported arguments."""
        raise UsageError(f"{self.source}: {problem}; {remedy}")

    def count(self, name: str, default: int | None = None, minimum: int = 0) -> int:
        """An argument as an integer."""
        value = default if self[name] is None else self[name]
        if type(value) is not int or value < minimum:
            self.reject(f"{name} is {value!r}, not a whole number from {minimum} on", "copy the files again")
        return value

    def number(self, name: str, *values: Any) -> float:
        """An argument, or one of its values, as a number; 0 without the argument and a default."""
        (value,) = values or (0.0 if self[name] is None else self[name],)
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            self.reject(f"{name} is {value!r}, not a number from 0 on", "copy the checkpoint again")
        return float(value)

    def numbers(self, fields: Mapping[str, str]) -> dict[str, float]:
        """Numbers by mjax's fields."""
        return {field: self.number(argument) for field, argument in fields.items()}

    @property
    def epsilon(self) -> str:
        """The name of LayerNorm's epsilon argument, which changed in 2023."""
        old = self.values.get("norm_epsilon") is None and self["layernorm_epsilon"] is not None
        return "layernorm_epsilon" if old else "norm_epsilon"

    def check_known(self, supported_values: Mapping[str, Any], known: set[str]) -> None:
        """Reject arguments with which Megatron's model differs from mjax's, or may differ."""
        settings = SETTINGS | {name: Setting("refused", [value]) for name, value in supported_values.items()}
        settings |= dict.fromkeys(known, Setting("reproduced"))
        refused = {
            name: setting
            for name, value in self.values.items()
            if not (setting := settings.get(name, Setting())).allows(value)
            and (self["num_experts"] or not name.startswith("moe_"))
        }
        if refused:
            listed = " and ".join(f"{name} is {reprlib.repr(self[name])}" for name in refused)
            only = dict.fromkeys(repr(default) for setting in refused.values() for default in setting.defaults)
            fix = f"convert another model, or add --ignore {','.join(refused)} if the model computes the same without"
            self.reject(f"{listed}, but mjax supports only {' or '.join(only)}", fix)

    def check_shapes(self, shapes: Mapping[str, int]) -> None:
        """Reject arguments that contradict the shapes of the tensors."""
        for name, size in shapes.items():
            if self.values.get(name) not in (None, size):
                problem = f"{name} is {self[name]!r} among the arguments, and {size} by the tensors"
                self.reject(problem, "copy the whole checkpoint")


def assume_arguments(arguments: Mapping[str, Any], kind: Literal["gpt", "bert", "decoder"]) -> dict[str, Any]:
    """The arguments that a checkpoint lacks and its model needs, with the `DEFAULTS` that the import assumes."""
    names = [*FIELDS.values(), MegatronArguments(arguments, "").epsilon]
    if kind == "decoder":
        names += ["position_embedding_type", "rotary_base", "rotary_percent"]
        names += ["rope_scaling_factor"] if arguments.get("use_rope_scaling") else []
        names += [name for name in DEFAULTS if name.startswith("moe_") and arguments.get("num_experts")]
    elif not arguments.get("openai_gelu"):
        names.append("bias_gelu_fusion")
    return {name: (DECODER_VALUES | DEFAULTS)[name] for name in names if arguments.get(name) is None}


def _read_shapes(tensors: Tensors, trunk: str, source: str, mlp: str = "0.mlp.linear_fc2") -> dict[str, int]:
    """Read the arguments that follow from shapes.

    Args:
      tensors: by current names.
      trunk: the prefix of the layers.
      source: the checkpoint, for messages.
      mlp: a layer and the second matrix of an MLP in it, for its width.
    """
    layers = {int(match[1]) for name in tensors if (match := re.match(rf"{trunk}\.layers\.(\d+)\.", name))}
    return {
        "num_layers": max(layers, default=-1) + 1,
        "hidden_size": _dim_size(tensors, EMBEDDING, 1, source),
        "ffn_hidden_size": _dim_size(tensors, f"{trunk}.layers.{mlp}.weight", 1, source),
        "padded_vocab_size": _dim_size(tensors, EMBEDDING, 0, source),
    }


def _dim_size(tensors: Tensors, name: str, dim: int, source: str) -> int:
    shape = tensors[name].shape if name in tensors else ()
    if len(shape) != 2:
        raise UsageError(f"{source} lacks the matrix {name}; copy the whole checkpoint, or convert another model")
    return shape[dim]


def drop_ignored(arguments: Mapping[str, Any] | None, ignored: str, source: str) -> dict[str, Any] | None:
    """The arguments except for the names in `--ignore`, comma-separated."""
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
    old_names: bool = False,
) -> ModelConfig:
    """The model, with every row of its embedding as a token: shapes do not show which rows pad the vocabulary.

    Args:
      arguments: of the run; None if the checkpoint has none.
      tensors: by current names.
      kind: `gpt` or `bert`.
      source: the checkpoint, for messages.
      heads, activation: of the user, if there are no arguments.
      old_names: True if the names of the tensors are from before megatron-core.

    Raises:
      UsageError: the arguments are not supported, contradict the tensors or the user, or are missing.
    """
    args = MegatronArguments(arguments or {}, source)
    args.check_known(SUPPORTED_VALUES, {"apply_residual_connection_post_layernorm"})
    if kind == "gpt" and arguments is None and POSITIONS not in tensors:
        problem = f"neither args nor {POSITIONS}: its positions are rotary or missing, and args would describe them"
        raise UsageError(f"{source} has {problem}; save it again with Megatron, which stores args")
    shapes = _read_shapes(tensors, TRUNKS[kind], source)
    shapes["max_position_embeddings"] = _dim_size(tensors, POSITIONS, 0, source)
    args.check_shapes(shapes)
    hidden, count = shapes["hidden_size"], _num_heads(args, heads)
    size = hidden / count if args["kv_channels"] is None else args["kv_channels"]
    if size * count != hidden or hidden % count:
        problem = f"{count} heads of {size!r} numbers are not the {hidden} of hidden_size"
        args.reject(problem, "give the --heads of the model, or convert another model")
    if arguments is not None and activation is not None:
        args.reject("its arguments include the activation", "leave out --activation")
    layernorm = "post" if args["apply_residual_connection_post_layernorm"] else "pre"
    if layernorm == "post" and kind != "bert":
        args.reject("apply_residual_connection_post_layernorm is set: a GPT has no such form, only old BERT models")
    assumed = {"activation": activation or ACTIVATIONS[kind]}
    return (BERTConfig if kind == "bert" else GPTConfig)(
        heads=count,
        feed_forward=None if shapes["ffn_hidden_size"] == 4 * hidden else shapes["ffn_hidden_size"],
        sequence=shapes["max_position_embeddings"],
        max_position_embeddings=shapes["max_position_embeddings"],
        **{field: shapes[argument] for field, argument in SHAPE_FIELDS.items()},
        **({"layernorm": layernorm} if kind == "bert" else {}),
        **(assumed if arguments is None else _activations(kind, args, old_names)),
        **args.numbers({**FIELDS, "layernorm_epsilon": args.epsilon}),
    )


def _num_heads(arguments: MegatronArguments, heads: int | None) -> int:
    saved_heads = arguments["num_attention_heads"]
    if saved_heads is None and heads is None:
        arguments.reject("it has no number of attention heads", "add --heads, 16 for the published 345M")
    if saved_heads is not None and heads not in (None, saved_heads):
        arguments.reject(f"the model has {saved_heads} attention heads and --heads is {heads}", "remove it")
    return heads if saved_heads is None else arguments.count("num_attention_heads", minimum=1)


def _activations(kind: str, arguments: MegatronArguments, old_names: bool) -> dict[str, Activation]:
    """GELU of the MLP, and of a BERT's MLM head, to which Megatron's fused kernel (tanh) does not apply.

    Only the models before megatron-core read openai_gelu (tanh, of both) and onnx_safe.
    """
    openai = old_names and arguments["openai_gelu"]
    fused = arguments["bias_gelu_fusion"] and not openai
    if fused and old_names and arguments["onnx_safe"]:
        arguments.reject("bias_gelu_fusion and onnx_safe are both set, which versions of Megatron compute differently")
    mlm: dict[str, Activation] = {"mlm_activation": "gelu_erf"} if fused and kind == "bert" else {}
    return {"activation": "gelu_tanh" if fused or openai else "gelu_erf", **mlm}


# --- Decoders ---------------------------------------------------------------------------------------------------------


def is_decoder(arguments: Mapping[str, Any] | None, names: list[str]) -> bool:
    """True if a checkpoint has no learned positions, and its arguments describe a decoder with rotary ones."""
    args = arguments or {}
    return not any("position_embeddings" in name for name in names) and (
        args.get("position_embedding_type") not in (None, "learned_absolute") or args.get("normalization") == "RMSNorm"
    )


def decoder_config(arguments: Mapping[str, Any], tensors: Tensors, source: str, version: float) -> ModelConfig:
    """The model, with every row of its embedding as a token: a Llama, a mixture, or with latent attention a DeepSeek.

    Args:
      arguments: of the run.
      tensors: by current names.
      source: the checkpoint, for messages.
      version: `checkpoint_version`.

    Raises:
      UsageError: the arguments are not supported, or contradict the tensors.
    """
    args, layer = MegatronArguments(arguments, source), "decoder.layers.0"
    for name in DECODER_SWITCHES:
        if not isinstance(args[name], bool | None):
            args.reject(f"{name} is {args[name]!r}, not true or false", "copy the checkpoint again")
    latent = bool(args["multi_latent_attention"])
    args.check_known(DECODER_VALUES, DECODER_SWITCHES | {"num_experts"} | ({"mtp_num_layers"} if latent else set()))
    if version < 2:
        args.reject(f"checkpoint_version is {version:g}, and decoders are read from 2 on", "save it again")
    heads = args.count("num_attention_heads", minimum=1)
    sequence = args.count("max_position_embeddings", minimum=1)
    experts = bool(args["num_experts"])
    router = _find_router(args, tensors) or f"{layer}.mlp.router.weight"
    expert = f"{router.split('.')[2]}.mlp.experts.0.linear_fc2"
    shapes = _read_shapes(tensors, "decoder", source, expert if experts else "0.mlp.linear_fc2")
    width = shapes.pop("ffn_hidden_size")
    args.check_shapes(shapes if experts else {**shapes, "ffn_hidden_size": width})
    mlp = {"feed_forward": width}
    if experts:
        mlp = _mixture_fields(args, tensors.get(router), shapes["num_layers"], width)
    common = {
        "heads": heads,
        "sequence": sequence,
        "max_position_embeddings": sequence,
        **{field: shapes[argument] for field, argument in SHAPE_FIELDS.items()},
        **mlp,
        "init_std": args.number(FIELDS["init_std"]),
        "rope_theta": args.number("rotary_base"),
        "norm_epsilon": args.number(args.epsilon),
    }
    if latent:
        return DeepSeekConfig(**common, **_latent_fields(args, tensors, heads))
    head_dim = args.count("kv_channels", shapes["hidden_size"] // heads, 1)
    rows, expected = _dim_size(tensors, f"{layer}.{QKV}.weight", 0, source), 3 * heads * head_dim
    if args["group_query_attention"] is None and rows != expected:
        problem = f"group_query_attention is missing among the arguments, and {QKV} has {rows} rows, not {expected}"
        args.reject(problem, "set it and num_query_groups in args and save the checkpoint again")
    return (MixtureConfig if experts else LlamaConfig)(
        **(common | args.numbers(FIELDS)),
        kv_heads=args.count("num_query_groups", minimum=1) if args["group_query_attention"] else heads,
        head_dim=head_dim,
        qk_norm="head" if args["qk_layernorm"] else "none",
        qkv_bias=f"{layer}.{QKV}.bias" in tensors,
        tie_embeddings=not args["untie_embeddings_and_output_weights"],
        rotary_percent=args.number("rotary_percent"),
        **_rope_scaling_fields(args),
    )


def _find_router(args: MegatronArguments, tensors: Tensors) -> str | None:
    """The name of the first router, which a dense decoder has not."""
    router = next((name for name in tensors if re.fullmatch(r"decoder\..+\.mlp\.router\.weight", name)), None)
    if router and not args["num_experts"]:
        rows = _dim_size(tensors, router, 0, args.source)
        problem = f"num_experts is missing among the arguments, and {router} has {rows} rows"
        args.reject(problem, f"set num_experts to {rows} in args and save the checkpoint again")
    return router


def _rope_scaling_fields(arguments: MegatronArguments) -> dict[str, Any]:
    """mjax's fields for RoPE scaling; Megatron's Llama 3 scaling has fixed frequencies and 8,192 positions."""
    factor = arguments.number("rotary_seq_len_interpolation_factor")
    if not arguments["use_rope_scaling"]:
        return {"rope_scaling": "linear", "rope_factor": factor} if factor else {}
    if factor not in (0, 1):
        arguments.reject("use_rope_scaling and rotary_seq_len_interpolation_factor are both set; mjax has one of them")
    factor = arguments.number("rope_scaling_factor")
    return {"rope_scaling": "llama3", "rope_factor": factor, "rope_original_length": 8192}


def _latent_fields(args: MegatronArguments, tensors: Tensors, heads: int) -> dict[str, Any]:
    """The fields of a `DeepSeekConfig` that a mixture lacks (`MLASelfAttention` in
    megatron/core/transformer/multi_latent_attention.py, 0.19): sizes by the shapes of the first layer's tensors."""

    def size(module: str, dim: int) -> int:
        return _dim_size(tensors, f"decoder.layers.0.self_attention.linear_{module}.weight", dim, args.source)

    rank, value = size("kv_up_proj", 1), size("proj", 1) // heads
    sizes = {
        "q_lora_rank": size("q_down_proj", 0) if args["q_lora_rank"] else None,
        "kv_lora_rank": rank,
        "qk_head_dim": size("kv_up_proj", 0) // heads - value,
        "qk_pos_emb_head_dim": size("kv_down_proj", 0) - rank,
        "v_head_dim": value,
    }
    args.check_shapes(sizes)
    needs = {"num_experts": True, "qk_layernorm": True, "untie_embeddings_and_output_weights": True}
    needs["moe_router_enable_expert_bias"] = args["moe_router_score_function"] == "sigmoid"
    for name, needed in needs.items():
        if bool(args[name]) != needed:
            args.reject(f"{name} is {args[name]!r}, and with latent attention mjax {'needs' if needed else 'lacks'} it")
    mtp = args.count("mtp_num_layers", 0)
    of_mtp = {"mtp_layers": mtp, "mtp_loss_coef": args.number("mtp_loss_scaling_factor")} if mtp else {}
    if mtp > 1:
        args.reject(f"mtp_num_layers is {mtp}, and mjax supports 0 and 1")
    fields = {field: sizes[argument] for field, argument in LATENT_FIELDS.items()}
    return {**fields, **of_mtp, "latent_norm_epsilon": args.number(args.epsilon), **_latent_rope_fields(args)}


def _latent_rope_fields(args: MegatronArguments) -> dict[str, Any]:
    """mjax's fields for YaRN. Megatron multiplies scores by the square of the magnitude of mscale_all_dim, whatever the
    rope_type, and cos and sin by the ratio of both magnitudes."""
    factor, scale, over_all = (args.number(name) for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    kind, whole = args["rope_type"], args.number("rotary_percent") == 1
    if (kind == "yarn" and factor == 1) or (kind == "rope" and whole and (factor <= 1 or not over_all)):
        return {}
    if kind != "yarn" or scale != over_all or args.number("beta_slow") != 1:
        names = ("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_slow")
        given = ", ".join(f"{name} {args[name]!r}" for name in names)
        args.reject(f"positions have {given}, and mjax has yarn with equal mscales and beta_slow 1")
    original, fast = args.count("original_max_position_embeddings", minimum=1), args.number("beta_fast")
    yarn = {"rope_scaling": "yarn", "rope_factor": factor, "rope_original_length": original}
    return {**yarn, "rope_mscale": scale, "rope_beta_fast": fast}


# --- Mixtures of experts ----------------------------------------------------------------------------------------------

AUX_LOSS_SCOPES = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}
"""moe_router_load_balancing_type → mjax's scope of the loss. Both are E / (k T²) · Σ_i (Σ_t p_ti)(tokens of expert i),
of every layer, with T the tokens of a micro-batch or of a sequence, and the mean over these. So coefficients agree."""
LOSS_TYPES = (*AUX_LOSS_SCOPES, "global_aux_loss", "none")


def _mixture_fields(arguments: MegatronArguments, router: LazyTensor | None, layers: int, width: int) -> dict[str, Any]:
    """The fields of a `MixtureConfig` that a Llama does not have, and the width of the MLP.

    Args:
      arguments: of the run.
      router: of a layer with experts.
      layers: of the model.
      width: of an expert, by its shape.

    Raises:
      UsageError: the arguments request an unsupported feature, or contradict the tensors.
    """
    capacity = arguments["moe_expert_capacity_factor"]
    if capacity is not None and not (type(capacity) in (int, float) and capacity < 0):
        arguments.reject(f"moe_expert_capacity_factor is {capacity!r}, with which Megatron drops tokens and mjax none")
    experts = router.shape[0] if router is not None and router.shape else 0
    arguments.check_shapes({"num_experts": experts, "moe_ffn_hidden_size": width})
    score, topk = arguments["moe_router_score_function"], arguments.count("moe_router_topk")
    if score not in ("softmax", "sigmoid"):
        arguments.reject(f"moe_router_score_function is {score!r}, and mjax knows softmax and sigmoid")
    if (bias := bool(arguments["moe_router_enable_expert_bias"])) and score != "sigmoid":
        arguments.reject("moe_router_enable_expert_bias is set, which Megatron has with sigmoid only")
    feed_forward = arguments.count("ffn_hidden_size", width)
    return {
        "experts": experts,
        "experts_per_token": topk,
        "feed_forward": feed_forward,
        "moe_ffn_hidden": None if feed_forward == width else width,
        "router": score,
        # A softmax after the choice is the one before it, divided by the sum of those chosen.
        "router_normalized": topk > 1 if score == "sigmoid" else not arguments["moe_router_pre_softmax"],
        "router_scale": arguments.number("moe_router_topk_scaling_factor") or 1.0,
        "router_bias": bias,
        "router_bias_update_rate": arguments.number("moe_router_bias_update_rate") if bias else 0.0,
        "shared_expert_ffn_hidden": arguments.count("moe_shared_expert_intermediate_size", 0),
        "z_loss": arguments.number("moe_z_loss_coeff"),
        **_expert_layer_fields(arguments, layers),
        **_router_group_fields(arguments, score, topk),
        **_aux_loss_fields(arguments)[0],
    }


def _expert_layer_fields(arguments: MegatronArguments, layers: int) -> dict[str, int]:
    """Fields for the layers that have experts: with a number n those whose number from 0 n divides, or a mark for each
    (`get_gpt_decoder_layer_specs` in megatron/core/models/gpt/gpt_layer_specs.py, 0.16)."""
    value = arguments["moe_layer_freq"]
    frequency = 1 if value is None else value
    one = type(frequency) is int and frequency > 0
    marks = [i % frequency == 0 for i in range(layers)] if one else _to_list(frequency)
    sparse = [i for i, mark in enumerate(marks) if mark]
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    dense = sparse[0] - interval + 1 if sparse else -1
    if dense < 0 or marks != expert_marks(layers, dense, interval):
        problem = "mjax has experts in all layers, or in each n-th after dense layers"
        arguments.reject(f"moe_layer_freq is {reprlib.repr(frequency)} for {layers} layers, and {problem}")
    return {"first_dense_layers": dense, "moe_layer_freq": interval}


def expert_marks(layers: int, dense: int, interval: int) -> list[int]:
    """1 for each layer that has experts, and 0 for the first `dense` ones and those between the experts."""
    return [int(i >= dense and (i - dense) % interval == interval - 1) for i in range(layers)]


def _router_group_fields(arguments: MegatronArguments, score: str, topk: int) -> dict[str, int]:
    """Fields for groups of experts. Megatron scores a group by the sum of its best moe_router_topk /
    moe_router_group_topk experts."""
    top, groups = arguments.count("moe_router_group_topk", 0), arguments.count("moe_router_num_groups", 1) or 1
    if top in (0, groups):  # every expert can be chosen
        return {}
    if score == "softmax" and not arguments["moe_router_pre_softmax"]:
        arguments.reject(f"moe_router_group_topk is {top} without moe_router_pre_softmax, which mjax needs")
    return {"router_n_groups": groups, "router_topk_groups": top, "router_group_best": topk // top}


def describe_differences(arguments: Mapping[str, Any], source: str) -> list[str]:
    """A line for each setting of a decoder that Megatron's training computes differently."""
    args = MegatronArguments(arguments, source)
    lines = [_aux_loss_fields(args)[1]] if args["num_experts"] else []
    latent, factor = args["multi_latent_attention"], args.number("rope_scaling_factor")
    dropouts = [name for name in ("hidden_dropout", "attention_dropout") if latent and args.number(name)]
    lines += [f"{name} {args[name]:g}: mjax does not support it with latent attention" for name in dropouts]
    if not latent and args["use_rope_scaling"] and factor != DEFAULTS["rope_scaling_factor"]:
        fix = "if it trained this model, convert it with --ignore rope_scaling_factor"
        lines.append(f"rope_scaling_factor {factor:g} applies; pretrain_gpt.py ignores it and computes with 8: {fix}")
    return list(filter(None, lines))


def _aux_loss_fields(arguments: MegatronArguments) -> tuple[dict[str, Any], str]:
    """mjax's fields for the auxiliary loss, and one line about an unsupported loss."""
    kinds, name = _to_list(arguments["moe_router_load_balancing_type"] or "aux_loss"), "moe_aux_loss_coeff"
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in LOSS_TYPES]:
        arguments.reject(f"moe_router_load_balancing_type is {unknown[0]!r}, and mjax knows {', '.join(LOSS_TYPES)}")
    numbers = [arguments.number(name, value) for value in _to_list(arguments[name])]
    if len(numbers) != len(kinds):
        arguments.reject(f"{name} has {len(numbers)} numbers and moe_router_load_balancing_type {len(kinds)} losses")
    losses = {kind: number for kind, number in zip(kinds, numbers, strict=True) if number and kind != "none"}
    if not losses:
        return {}, ""
    # Megatron's losses count the best experts of all groups, whichever a token takes.
    in_groups = arguments["moe_router_group_topk"] not in (None, 0, arguments["moe_router_num_groups"])
    if len(losses) == 1 and losses.keys() <= AUX_LOSS_SCOPES.keys() and not in_groups:
        ((kind, number),) = losses.items()
        return {"aux_loss_coef": number, "aux_loss_scope": AUX_LOSS_SCOPES[kind]}, ""
    listed = " and ".join(f"{kind} {number:g}" for kind, number in losses.items())
    missing = f"mjax has no {listed}{' with groups of experts' if in_groups else ''}, so it is left out"
    return {}, f"balance loss: {missing}; to train on with the one of mjax, add --model.aux-loss-coef"


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- Export -----------------------------------------------------------------------------------------------------------


def write_arguments(model: ModelConfig, padded_vocabulary: int) -> dict[str, Any]:
    """The arguments of a run of Megatron with this model: the inverse of `model_config` and `decoder_config`.

    A field without an argument is left out; the export reads the arguments back and compares.
    """
    decoder, get = model.kind not in ACTIVATIONS, partial(getattr, model)
    sizes = {"layers": model.layers, "hidden": model.hidden, "vocabulary": padded_vocabulary}
    values = {
        **{argument: sizes[field] for field, argument in SHAPE_FIELDS.items()},
        "ffn_hidden_size": get("mlp_width"),
        "num_attention_heads": model.heads,
        **({} if model.kind == "deepseek" else {"kv_channels": model.head_size}),
        "vocab_size": model.vocabulary,
        "seq_length": model.sequence,
        "max_position_embeddings": model.max_positions,
        **{argument: getattr(model, field, 0.0) for field, argument in FIELDS.items()},
        **(DECODER_VALUES if decoder else SUPPORTED_VALUES),
    }
    if not decoder:
        return values | {"bias_gelu_fusion": get("activation") == "gelu_tanh", "norm_epsilon": get("layernorm_epsilon")}
    values |= {
        "norm_epsilon": get("norm_epsilon"),
        "rotary_base": get("rope_theta"),
        "rotary_percent": getattr(model, "rotary_percent", 1.0),
        "untie_embeddings_and_output_weights": not get("tie_embeddings"),
        **(_mixture_arguments(model) if model.experts else {}),
        **(_latent_arguments(model) if model.kind == "deepseek" else _grouped_query_arguments(model)),
    }
    whole = ("rotary_base", "rotary_seq_len_interpolation_factor")  # whole numbers on Megatron's command line
    return values | {name: int(values[name]) for name in whole if name in values and values[name] % 1 == 0}


def _grouped_query_arguments(model: Any) -> dict[str, Any]:
    factor, scaling = model.rope_factor, model.rope_scaling
    return {
        "group_query_attention": True,
        "num_query_groups": model.groups,
        "qk_layernorm": model.qk_norm == "head",
        "add_qkv_bias": model.qkv_bias,
        **({"rotary_seq_len_interpolation_factor": factor} if scaling == "linear" else {}),
        **({"use_rope_scaling": True, "rope_scaling_factor": factor} if scaling == "llama3" else {}),
    }


def _latent_arguments(model: Any) -> dict[str, Any]:
    names, scale = ("rotary_scaling_factor", "mscale", "mscale_all_dim"), model.rope_mscale
    yarn = {"rope_type": "yarn", **dict(zip(names, (model.rope_factor, scale, scale), strict=True))}
    mtp = {"mtp_num_layers": model.mtp_layers, "mtp_loss_scaling_factor": model.mtp_loss_coef}
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **{argument: getattr(model, field) for field, argument in LATENT_FIELDS.items()},
        **(yarn if model.rope_scaling == "yarn" else {"rope_type": "rope"}),
        **(mtp if model.mtp_layers else {}),
    }


def _mixture_arguments(model: Any) -> dict[str, Any]:
    scopes = {scope: kind for kind, scope in AUX_LOSS_SCOPES.items()}
    groups = {"moe_router_num_groups": model.router_n_groups, "moe_router_group_topk": model.top_groups}
    dense, interval = model.first_dense_layers, model.moe_layer_freq
    return {
        "num_experts": model.experts,
        "moe_layer_freq": 1 if model.expert_layers == model.layers else expert_marks(model.layers, dense, interval),
        "moe_ffn_hidden_size": model.expert_width,
        "moe_router_topk": model.experts_per_token,
        "moe_router_score_function": model.router,
        "moe_router_pre_softmax": model.router == "softmax" and not model.router_normalized,
        "moe_router_enable_expert_bias": model.has_router_bias,
        **({"moe_router_bias_update_rate": model.router_bias_update_rate} if model.has_router_bias else {}),
        "moe_router_topk_scaling_factor": model.router_scale if model.router_scale != 1 else None,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden or None,
        "moe_z_loss_coeff": model.z_loss or None,
        "moe_router_load_balancing_type": scopes[model.aux_loss_scope] if model.aux_loss_coef else "none",
        "moe_aux_loss_coeff": model.aux_loss_coef,
        **(groups if model.top_groups < model.router_n_groups else {}),
    }
