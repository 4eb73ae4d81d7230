"""Decoders of megatron-core and their mixtures of experts, without torch: what each rank holds in each layout, by hand;
what arguments become, and what is refused."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mjax.errors import UsageError
from mjax.interop.megatron.arguments import SETTINGS, assume_arguments, decoder_config, describe_differences
from mjax.interop.megatron.checkpoint import open_checkpoint
from mjax.interop.megatron.tensors import DECODER, MIXTURE, join_expert_ranks, join_tensor_ranks, split_fused
from mjax.interop.tensor_files import LazyTensor
from mjax.interop.weights import make_block_reader, match_tensors
from scripts.make_megatron_settings import classify, read_classes
from tests.interop.megatron_files import harmless_arguments

H, N, K, D, F, V, LAYERS = 6, 4, 2, 2, 8, 12, 4
E = 4  # experts
ARGUMENTS = {
    "num_attention_heads": N, "group_query_attention": True, "num_query_groups": K, "kv_channels": D,
    "max_position_embeddings": 16, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True,
    "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 500_000,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
OF_MIXTURE = ARGUMENTS | {"num_experts": E, "moe_router_topk": 2, "ffn_hidden_size": 20, "moe_ffn_hidden_size": F}
PARTS = ("query", "key", "value", "out", "gate", "up", "down", "router")


def matrix(layer, part, rows, columns, expert=0):
    """A matrix [out, in] none of whose numbers is in another one."""
    first = 200 * ((layer * len(PARTS) + PARTS.index(part)) * E + expert)
    return np.arange(first, first + rows * columns, dtype=np.float32).reshape(rows, columns)


def part_of(array, rank, ranks, axis=0):
    return np.split(array, ranks, axis=axis)[rank]


def gate_and_up(layer, expert, rank, ranks):
    """Return a tensor rank's part of linear_fc1: its gate, then the half that the gate multiplies."""
    return np.concatenate([part_of(matrix(layer, part, F, H, expert), rank, ranks) for part in ("gate", "up")])


def down(layer, expert, rank, ranks):
    return part_of(matrix(layer, "down", H, F, expert), rank, ranks, axis=1)


def of_experts(layout, layer, rank, ranks, expert_rank, expert_ranks):
    """The experts of a rank by the rest of their names."""
    own = range(expert_rank * E // expert_ranks, (expert_rank + 1) * E // expert_ranks)
    ups = [gate_and_up(layer, expert, rank, ranks) for expert in own]
    downs = [down(layer, expert, rank, ranks) for expert in own]
    if layout == "grouped, of old":
        stacked = [np.stack([each.T for each in both]) for both in (ups, downs)]  # [E / q, in, out]
        return {"weight1": stacked[0].reshape(H, -1), "weight2": stacked[1].reshape(-1, H)}
    name = "local_experts.{0}.linear_fc{1}.weight" if layout == "one by one" else "linear_fc{1}.weight{0}"
    found = {name.format(number, 1): matrix for number, matrix in enumerate(ups)}
    return found | {name.format(number, 2): matrix for number, matrix in enumerate(downs)}


def share(layout, stage, rank, ranks, expert_rank=0, expert_ranks=1):
    """Return a rank's share of two stages of two layers each; without a `layout` a decoder without experts."""
    found = {}
    for local in range(2):
        layer, name = 2 * stage + local, f"decoder.layers.{local}"
        parts = {"query": N, "key": K, "value": K}
        q, k, v = (np.split(matrix(layer, part, heads * D, H), K) for part, heads in parts.items())
        fused = np.concatenate([each for group in zip(q, k, v, strict=True) for each in group])
        found |= {
            f"{name}.input_layernorm.weight": np.ones(H, np.float32),
            f"{name}.pre_mlp_layernorm.weight": np.ones(H, np.float32),
            f"{name}.self_attention.linear_qkv.weight": part_of(fused, rank, ranks),
            f"{name}.self_attention.linear_proj.weight": part_of(matrix(layer, "out", H, N * D), rank, ranks, 1),
        }
        if layout is None:
            found[f"{name}.mlp.linear_fc1.weight"] = gate_and_up(layer, 0, rank, ranks)
            found[f"{name}.mlp.linear_fc2.weight"] = down(layer, 0, rank, ranks)
            continue
        experts = of_experts(layout, layer, rank, ranks, expert_rank, expert_ranks)
        found |= {f"{name}.mlp.experts.{rest}": array for rest, array in experts.items()}
        found[f"{name}.mlp.router.weight"] = matrix(layer, "router", E, H)
    table = part_of(np.ones((V, H), np.float32), rank, ranks)
    if stage == 0:
        return found | {"embedding.word_embeddings.weight": table}
    return found | {"decoder.final_layernorm.weight": np.ones(H, np.float32), "output_layer.weight": table + 1}


def tensors_of(layout, ranks=1, expert_ranks=1, change=lambda shares: None):
    """`join_tensor_ranks`; `change` takes what the expert ranks of tensor rank 0 and stage 0 hold."""
    pieces = [
        [
            [share(layout, stage, rank, ranks, each, expert_ranks) for each in range(expert_ranks)]
            for rank in range(ranks)
        ]
        for stage in range(2)
    ]
    change(pieces[0][0])
    merged = [[join_expert_ranks(shares, "source") for shares in piece] for piece in pieces]
    return join_tensor_ranks(merged, 3.0, "source", gated=True)


def reader_of(tensors, arguments, family):
    model = decoder_config(arguments, tensors, "source", 3.0)
    theirs = split_fused(tensors, model, "source")
    return make_block_reader(family, theirs, match_tensors(family, theirs, model, "source"), model, lambda size: None)


def check(read, experts):
    """Every number of every matrix is where it belongs."""
    query = read("blocks.attention.query.kernel", 0, LAYERS).reshape(LAYERS, H, -1)  # [l, h, n, d]
    key_value = read("blocks.attention.key_value.kernel", 0, LAYERS).reshape(LAYERS, H, 2, -1)  # [l, h, 2, k, d]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(query[layer].T, matrix(layer, "query", N * D, H))
        for half, part in enumerate(("key", "value")):
            np.testing.assert_array_equal(key_value[layer, :, half].T, matrix(layer, part, K * D, H))
    if experts:
        router = read("blocks.mlp.router.kernel", 0, LAYERS)  # [l, h, E]
        for layer in range(LAYERS):
            np.testing.assert_array_equal(router[layer].T, matrix(layer, "router", E, H))
    names = ("mlp.up", "mlp.down") if experts else ("mlp.up.kernel", "mlp.down.kernel")
    up, out = (read(f"blocks.{name}", 0, LAYERS) for name in names)
    up, out = up.reshape(LAYERS, -1, H, 2, F), out.reshape(LAYERS, -1, F, H)
    for layer, expert in product(range(LAYERS), range(up.shape[1])):
        for half, part in enumerate(("gate", "up")):
            np.testing.assert_array_equal(up[layer, expert, :, half].T, matrix(layer, part, F, H, expert))
        np.testing.assert_array_equal(out[layer, expert].T, matrix(layer, "down", H, F, expert))


# --- Tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4], ids=["one rank", "a group each", "half a group each"])
def test_decoder_shares_merge(ranks):
    tensors = tensors_of(None, ranks)
    model = decoder_config(ARGUMENTS, tensors, "source", 3.0)
    assert (model.layers, model.groups, model.head_size, model.mlp_width, model.tie_embeddings) == (
        LAYERS,
        K,
        D,
        F,
        False,
    )
    assert (model.rope_theta, model.norm_epsilon, model.rope_scaling) == (500_000, 1e-6, "none")
    check(reader_of(tensors, ARGUMENTS, DECODER), experts=False)
    some = split_fused(tensors, model, "source")["decoder.layers.3.mlp.linear_fc1.up.weight"][2:5]
    np.testing.assert_array_equal(some, matrix(3, "up", F, H)[2:5])


@pytest.mark.parametrize(("ranks", "expert_ranks"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["one by one", "grouped", "grouped, of old"])
def test_mixture_shares_merge(layout, ranks, expert_ranks):
    check(reader_of(tensors_of(layout, ranks, expert_ranks), OF_MIXTURE, MIXTURE), experts=True)


RANK_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@pytest.mark.parametrize("stages", [1, 2])
def test_numbers_in_file_names_are_told_apart(stages, write_rank, tmp_path):
    """Tensor rank, pipeline stage and expert rank; without a pipeline the second number is the expert rank."""

    def opened(expert_tensor_ranks):
        said = OF_MIXTURE | dict(zip(RANK_SIZES, (2, stages, 2), strict=True))
        said |= {"expert_tensor_parallel_size": expert_tensor_ranks}
        for rank, stage, expert_rank in product(range(2), range(stages), range(2)):
            held = {"model": share("one by one", stage, rank, 2, expert_rank, 2)}
            if stages == 1:  # the second half of the layers is another chunk
                held = {"model0": held["model"], "model1": share("one by one", 1, rank, 2, expert_rank, 2)}
            numbers = (rank, stage, expert_rank) if stages > 1 else (rank, expert_rank)
            write_rank(tmp_path, "_".join(f"{number:02}" for number in numbers), args=said, **held)
        return open_checkpoint(tmp_path).tensors

    check(reader_of(opened(2), OF_MIXTURE, MIXTURE), experts=True)
    with pytest.raises(UsageError, match="expert_tensor_parallel_size was 1, and there are 2 tensor ranks"):
        opened(1)


LAYER = "decoder.layers.1.mlp"
FC1, FC2 = (f"{LAYER}.experts.local_experts.{which}.weight" for which in ("2.linear_fc1", "1.linear_fc2"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pair: pair[1].pop(f"{LAYER}.router.weight"), f"only one holds {LAYER}.router.weight"),
        (lambda pair: pair[1].pop(FC2), "lacks the tensor decoder.layers.1.mlp.experts.3.linear_fc2.weight"),
        (lambda pair: pair[0].update({FC1: np.zeros((2 * F, H))}), f"two expert ranks hold {LAYER}.experts.2."),
    ],
    ids=["a tensor of one rank only", "an expert less", "an expert twice"],
)
def test_expert_ranks_that_do_not_fit_are_refused(change, words):
    with pytest.raises(UsageError) as refused:
        reader_of(tensors_of("one by one", expert_ranks=2, change=change), OF_MIXTURE, MIXTURE)
    assert words in str(refused.value)


# --- Arguments --------------------------------------------------------------------------------------------------------

DENSE, TENSORS = tensors_of(None), tensors_of("one by one")
OF_LATENT = OF_MIXTURE | {
    "multi_latent_attention": True, "qk_layernorm": True, "rotary_scaling_factor": 4.0, "mscale": 0.7,
    "mscale_all_dim": 0.7, "q_lora_rank": 7,
}  # fmt: skip
LATENT = dict(TENSORS)  # of 4 heads with 3 and 2 dims and values of 4, by a latent of 5
for part, shape in {"q_down": (7, H), "kv_down": (7, H), "kv_up": (28, 5), "": (H, 16)}.items():
    name = f"decoder.layers.0.self_attention.linear_{part}_proj.weight".replace("__", "_")
    LATENT[name] = LazyTensor.from_array(np.zeros(shape, np.float32))
SIGMOID = {"moe_router_score_function": "sigmoid"}
SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.02}
IN_GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
LLAMA_3 = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rotary_percent": 0.5, "qk_layernorm": True}, {"rotary_percent": 0.5, "qk_norm": "head"}),
        (LLAMA_3, {"rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_length": 8192}),
        (LLAMA_3 | {"rotary_seq_len_interpolation_factor": 1}, {"rope_scaling": "llama3", "rope_factor": 32.0}),
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        ({}, {"router": "softmax", "router_normalized": True, "router_scale": 1.0, "aux_loss_coef": 0, "z_loss": 0}),
        ({"moe_router_pre_softmax": True}, {"router": "softmax", "router_normalized": False}),
        (SIGMOID | {"moe_router_topk": 1}, {"router_normalized": False}),
        (SIGMOID | IN_GROUPS, {"router_n_groups": 2, "router_topk_groups": 1, "router_group_best": 2}),
        (SIGMOID | {"moe_router_enable_expert_bias": True}, {"router_bias": True, "router_bias_update_rate": 0.0}),
        ({"moe_aux_loss_coeff": 0.01}, {"aux_loss_coef": 0.01, "aux_loss_scope": "micro_batch"}),
        ({name: [value] for name, value in SEQUENCE.items()}, {"aux_loss_coef": 0.02, "aux_loss_scope": "sequence"}),
        ({"moe_ffn_hidden_size": None}, {"feed_forward": 20, "moe_ffn_hidden": F}),
    ],
    ids=str,
)
def test_arguments_become_matching_fields(given, expected):
    model = decoder_config(OF_MIXTURE | given, TENSORS, "source", 3.0)
    assert {name: getattr(model, name) for name in expected} == expected
    assert "balance loss" not in "".join(describe_differences(OF_MIXTURE | given, "source"))


def test_shapes_and_yarn_become_fields_of_latent_attention():
    yarn = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_mscale": 0.7, "rope_original_length": 4096}
    sizes = {"q_lora_rank": 7, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    model = decoder_config(OF_LATENT, LATENT, "source", 3.0)
    assert {name: getattr(model, name) for name in yarn | sizes} == yarn | sizes
    assert (model.latent_norm_epsilon, model.mtp_layers) == (1e-6, 0)
    for plain in ({"rotary_scaling_factor": 1.0}, {"rope_type": "rope", "mscale_all_dim": 0.0}):
        assert decoder_config(OF_LATENT | plain, LATENT, "source", 3.0).rope_scaling == "none"
    (line,) = describe_differences(OF_LATENT | {"hidden_dropout": 0.1, "attention_dropout": 0.0}, "source")
    assert line == "hidden_dropout 0.1: mjax does not support it with latent attention"


RATES = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02}


@pytest.mark.parametrize(
    ("given", "assumed"),
    [
        ({}, {"rotary_percent": 1.0}),
        ({"position_embedding_type": None}, {"rotary_percent": 1.0, "position_embedding_type": "rope"}),
        (
            {"norm_epsilon": None, "rotary_base": None},
            {"norm_epsilon": 1e-5, "rotary_base": 10_000, "rotary_percent": 1},
        ),
        ({"rotary_percent": 0.5, "use_rope_scaling": True}, {"rope_scaling_factor": 8.0}),
        (
            {"num_experts": E, "rotary_percent": 0.5},
            {"moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
            | {"moe_aux_loss_coeff": 0.0},
        ),
    ],
    ids=["complete", "positions", "epsilon and base", "scaled", "experts"],
)
def test_assumed_arguments_equal_stated_ones(given, assumed):
    """The assumed arguments equal the model's: stating them changes nothing."""
    said, tensors = ARGUMENTS | given, TENSORS if "num_experts" in given else DENSE
    assert assume_arguments(said, "decoder") == RATES | assumed
    models = [decoder_config(each, tensors, "source", 3.0) for each in (said, said | RATES | assumed)]
    assert models[0] == models[1]
    assert not assume_arguments(said | RATES | assumed, "decoder")


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        (SEQUENCE | {"moe_router_load_balancing_type": "global_aux_loss"}, "global_aux_loss 0.02"),
        (SIGMOID | IN_GROUPS | SEQUENCE, "seq_aux_loss 0.02 with groups of experts"),
    ],
)
def test_unknown_balance_loss_is_left_out(given, left_out):
    assert f"mjax has no {left_out}, so it is left out" in describe_differences(OF_MIXTURE | given, "source")[0]
    assert decoder_config(OF_MIXTURE | given, TENSORS, "source", 3.0).aux_loss_coef == 0


def test_factor_that_training_ignores_is_noted():
    (line,) = describe_differences(ARGUMENTS | LLAMA_3, "source")
    assert "rope_scaling_factor 32 applies" in line
    assert not describe_differences(ARGUMENTS | LLAMA_3 | {"rope_scaling_factor": 8.0}, "source")
    assert not describe_differences(ARGUMENTS | {"rope_scaling_factor": 32.0}, "source")


REFUSED = [
    (DENSE, {"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
    (DENSE, {"num_experts": 8}, "lacks the matrix decoder.layers.0.mlp.experts.0.linear_fc2.weight"),
    (DENSE, LLAMA_3 | {"rotary_seq_len_interpolation_factor": 4}, "both set"),
    (TENSORS, {"moe_router_enable_expert_bias": True}, "expert_bias is set, which Megatron has with sigmoid only"),
    (TENSORS, {"multi_latent_attention": True}, "lacks the matrix decoder.layers.0.self_attention.linear_kv_up_proj"),
    (LATENT, {"qk_layernorm": False}, "qk_layernorm is False, and with latent attention mjax needs it"),
    (LATENT, SIGMOID, "moe_router_enable_expert_bias is None, and with latent attention mjax needs it"),
    (
        LATENT,
        {"mscale_all_dim": 0.0},
        "mscale 0.7, mscale_all_dim 0.0, beta_slow 1, and mjax has yarn with equal mscales",
    ),
    (LATENT, {"mtp_num_layers": 2}, "mtp_num_layers is 2, and mjax supports 0 and 1"),
    (LATENT, {"v_head_dim": 9}, "v_head_dim is 9 among the arguments, and 4 by the tensors"),
    (TENSORS, {"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps is 0.1, but mjax supports only None"),
    (TENSORS, {"moe_expert_capacity_factor": 1.0}, "capacity_factor is 1.0, with which Megatron drops tokens"),
    (TENSORS, {"moe_router_score_function": "sqrtsoftplus"}, "'sqrtsoftplus', and mjax knows softmax and sigmoid"),
    (TENSORS, IN_GROUPS, "group_topk is 1 without moe_router_pre_softmax"),
    (TENSORS, {"num_experts": 8}, "num_experts is 8 among the arguments, and 4 by the tensors"),
    (
        TENSORS,
        {"num_experts": None},
        "num_experts is missing among the arguments, and decoder.layers.0.mlp.router.weight",
    ),
    (
        DENSE,
        {"group_query_attention": None},
        "group_query_attention is missing among the arguments, and self_attention",
    ),
    (TENSORS, {"moe_router_topk": "2"}, "moe_router_topk is '2', not a whole number"),
    (TENSORS, {"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size is 32, but mjax supports only None"),
    (DENSE, {"softmax_type": "learnable"}, "softmax_type is 'learnable', but mjax supports only 'vanilla'"),
    (DENSE, {"mtp_num_layers": 1}, "mtp_num_layers is 1, but mjax supports only None"),
]


SWITCHES = {
    "softmax_scale": 0.5, "layernorm_zero_centered_gamma": True, "apply_layernorm_1p": True, "squared_relu": True,
    "quick_geglu": True, "mtp_detach_heads": True, "attention_output_gate": True, "window_size": [128, 0],
    "window_attn_skip_freq": 2, "experimental_attention_variant": "dsa", "linear_attention_freq": 4, "qk_l2_norm": True,
    "hybrid_layer_pattern": "M*M*", "hybrid_override_pattern": "M*", "is_hybrid_model": True, "use_mup": True,
    "hybrid_attention_ratio": 0.5, "spec": ["a", "b"], "heterogeneous_layers_config_path": "a.json",
    "retro_add_retriever": True, "rotary_interleaved": True, "mrope_section": [1, 1, 2], "no_rope_freq": 4,
    "apply_residual_connection_post_layernorm": True,
    "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0, "lora_rank": 8, "use_kitchen_attention": True,
    "of_a_later_version": {"size": np.ones(3)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("frequency", "dense", "interval"),
    [(None, 0, 1), (1, 0, 1), ([1, 1, 1, 1], 0, 1), ([0, 1, 1, 1], 1, 1), ((0, 0, 0, 1), 3, 1), ([0, 1, 0, 1], 0, 2)],
)
def test_layers_with_experts_become_fields(frequency, dense, interval):
    model = decoder_config(OF_MIXTURE | {"moe_layer_freq": frequency}, TENSORS, "source", 3.0)
    assert (model.first_dense_layers, model.moe_layer_freq) == (dense, interval)


@pytest.mark.parametrize(
    "frequency",
    [0, 2, [1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 1], [0, 0, 0, 0], [0, 2, 0, 2], [0, 1, 1, 0], "[1]*4"],
    ids=str,
)
def test_other_layers_with_experts_are_refused(frequency):
    with pytest.raises(
        UsageError, match=r"moe_layer_freq is .+ for 4 layers, and mjax has experts in all layers, or in"
    ):
        decoder_config(OF_MIXTURE | {"moe_layer_freq": frequency}, TENSORS, "source", 3.0)


@pytest.mark.parametrize("name", SWITCHES)
def test_unknown_argument_that_is_set_is_refused(name):
    with pytest.raises(UsageError, match=f": {name} is .+, but mjax supports only ('' or )?(None|False|0.0)"):
        decoder_config(ARGUMENTS | {name: SWITCHES[name]}, DENSE, "source", 3.0)
    for default in SETTINGS[name].defaults if name in SETTINGS else (None, type(SWITCHES[name])()):
        decoder_config(ARGUMENTS | {name: default}, DENSE, "source", 3.0)


@pytest.mark.parametrize(
    ("name", "value"), [("softmax_scale", 0.0), ("softmax_type", ""), ("window_attn_skip_freq", 0)]
)
def test_zero_is_refused_unless_default(name, value):
    with pytest.raises(UsageError, match=f"{name} is {value!r}, but mjax supports only"):
        decoder_config(ARGUMENTS | {name: value}, DENSE, "source", 3.0)


def test_truncated_decoder_is_refused():
    with pytest.raises(UsageError, match=f"num_layers is 5 among the arguments, and {LAYERS} by the tensors"):
        decoder_config(ARGUMENTS | {"num_layers": 5}, DENSE, "source", 3.0)


def test_defaults_of_refused_settings_agree_over_versions():
    """So the importer needs not know which Megatron wrote a checkpoint."""
    refused = {name: setting.defaults for name, setting in SETTINGS.items() if setting.kind == "refused"}
    assert len(refused) > 50
    for name, defaults in refused.items():
        assert not any(defaults) or len(set(defaults)) == 1, name


def test_settings_have_classes_of_rules():
    """settings.tsv agrees with scripts/megatron_settings.txt, from which make_megatron_settings.py writes it."""
    rules = read_classes(Path("scripts/megatron_settings.txt").read_text())
    assert {kind for _, kind, _ in rules} == {setting.kind for setting in SETTINGS.values()}
    for line in Path("mjax/interop/megatron/settings.tsv").read_text().splitlines()[1:]:
        name, kind, *_, reason = line.split("\t")
        assert (kind, reason) == classify(name, rules), name


@pytest.mark.parametrize(("tensors", "said"), [(DENSE, ARGUMENTS), (TENSORS, OF_MIXTURE)], ids=["dense", "mixture"])
def test_harmless_arguments_change_no_decoder(tensors, said):
    defaults = {name: setting.defaults[-1] for name, setting in SETTINGS.items() if setting.kind != "reproduced"}
    given = defaults | harmless_arguments() | said
    assert decoder_config(given, tensors, "source", 3.0) == decoder_config(said, tensors, "source", 3.0)


@pytest.mark.parametrize(("tensors", "change", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_unsupported_arguments_are_refused_by_name(tensors, change, words):
    arguments = {id(TENSORS): OF_MIXTURE, id(LATENT): OF_LATENT}.get(id(tensors), ARGUMENTS) | change
    with pytest.raises(UsageError) as refused:
        split_fused(tensors, decoder_config(arguments, tensors, "source", 3.0), "source")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
