"""run_config.yaml of Megatron-Bridge as arguments of Megatron-LM. test_megatron_recorded.py reads a whole one."""

import pytest
import yaml

from mjax.errors import UsageError
from mjax.interop.megatron.checkpoint import read_run_config

SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
GELU = {"_target_": "torch._C._nn.gelu", "_call_": False}
PROVIDER = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}
LLAMA = PROVIDER | {
    "activation_func": SILU, "gated_linear_unit": True, "num_attention_heads": 4, "num_query_groups": 2,
    "seq_length": 64, "rope_scaling": True, "share_embeddings_and_output_weights": False, "num_moe_experts": None,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """A function that reads a model's settings, or a text, as run_config.yaml."""

    def read(model):
        text = model if isinstance(model, str) else yaml.safe_dump({"model": model})
        (tmp_path / "run_config.yaml").write_text(text)
        return read_run_config(tmp_path / "run_config.yaml")

    return read


def test_fields_become_arguments(read):
    assert read(LLAMA) == {
        "num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True, "max_position_embeddings": 64,
        "use_rope_scaling": True, "untie_embeddings_and_output_weights": True, "num_experts": None, "swiglu": True,
        "bias_gelu_fusion": False,
    }  # fmt: skip


def test_gelu_follows_fusion(read):
    for fused in (False, True):
        arguments = read(PROVIDER | {"activation_func": GELU, "bias_activation_fusion": fused})
        assert arguments["bias_gelu_fusion"] is fused
        assert not arguments["swiglu"]


def test_nested_transformer_is_read(read):
    """`GPTModelConfig`, which writes no functions: megatron/training/models/base.py of megatron-core 0.19."""
    target = {"_target_": "megatron.training.models.gpt.GPTModelConfig", "seq_length": 64}
    builder = {"_builder_": "megatron.training.models.gpt.GPTModelBuilder"}
    transformer = {"_target_": "megatron.bridge.models.transformer_config.TransformerConfig", "num_moe_experts": 8}
    arguments = read(target | builder | {"transformer": transformer})
    assert (arguments["num_experts"], arguments["max_position_embeddings"]) == (8, 64)
    assert arguments["activation_func"] == "not there"
    assert arguments.keys().isdisjoint({"_target_", "_builder_", "transformer"})


@pytest.mark.parametrize(
    ("name", "known", "other"),
    [
        ("activation_func", SILU, SILU | {"inplace": True}),
        ("activation_func", SILU, {"_target_": "torch.nn.functional.relu", "_call_": False}),
        (
            "transformer_layer_spec",
            {
                "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", "_partial_": True,
                "_args_": [], "use_transformer_engine": True,
            },
            {
                "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", "_partial_": True,
                "_args_": [], "qk_l2_norm": True,
            },
        ),
        ("_target_", PROVIDER["_target_"], "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider"),
    ],
)  # fmt: skip
def test_other_classes_and_functions_stay_arguments(read, name, known, other):
    assert name not in read(LLAMA | {name: known})
    assert read(LLAMA | {name: other})[name] == other


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model: !!python/object/apply:os.system ['touch sprung']",
            "is not a run_config of Megatron-Bridge (Construct",
        ),
        ("model: [1", "(ParserError"),
        ("model: 5", "(TypeError"),
        ("other: {}", "(KeyError"),
        ("[" * 5000, "is not a run_config"),
        ("model: {_target_: x}\npeft: {dim: 8}", "has peft, adapters without a model; merge them"),
        ("\xff: [", "is not a run_config"),
    ],
    ids=["executes", "cut off", "a number", "no model", "deep", "adapters", "characters"],
)
def test_other_files_are_refused_unexecuted(read, text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        read(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "sprung").exists()
