"""GPT2LMHeadModel of `transformers`, the form in which GPT-2 and its many relatives are published.

It is the model mjax trains (pre-LN, learned positions, tied embedding), under other names. GPT-2's `Conv1D` stores a
weight as [in, out], and so does mjax, therefore no tensor is transposed: layouts differ by a reshape.

    transformer.wte.weight                [v, h]      embedding.table [padded v, h]: zeros in the rows of the padding
    transformer.wpe.weight                [s, h]      positions
    transformer.h.3.attn.c_attn.weight    [h, 3 h]    blocks.attention.qkv.kernel [l, h, 3, n, d]: q | k | v, by heads
    transformer.h.3.attn.c_proj.weight    [h, h]      blocks.attention.out.kernel [l, n, d, h]
    …                                                 layers are stacked: the leading dim of blocks.* is the layer
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mjax.config import ModelConfig
from mjax.errors import UsageError
from mjax.interop.tensor_files import FLOATS, Tensors
from mjax.models.gpt import GPT
from mjax.names import leaf_name

ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."

# --- config.json ------------------------------------------------------------------------------------------------------

COUNTS = {
    "n_layer": ("layers", 12),
    "n_embd": ("hidden", 768),
    "n_head": ("heads", 12),
    "n_positions": ("sequence", 1024),
    "vocab_size": ("vocabulary", 50257),
}
"""Whole numbers: transformers' name → ours, and what holds where config.json leaves it out."""
NUMBERS = {
    "attn_pdrop": ("attention_dropout", 0.1),
    "resid_pdrop": ("hidden_dropout", 0.1),
    "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
    "initializer_range": ("init_std", 0.02),
}
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}
ONLY = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}
"""Settings that change what the model computes, and the only value of each that mjax knows."""
# Who wrote it and how it was stored; heads of other tasks; how to generate and what to return by default. And
# reorder_and_upcast_attn, about rounding only: mjax always takes the softmax in float32.
WITHOUT_EFFECT = {
    "_name_or_path", "_num_labels", "architectures", "bos_token_id", "chunk_size_feed_forward",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "is_decoder", "label2id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "temperature",
    "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
    "typical_p", "use_bfloat16", "use_cache",
}  # fmt: skip
MAPPED = {*COUNTS, *NUMBERS, *ONLY, "activation_function", "embd_pdrop", "n_ctx", "n_inner"}


def model_config(values: dict[str, Any], file: str, vocabulary_multiple: int) -> ModelConfig:
    """The model that a config.json describes; what it leaves out is as in `transformers`.

    Args:
      values: what is in the file.
      file: its name, for messages.
      vocabulary_multiple: as in `ModelConfig`.

    Raises:
      UsageError: something in it is unknown, or is not what mjax computes; the sentence names it.
    """
    for name, value in values.items():
        said = value not in (None, {}, [])
        if name in ONLY and value != ONLY[name]:
            raise UsageError(f"{file}: {name} is {value!r}, and mjax knows only {ONLY[name]!r}; convert another model")
        if said and name not in MAPPED | WITHOUT_EFFECT:
            raise UsageError(
                f"{file}: {name} is {value!r}, which mjax does not know; take it out if the model is the same without"
            )
    if values.get("model_type") is None:
        raise UsageError(f"{file} has no model_type; give the config.json of a model such as {ARCHITECTURE}")

    def number(name: str, default: float | None, whole: bool) -> Any:
        value = values.get(name, default)
        if type(value) not in ((int,) if whole else (int, float)) or value < (1 if whole else 0):
            kind = "a whole number above 0" if whole else "a number from 0 on"
            raise UsageError(f"{file}: {name} is {value!r}, which is not {kind}; restore the file")
        return value

    found = {ours: number(name, default, True) for name, (ours, default) in COUNTS.items()}
    found |= {ours: number(name, default, False) for name, (ours, default) in NUMBERS.items()}
    if values.get("n_inner") is not None:
        found["feed_forward"] = number("n_inner", None, True)
    if values.get("n_ctx", found["sequence"]) != found["sequence"]:
        raise UsageError(
            f"{file}: n_ctx is {values['n_ctx']!r} and n_positions {found['sequence']}; mjax knows them equal only"
        )
    embedding_dropout = number("embd_pdrop", 0.1, False)
    if embedding_dropout != found["hidden_dropout"]:
        raise UsageError(
            f"{file}: embd_pdrop is {embedding_dropout} and resid_pdrop {found['hidden_dropout']}, and mjax has one "
            "rate for both; make them equal (they matter in training only)"
        )
    activation = values.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise UsageError(
            f"{file}: activation_function is {activation!r}; mjax knows {', '.join(ACTIVATIONS)}: convert another model"
        )
    if found["hidden"] % found["heads"]:
        raise UsageError(f"{file}: n_head {found['heads']} does not divide n_embd {found['hidden']}; restore the file")
    return ModelConfig(**found, activation=ACTIVATIONS[activation], vocabulary_multiple=vocabulary_multiple)


def config_values(model: ModelConfig, dtype: str, eod: int | None) -> dict[str, Any]:
    """The config.json that `transformers` needs to open an export of `model`.

    Args:
      model: the model.
      dtype: type of the tensors, in torch's words.
      eod: id that ends documents, which GPT-2 begins them with too; None where there is no tokenizer.
    """
    ours = dataclasses.asdict(model)
    return {
        "architectures": [ARCHITECTURE],
        **ONLY,
        **{name: ours[field] for name, (field, _) in {**COUNTS, **NUMBERS}.items()},
        "n_ctx": model.sequence,
        "n_inner": model.feed_forward,
        "embd_pdrop": model.hidden_dropout,
        "activation_function": next(name for name, known in ACTIVATIONS.items() if known == model.activation),
        "bos_token_id": eod,
        "eos_token_id": eod,
        "torch_dtype": dtype,
    }


# --- Tensors ----------------------------------------------------------------------------------------------------------

OUTSIDE = {
    "embedding.table": "wte.weight",
    "positions": "wpe.weight",
    "final_norm.scale": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
}
"""Our name → transformers', behind the prefix `transformer.` that some files leave out."""
IN_LAYER = {
    "blocks.attention_norm.scale": "ln_1.weight",
    "blocks.attention_norm.bias": "ln_1.bias",
    "blocks.attention.qkv.kernel": "attn.c_attn.weight",
    "blocks.attention.qkv.bias": "attn.c_attn.bias",
    "blocks.attention.out.kernel": "attn.c_proj.weight",
    "blocks.attention.out.bias": "attn.c_proj.bias",
    "blocks.mlp_norm.scale": "ln_2.weight",
    "blocks.mlp_norm.bias": "ln_2.bias",
    "blocks.mlp.up.kernel": "mlp.c_fc.weight",
    "blocks.mlp.up.bias": "mlp.c_fc.bias",
    "blocks.mlp.down.kernel": "mlp.c_proj.weight",
    "blocks.mlp.down.bias": "mlp.c_proj.bias",
}
"""The same for what each layer has, behind `h.LAYER.`."""
OUTPUT = "lm_head.weight"
ROWS = 4096  # of an embedding that are read at once
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""The causal mask, which old versions stored with the weights."""


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, without the prefix, in the order of the file."""
    h, f = model.hidden, model.mlp_width
    layer = {
        "ln_1.weight": (h,),
        "ln_1.bias": (h,),
        "attn.c_attn.weight": (h, 3 * h),
        "attn.c_attn.bias": (3 * h,),
        "attn.c_proj.weight": (h, h),
        "attn.c_proj.bias": (h,),
        "ln_2.weight": (h,),
        "ln_2.bias": (h,),
        "mlp.c_fc.weight": (h, f),
        "mlp.c_fc.bias": (f,),
        "mlp.c_proj.weight": (f, h),
        "mlp.c_proj.bias": (h,),
    }
    layers = {f"h.{i}.{name}": shape for i in range(model.layers) for name, shape in layer.items()}
    return {
        "wte.weight": (model.vocabulary, h),
        "wpe.weight": (model.sequence, h),
        **layers,
        "ln_f.weight": (h,),
        "ln_f.bias": (h,),
    }


def find_tensors(tensors: Tensors, model: ModelConfig, source: str) -> dict[str, str]:
    """The name in the files of each tensor in `shapes`, after a look at what there is.

    Raises:
      UsageError: a tensor is missing, unknown, of another shape or of a type that holds no weights; or the output layer
        is not the embedding.
    """
    expected, found = shapes(model), {}
    for name, kind in tensors.kinds.items():
        short = name.removeprefix(PREFIX)
        if BUFFERS.fullmatch(short) or short == OUTPUT:
            continue
        if short not in expected:
            raise UsageError(
                f"{source} holds a tensor {name}, which {ARCHITECTURE} with {model.layers} layers has not; "
                "convert the model it was made for, or restore config.json"
            )
        if short in found:
            raise UsageError(f"{source} holds both {name} and {found[short]}; take out the one that is not the model's")
        if kind.dtype not in FLOATS:
            raise UsageError(f"{source}: {name} is of type {kind.dtype}; mjax reads {', '.join(FLOATS)}")
        if kind.shape != expected[short]:
            raise UsageError(
                f"{source}: {name} has shape {kind.shape}, and config.json asks for {expected[short]}; "
                "restore the one or the other"
            )
        found[short] = name
    if missing := [name for name in expected if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"{source} lacks the tensor {missing[0]}{more}; download the model again")
    if OUTPUT in tensors.kinds and not _equal(tensors, OUTPUT, found["wte.weight"]):
        raise UsageError(
            f"{source}: {OUTPUT} differs from {found['wte.weight']}, and mjax's output layer is the embedding; "
            "convert a model whose embeddings are tied"
        )
    return found


def _equal(tensors: Tensors, one: str, other: str) -> bool:
    """Whether two tensors hold the same numbers, read a few rows at a time."""
    shape = tensors.kinds[one].shape
    return shape == tensors.kinds[other].shape and all(
        np.array_equal(tensors.read(one, part), tensors.read(other, part))
        for part in (slice(start, start + ROWS) for start in range(0, shape[0], ROWS))
    )


def read_weights(
    tensors: Tensors, names: dict[str, str], model: ModelConfig, target: GPT, read: Callable[[int], None]
) -> GPT:
    """The weights, each straight into its shards, one tensor in memory beside them.

    Args:
      tensors: the files.
      names: what `find_tensors` found in them.
      model: the model.
      target: `GPT` of ShapeDtypeStructs with shardings; layers as [l, …], not cut into a pipeline's chunks.
      read: called with the bytes of tensors read since the last call.

    Raises:
      UsageError: a weight is not finite.
    """

    def tensor(short: str, rows: slice = slice(None)) -> np.ndarray:
        array = tensors.read(names[short], rows)
        read(array.nbytes)
        if not np.isfinite(array).all():
            raise UsageError(f"{names[short]} holds numbers that are not finite; download the model again")
        return array

    def leaf(path: tuple, target: jax.ShapeDtypeStruct) -> jax.Array:
        name = leaf_name(path)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            first, end, _ = index[0].indices(target.shape[0])
            if name in OUTSIDE:
                whole = np.zeros((end - first, *target.shape[1:]), target.dtype)
                there = tensors.kinds[names[OUTSIDE[name]]].shape[0]  # without the padding of the vocabulary
                for start in range(first, min(end, there), ROWS):  # an embedding is large: not twice in memory
                    rows = slice(start, min(start + ROWS, end, there))
                    whole[start - first : rows.stop - first] = tensor(OUTSIDE[name], rows)
                return whole[(slice(None), *index[1:])]
            layers = [f"h.{layer}.{IN_LAYER[name]}" for layer in range(first, end)]
            of_layer = [len(range(*part.indices(size))) for part, size in zip(index[1:], target.shape[1:], strict=True)]
            stacked = np.empty((len(layers), *of_layer), target.dtype)
            for place, layer in zip(stacked, layers, strict=True):
                place[...] = tensor(layer).reshape(target.shape[1:])[index[1:]]
            return stacked

        return jax.make_array_from_callback(target.shape, target.sharding, shard)

    return jax.tree_util.tree_map_with_path(leaf, target)


def weight_arrays(weights: GPT, model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of an export, in the order of `shapes`: views of `weights`, whose arrays are on the CPU.

    The rows that pad the vocabulary are left out.
    """
    leaves = {leaf_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
    places = {theirs: leaves[ours] for ours, theirs in OUTSIDE.items()}
    for ours, theirs in IN_LAYER.items():
        places |= {f"h.{layer}.{theirs}": array for layer, array in enumerate(leaves[ours])}
    for name, shape in shapes(model).items():
        rows = places[name] if name != "wte.weight" else places[name][: model.vocabulary]
        assert rows.size == math.prod(shape), (name, rows.shape, shape)
        yield PREFIX + name, rows.reshape(shape)
