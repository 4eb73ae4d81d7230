"""HybridModel and fsdp_dtensor without torch: whose layers are those of a GPT, under which names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mjax.commands import cli
from mjax.errors import UsageError
from mjax.interop.megatron.checkpoint import MegatronCheckpoint, open_hybrid, strip_wrappers
from mjax.interop.megatron.tensors import join_tensor_ranks
from mjax.interop.tensor_files import LazyTensor

NAMES = (
    "decoder.layers.0.input_layernorm.weight", "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.layers.2.input_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight",
    "decoder.final_layernorm.weight",
)  # fmt: skip


def named(names):
    """Tensors that are their own names."""
    return {name: LazyTensor("F32", (4,), np.array(list(name)).__getitem__) for name in names}


def hybrid(names=NAMES, **arguments):
    opened = (3.0, False, arguments, None, False, {}, lambda slot: named(names))
    return MegatronCheckpoint(Path("in"), "decoder", named(names), *opened)


@pytest.mark.parametrize("pattern", ["*-*-", "*-|*-", "*|-*|-"])
def test_hybrid_layers_pair_up(pattern):
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    given = {"hybrid_layer_pattern": pattern, "num_layers": 4, "is_hybrid_model": True, "spec": spec, "seed": 1}
    opened = open_hybrid(hybrid(**given))
    assert opened.arguments == {"num_layers": 2, "seed": 1}
    assert "".join(opened.tensors["decoder.layers.1.pre_mlp_layernorm.weight"][:]) == NAMES[3]
    halves = [NAMES[0], NAMES[1].replace("1", "0"), NAMES[2].replace("2", "1"), NAMES[3].replace("3", "1"), NAMES[4]]
    assert list(opened.tensors) == halves == list(opened.open_slot("exp_avg"))


def test_uneven_stages_are_numbered_through():
    """`*-*|-`, as each stage of the format torch numbers its layers from 0."""
    ones = np.ones(4, np.float32)
    first = {name: ones * number for number, name in enumerate(NAMES[:3])}
    last = {"decoder.layers.0.pre_mlp_layernorm.weight": ones * 3, NAMES[4]: ones * 4}
    stages = replace(hybrid(hybrid_layer_pattern="*-*|-"), tensors=join_tensor_ranks([[first], [last]], 3.0, "in"))
    tensors = open_hybrid(stages).tensors
    assert [tensor[:][0] for tensor in tensors.values()] == [0, 1, 2, 3, 4]
    assert list(tensors)[3] == "decoder.layers.1.pre_mlp_layernorm.weight"


def test_other_models_and_specs_are_kept():
    checkpoint = hybrid(spec=["my.specs", "stack"])
    assert open_hybrid(checkpoint) is checkpoint
    opened = open_hybrid(hybrid(spec=["my.specs", "stack"], hybrid_override_pattern="*-*E", moe_layer_freq=1))
    assert opened.arguments == {"spec": ["my.specs", "stack"], "num_layers": 2, "moe_layer_freq": [0, 1]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hybrid_layer_pattern": "M-*-"}, "hybrid_layer_pattern is 'M-*-': M is Mamba, which mjax lacks"),
        ({"hybrid_override_pattern": "G-*-"}, "hybrid_override_pattern is 'G-*-': G is a gated delta net"),
        ({"hybrid_layer_pattern": "D-"}, "D is DeepSeek's sparse attention"),
        ({"hybrid_layer_pattern": "+E"}, "+ is multi-latent attention"),
        ({"hybrid_layer_pattern": "*-*-/*-"}, "/ is multi-token prediction"),
        ({"hybrid_layer_pattern": "**--"}, "'**--': mjax reads attention with MLP (*-) or experts (*E) in turn"),
        ({"hybrid_layer_pattern": "*-*"}, "'*-*': mjax reads attention with MLP (*-) or experts (*E) in turn"),
        ({"hybrid_layer_pattern": 5}, "hybrid_layer_pattern is 5: mjax reads"),
        ({"hybrid_layer_pattern": "*-*-", "use_rope_scaling": True}, "ignores; add --ignore use_rope_scaling"),
    ],
    ids=str,
)
def test_other_layers_are_refused_by_name(arguments, words):
    with pytest.raises(UsageError) as refused:
        open_hybrid(hybrid(**arguments))
    assert words in str(refused.value)


def test_layers_that_break_pattern_are_refused():
    names = ("decoder.layers.0.input_layernorm.weight", "decoder.layers.1.input_layernorm.weight")
    with pytest.raises(UsageError, match=r"in has both .+0\.input.+ and .+1\.input.+, which its pattern excludes"):
        open_hybrid(hybrid(names, hybrid_layer_pattern="*-"))


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.module.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("model.module.module.decoder.layers.0.mlp.linear_fc1.weight_w", "decoder.layers.0.mlp.linear_fc1.weight_w"),
        ("model.a.mlp.experts.local_experts.3.linear_fc2.weight", "a.mlp.experts.3.linear_fc2.weight"),
        ("model.module.a.mlp.experts.linear_fc1.weight13_v", "a.mlp.experts.13.linear_fc1.weight_v"),
    ],
)
def test_wrappers_are_stripped(stored, name):
    assert strip_wrappers(stored) == name


@pytest.mark.parametrize(("state", "words"), [({"step": 7}, "no checkpoint iter_0000007"), ({}, "has no step; give")])
def test_bridge_tracker_selects_checkpoint(state, words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("mjax.interop.megatron.checkpoint.load_megatron_file", lambda file: state)
    (tmp_path / "in" / "iter_0000005").mkdir(parents=True)
    (tmp_path / "in" / "latest_train_state.pt").touch()
    assert cli.main(["convert", "from-megatron", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
