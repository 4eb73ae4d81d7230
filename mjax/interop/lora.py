"""Adapters as a folder of peft, and merged into the weights of their base.

    adapter_config.json          rank, alpha, and the modules that have an adapter
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r]

The modules are those of the base model's family (`models/huggingface/`): the name of a kernel's tensor without
`.weight`.
"""

from __future__ import annotations

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
from mjax.interop.tensor_files import SafetensorsFiles
from mjax.interop.weights import places
from mjax.lora.adapters import Linear, linear_layers, match_targets
from mjax.models.build import abstract_weights, build_model
from mjax.models.huggingface.family import Family
from mjax.parallel.layers import ColumnParallelLinear

Blocks = Callable[[str, int], Iterable[tuple[int, np.ndarray]]]
Weights = dict[str, np.ndarray]
"""By our names."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READ = {"r", "lora_alpha", "use_rslora", "lora_dropout"}
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
"""Settings of adapter_config.json that change nothing: the names of the tensors say which modules have adapters."""
PLAIN = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, False, "gaussian", "orthogonal"]}
"""Values of others that leave LoRA plain; some initializations change the base when peft loads it."""
OTHER_BASE = "give --base the run of the model that it was trained on"
UNUSED = [None, False, {}, []]
"""Such values of all other settings, known or not: anything else may change what is computed."""


@dataclass(frozen=True)
class Module:
    """An adapter of one module of the base model.

    Attributes:
      path: of our layer, such as `blocks.attention.query`.
      target: its name in `lora.targets`.
      layer: index in the stacked weights.
      part: index among the adapters of a column-parallel layer.
      columns: whether the layer is column-parallel.
    """

    path: str
    target: str
    layer: int
    part: int
    columns: bool

    def a(self, stacked: np.ndarray) -> np.ndarray:
        """[r, in], a view of our A."""
        one = stacked[self.layer]
        return one[:, self.part].T if self.columns else one.reshape(-1, one.shape[-1]).T

    def b(self, stacked: np.ndarray) -> np.ndarray:
        """[out, r], a view of our B."""
        one = stacked[self.layer, self.part] if self.columns else stacked[self.layer]
        return one.reshape(len(one), -1).T


@lru_cache(maxsize=8)
def adapter_layers(model: ModelConfig) -> dict[str, Linear]:
    """The layers with an adapter in the traced model, by dotted path."""
    layers = linear_layers(jax.eval_shape(lambda: build_model(0, model)))
    return {path: layer for path, _, layer in layers if layer.adapter is not None}


def adapter_modules(family: Family, model: ModelConfig) -> dict[str, Module]:
    """Return the adapter of each module of the base model, by its name.

    Raises:
      UsageError: peft has no adapter like one of `model`, whose base has one matrix for several.
    """
    layers, found = adapter_layers(model), {}
    for name, place in places(family, model.without_lora()).items():
        path, _, last = place.ours.rpartition(".")
        if last != "kernel" or path not in layers:
            continue
        layer = layers[path]
        columns = isinstance(layer, ColumnParallelLinear)
        targets, which = match_targets(path.rpartition(".")[2], layer), place.index[-1]
        if not family.transposed or (len(targets) > 1 and len(place.index) < 3):
            parts = " and ".join(targets)
            raise UsageError(f"{family.model} has {parts} in one matrix, as peft's adapters are not; add --merged")
        if not columns or len(targets) == 1:
            found[name.removesuffix(".weight")] = Module(path, targets[0], place.index[0], 0, columns)
        elif which in layer.adapter.parts:
            part = layer.adapter.parts.index(which)
            found[name.removesuffix(".weight")] = Module(path, targets[which], place.index[0], part, columns)
    return found


# --- Export -----------------------------------------------------------------------------------------------------------


def read_adapters(checkpoint: Path, model: ModelConfig) -> Weights:
    """The adapters in a checkpoint by name: a few of the model's bytes."""
    return {
        name: np.concatenate([block for _, block in read_in_blocks(checkpoint, f"model.{name}", len(shape))])
        for name, (shape, _) in abstract_weights(model).items()
        if ".adapter." in name
    }


def adapter_config(model: ModelConfig, modules: Mapping[str, Module], base: str) -> dict[str, Any]:
    """The contents of adapter_config.json; `base` is the name or folder of the base model."""
    # By last name where that means no other module, else in full: experts may have modules of the same name.
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


def peft_tensors(modules: Mapping[str, Module], adapters: Weights) -> Iterator[tuple[str, int, np.ndarray]]:
    """The tensors of a peft folder, as `weights.tensor_parts` gives those of a model."""
    for name, module in modules.items():
        yield f"{PREFIX}{name}.lora_A.weight", 0, module.a(adapters[f"{module.path}.adapter.a"])
        yield f"{PREFIX}{name}.lora_B.weight", 0, module.b(adapters[f"{module.path}.adapter.b"])


def merge_adapters(blocks: Blocks, model: ModelConfig, adapters: Weights) -> Blocks:
    """`blocks` of the base, as `weights.tensor_parts` takes them, with s A B added to each kernel that has adapters."""
    layers = adapter_layers(model)

    def with_adapters(name: str, rank: int) -> Iterator[tuple[int, np.ndarray]]:
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
                ours_a, ours_b = (a[:, :, i], b[:, i]) if columns else (a, b)
                ours_a, ours_b = ours_a.reshape(len(a), -1, a.shape[-1]), ours_b.reshape(*ours_b.shape[:2], -1)
                product = np.matmul(ours_a, ours_b)  # [l, in, out]
                kernel += (model.lora_scale * product).reshape(kernel.shape).astype(kernel.dtype)
            yield first, sums

    return with_adapters


# --- Import -----------------------------------------------------------------------------------------------------------


def add_adapters(folder: Path, base: ModelConfig, family: Family) -> tuple[ModelConfig, Weights]:
    """The model of a peft folder on a `base`, and its A and B by our names, float32.

    Raises:
      UsageError: the folder is not LoRA as mjax knows it, or not of this base.
    """
    fields = _read_config(folder)
    tensors = SafetensorsFiles({folder / WEIGHTS: []})
    named = {}
    for name in tensors.kinds:
        inside = re.fullmatch(rf"(?:{re.escape(PREFIX)})?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if inside is None:
            raise UsageError(f"{folder} has a tensor {name}, which is not part of LoRA's adapters; merge it with peft")
        named[inside[1], inside[2].lower()] = name
    model = replace(base, **fields)
    every = adapter_modules(family, model)
    if foreign := sorted({module for module, _ in named} - every.keys()):
        known = f"the linear layers of {base.title} are {join_shortened(sorted(every))}"
        raise UsageError(f"{folder} has an adapter of {foreign[0]}, and {known}; {OTHER_BASE}")
    targets = {every[module].target for module, _ in named}
    if targets != {module.target for module in every.values()}:
        model = replace(model, lora_targets=tuple(sorted(targets)))
    modules = adapter_modules(family, model)
    if missing := [pair for pair in product(modules, "ab") if pair not in named]:
        absent = f"{missing[0][0]}.lora_{missing[0][1].upper()}"
        raise UsageError(f"{folder} lacks {absent}; mjax has adapters in all layers or in none: merge with peft")
    shapes = abstract_weights(model)
    own = {name: np.zeros(shape, np.float32) for name, (shape, _) in shapes.items() if ".adapter." in name}
    for (name, module), matrix in product(modules.items(), "ab"):
        ours = getattr(module, matrix)(own[f"{module.path}.adapter.{matrix}"])
        theirs = tensors.read(named[name, matrix]).astype(np.float32)
        if theirs.shape != ours.shape:
            shapes = f"shape {theirs.shape}, and the base asks for {ours.shape}"
            raise UsageError(f"{folder}: {named[name, matrix]} has {shapes}; {OTHER_BASE}")
        ours[...] = theirs
    return model, own


def _read_config(folder: Path) -> dict[str, Any]:
    """The fields of a model with the adapters of a peft folder."""
    file = folder / CONFIG
    values = read_object(file)
    for name in sorted(values.keys() - READ - HARMLESS):
        if values[name] not in PLAIN.get(name, UNUSED):
            raise UsageError(f"{file}: {name} is {values[name]!r}, and mjax has plain LoRA only; merge it with peft")
    if not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder} has no {WEIGHTS}; give a folder written by save_pretrained of peft")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise UsageError(f"{file}: r is {rank!r} and lora_alpha {alpha!r}; restore the file")
    return {
        "lora_rank": rank,
        "lora_alpha": alpha * rank**0.5 if values.get("use_rslora") else float(alpha),
        "lora_dropout": float(values.get("lora_dropout") or 0.0),
    }
