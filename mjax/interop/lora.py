"""LoRA adapters as a folder of peft, and merged into the weights of their base.

    adapter_config.json          rank, alpha, and the modules that have an adapter
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r]

A module is the tensor name of a kernel in the base model's family (`models/huggingface/`) without `.weight`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mjax.checkpoint.arrays import read_in_blocks
from mjax.config.model import ModelConfig
from mjax.errors import UsageError, join_shortened
from mjax.interop.model_folder import read_object
from mjax.interop.tensor_files import open_safetensors
from mjax.interop.weights import tensor_layouts
from mjax.lora.adapters import Linear, linear_layers, match_targets
from mjax.models.build import abstract_weights, build_model
from mjax.models.huggingface.family import Family
from mjax.parallel.layers import ColumnParallelLinear

BlockReader = Callable[[str, int], Iterable[tuple[int, np.ndarray]]]
NamedArrays = dict[str, np.ndarray]  # weights by name
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
READ_SETTINGS = {"r", "lora_alpha", "use_rslora", "lora_dropout"}
IGNORED_SETTINGS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
"""Settings of adapter_config.json that change nothing; the tensor names determine the modules with adapters."""
PLAIN_VALUES = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, False, "gaussian", "orthogonal"]}
"""Allowed values of other settings; some initializations change the base when peft loads it."""
WRONG_BASE = "give --base the run of the model that it was trained on"
UNSET_VALUES = [None, False, {}, []]  # allowed values of all remaining settings, which may change the model otherwise


@dataclass(frozen=True)
class AdapterModule:
    """An adapter of one module of the base model.

    Attributes:
      path: of the layer in mjax, such as `blocks.attention.query`.
      target: its name in `lora.targets`.
      layer: index in the stacked weights.
      part: index among the adapters of a column-parallel layer.
      columns: True if the layer is column-parallel.
    """

    path: str
    target: str
    layer: int
    part: int
    columns: bool

    def a(self, stacked: np.ndarray) -> np.ndarray:
        """lora_A, [r, in], a view of the stacked A."""
        a = stacked[self.layer]
        return a[:, self.part].T if self.columns else a.reshape(-1, a.shape[-1]).T

    def b(self, stacked: np.ndarray) -> np.ndarray:
        """lora_B, [out, r], a view of the stacked B."""
        b = stacked[self.layer, self.part] if self.columns else stacked[self.layer]
        return b.reshape(len(b), -1).T


@lru_cache(maxsize=8)
def adapter_layers(model: ModelConfig) -> dict[str, Linear]:
    """The layers with an adapter in the traced model, by dotted path."""
    layers = linear_layers(jax.eval_shape(lambda: build_model(0, model)))
    return {path: layer for path, _, layer in layers if layer.adapter is not None}


def adapter_modules(family: Family, model: ModelConfig) -> dict[str, AdapterModule]:
    """The adapter of each module of the base model, by its name in peft.

    Raises:
      UsageError: the base has one matrix for several modules, which peft cannot adapt separately.
    """
    layers, modules = adapter_layers(model), {}
    for name, layout in tensor_layouts(family, model.without_lora()).items():
        path, _, last = layout.weight.rpartition(".")
        if last != "kernel" or path not in layers:
            continue
        layer, module = layers[path], name.removesuffix(".weight")
        columns = isinstance(layer, ColumnParallelLinear)
        targets, part = match_targets(path.rpartition(".")[2], layer), layout.index[-1]
        if not family.transposed or (len(targets) > 1 and len(layout.index) < 3):
            parts = " and ".join(targets)
            raise UsageError(f"{family.model} has {parts} in one matrix, as peft's adapters are not; add --merged")
        if not columns or len(targets) == 1:
            modules[module] = AdapterModule(path, targets[0], layout.index[0], 0, columns)
        elif part in (parts := layer.adapter.parts):
            modules[module] = AdapterModule(path, targets[part], layout.index[0], parts.index(part), columns)
    return modules


# --- Export -----------------------------------------------------------------------------------------------------------


def read_adapters(checkpoint: Path, model: ModelConfig) -> NamedArrays:
    """Read the adapters in a checkpoint, and no other weights."""
    return {
        name: np.concatenate([block for _, block in read_in_blocks(checkpoint, f"model.{name}", len(shape))])
        for name, (shape, _) in abstract_weights(model).items()
        if ".adapter." in name
    }


def adapter_config(model: ModelConfig, modules: Mapping[str, AdapterModule], base: str) -> dict[str, Any]:
    """The contents of adapter_config.json; `base` is the name or folder of the base model."""
    # Last names if unique, else full names: modules of experts may have the same last name.
    names = modules if model.experts else {name.rpartition(".")[2] for name in modules}
    alpha = model.adapter_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": sorted(names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def peft_tensors(modules: Mapping[str, AdapterModule], adapters: NamedArrays) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield the tensors of a peft folder, in the format of `weights.iterate_tensors`."""
    for name, module in modules.items():
        yield f"{PEFT_PREFIX}{name}.lora_A.weight", 0, module.a(adapters[f"{module.path}.adapter.a"])
        yield f"{PEFT_PREFIX}{name}.lora_B.weight", 0, module.b(adapters[f"{module.path}.adapter.b"])


def merge_adapters(blocks: BlockReader, model: ModelConfig, adapters: NamedArrays) -> BlockReader:
    """Add s A B to the `blocks` of each kernel with adapters, for `weights.iterate_tensors`."""
    layers = adapter_layers(model)

    def merge_blocks(name: str, rank: int) -> Iterator[tuple[int, np.ndarray]]:
        path = name.removeprefix("model.").removesuffix(".kernel")
        for first, block in blocks(name, rank):
            if not name.endswith(".kernel") or path not in layers:
                yield first, block
                continue
            a, b = (adapters[f"{path}.adapter.{matrix}"][first : first + len(block)] for matrix in "ab")
            layer, sums = layers[path], block.copy()
            columns = isinstance(layer, ColumnParallelLinear)
            for i, part in enumerate(layer.adapter.parts if columns else (0,)):
                kernel = sums[:, :, part] if columns and layer.split else sums
                part_a, part_b = (a[:, :, i], b[:, i]) if columns else (a, b)
                delta = part_a.reshape(len(a), -1, a.shape[-1]) @ part_b.reshape(*part_b.shape[:2], -1)  # [l, in, out]
                kernel += (model.lora_scale * delta).reshape(kernel.shape).astype(kernel.dtype)
            yield first, sums

    return merge_blocks


# --- Import -----------------------------------------------------------------------------------------------------------


def load_adapters(folder: Path, base: ModelConfig, family: Family) -> tuple[ModelConfig, NamedArrays]:
    """The model of a peft folder on a `base`, and its adapters by name in mjax, float32.

    Raises:
      UsageError: the folder has LoRA that mjax does not support, or of another base.
    """
    fields = _read_lora_fields(folder)
    tensors = open_safetensors({folder / ADAPTER_WEIGHTS: []})
    named = {}
    for name in tensors:
        match = re.fullmatch(rf"(?:{re.escape(PEFT_PREFIX)})?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if match is None:
            raise UsageError(f"{folder} has a tensor {name}, which is not part of LoRA's adapters; merge it with peft")
        named[match[1], match[2].lower()] = name
    model = replace(base, **fields)
    all_modules = adapter_modules(family, model)
    if unknown := sorted({module for module, _ in named} - all_modules.keys()):
        known = f"the linear layers of {base.title} are {join_shortened(sorted(all_modules))}"
        raise UsageError(f"{folder} has an adapter of {unknown[0]}, and {known}; {WRONG_BASE}")
    targets = {all_modules[module].target for module, _ in named}
    if targets != {module.target for module in all_modules.values()}:
        model = replace(model, lora_targets=tuple(sorted(targets)))
    modules = adapter_modules(family, model)
    if missing := [pair for pair in product(modules, "ab") if pair not in named]:
        absent = f"{missing[0][0]}.lora_{missing[0][1].upper()}"
        raise UsageError(f"{folder} lacks {absent}; mjax has adapters in all layers or in none: merge with peft")
    shapes = abstract_weights(model)
    arrays = {name: np.zeros(shape, np.float32) for name, (shape, _) in shapes.items() if ".adapter." in name}
    for (name, module), matrix in product(modules.items(), "ab"):
        view = getattr(module, matrix)(arrays[f"{module.path}.adapter.{matrix}"])
        tensor = tensors[named[name, matrix]][:].astype(np.float32)
        if tensor.shape != view.shape:
            shapes = f"shape {tensor.shape}, and the base asks for {view.shape}"
            raise UsageError(f"{folder}: {named[name, matrix]} has {shapes}; {WRONG_BASE}")
        view[...] = tensor
    return model, arrays


def _read_lora_fields(folder: Path) -> dict[str, Any]:
    """Read the LoRA fields of the model config from a peft folder."""
    file = folder / ADAPTER_CONFIG
    values = read_object(file)
    for name in sorted(values.keys() - READ_SETTINGS - IGNORED_SETTINGS):
        if values[name] not in PLAIN_VALUES.get(name, UNSET_VALUES):
            raise UsageError(f"{file}: {name} is {values[name]!r}, and mjax has plain LoRA only; merge it with peft")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{folder} has no {ADAPTER_WEIGHTS}; give a folder written by save_pretrained of peft")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise UsageError(f"{file}: r is {rank!r} and lora_alpha {alpha!r}; restore the file")
    alpha, dropout = alpha * rank**0.5 if values.get("use_rslora") else float(alpha), values.get("lora_dropout")
    return {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": float(dropout or 0.0)}
