"""Decoders of megatron-core: what each rank holds, by hand, and what is refused."""

import numpy as np
import pytest

from mjax.errors import UsageError
from mjax.interop.megatron.checkpoint import _architecture
from mjax.interop.megatron.decoder import DECODER, DecoderTensors, decoder_config
from mjax.interop.megatron.ranks import RankTensors
from mjax.interop.weights import block_reader, find_tensors

H, N, K, D, F, V, LAYERS = 6, 4, 2, 2, 8, 12, 4
ARGUMENTS = {
    "num_attention_heads": N,
    "group_query_attention": True,
    "num_query_groups": K,
    "kv_channels": D,
    "max_position_embeddings": 16,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 500_000,
    "untie_embeddings_and_output_weights": True,
}


def number(layer, part, row):
    """What every number of a row is, so that each can be found again."""
    return 1000 * layer + 100 * part + row


def matrix(layer, part, rows, columns=H):
    return np.stack([np.full(columns, number(layer, part, row), np.float32) for row in range(rows)])


def share(stage, rank, ranks):
    """What a rank holds of two stages of two layers each: of a group its queries, its key, its value; gate and up."""
    q, k, v = (lambda layer, part=part: matrix(layer, part, N * D if part == 0 else K * D) for part in range(3))
    found = {}
    for local in range(2):
        layer, name = 2 * stage + local, f"decoder.layers.{local}"
        fused = []
        for group in range(K):
            fused += [*q(layer)[group * 2 * D : (group + 1) * 2 * D]]
            fused += [*k(layer)[group * D : (group + 1) * D], *v(layer)[group * D : (group + 1) * D]]
        fused, gate, up = np.stack(fused), matrix(layer, 3, F), matrix(layer, 4, F)
        mine = slice(rank * F // ranks, (rank + 1) * F // ranks)
        found |= {
            f"{name}.input_layernorm.weight": np.ones(H, np.float32),
            f"{name}.pre_mlp_layernorm.weight": np.ones(H, np.float32),
            f"{name}.self_attention.linear_qkv.weight": np.split(fused, ranks)[rank],
            f"{name}.self_attention.linear_proj.weight": np.split(matrix(layer, 5, H, N * D), ranks, axis=1)[rank],
            f"{name}.mlp.linear_fc1.weight": np.concatenate([gate[mine], up[mine]]),
            f"{name}.mlp.linear_fc2.weight": np.split(matrix(layer, 6, H, F), ranks, axis=1)[rank],
        }
    table = np.split(matrix(0, 7, V), ranks)[rank]
    if stage == 0:
        return found | {"embedding.word_embeddings.weight": table}
    return found | {"decoder.final_layernorm.weight": np.ones(H, np.float32), "output_layer.weight": table + 1}


def tensors_of(ranks):
    pieces = [[share(stage, rank, ranks) for rank in range(ranks)] for stage in range(2)]
    return RankTensors(pieces, 3.0, "source", gated=True)


@pytest.mark.parametrize("ranks", [1, 2, 4], ids=["one rank", "a group each", "half a group each"])
def test_the_shares_of_ranks_and_stages_are_put_together(ranks):
    tensors = tensors_of(ranks)
    model = decoder_config(ARGUMENTS, tensors, "source", 3.0)
    assert (model.layers, model.groups, model.head_size, model.mlp_width, model.tied) == (LAYERS, K, D, F, False)
    assert (model.rope_theta, model.norm_epsilon, model.rope_scaling) == (500_000, 1e-6, "none")
    theirs = DecoderTensors(tensors, model, "source")
    read = block_reader(DECODER, theirs, find_tensors(DECODER, theirs, model, "source"), model, lambda size: None)
    query = read("blocks.attention.query.kernel", 0, LAYERS)  # [l, h, n, d]
    key_value = read("blocks.attention.key_value.kernel", 0, LAYERS)  # [l, h, 2, k, d]
    up = read("blocks.mlp.up.kernel", 0, LAYERS)  # [l, h, 2, f]
    for layer in range(LAYERS):
        assert query[layer, 0].ravel().tolist() == [number(layer, 0, row) for row in range(N * D)]
        for part in range(2):
            assert key_value[layer, 0, part].ravel().tolist() == [number(layer, 1 + part, row) for row in range(K * D)]
            assert up[layer, 0, part].tolist() == [number(layer, 3 + part, row) for row in range(F)]
    assert theirs.read("model.layers.3.mlp.up_proj.weight", slice(2, 5))[:, 0].tolist() == [3402, 3403, 3404]


def test_a_checkpoint_that_says_nothing_of_rotary_positions_is_a_gpt():
    names = list(tensors_of(1).kinds)
    assert _architecture(ARGUMENTS, names) == "decoder"
    assert _architecture(None, names) == "gpt"
    assert _architecture(ARGUMENTS, [*names, "embedding.position_embeddings.weight"]) == "gpt"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"swiglu": False}, "swiglu is False"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type is 'yarn'"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"num_experts": 8}, "lacks the matrix decoder.layers.0.mlp.experts.0.linear_fc2.weight"),
        ({"window_size": (127, 0)}, "window_size"),
        ({"num_query_groups": 4}, "ask for 24 rows"),
        ({"kv_channels": "2"}, "kv_channels is '2'"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"qk_layernorm": "yes"}, "qk_layernorm is 'yes'"),
        ({"rotary_base": "big"}, "rope_theta would be 'big'"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4}, "both set"),
    ],
)
def test_arguments_that_mjax_does_not_compute_are_refused_in_one_sentence(change, said):
    tensors = tensors_of(1)
    with pytest.raises(UsageError, match=said):
        DecoderTensors(tensors, decoder_config(ARGUMENTS | change, tensors, "source", 3.0), "source")


def test_an_old_order_of_queries_is_refused():
    with pytest.raises(UsageError, match="checkpoint_version is 0"):
        decoder_config(ARGUMENTS, tensors_of(1), "source", 0)
