"""GPT and BERT of Megatron, without torch: shares of ranks put together, names of every year, arguments, vocabulary."""

from dataclasses import replace

import numpy as np
import pytest

from mjax.commands import cli
from mjax.config import GPTConfig, read_config
from mjax.config.model import convert_kind
from mjax.errors import UsageError
from mjax.interop.megatron.arguments import DEFAULTS, SETTINGS, model_config
from mjax.interop.megatron.checkpoint import flatten_names
from mjax.interop.megatron.tensors import join_tensor_ranks, megatron_family, to_current_names
from tests.interop.megatron_files import draw, harmless_arguments, share
from tests.interop.whole_weights import assert_same, read_weights, weights_of

SMALL = GPTConfig(layers=2, hidden=24, heads=4, feed_forward=40, sequence=10, vocabulary=29, vocabulary_multiple=8)
BERT = convert_kind(SMALL, "bert")
WORDS, QKV = "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight"


def current_share(model, *args):
    """The tensors of a rank by current names."""
    return to_current_names(flatten_names(share(draw(model), model, *args)), model.kind, "source")


def pieces_of(model, version=3.0, ranks=1, stages=1):
    """The weights that each rank of each stage holds, by current names."""
    return [
        [current_share(model, version, rank, ranks, stage, stages, 32) for rank in range(ranks)]
        for stage in range(stages)
    ]


def read(tensors, model, version=3.0):
    names = megatron_family(model.kind, version, getattr(model, "layernorm", "pre"), model.layers)
    return read_weights(names, tensors, model, "source")


# --- Shares of ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "ranks", "stages"),
    [(0, 1, 1), (0, 4, 2), (1.0, 2, 1), (2.0, 4, 1), (3.0, 2, 2)],
)
@pytest.mark.parametrize("model", [SMALL, BERT], ids=["gpt", "bert"])
def test_shares_of_any_ranks_merge(model, version, ranks, stages):
    tensors = join_tensor_ranks(pieces_of(model, version, ranks, stages), version, "source")
    assert tensors[WORDS][29:].min() == 7.5, "Megatron's rows of padding"
    assert_same(read(tensors, model, version), draw(model))


def test_other_spellings_name_same_tensors():
    of_2020, new = flatten_names(share(draw(SMALL), SMALL, 3.0)), current_share(SMALL, 3.0)
    assert {WORDS, QKV, "decoder.layers.1.mlp.linear_fc1.weight", "decoder.final_layernorm.bias"} < new.keys()
    of_2021 = [name.replace("transformer.", "encoder.").replace(".attention.", ".self_attention.") for name in of_2020]
    fused = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}  # by TransformerEngine
    fused |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    of_engine = list(new)
    for name, inside in fused.items():
        of_engine = [each.replace(name, inside) for each in of_engine]
    assert len({*of_2020, *of_2021, *new, *of_engine}) > 2 * len(new)
    current = set(new)
    for names in (of_2020, of_2021, of_engine):
        assert to_current_names(dict.fromkeys(names, 0), "gpt", "source").keys() == current


@pytest.mark.parametrize("rows", [slice(0, 5), slice(6, 20), slice(30, 40)], ids=str)
def test_rows_of_split_embedding_match_whole(rows):
    tensors = join_tensor_ranks(pieces_of(SMALL, ranks=4), 3.0, "source")
    whole = tensors[WORDS][:]
    assert whole.shape == (32, 24)
    np.testing.assert_array_equal(tensors[WORDS][rows], whole[rows])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pieces: pieces[0][1].pop(QKV), f"only one holds {QKV}"),
        (lambda pieces: pieces[0][1].update({QKV: np.ones((36, 20), np.float32)}), "on tensor rank 0 and float32"),
        (lambda pieces: pieces.append(pieces[0]), "two stages of the pipeline hold decoder.final_layernorm.weight"),
        (
            lambda pieces: [each.update({"output_layer.weight": each[WORDS] + 1}) for each in pieces[0]],
            f"output_layer.weight differs from {WORDS}",
        ),
    ],
    ids=["missing", "shape", "twice", "untied"],
)
def test_shares_that_do_not_fit_are_refused(change, words):
    pieces = pieces_of(SMALL, ranks=2)
    change(pieces)
    with pytest.raises(UsageError) as refused:
        read(join_tensor_ranks(pieces, 3.0, "source"), SMALL)
    assert words in str(refused.value)


# --- Files of ranks ---------------------------------------------------------------------------------------------------


def convert(folder, *flags):
    return cli.main(["convert", "from-megatron", str(folder / "in"), str(folder / "run"), *flags])


def test_interleaved_chunks_are_ordered(write_rank, tmp_path):
    """Two stages with eleven chunks each: the layers go from stage to stage, eleven times."""
    model = replace(SMALL, layers=22)
    weights = draw(model)
    for stage in range(2):
        parts = {chunk: share(weights, model, 3.0, 0, 1, 2 * chunk + stage, 22, 32) for chunk in range(11)}
        chunks = {f"model{chunk}": part for chunk, part in parts.items()}
        write_rank(tmp_path / "in", f"00_{stage:03}", **chunks)
    assert convert(tmp_path, "--heads", "4", "--vocabulary", "29", "--vocabulary-multiple", "8") == 0
    assert_same(weights_of(tmp_path / "run"), weights)


@pytest.mark.parametrize(
    ("version", "names", "origin"), [(0, share, "from before megatron-core"), (3, current_share, "of megatron-core")]
)
def test_missing_version_follows_names(version, names, origin, write_rank, tmp_path, capsys):
    weights = draw(SMALL)
    model = share(weights, SMALL, version) if names is share else current_share(SMALL, version)
    write_rank(tmp_path / "in", "00", model=model, checkpoint_version=None)
    assert convert(tmp_path, "--heads", "4", "--vocabulary-multiple", "8") == 0
    line = f"no checkpoint_version in it: assumed {version}, because its names are {origin}\n"
    assert line in capsys.readouterr().out
    assert_same(weights_of(tmp_path / "run"), weights)


def test_post_layernorm_bert_is_read_by_old_names(write_rank, tmp_path, capsys):
    """The layers equal the original's, cut elsewhere; megatron-core ignores the argument."""
    model = replace(BERT, layernorm="post", layers=3)
    arguments = {"num_attention_heads": 4, "apply_residual_connection_post_layernorm": True}
    write_rank(tmp_path / "in", "00", model=current_share(model, 3.0), args=arguments)
    assert convert(tmp_path) == 2
    assert "post_layernorm is set, which megatron-core ignores" in capsys.readouterr().err
    write_rank(tmp_path / "in", "00", model=share(draw(model), model, 3.0), args=arguments)
    assert convert(tmp_path, "--vocabulary-multiple", "8") == 0
    assert_same(weights_of(tmp_path / "run"), draw(model))


def test_files_of_several_steps_are_refused(write_rank, tmp_path, capsys):
    for rank in range(2):
        write_rank(tmp_path / "in", f"{rank:02}", model=share(draw(SMALL), SMALL, 3.0, rank, 2), iteration=5 + rank)
    assert convert(tmp_path, "--heads", "4") == 2
    assert "iteration is 6, and 5 in" in capsys.readouterr().err


ROTARY = {name: tensor for name, tensor in current_share(SMALL, 3.0).items() if "position" not in name}
T5 = {f"{trunk}.layers.0.mlp.linear_fc1.weight": np.ones((4, 4)) for trunk in ("encoder", "decoder")}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ROTARY, "neither args nor embedding.position_embeddings.weight: its positions are rotary or missing"),
        (T5 | {"lm_head.bias": np.ones(4)}, "holds an encoder and a decoder, as of T5, which mjax does not support"),
        ({f"language_model.{name}": tensor for name, tensor in T5.items()}, "an encoder and a decoder, as of T5"),
    ],
    ids=["rotary without args", "T5", "T5 of 2020"],
)
def test_unreadable_architecture_is_refused_by_name(model, words, write_rank, tmp_path, capsys):
    write_rank(tmp_path / "in", "00", model=model)
    assert convert(tmp_path, "--heads", "4") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "padded", "flags", "vocabulary", "words"),
    [
        (1, 384, "--tokenizer bytes", 257, "384 rows, 127 of padding left out"),
        (2, 512, "--tokenizer bytes", 257, "512 rows, 255 of padding left out"),
        (1, 384, "", 384, "384 rows, none of them padding"),
        (1, 640, "--tokenizer bytes", None, "640 rows, more than padding to a multiple of 128 explains"),
        (1, 640, "--tokenizer bytes --vocabulary 257", 257, "640 rows, 383 of padding left out"),
        (1, 640, "--vocabulary 641", None, "--vocabulary is 641; the embedding has 640 rows"),
    ],
)
def test_tokenizer_tells_padding_of_vocabulary(write_rank, ranks, padded, flags, vocabulary, words, tmp_path, capsys):
    model = replace(SMALL, vocabulary=257)
    for rank in range(ranks):
        write_rank(tmp_path / "in", f"{rank:02}", model=share(draw(model), model, 3.0, rank, ranks, padded=padded))
    assert convert(tmp_path, "--heads", "4", *flags.split()) == (0 if vocabulary else 2)
    printed = capsys.readouterr()
    assert words in (printed.out if vocabulary else printed.err)
    if vocabulary:
        assert read_config(tmp_path / "run" / "config.json").model.vocabulary == vocabulary


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "attention_dropout 0.1, init_method_std 0.02, norm_epsilon 1e-05, bias_gelu_fusion False"),
        ({"layernorm_epsilon": 1e-6, "openai_gelu": True}, "attention_dropout 0.1, init_method_std 0.02"),
        (dict.fromkeys(DEFAULTS, 0.5), ""),
    ],
    ids=["none", "older", "all"],
)
def test_assumed_arguments_are_printed(arguments, words, write_rank, tmp_path, capsys):
    write_rank(tmp_path / "in", "00", model=share(draw(SMALL), SMALL, 3.0), args={"num_attention_heads": 4} | arguments)
    assert convert(tmp_path, "--vocabulary-multiple", "8") == 0
    printed = capsys.readouterr().out
    assert (f"{words}\n" in printed) if words else ("missing" not in printed)


# --- The arguments of the run -----------------------------------------------------------------------------------------

TENSORS = join_tensor_ranks(pieces_of(SMALL), 3.0, "source")
ARGUMENTS = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40, "max_position_embeddings": 10,
    "padded_vocab_size": 32, "kv_channels": 6, "hidden_dropout": 0.1, "attention_dropout": 0.2, "init_method_std": 0.01,
    "layernorm_epsilon": 1e-6, "bias_gelu_fusion": True, "openai_gelu": False, "group_query_attention": False,
    "num_experts": None, "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_harmless_arguments_change_no_model(kind):
    tensors = join_tensor_ranks(pieces_of(convert_kind(SMALL, kind)), 3.0, "source")
    defaults = {name: setting.defaults[-1] for name, setting in SETTINGS.items() if setting.kind != "reproduced"}
    given = defaults | harmless_arguments() | ARGUMENTS
    assert model_config(given, tensors, kind, "source") == model_config(ARGUMENTS, tensors, kind, "source")


def test_ignored_arguments_are_left_out(write_rank, tmp_path, capsys):
    arguments = {"num_attention_heads": 4, "new": 1, "newer": "a"}
    write_rank(tmp_path / "in", "00", model=share(draw(SMALL), SMALL, 3.0), args=arguments)
    assert convert(tmp_path, "--vocabulary-multiple", "8") == 2
    assert "convert another model, or add --ignore new,newer if the model computes" in capsys.readouterr().err
    assert convert(tmp_path, "--ignore", "new,newest") == 2
    assert "has no argument newest" in capsys.readouterr().err
    assert convert(tmp_path, "--vocabulary-multiple", "8", "--ignore", "new,newer") == 0


def test_arguments_and_shapes_describe_model():
    assert model_config(ARGUMENTS, TENSORS, "gpt", "source") == GPTConfig(
        layers=2, hidden=24, heads=4, feed_forward=40, sequence=10, max_position_embeddings=10, vocabulary=32,
        hidden_dropout=0.1, attention_dropout=0.2, init_std=0.01, layernorm_epsilon=1e-6, activation="gelu_tanh",
    )  # fmt: skip
    found = model_config(None, TENSORS, "gpt", "source", heads=3)
    assert (found.heads, found.activation, found.layernorm_epsilon) == (3, "gelu_tanh", 1e-5)


@pytest.mark.parametrize(
    ("kind", "arguments", "old_names", "mlp", "head"),
    [
        ("bert", {"bias_gelu_fusion": True}, False, "gelu_tanh", "gelu_erf"),
        ("bert", {"bias_gelu_fusion": True, "openai_gelu": True}, True, "gelu_tanh", None),
        ("bert", {"bias_gelu_fusion": True, "openai_gelu": True}, False, "gelu_tanh", "gelu_erf"),
        ("bert", {"bias_gelu_fusion": False, "openai_gelu": True}, False, "gelu_erf", None),
        ("bert", None, True, "gelu_erf", None),
        ("gpt", {}, False, "gelu_erf", None),
        ("gpt", {"openai_gelu": True}, True, "gelu_tanh", None),
        ("gpt", {"openai_gelu": True}, False, "gelu_erf", None),
    ],
)
def test_activation_matches_kernels_of_megatron(kind, arguments, old_names, mlp, head):
    """megatron-core reads no openai_gelu, and BertLMHead has erf (core/models/bert/bert_lm_head.py, 0.16 to 0.19)."""
    tensors = join_tensor_ranks(pieces_of(convert_kind(SMALL, kind)), 3.0, "source")
    found = model_config(arguments, tensors, kind, "source", heads=4, old_names=old_names)
    assert (found.activation, getattr(found, "mlm_activation", None)) == (mlp, head)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "rope"}, "position_embedding_type is 'rope', but mjax supports only"),
        ({"num_experts": 8}, "num_experts is 8, but mjax supports only None"),
        ({"add_bias_linear": False}, "add_bias_linear is False"),
        ({"bias_gelu_fusion": True, "onnx_safe": True}, "bias_gelu_fusion and onnx_safe are both set"),
        ({"apply_residual_connection_post_layernorm": True}, "a GPT has no such form"),
        ({"num_attention_heads": None}, "add --heads, 16 for the published 345M"),
        ({"num_layers": 24}, "num_layers is 24 among the arguments, and 2 by the tensors"),
        ({"swiglu": True}, "swiglu is True, but mjax supports only False"),
        ({"moe_layers": 2, "new": 1, "newer": "a"}, "new is 1 and newer is 'a', but mjax supports only None"),
    ],
    ids=str,
)
def test_unsupported_arguments_are_refused_by_name(change, words):
    with pytest.raises(UsageError) as refused:
        model_config(ARGUMENTS | change, TENSORS, "gpt", "source", old_names=True)
    assert words in str(refused.value)
