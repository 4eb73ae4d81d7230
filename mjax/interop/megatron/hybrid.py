"""A `HybridModel` whose layers are those of a GPT, by the names of a GPT.

`HybridModel` (megatron/core/models/hybrid/hybrid_model.py of megatron-core 0.18; `MambaModel` until 0.17) makes a layer
of each module and states their order in a pattern:

    decoder.layers.0.self_attention…  decoder.layers.1.mlp…  decoder.layers.2.self_attention…     `*-*-`
    decoder.layers.0.self_attention…  decoder.layers.0.mlp…  decoder.layers.1.self_attention…     a GPT

`*` is attention, `-` an MLP, `E` experts, and `|` a boundary of pipeline stages.
"""

import re
from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.interop.megatron.checkpoint import MegatronCheckpoint
from mjax.interop.megatron.tensors import incomplete_error
from mjax.interop.tensor_files import Tensors

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments with the pattern: since 0.17, and before."""
OTHER_ARGUMENTS = ("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Arguments without effect if there is a pattern."""
OTHER_LAYERS = {
    "M": "Mamba", "G": "a gated delta net", "D": "DeepSeek's sparse attention", "+": "multi-latent attention",
    "/": "multi-token prediction",
}  # fmt: skip
LAYER_SPEC = re.compile(r"megatron\.core\.models\.(mamba|hybrid)\.\w+ (mamba|hybrid)(_inference)?_stack_spec")


def open_hybrid(checkpoint: MegatronCheckpoint) -> MegatronCheckpoint:
    """The checkpoint of a `HybridModel` as that of a GPT; another checkpoint is returned unchanged.

    Raises:
      UsageError: mjax does not support a kind of layer, or their order, or the tensors do not follow the pattern.
    """
    arguments = checkpoint.arguments or {}
    names = [name for name in PATTERNS if arguments.get(name)]
    if not names:
        return checkpoint
    pattern, source = arguments[names[0]], str(checkpoint.folder)
    sparse = _read_pattern(pattern, names[0], source)
    if arguments.get("use_rope_scaling"):
        problem = "use_rope_scaling is set, which HybridModel ignores"
        raise UsageError(f"{source}: {problem}; add --ignore use_rope_scaling")
    dropped = {*PATTERNS, *OTHER_ARGUMENTS}
    if LAYER_SPEC.fullmatch(" ".join(map(str, arguments.get("spec") or []))):
        dropped.add("spec")
    settings: dict[str, Any] = {name: value for name, value in arguments.items() if name not in dropped}
    tensors = _halve_layer_numbers(checkpoint.tensors, source)
    settings |= {"num_layers": len(sparse), **({"moe_layer_freq": sparse} if any(sparse) else {})}

    def open_slot(slot: str) -> Tensors:
        return _halve_layer_numbers(checkpoint.open_slot(slot), source)

    return replace(checkpoint, arguments=settings, tensors=tensors, open_slot=open_slot)


def _read_pattern(pattern: Any, name: str, source: str) -> list[int]:
    """1 for each of a GPT's layers that has experts, 0 for the others."""
    if isinstance(pattern, str) and re.fullmatch(r"(\*[-E])+", modules := pattern.replace("|", "")):
        return [int(module == "E") for module in modules[1::2]]
    unsupported = [f"{kind} is {word}, which mjax lacks" for kind, word in OTHER_LAYERS.items() if kind in str(pattern)]
    problem = unsupported[0] if unsupported else "mjax reads attention with MLP (*-) or experts (*E) in turn"
    raise UsageError(f"{source}: {name} is {pattern!r}: {problem}; convert another model")


def _halve_layer_numbers(tensors: Tensors, source: str) -> Tensors:
    """The tensors of a `HybridModel` with the layer numbers of a GPT: half of its own.

    Raises:
      UsageError: two modules of the same kind follow each other.
    """
    names: dict[str, str] = {}
    for stored in tensors:
        name = re.sub(r"(?<=\.layers\.)\d+", lambda match: str(int(match[0]) // 2), stored)
        if (earlier := names.setdefault(name, stored)) != stored:
            raise incomplete_error(f"{source} has both {earlier} and {stored}, which its pattern excludes")
    return {name: tensors[stored] for name, stored in names.items()}
