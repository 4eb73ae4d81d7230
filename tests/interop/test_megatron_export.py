"""Exports to Megatron, without torch: shards of ranks compared with shards by hand, and models that Megatron lacks."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from jax.numpy import bfloat16

from mjax.config import DeepSeekConfig, LlamaConfig, MixtureConfig
from mjax.config.model import convert_kind
from mjax.errors import UsageError
from mjax.interop.megatron.arguments import decoder_config
from mjax.interop.megatron.export import (
    gather_tensors,
    list_sharded_tensors,
    make_command,
    plan_export,
    rank_tensors,
)
from mjax.interop.megatron.tensors import DECODER, EMBEDDING, MIXTURE, QKV, SCORES_BIAS, VOCABULARY
from mjax.models.build import abstract_weights
from tests.interop import test_megatron_decoder as decoders
from tests.interop.megatron_files import draw
from tests.interop.test_megatron import SMALL, current_share

RUN = Path("runs/demo")
BERT = replace(convert_kind(SMALL, "bert"), mlm_activation="gelu_erf")  # as in megatron-core, whatever the MLP's


def shards_of(model, weights, folder, tensor=1, pipeline=1, expert=1):
    """The tensors of each rank of an export, by its numbers."""
    export = plan_export(model, RUN, tensor, pipeline, expert)
    blocks = lambda name, rank: [(0, weights[name.removeprefix("model.")])]  # noqa: E731
    whole = gather_tensors(export, blocks, np.dtype(np.float32), folder / "scratch", lambda size: None)
    return {rank: rank_tensors(export, whole, rank) for rank in export.ranks}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("model", [SMALL, BERT], ids=["gpt", "bert"])
def test_shards_match_shards_by_hand(model, tensor, pipeline, tmp_path):
    shards = shards_of(model, draw(model), tmp_path, tensor, pipeline)
    whole, last = current_share(model, 3.0), model.vocabulary - 1
    for (rank, stage, _), found in shards.items():
        expected = current_share(model, 3.0, rank, tensor, stage, pipeline, 128 * tensor)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            if name in VOCABULARY:  # rows that pad it repeat the last token's
                padding = array == 7.5
                array[padding] = np.broadcast_to(
                    whole[SCORES_BIAS if array.ndim == 1 else EMBEDDING][last], array.shape
                )[padding]
            np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def test_bias_of_the_router_stays_float32(tmp_path):
    """Rounded to bf16, a router chooses other experts; Megatron's buffer is float32, too."""
    weights = draw(LATENT)
    blocks = lambda name, rank: [(0, weights[name.removeprefix("model.")])]  # noqa: E731
    export = plan_export(LATENT, RUN)
    whole = gather_tensors(export, blocks, np.dtype(bfloat16), tmp_path / "scratch", lambda size: None)
    written = whole["decoder.layers.1.mlp.router.expert_bias"]
    np.testing.assert_array_equal(written, weights["blocks.mlp.router.bias"][1], strict=True)


@pytest.mark.parametrize("expert_ranks", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_of_decoder_match_shards_by_hand(ranks, expert_ranks, tmp_path):
    """Shards by hand, to weights and back, in two stages."""
    layout, arguments = (None, decoders.ARGUMENTS) if not expert_ranks else ("one by one", decoders.OF_MIXTURE)
    expert_ranks = expert_ranks or 1
    tensors = decoders.tensors_of(layout, ranks, expert_ranks)
    model = decoder_config(arguments, tensors, "source", 3.0)
    model = replace(model, vocabulary_multiple=4)
    read = decoders.reader_of(tensors, arguments, MIXTURE if layout else DECODER)
    weights = {name: read(name, 0, shape[0]) for name, (shape, _) in abstract_weights(model).items()}
    shards = shards_of(model, weights, tmp_path, ranks, 2, expert_ranks)
    assert len(shards) == 2 * ranks * expert_ranks
    for (rank, stage, expert), found in shards.items():
        expected = decoders.share(layout, stage, rank, ranks, expert, expert_ranks)
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"embedding.word_embeddings.weight", "output_layer.weight"}:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)


LLAMA = LlamaConfig(layers=4, hidden=24, heads=4, kv_heads=2, feed_forward=40, sequence=10, vocabulary=29)
ROUTED = MixtureConfig(layers=2, hidden=24, heads=4, experts=4, feed_forward=40, sequence=10, vocabulary=29)

LATENT = DeepSeekConfig(
    layers=2, hidden=24, heads=4, experts=4, q_lora_rank=12, kv_lora_rank=10, router="sigmoid", router_scale=2.5,
    feed_forward=40, sequence=10, vocabulary=29, rope_scaling="yarn", rope_factor=4.0, rope_original_length=4096,
    latent_norm_epsilon=1e-6, mtp_layers=1, mtp_loss_coef=0.1,
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        SMALL, replace(SMALL, activation="gelu_erf", hidden_dropout=0.0, layernorm_epsilon=1e-6),
        BERT, replace(BERT, activation="gelu_erf", mlm_activation=None),
        LLAMA, replace(LLAMA, qk_norm="head", qkv_bias=True, tie_embeddings=True, rotary_percent=0.5, head_dim=8),
        replace(LLAMA, rope_scaling="linear", rope_factor=4.0),
        replace(LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original_length=8192, rope_theta=5e5),
        ROUTED, replace(ROUTED, router_normalized=False, shared_expert_ffn_hidden=8, moe_ffn_hidden=16, z_loss=0.1),
        replace(ROUTED, router="sigmoid", router_scale=2.5, router_n_groups=2, router_topk_groups=1),
        LATENT, replace(LATENT, rope_scaling="none", rope_factor=1.0, rope_original_length=None, q_lora_rank=6),
        replace(ROUTED, layers=6, first_dense_layers=2), replace(ROUTED, layers=6, moe_layer_freq=2),
        replace(ROUTED, aux_loss_coef=0.1), replace(ROUTED, aux_loss_coef=0.1, aux_loss_scope="micro_batch"),
    ],
)  # fmt: skip
def test_arguments_describe_model(model):
    """`plan_export` compares with what the import reads."""
    assert plan_export(model, RUN).arguments["padded_vocab_size"] == 128


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            replace(SMALL, positions="alibi"),
            "runs/demo has --model.positions alibi, and to-megatron can write only",
        ),
        (replace(SMALL, embedding_layernorm=True), "--model.embedding-layernorm True"),
        (replace(BERT, layernorm="post"), "--model.layernorm post"),
        (
            replace(BERT, mlm_activation=None),
            "--model.mlm-activation gelu_tanh, and to-megatron can write only gelu_erf",
        ),
        (replace(LLAMA, window=4), "--model.window 4"),
        (replace(LLAMA, norms="post"), "--model.norms post"),
        (replace(LLAMA, activation="gelu_tanh"), "--model.activation gelu_tanh"),
        (replace(LLAMA, rope_scaling="yarn", rope_factor=4.0, rope_original_length=5), "--model.rope-scaling yarn"),
        (replace(ROUTED, router_bias_update_rate=0.1), "expert_bias is set, which Megatron has with sigmoid only"),
        (replace(LATENT, rope_beta_fast=1.0), "--model.rope-beta-fast 1.0, and to-megatron can write only 32"),
        (replace(LATENT, latent_norm_epsilon=1e-5), "--model.latent-norm-epsilon 1e-05"),
        (convert_kind(LLAMA, "gemma3"), "runs/demo is a Gemma 3, and GPTModel lacks its post-LayerNorms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_that_megatron_lacks_is_refused(model, words):
    with pytest.raises(UsageError) as refused:
        plan_export(model, RUN)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ((3, 1, 1), "--tensor 3 does not divide heads 4; use 1, 2, 4"),
        ((1, 3, 1), "--pipeline 3 does not divide layers 2; use 1, 2"),
        ((1, 1, 3), "--expert 3 does not divide experts 4; use 1, 2, 4"),
    ],
)
def test_split_that_does_not_divide_is_refused(split, words):
    with pytest.raises(UsageError) as refused:
        plan_export(ROUTED, RUN, *split)
    assert words in str(refused.value)


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_layernorm_of_experts_is_apart_with_transformer_engine(implementation, tmp_path):
    """`pre_mlp_layernorm` is an identity in its dense layers (megatron/core/models/gpt/gpt_layer_specs.py)."""
    model = replace(ROUTED, first_dense_layers=1)
    weights = draw(model)
    export = plan_export(model, RUN, transformer_impl=implementation)
    blocks = lambda name, rank: [(0, weights[name.removeprefix("model.")])]  # noqa: E731
    whole = gather_tensors(export, blocks, np.dtype(np.float32), tmp_path / "scratch", lambda size: None)
    names = {name for name, _ in list_sharded_tensors(export, whole) if "norm" in name}
    fused, of_experts = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    of_mlp = {"decoder.layers.0": fused, "decoder.layers.1": fused if implementation == "local" else of_experts}
    expected = {f"{layer}.{name}" for layer, norm in of_mlp.items() for name in (norm, f"{QKV}.layer_norm_weight")}
    assert names == expected | {"decoder.final_layernorm.weight"}


def test_fewer_key_heads_than_ranks_are_split():
    for heads, ranks in product((1, 2, 4), (1, 2, 4)):
        plan_export(replace(LLAMA, kv_heads=heads), RUN, ranks)


def test_command_has_every_argument():
    """A rate of 0 is not Megatron's default, and a bias that is off has a flag with another name."""
    words = make_command(plan_export(LLAMA, RUN, 2), Path("out"), "torch", "bf16", [])
    assert " ".join(words[:5]) == "torchrun --nproc-per-node 2 pretrain_gpt.py --load"
    pairs = dict(pairwise(words))
    assert (pairs["--hidden-dropout"], pairs["--num-query-groups"], words[-1]) == ("0.0", "2", "--bf16")
    assert {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"} <= {*words}
    assert "--no-bias-gelu-fusion" not in make_command(plan_export(SMALL, RUN), Path("out"), "torch_dist", "fp32", [])
