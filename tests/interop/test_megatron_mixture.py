"""Mixtures of experts of megatron-core: what each rank holds in each layout, by hand; what arguments become, and what
is refused."""

from itertools import product

import numpy as np
import pytest

from mjax.errors import UsageError
from mjax.interop.megatron.decoder import MIXTURE, DecoderTensors, decoder_config
from mjax.interop.megatron.experts import balance_left_out, gathered
from mjax.interop.megatron.names import renamed
from mjax.interop.megatron.pickles import Chunk, Stored
from mjax.interop.megatron.ranks import RankTensors
from mjax.interop.weights import block_reader, find_tensors
from tests.interop.test_megatron_decoder import ARGUMENTS as OF_DECODER
from tests.interop.test_megatron_decoder import LAYERS, H
from tests.interop.test_megatron_decoder import share as share_of_decoder
from tests.interop.test_megatron_files import InMemory

E, F, S = 4, 8, 4
ARGUMENTS = OF_DECODER | {"num_experts": E, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": S}
ARGUMENTS |= {"ffn_hidden_size": 20, "moe_ffn_hidden_size": F}
GATE, UP, DOWN, ROUTER, SHARED_GATE, SHARED_UP, SHARED_DOWN = range(7)


def matrix(layer, part, expert, rows, columns):
    """A matrix none of whose numbers is in another one."""
    first = 100 * ((layer * 7 + part) * E + expert)
    return np.arange(first, first + rows * columns, dtype=np.float32).reshape(rows, columns)


def part_of(array, rank, ranks, axis):
    return np.split(array, ranks, axis=axis)[rank]


def gate_and_up(layer, gate, expert, width, rank, ranks):
    """What a tensor rank has of linear_fc1: its gate, then what the gate lets through."""
    return np.concatenate([part_of(matrix(layer, part, expert, width, H), rank, ranks, 0) for part in (gate, gate + 1)])


def of_experts(layout, layer, rank, ranks, expert_rank, expert_ranks):
    """The experts of a rank by the rest of their names."""
    own = range(expert_rank * E // expert_ranks, (expert_rank + 1) * E // expert_ranks)
    ups = [gate_and_up(layer, GATE, expert, F, rank, ranks) for expert in own]
    downs = [part_of(matrix(layer, DOWN, expert, H, F), rank, ranks, 1) for expert in own]
    if layout == "grouped, of old":
        stacked = [np.stack([each.T for each in both]) for both in (ups, downs)]  # [E / q, in, out]
        return {"weight1": stacked[0].reshape(H, -1), "weight2": stacked[1].reshape(-1, H)}
    name = "local_experts.{0}.linear_fc{1}.weight" if layout == "one by one" else "linear_fc{1}.weight{0}"
    found = {name.format(number, 1): up for number, up in enumerate(ups)}
    return found | {name.format(number, 2): down for number, down in enumerate(downs)}


def share(layout, stage, rank, ranks, expert_rank=0, expert_ranks=1):
    """What a rank holds of two stages of two layers each."""
    found = {name: array for name, array in share_of_decoder(stage, rank, ranks).items() if ".mlp." not in name}
    for local in range(2):
        layer, name = 2 * stage + local, f"decoder.layers.{local}.mlp"
        experts = of_experts(layout, layer, rank, ranks, expert_rank, expert_ranks)
        found |= {f"{name}.experts.{rest}": array for rest, array in experts.items()}
        found |= {
            f"{name}.router.weight": matrix(layer, ROUTER, 0, E, H),
            f"{name}.shared_experts.linear_fc1.weight": gate_and_up(layer, SHARED_GATE, 0, S, rank, ranks),
            f"{name}.shared_experts.linear_fc2.weight": part_of(matrix(layer, SHARED_DOWN, 0, H, S), rank, ranks, 1),
        }
    return found


def shares(layout, stage, rank, ranks, expert_ranks):
    return [share(layout, stage, rank, ranks, expert_rank, expert_ranks) for expert_rank in range(expert_ranks)]


def tensors_of(layout="one by one", ranks=1, expert_ranks=1):
    pieces = [
        [gathered(shares(layout, stage, rank, ranks, expert_ranks), "source") for rank in range(ranks)]
        for stage in range(2)
    ]
    return RankTensors(pieces, 3.0, "source", gated=True)


def reader_of(tensors, **changes):
    model = decoder_config(ARGUMENTS | changes, tensors, "source", 3.0)
    theirs = DecoderTensors(tensors, model, "source")
    return block_reader(MIXTURE, theirs, find_tensors(MIXTURE, theirs, model, "source"), model, lambda size: None)


def check(read):
    """Every number of every expert, of the router and of the shared expert is where it belongs."""
    up, down = read("blocks.mlp.up", 0, LAYERS), read("blocks.mlp.down", 0, LAYERS)  # [l, E, h, 2, f], [l, E, f, h]
    router = read("blocks.mlp.router.kernel", 0, LAYERS)  # [l, h, E]
    shared_up = read("blocks.mlp.shared.up.kernel", 0, LAYERS)  # [l, h, 2, f]
    shared_down = read("blocks.mlp.shared.down.kernel", 0, LAYERS)  # [l, f, h]
    for layer in range(LAYERS):
        for expert, half in product(range(E), range(2)):
            np.testing.assert_array_equal(up[layer, expert, :, half].T, matrix(layer, GATE + half, expert, F, H))
            np.testing.assert_array_equal(down[layer, expert].T, matrix(layer, DOWN, expert, H, F))
        np.testing.assert_array_equal(router[layer].T, matrix(layer, ROUTER, 0, E, H))
        np.testing.assert_array_equal(shared_up[layer, :, 0].T, matrix(layer, SHARED_GATE, 0, S, H))
        np.testing.assert_array_equal(shared_up[layer, :, 1].T, matrix(layer, SHARED_UP, 0, S, H))
        np.testing.assert_array_equal(shared_down[layer].T, matrix(layer, SHARED_DOWN, 0, H, S))


@pytest.mark.parametrize(("ranks", "expert_ranks"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("layout", ["one by one", "grouped", "grouped, of old"])
def test_the_experts_of_tensor_and_expert_ranks_and_stages_are_put_together(layout, ranks, expert_ranks):
    check(reader_of(tensors_of(layout, ranks, expert_ranks)))


# --- Format torch_dist ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["all layers in one tensor", "a tensor for each layer", "gate and up apart"])
def test_experts_that_are_stored_as_one_tensor_are_read_one_by_one(stored, tmp_path):
    layers = {}
    for stage, local in product(range(2), range(2)):
        for name, array in share("one by one", stage, 0, 1).items():
            if name.startswith(f"decoder.layers.{local}."):
                layers[name.replace(f"layers.{local}.", f"layers.{2 * stage + local}.")] = array
            elif not name.startswith("decoder.layers."):
                layers[name] = array
    found = {}
    for name, array in layers.items():
        name = name.replace("experts.local_experts.", "experts.experts.")
        if stored == "gate and up apart" and name.endswith("linear_fc1.weight"):
            found[f"{name}_w"], found[f"{name}_v"] = np.split(array, 2)
        else:
            found[name] = array
    if stored != "gate and up apart":
        for layer, part in product(range(LAYERS), (1, 2)):
            name = f"decoder.layers.{layer}.mlp.experts.experts"
            found[f"{name}.linear_fc{part}.weight"] = np.stack(
                [found.pop(f"{name}.{expert}.linear_fc{part}.weight") for expert in range(E)]
            )
    if stored == "all layers in one tensor":
        for name in [name for name in found if name.startswith("decoder.layers.0.")]:
            each = [found.pop(name.replace("layers.0.", f"layers.{layer}.")) for layer in range(LAYERS)]
            found[name.replace("layers.0.", "layers.")] = np.stack(each)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100_000))
    listed = {}
    for number, (name, array) in enumerate(found.items()):
        whole = Chunk((0,) * array.ndim, array.shape, "__0_0.distcp", number, 4 * array.size)
        listed[name] = Stored("float32", array.shape, (whole,))
    parts = dict(enumerate(found.values()))
    check(reader_of(InMemory(tmp_path, renamed(listed, "decoder", "source"), parts)))


# --- Ranks that do not fit together -----------------------------------------------------------------------------------

LAYER = "decoder.layers.1.mlp"


def without(name):
    def change(pair):
        del pair[1][name]

    return change


def double(pair):
    pair[0][f"{LAYER}.experts.local_experts.2.linear_fc1.weight"] = np.zeros((2 * F, H), np.float32)


def five_experts(pair):
    pair[1][f"{LAYER}.router.weight"] = np.zeros((5, H), np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{LAYER}.shared_experts.linear_fc2.weight"), f"only one holds {LAYER}.shared_experts.linear_fc2"),
        (without(f"{LAYER}.experts.local_experts.1.linear_fc2.weight"), "the tensor model.layers.1.mlp.experts.3."),
        (double, f"two expert ranks hold {LAYER}.experts.2.linear_fc1.weight, rank 1 the second time"),
        (five_experts, f"{LAYER}.router.weight does not say how many experts each of 2 expert ranks has"),
    ],
    ids=["a tensor of one rank only", "an expert less", "an expert twice", "experts that the ranks do not divide"],
)
def test_expert_ranks_that_do_not_fit_together_are_refused(change, said):
    pairs = [shares("one by one", stage, 0, 1, 2) for stage in range(2)]
    change(pairs[0])
    with pytest.raises(UsageError) as refused:
        reader_of(RankTensors([[gathered(pair, "source")] for pair in pairs], 3.0, "source", gated=True))
    assert said in str(refused.value)


def test_an_array_of_another_shape_for_all_experts_is_refused_by_its_name():
    pieces = [share("grouped, of old", stage, 0, 1) for stage in range(2)]
    pieces[0][f"{LAYER}.experts.weight1"] = np.zeros((H, 3), np.float32)
    with pytest.raises(UsageError, match=r"a tensor decoder.layers.1.mlp.experts.0.weight1, which is not part of"):
        reader_of(RankTensors([[gathered([piece], "source")] for piece in pieces], 3.0, "source", gated=True))


# --- Arguments --------------------------------------------------------------------------------------------------------


def config_of(**changes):
    return decoder_config(ARGUMENTS | changes, TENSORS, "source", 3.0)


TENSORS = tensors_of()
SIGMOID = {"moe_router_score_function": "sigmoid"}
SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.02}
IN_GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"router": "softmax", "router_normalized": True, "router_scale": 1.0, "balance_loss": 0, "z_loss": 0}),
        ({"moe_router_topk": None}, {"experts_per_token": 2}),
        ({"moe_router_topk": 3}, {"experts_per_token": 3}),
        ({"moe_router_pre_softmax": True}, {"router": "softmax", "router_normalized": False}),
        (SIGMOID, {"router": "sigmoid", "router_normalized": True}),
        (SIGMOID | {"moe_router_topk": 1}, {"router_normalized": False}),
        ({"moe_router_topk_scaling_factor": 2.5}, {"router_scale": 2.5}),
        (SIGMOID | IN_GROUPS, {"router_groups": 2, "router_top_groups": 1}),
        ({"moe_router_num_groups": 2}, {"router_groups": 1, "router_top_groups": None}),
        (IN_GROUPS | {"moe_router_group_topk": 2}, {"router_groups": 1, "router_top_groups": None}),
        ({"moe_aux_loss_coeff": 0.01}, {"balance_loss": 0.01, "balance_over": "micro_batch"}),
        (SEQUENCE, {"balance_loss": 0.02, "balance_over": "sequence"}),
        ({name: [value] for name, value in SEQUENCE.items()}, {"balance_loss": 0.02, "balance_over": "sequence"}),
        (SEQUENCE | {"moe_router_load_balancing_type": "none"}, {"balance_loss": 0.0}),
        ({"moe_z_loss_coeff": 1e-3}, {"z_loss": 1e-3}),
        ({"moe_layer_freq": [1, 1, 1, 1], "moe_expert_capacity_factor": -1.0}, {"experts": E}),
        ({"moe_ffn_hidden_size": None}, {"feed_forward": 20, "expert_width": F, "shared_width": S}),
        ({"ffn_hidden_size": F}, {"feed_forward": F, "expert_width": None}),
    ],
)  # fmt: skip
def test_arguments_become_the_fields_that_mean_the_same(given, expected):
    model = config_of(**given)
    assert {name: getattr(model, name) for name in expected} == expected
    assert not balance_left_out(ARGUMENTS | given, "source")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (SEQUENCE | {"moe_router_load_balancing_type": "global_aux_loss"}, "mjax has no global_aux_loss 0.02, so"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.01, 0.02]},
            "mjax has no aux_loss 0.01 and seq_aux_loss 0.02, so the run has none",
        ),
        (SIGMOID | IN_GROUPS | SEQUENCE, "mjax has no seq_aux_loss 0.02 with groups of experts, so the run has none"),
    ],
)
def test_a_balance_loss_without_a_counterpart_is_left_out_and_said(given, said):
    assert said in balance_left_out(ARGUMENTS | given, "source")
    assert config_of(**given).balance_loss == 0


def test_a_layer_without_experts_is_refused_by_its_argument():
    tensors = tensors_of()
    for name in [name for name in tensors.kinds if name.startswith("decoder.layers.0.mlp.")]:
        del tensors.kinds[name]
    with pytest.raises(
        UsageError, match=r"moe_layer_freq is \[0, 1, 1, 1\], and mjax convert reads those whose layers all have"
    ):
        decoder_config(ARGUMENTS | {"moe_layer_freq": [0, 1, 1, 1]}, tensors, "source", 3.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"moe_router_enable_expert_bias": True}, "expert_bias is True, and mjax convert does not read the bias"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate is True, and the shared expert of mjax has no gate"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input is True"),
        ({"moe_latent_size": 3}, "moe_latent_size is 3"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps is 0.1, and mjax adds no noise"),
        ({"moe_router_topk_limited_devices": 2}, "moe_router_topk_limited_devices is 2"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0, with which Megatron drops tokens"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, and mjax convert reads those whose layers all have"),
        ({"moe_layer_freq": [0, 1, 1, 1]}, "moe_layer_freq is [0, 1, 1, 1]"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "is 'sqrtsoftplus', and mjax knows softmax and sigmoid"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "is 'sinkhorn', and mjax knows aux_loss, seq_aux_loss, "),
        (SIGMOID | IN_GROUPS | {"moe_router_topk": 1}, "score a group by its best 1 experts, and mjax by its best 2"),
        (IN_GROUPS, "group_topk is 1 without moe_router_pre_softmax, which scores groups before the softmax"),
        ({"num_experts": 8}, "num_experts is 8 among the arguments, and 4 by the tensors"),
        ({"moe_ffn_hidden_size": 16}, "moe_ffn_hidden_size is 16 among the arguments, and 8 by the tensors"),
        ({"moe_shared_expert_intermediate_size": None}, "and the arguments ask for 0 rows"),
        ({"moe_router_topk": "2"}, "moe_router_topk is '2', not a whole number"),
        ({"moe_router_pre_softmax": 1}, "moe_router_pre_softmax is 1, not true or false"),
        ({"moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff is -1.0, not a number from 0 on"),
        ({"moe_aux_loss_coeff": [0.1, 0.2]}, "moe_aux_loss_coeff has 2 numbers and moe_router_load_balancing_type 1"),
        ({"moe_z_loss_coeff": np.zeros(3)}, "moe_z_loss_coeff is a ndarray"),
        ({"moe_aux_loss_coeff": [np.zeros(3)]}, "moe_aux_loss_coeff is array"),
        ({"num_experts": None}, "lacks the matrix decoder.layers.0.mlp.linear_fc2.weight"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
    ],
)  # fmt: skip
def test_what_mjax_does_not_compute_is_refused_in_one_sentence(change, said):
    with pytest.raises(UsageError) as refused:
        DecoderTensors(TENSORS, config_of(**change), "source")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
