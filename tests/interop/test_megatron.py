"""What is in a checkpoint of Megatron, without torch: shares put together, names of every year, arguments."""

from dataclasses import replace

import numpy as np
import pytest

from mjax import cli
from mjax.config import Config, GPTConfig, save_config
from mjax.errors import UsageError
from mjax.interop.convert import abstract_weights
from mjax.interop.megatron.arguments import model_config
from mjax.interop.megatron.names import family_of, flat, kind_of, renamed
from mjax.interop.megatron.ranks import RankTensors
from mjax.interop.weights import find_tensors
from mjax.model_config import as_kind
from tests.interop.megatron_files import draw, share
from tests.interop.whole_weights import read_weights
from tests.small import named

SMALL = GPTConfig(layers=2, hidden=24, heads=4, feed_forward=40, sequence=10, vocabulary=29, vocabulary_multiple=8)
BERT = as_kind(SMALL, "bert")


def tensors_of(model, version, ranks=1, stages=1, padded=32, nested=True):
    """`RankTensors` of random weights, and the weights."""
    weights = draw(model)
    pieces = [
        [
            renamed(
                flat(share(weights, model, version, rank, ranks, stage, stages, padded, nested)), model.kind, "source"
            )
            for rank in range(ranks)
        ]
        for stage in range(stages)
    ]
    return RankTensors(pieces, version, "source"), weights


def read(tensors, model, version):
    names = family_of(model.kind, version, getattr(model, "layernorm", "pre"), model.layers)
    found = find_tensors(names, tensors, model, "source")
    target = abstract_weights(Config(model=model))
    return named(read_weights(names, tensors, found, model, target))


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


# --- Format torch: shares of ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("model", [SMALL, BERT], ids=["gpt", "bert"])
def test_shares_of_any_ranks_and_version_are_the_model_again(model, version, ranks, stages):
    tensors, weights = tensors_of(model, version, ranks, stages)
    assert_same(read(tensors, model, version), weights)


@pytest.mark.parametrize("model", [SMALL, BERT], ids=["gpt", "bert"])
def test_the_names_of_megatron_core_are_understood_too(model):
    tensors, weights = tensors_of(model, 3.0, 2, 2, nested=False)
    assert_same(read(tensors, model, 3.0), weights)


def test_a_bert_with_layernorm_behind_the_sums_is_the_original_with_its_layers_cut_elsewhere():
    model = replace(BERT, layernorm="post", layers=3)
    tensors, weights = tensors_of(model, 2.0)
    assert_same(read(tensors, model, 2.0), weights)


@pytest.mark.parametrize("version", [0, 1.0])
def test_orders_of_queries_keys_and_values_are_three(version):
    tensors, weights = tensors_of(SMALL, version, 2)
    assert not np.array_equal(
        read(tensors, SMALL, 2.0)["blocks.attention.qkv.kernel"], weights["blocks.attention.qkv.kernel"]
    )


def test_later_spellings_of_old_names_are_the_same_tensors():
    old, weights = tensors_of(SMALL, 2.0)
    share_of_2021 = {
        name.replace("transformer.", "encoder.").replace(".attention.", ".self_attention."): array
        for name, array in flat(share(weights, SMALL, 2.0, padded=32)).items()
    }
    later = RankTensors([[renamed(share_of_2021, "gpt", "source")]], 2.0, "source")
    assert later.kinds == old.kinds


def test_a_layernorm_inside_the_linear_layer_behind_it_is_found():
    plain, weights = tensors_of(SMALL, 3.0, nested=False)
    fused = {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): array
        for name, array in share(weights, SMALL, 3.0, padded=32, nested=False).items()
    }
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in fused
    assert renamed(fused, "gpt", "source").keys() == plain.kinds.keys()


@pytest.mark.parametrize("rows", [slice(0, 5), slice(6, 20), slice(15, 17), slice(30, 40), slice(None)], ids=str)
def test_some_rows_of_a_split_embedding_are_those_of_the_whole(rows):
    tensors, _ = tensors_of(SMALL, 3.0, 4)
    whole = tensors.read("embedding.word_embeddings.weight")
    assert whole.shape == (32, 24)
    np.testing.assert_array_equal(tensors.read("embedding.word_embeddings.weight", rows), whole[rows])


def test_rows_that_pad_the_vocabulary_are_left_out():
    tensors, weights = tensors_of(BERT, 3.0, 2)
    assert tensors.read("embedding.word_embeddings.weight")[29:].min() == 7.5
    ours = read(tensors, BERT, 3.0)
    for name in ("embedding.table", "mlm.bias"):
        np.testing.assert_array_equal(ours[name][:29], weights[name][:29])
        assert not ours[name][29:].any(), "rows of zeros pad it"


def _pieces(change, ranks=2, stages=1):
    weights = draw(SMALL)
    pieces = [
        [
            renamed(flat(share(weights, SMALL, 3.0, rank, ranks, stage, stages, 32)), "gpt", "source")
            for rank in range(ranks)
        ]
        for stage in range(stages)
    ]
    change(pieces)
    return RankTensors(pieces, 3.0, "source")


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda pieces: pieces[0][1].pop(QKV), f"only one holds {QKV}"),
        (lambda pieces: pieces[0][1].update({QKV: np.ones((36, 20), np.float32)}), "on tensor rank 0 and float32"),
        (lambda pieces: pieces[0][1].update({QKV: np.ones((36, 24), np.float16)}), "and float16 (36, 24) on 1"),
        (lambda pieces: pieces.append(pieces[0]), "two stages of the pipeline hold decoder.final_layernorm.weight"),
    ],
    ids=["missing", "shape", "type", "twice"],
)
def test_shares_that_do_not_fit_together_are_refused(change, expected):
    with pytest.raises(UsageError) as refused:
        _pieces(change)
    assert expected in str(refused.value)


def test_a_tensor_under_two_names_is_refused():
    with pytest.raises(UsageError, match=r"has both language_model.pooler.dense.bias and pooler.dense.bias"):
        renamed({"language_model.pooler.dense.bias": 0, "pooler.dense.bias": 0}, "bert", "source")


def test_an_output_layer_of_its_own_is_refused():
    tensors, _ = tensors_of(SMALL, 3.0, 1, 2)
    tensors._shares["output_layer.weight"] = [tensors.read("output_layer.weight") + 1]
    with pytest.raises(UsageError, match=r"output_layer.weight differs from embedding.word_embeddings.weight"):
        read(tensors, SMALL, 3.0)


# --- The arguments of the run -----------------------------------------------------------------------------------------

ARGUMENTS = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40, "max_position_embeddings": 10,
    "padded_vocab_size": 32, "kv_channels": 6, "hidden_dropout": 0.1, "attention_dropout": 0.2, "init_method_std": 0.01,
    "layernorm_epsilon": 1e-6, "bias_gelu_fusion": True, "openai_gelu": False, "group_query_attention": False,
    "num_experts": None, "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
}  # fmt: skip


def test_arguments_and_shapes_describe_the_model():
    tensors, _ = tensors_of(SMALL, 3.0)
    found = model_config(ARGUMENTS, tensors, "gpt", "source")
    assert found == GPTConfig(
        layers=2, hidden=24, heads=4, feed_forward=40, sequence=10, vocabulary=32, hidden_dropout=0.1,
        attention_dropout=0.2, init_std=0.01, layernorm_epsilon=1e-6, activation="gelu_tanh",
    )  # fmt: skip
    found = model_config(None, tensors, "gpt", "source", heads=3)
    assert (found.heads, found.activation, found.layernorm_epsilon) == (3, "gelu_tanh", 1e-5)


@pytest.mark.parametrize(
    ("kind", "arguments", "mlp", "head"),
    [
        ("bert", {"bias_gelu_fusion": True}, "gelu_tanh", "gelu_erf"),
        ("bert", {"bias_gelu_fusion": True, "openai_gelu": True}, "gelu_tanh", None),
        ("bert", {"bias_gelu_fusion": False}, "gelu_erf", None),
        ("bert", {"bias_gelu_fusion": False, "onnx_safe": True}, "gelu_erf", None),
        ("bert", None, "gelu_erf", None),
        ("gpt", {"bias_gelu_fusion": True}, "gelu_tanh", None),
        ("gpt", {"openai_gelu": True}, "gelu_tanh", None),
        ("gpt", {}, "gelu_erf", None),
        ("gpt", None, "gelu_tanh", None),
    ],
)
def test_the_gelu_is_that_of_megatrons_kernels(kind, arguments, mlp, head):
    tensors, _ = tensors_of(as_kind(SMALL, kind), 3.0)
    found = model_config(arguments, tensors, kind, "source", heads=4)
    assert (found.activation, getattr(found, "mlm_activation", None)) == (mlp, head)


REFUSED = {
    "rotary positions": (
        {"position_embedding_type": "rope"},
        "position_embedding_type is 'rope', but mjax supports only",
    ),
    "rotary positions of 2023": ({"use_rotary_position_embeddings": True}, "use_rotary_position_embeddings is True"),
    "no positions": ({"add_position_embedding": False}, "add_position_embedding is False"),
    "RMSNorm": ({"normalization": "RMSNorm"}, "normalization is 'RMSNorm'"),
    "LayerNorm around 1": ({"apply_layernorm_1p": True}, "apply_layernorm_1p is True"),
    "SwiGLU": ({"swiglu": True}, "swiglu is True"),
    "squared ReLU": ({"squared_relu": True}, "squared_relu is True"),
    "experts": ({"num_experts": 8}, "num_experts is 8, but mjax supports only None"),
    "grouped queries": ({"group_query_attention": True}, "group_query_attention is True"),
    "latent attention": ({"multi_latent_attention": True}, "multi_latent_attention is True"),
    "an output layer of its own": ({"untie_embeddings_and_output_weights": True}, "untie_embeddings_and_output_"),
    "no biases": ({"add_bias_linear": False}, "add_bias_linear is False"),
    "a window": ({"window_size": (128, 0)}, "window_size is (128, 0)"),
    "either GELU": ({"bias_gelu_fusion": True, "onnx_safe": True}, "bias_gelu_fusion and onnx_safe are both set"),
    "an array for a setting": ({"swiglu": np.zeros(3)}, "swiglu is a ndarray"),
    "normalised queries": ({"qk_layernorm": True}, "qk_layernorm is True"),
    "wide heads": ({"kv_channels": 8}, "4 heads of 8 numbers are not the 24 of hidden_size"),
    "heads that do not divide": ({"num_attention_heads": 5, "kv_channels": None}, "5 heads of 4.8 numbers"),
    "a rate that is no number": ({"hidden_dropout": "0.1"}, "hidden_dropout is '0.1', which is not a number"),
    "no heads": ({"num_attention_heads": None}, "add --heads, 16 for the published 345M"),
    "heads that are none": ({"num_attention_heads": 0}, "0 attention heads is not a whole number above 0"),
    "other layers": ({"num_layers": 24}, "num_layers is 24 among the arguments, and 2 by the tensors"),
    "another width": ({"hidden_size": 48}, "hidden_size is 48 among the arguments, and 24 by the tensors"),
    "another vocabulary": ({"padded_vocab_size": 64}, "padded_vocab_size is 64 among the arguments, and 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mjax_does_not_compute_is_refused_by_name(name):
    changes, expected = REFUSED[name]
    tensors, _ = tensors_of(SMALL, 3.0)
    with pytest.raises(UsageError) as refused:
        model_config(ARGUMENTS | changes, tensors, "gpt", "source")
    assert expected in str(refused.value)


def test_a_user_cannot_contradict_a_checkpoint():
    tensors, _ = tensors_of(SMALL, 3.0)
    with pytest.raises(UsageError, match="has 4 attention heads and --heads is 6"):
        model_config(ARGUMENTS, tensors, "gpt", "source", heads=6)
    with pytest.raises(UsageError, match="leave out --activation"):
        model_config(ARGUMENTS, tensors, "gpt", "source", activation="gelu_erf")


def test_a_model_without_learned_positions_is_refused():
    tensors, _ = tensors_of(SMALL, 3.0)
    del tensors.kinds["embedding.position_embeddings.weight"]
    with pytest.raises(UsageError, match=r"lacks the matrix embedding.position_embeddings.weight"):
        model_config(None, tensors, "gpt", "source", heads=4)


def test_heads_for_masked_tokens_tell_a_bert_from_a_gpt():
    for model in (SMALL, BERT):
        for nested in (True, False):
            assert kind_of(list(flat(share(draw(model), model, 3.0, nested=nested)))) == model.kind


def test_a_bert_with_two_gelus_has_no_place_in_transformers(tmp_path, capsys):
    save_config(Config(model=replace(BERT, mlm_activation="gelu_erf")), tmp_path / "config.json")
    assert cli.main(["convert", "to-hf", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has gelu_tanh and its MLM head gelu_erf" in capsys.readouterr().err
