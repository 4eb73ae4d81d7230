"""Vary every setting of megatron-core's models on the CPU, and write down which of them change the logits.

Run as a program, because megatron-core changes the process it is in:

    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python vary_megatron_core.py FILE

writes FILE, JSON: model → setting → [[value, largest change of a logit], …]. The change is null where megatron-core
refuses the value. The models are one for each of mjax's families, with the same weights in each variation. Settings are
the fields of TransformerConfig and the parameters of GPTModel that have arguments. By its type a setting is flipped,
scaled or stepped through its choices. "arguments" is argument of megatron.training → fields of TransformerConfig that
it changes; empty before megatron-core 0.17, whose wheels lack megatron.training.
"""

import argparse
import contextlib
import dataclasses
import enum
import inspect
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

VOCABULARY, SEQUENCE = 32, 10
SHARED = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "use_cpu_initialization": True, "init_method_std": 0.2,
}  # fmt: skip
DECODER = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2,
    "kv_channels": 6, "activation_func": torch.nn.functional.silu,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 12}
ROPE = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({"bias_activation_fusion": True}, {"share_embeddings_and_output_weights": True}),
    "bert": ({"bias_activation_fusion": True}, {"share_embeddings_and_output_weights": True}),
    "llama": (DECODER, ROPE),
    "mixture": (DECODER | EXPERTS, ROPE),
    "deepseek": (
        DECODER | EXPERTS | {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
        | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 24},
        ROPE,
    ),
}  # fmt: skip
"""Fields of TransformerConfig, and parameters of GPTModel."""
MODEL_PARAMETERS = {
    "position_embedding_type": ["learned_absolute", "rope", "none"], "rotary_percent": [0.5], "rotary_base": [500],
    "rope_scaling": [True], "rope_scaling_factor": [4.0], "seq_len_interpolation_factor": [2.0],
    "share_embeddings_and_output_weights": [False, True],
}  # fmt: skip
CHANGED = 1e-5


def main(file: Path) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    moe_utils.te_general_gemm = None
    types = typing.get_type_hints(TransformerConfig)
    found: dict[str, dict[str, list[tuple[str, float | None]]]] = {}
    for model, (config, parameters) in MODELS.items():
        weights, expected = compute_logits(model, config, parameters, None)
        assert compute_logits(model, config, parameters, weights)[1].equal(expected)
        found[model] = {}
        for field in dataclasses.fields(TransformerConfig):
            default = None if field.default is dataclasses.MISSING else field.default
            value = (SHARED | config).get(field.name, default)
            for other in other_values(types[field.name], value):
                change = measure(model, config | {field.name: other}, parameters, weights, expected)
                found[model].setdefault(field.name, []).append((to_text(other), change))
        for name, values in MODEL_PARAMETERS.items():
            for other in values:
                change = measure(model, config, parameters | {name: other}, weights, expected)
                found[model].setdefault(name, []).append((to_text(other), change))
    file.write_text(json.dumps({"arguments": vary_arguments()} | found))


def vary_arguments() -> dict[str, list[str]]:
    """Fields of TransformerConfig by the argument that changes them, for a GPT, a decoder and a mixture."""
    try:
        from megatron.training import argument_utils, arguments
    except ModuleNotFoundError:
        return {}
    convert = getattr(argument_utils, "core_transformer_config_from_args", None)
    convert = convert or arguments.core_transformer_config_from_args
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    sizes = {name: SHARED[name] for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")}
    gpu = ("apply_rope_fusion", "gradient_accumulation_fusion", "bias_swiglu_fusion")
    base = vars(parser.parse_args([])) | sizes | {"params_dtype": torch.float32} | dict.fromkeys(gpu, False)
    decoder = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "bias_gelu_fusion": False}
    mixture = {"num_experts": 8, "moe_router_topk": 4, "moe_router_score_function": "sigmoid"}

    def fields(values: dict[str, Any]) -> dict[str, str]:
        with contextlib.redirect_stdout(None):
            config = convert(argparse.Namespace(**values))
        return {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}

    found: dict[str, set[str]] = {}
    for model in ({}, decoder, decoder | mixture):
        expected = fields(base | model)
        for name, action in actions.items():
            value = (base | model)[name]
            kind = bool if action.nargs == 0 else action.type or str
            for other in action.choices or other_values(kind, value):
                with contextlib.suppress(Exception, SystemExit):
                    changed = fields(base | model | {name: other})
                    differ = {field for field in expected.keys() & changed if changed[field] != expected[field]}
                    found.setdefault(name, set()).update(differ)
    return {name: sorted(changed) for name, changed in found.items()}


def to_text(value: Any) -> Any:
    """A value as Megatron's arguments would have it, in JSON."""
    plain = isinstance(value, bool | int | float | str | list | None)
    return value if plain else getattr(value, "__name__", str(value))


def other_values(annotation: Any, value: Any) -> Iterator[Any]:
    """Values of a type that differ from one of it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from (choice for choice in inner if choice != value)
    elif inner and origin not in (list, tuple, dict) and not (origin and origin.__module__ == "collections.abc"):
        for each in inner:
            yield from other_values(each, value)
    elif annotation is bool:
        yield not value
    elif annotation in (int, float):
        number = value if type(value) in (int, float) else 0
        yield from (
            other for other in {annotation(2 * number + 1), annotation(max(number / 2, 0.5)), 2} if other != value
        )
    elif annotation is str:
        yield from (text for text in ("softmax", "sigmoid", "none", "a", "learnable", "dsa") if text != value)
    elif origin in (list, tuple) or annotation in (list, tuple):
        yield from ([1, 1], (1, 0), [1, 1, 1])
    elif inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        yield from (choice for choice in annotation if choice != value)
    elif callable(value) and value is not None:
        yield from (other for other in (torch.nn.functional.silu, torch.nn.functional.relu) if other != value)


def measure(
    model: str,
    config: dict[str, Any],
    parameters: dict[str, Any],
    weights: dict[str, torch.Tensor],
    expected: torch.Tensor,
) -> float | None:
    """The largest change of a logit; infinite if it is not a number, None if megatron-core refuses."""
    try:
        with contextlib.redirect_stdout(None):
            change = (compute_logits(model, config, parameters, weights)[1] - expected).abs().max().item()
    except Exception:  # of any kind: assertions, missing packages, shapes
        return None
    return change if change == change else float("inf")


def compute_logits(
    kind: str, config: dict[str, Any], parameters: dict[str, Any], weights: dict[str, torch.Tensor] | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The weights of a model, those given where names and shapes agree, and its logits."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    built = TransformerConfig(**(SHARED | config))
    spec = get_gpt_decoder_block_spec(
        built, use_transformer_engine=False, normalization=built.normalization, qk_l2_norm=built.qk_l2_norm
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": SEQUENCE, "parallel_output": False, **parameters}
    bert = kind == "bert"
    model = BertModel(built, 2, bert_layer_local_spec, **sizes) if bert else GPTModel(built, spec, **sizes)
    model.eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights is None:
                parameter += 0.1 * torch.randn(parameter.shape, generator=random)
            elif name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
        ids = torch.randint(VOCABULARY, (3, SEQUENCE), generator=torch.Generator().manual_seed(2))
        positions = torch.arange(SEQUENCE).expand(3, SEQUENCE)
        later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
        logits = model(ids, torch.ones_like(ids), ids % 2)[0] if bert else model(ids, positions, later)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, logits


if __name__ == "__main__":
    main(Path(sys.argv[1]))
