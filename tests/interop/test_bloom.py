"""`mjax convert` of BLOOM."""

import json

import numpy as np
import pytest

from mjax import cli
from mjax.config import MeshConfig, read_config
from mjax.interop.bloom import BLOOM as FAMILY
from mjax.interop.convert import abstract_weights
from mjax.interop.settings import model_config
from mjax.interop.tensor_files import open_tensors
from mjax.interop.weights import find_tensors
from mjax.models.build import count_parameters
from tests.interop.folders import BLOOM, read_folder, tensors_of, write_folder
from tests.interop.test_convert import assert_same, weights_of
from tests.interop.whole_weights import read_weights
from tests.small import named

QKV, WORDS = "transformer.h.1.self_attention.query_key_value", "transformer.word_embeddings.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("source") / "bloom", BLOOM, tensors_of(BLOOM))


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """The run folder made of it; the tests below only read it."""
    run = tmp_path_factory.mktemp("runs") / "bloom"
    assert cli.main(["convert", "from-hf", str(source), str(run), "--tokenizer", "bytes"]) == 0
    return run


def test_every_tensor_finds_its_place(source, run):
    theirs, ours = read_folder(source), named(weights_of(run))
    np.testing.assert_array_equal(ours["embedding.table"][:257], theirs[WORDS])
    norm = theirs["transformer.word_embeddings_layernorm.weight"]
    np.testing.assert_array_equal(ours["embedding_norm.scale"], norm)
    assert "positions" not in ours
    for head in range(3):
        for part in range(3):  # rows are head by head, and of a head its queries, keys and values
            rows = slice(head * 12 + part * 4, head * 12 + part * 4 + 4)
            kernel, bias = (ours[f"blocks.attention.qkv.{what}"][1] for what in ("kernel", "bias"))
            np.testing.assert_array_equal(kernel[:, part, head], theirs[f"{QKV}.weight"][rows].T)
            np.testing.assert_array_equal(bias[part, head], theirs[f"{QKV}.bias"][rows])
    down = theirs["transformer.h.0.mlp.dense_4h_to_h.weight"]
    np.testing.assert_array_equal(ours["blocks.mlp.down.kernel"][0], down.T)


def test_what_is_exported_is_what_was_imported_bit_for_bit(source, run, tmp_path, capsys):
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out"), "--shard-size", "8KB"]) == 0
    assert "as BloomForCausalLM," in capsys.readouterr().out
    assert_same(read_folder(tmp_path / "out"), read_folder(source))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: exported[name] for name in BLOOM} == BLOOM
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert cli.main(["convert", "from-hf", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    assert_same(named(weights_of(tmp_path / "again")), named(weights_of(run)))


@pytest.mark.parametrize("mesh", [MeshConfig(model=3), MeshConfig(pipe=2, data=2, zero=3)], ids=str)
def test_tensors_are_read_straight_into_the_shards_of_a_mesh(source, run, mesh):
    config, tensors = read_config(run / "config.json"), open_tensors(source)
    names = find_tensors(FAMILY, tensors, config.model, "source")
    target = abstract_weights(config, mesh)
    found = read_weights(FAMILY, tensors, names, config.model, target)
    assert_same(named(found), named(weights_of(run)))


def test_a_published_folder_without_prefix_and_with_a_stored_output_layer_gives_the_same_weights(run, tmp_path):
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(BLOOM).items()}
    tensors["lm_head.weight"] = tensors["word_embeddings.weight"].copy()
    folder = write_folder(tmp_path / "in", BLOOM, tensors)
    assert cli.main(["convert", "from-hf", str(folder), str(tmp_path / "run")]) == 0
    assert_same(named(weights_of(tmp_path / "run")), named(weights_of(run)))


def test_the_config_of_bloom_560m_is_that_of_its_publication():
    published = {
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom",
        "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100,
        "pad_token_id": 3, "pretraining_tp": 1, "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0,
        "use_cache": True, "vocab_size": 250880,
    }  # fmt: skip
    model = model_config(FAMILY, published, "config.json", 128)
    assert (model.layers, model.hidden, model.heads, model.sequence) == (24, 1024, 16, 2048)
    assert count_parameters(model) == 559_214_592  # that of the model card


def test_a_second_name_without_a_value_is_no_contradiction():
    model = model_config(FAMILY, BLOOM | {"n_embed": None}, "config.json", 128)
    assert model == model_config(FAMILY, BLOOM, "config.json", 128)


MISTAKES = {
    "another residual": (
        {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True",
    ),
    "two hidden sizes": ({"n_embed": 24}, "n_embed is 24 and hidden_size 12"),
    "no finite epsilon": ({"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon is inf, which is not a number"),
    "an unknown setting": ({"use_rope": True}, "use_rope is True, which mjax does not know"),
    "an untied output layer": ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    "heads that do not divide": ({"n_head": 5}, "n_head 5 does not divide hidden_size 12"),
    "no length": ({"seq_length": 0}, "seq_length is 0, which is not a whole number above 0"),
    "fewer layers": ({"n_layer": 1}, "which is not part of BloomForCausalLM with 1 layers"),
    "more layers": ({"n_layer": 3}, "lacks the tensor transformer.h.2.input_layernorm.weight and 11 more"),
    "another width": ({"hidden_size": 24}, "has shape (12,), and config.json asks for (24,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bloom_that_mjax_does_not_understand_is_refused_by_name(name, tmp_path, capsys):
    change, expected = MISTAKES[name]
    write_folder(tmp_path / "in", BLOOM | change, tensors_of(BLOOM))
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1, "one line"
    assert not (tmp_path / "out").exists()


def test_an_output_layer_of_its_own_is_refused(tmp_path, capsys):
    tensors = tensors_of(BLOOM)
    write_folder(tmp_path / "in", BLOOM, tensors | {"lm_head.weight": tensors[WORDS] + 1})
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert f"lm_head.weight differs from {WORDS}" in capsys.readouterr().err
