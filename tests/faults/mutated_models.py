"""Valid tokenizers and models of other libraries for `mutated_files.py`, and their contents as read."""

from __future__ import annotations

import json
import struct
import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mjax.config import ModelConfig
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError
from mjax.interop.convert import find_family, import_config
from mjax.interop.megatron.arguments import model_config as megatron_config
from mjax.interop.megatron.checkpoint import flatten_names, open_checkpoint
from mjax.interop.megatron.tensors import megatron_family, to_current_names
from mjax.interop.model_folder import read_object
from mjax.interop.tensor_files import Tensors, open_tensors
from mjax.interop.tokenizer_files import open_tokenizer
from mjax.interop.weights import match_tensors, tensor_layouts
from mjax.models.huggingface.family import Family, model_config
from tests.data.vocabularies import TEXTS
from tests.interop.folders import CONFIG, tensors_of
from tests.interop.megatron_files import draw, share
from tests.small import small_config

# --- Tokenizers -------------------------------------------------------------------------------------------------------


def said(tokenizer) -> tuple | None:
    """The ids of a few texts and the texts of a few ids."""
    if tokenizer is None:
        return None
    ids = tokenizer.encode_batch([*TEXTS[:2], "<|endoftext|> [SEP]</s>"])
    assert not any(tokenizer.eod in part for part in ids)
    return tokenizer.vocabulary, tokenizer.eod, ids, [tokenizer.decode(part) for part in ids]


def spec_reader(spec: str) -> Callable[[Path], tuple | None]:
    return lambda folder: said(load_tokenizer(spec.format(folder)))


# --- Models of others -------------------------------------------------------------------------------------------------


def _tensors(family: Family, tensors: Tensors, model: ModelConfig, source: str) -> dict:
    """Each tensor as it is read in the end: all of it, and the first rows of it."""
    values = {}
    found, expected = match_tensors(family, tensors, model, source), tensor_layouts(family, model)
    for known, name in sorted(found.items()):
        array = tensors[name][: expected[known].shape[0]]
        assert np.array_equal(tensors[name][:2], array[:2], equal_nan=True)
        if not np.isfinite(array).all():
            raise UsageError(f"{name} holds numbers that are not finite")
        values[name] = (array.shape, array.dtype.name, zlib.crc32(np.ascontiguousarray(array).view(np.uint8)))
    return values


def read_hf(folder: Path, allow_pickle: bool = False) -> dict:
    values = read_object(folder / "config.json")
    family = find_family(values, folder / "config.json")
    model = model_config(family, values, str(folder / "config.json"), 128)
    tokenizer = said(open_tokenizer(folder, None))
    tensors = open_tensors(folder, allow_pickle)
    import_config(model, str(folder), tensors)
    return {"tokenizer": tokenizer, "tensors": _tensors(family, tensors, model, str(folder))}


def expected_hf(files: dict[str, Any]) -> dict:
    """The tensors of safetensors files, read according to the format's description."""
    values = {}
    for name, content in files.items():
        if not name.endswith(".safetensors"):
            continue
        (size,) = struct.unpack_from("<Q", content)
        for tensor, said in json.loads(content[8 : 8 + size]).items():
            if tensor != "__metadata__":
                begin, end = said["data_offsets"]
                data, kind = content[8 + size + begin : 8 + size + end], said["dtype"]
                dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind]
                values[tensor] = (tuple(said["shape"]), dtype, zlib.crc32(data))
    return {"tokenizer": None, "tensors": values}


def write_pickled(folder: Path) -> None:
    import torch

    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: torch.tensor(array) for name, array in tensors_of(CONFIG).items()}
    torch.save(tensors, folder / "pytorch_model.bin")


def _megatron_model():
    return replace(
        small_config().model, layers=2, hidden=12, heads=3, sequence=6, vocabulary=29, vocabulary_multiple=32
    )


def _arguments() -> dict:
    shape = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "bias_gelu_fusion": True}
    return {"args": Namespace(**shape, padded_vocab_size=32), "iteration": 5}


def _as_torch(tree: Any) -> Any:
    import torch

    if isinstance(tree, dict):
        return {name: _as_torch(part) for name, part in tree.items()}
    return torch.tensor(np.ascontiguousarray(tree)) if isinstance(tree, np.ndarray) else tree


def write_megatron(folder: Path, legacy: bool = False) -> None:
    import torch

    model = _megatron_model()
    for rank in range(1 if legacy else 3):
        place = folder / "iter_0000005" / f"mp_rank_{rank:02}"
        place.mkdir(parents=True)
        held = _as_torch(share(draw(model), model, 2.0, rank, 1 if legacy else 3, padded=30))
        content = {"model": held, "checkpoint_version": 2.0, **_arguments()}
        content["args"].padded_vocab_size = 30
        torch.save(content, place / "model_optim_rng.pt", _use_new_zipfile_serialization=not legacy)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def write_distributed(folder: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    model = _megatron_model()
    place = folder / "iter_0000005"
    held = _as_torch(to_current_names(flatten_names(share(draw(model), model, 3.0, padded=32)), model.kind, "source"))
    checkpoint.save(held, checkpoint_id=str(place), no_dist=True)
    torch.save({**_arguments(), "checkpoint_version": 3.0}, place / "common.pt")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def read_megatron(folder: Path) -> dict:
    opened = open_checkpoint(folder)
    place = str(opened.folder)
    model = megatron_config(opened.arguments, opened.tensors, opened.architecture, place)
    model = replace(model, vocabulary=29, vocabulary_multiple=128)
    import_config(model, place, opened.tensors)
    family = megatron_family(model.kind, opened.version, getattr(model, "layernorm", "pre"), model.layers)
    return _tensors(family, opened.tensors, model, place)
