"""Settings that change the logits of megatron-core change mjax's model, or are refused: none is silent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mjax.errors import UsageError
from mjax.interop.megatron.arguments import SETTINGS, Setting, decoder_config, model_config
from tests.ports import free_port

pytest.importorskip("torch", reason="torch is not installed: make test-ci")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-ci")

from mjax.interop.megatron.tensors import TRUNKS
from scripts.make_megatron_settings import read_config_defaults
from tests.parity.vary_megatron_core import CHANGED, DECODER, MODELS, ROPE, SEQUENCE, SHARED, VOCABULARY

pytestmark = pytest.mark.parity

ARGUMENTS = {
    "num_moe_experts": "num_experts", "gated_linear_unit": "swiglu", "layernorm_epsilon": "norm_epsilon",
    "bias_activation_fusion": "bias_gelu_fusion", "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}  # fmt: skip
"""Fields of TransformerConfig and parameters of GPTModel → arguments of another name."""


def to_arguments(settings):
    """Arguments of a run with these settings."""
    found = {ARGUMENTS.get(name, name): value for name, value in settings.items()}
    if found.get("num_query_groups"):
        found["group_query_attention"] = True
    if "share_embeddings_and_output_weights" in found:
        shared = found.pop("share_embeddings_and_output_weights")
        found["untie_embeddings_and_output_weights"] = not shared
    if found.get("activation_func") is DECODER["activation_func"]:  # which --swiglu sets
        del found["activation_func"]
    return found


def shapes_of(model):
    """The shapes that an import reads, as tensors."""
    hidden, width = SHARED["hidden_size"], SHARED["ffn_hidden_size"]
    shapes = {"embedding.word_embeddings.weight": (VOCABULARY, hidden)}
    if model in ("gpt", "bert"):
        shapes["embedding.position_embeddings.weight"] = (SEQUENCE, hidden)
    rows = (SHARED["num_attention_heads"] + 2 * DECODER["num_query_groups"]) * DECODER["kv_channels"]
    for layer in (f"{TRUNKS.get(model, 'decoder')}.layers.{number}" for number in range(SHARED["num_layers"])):
        shapes[f"{layer}.self_attention.linear_qkv.weight"] = (rows, hidden)
        config = MODELS[model][0]
        if experts := config.get("num_moe_experts"):
            shapes[f"{layer}.mlp.router.weight"] = (experts, hidden)
            shapes[f"{layer}.mlp.experts.0.linear_fc2.weight"] = (hidden, config["moe_ffn_hidden_size"])
        else:
            shapes[f"{layer}.mlp.linear_fc2.weight"] = (hidden, width)
    return {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}


def read_model(model, changed):
    """The config of mjax, or the message of a refusal."""
    config, parameters = MODELS[model]
    positions = {"max_position_embeddings": SEQUENCE, "position_embedding_type": "learned_absolute"}
    arguments = to_arguments(positions | SHARED | config | parameters) | to_arguments(changed)
    try:
        if parameters is ROPE:
            return decoder_config(arguments, shapes_of(model), "source", 3.0)
        return model_config(arguments, shapes_of(model), model, "source")
    except UsageError as error:
        return str(error)


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """Changes of logits by model and setting."""
    file = tmp_path_factory.mktemp("varied") / "changes.json"
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = [sys.executable, str(Path(__file__).with_name("vary_megatron_core.py")), str(file)]
    # Some settings are names of folders, into which megatron-core writes.
    output = {"cwd": file.parent, "capture_output": True, "text": True}
    done = subprocess.run(program, env=environment, timeout=600, check=False, **output)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("model", MODELS)
def test_no_setting_changes_logits_silently(varied, model):
    unchanged = read_model(model, {})
    assert not isinstance(unchanged, str), unchanged
    changing = {
        (name, json.dumps(value)): value
        for name, values in varied[model].items()
        for value, change in values
        if change is not None and change > CHANGED
    }
    assert len({name for name, _ in changing}) >= {"gpt": 16, "bert": 14, "llama": 22}.get(model, 30)
    silent = [key for key, value in changing.items() if read_model(model, {key[0]: value}) == unchanged]
    silent += [key for key in changing if SETTINGS.get(key[0], Setting()).kind == "no effect"]
    assert not silent


def test_arguments_of_reproduced_and_refused_settings_are_read(varied):
    """An argument without effect changes only fields without effect, in megatron.training's own conversion."""
    found = varied["arguments"]
    if not found:
        pytest.skip("the wheel of this megatron-core lacks megatron.training")
    assert len(found) > 600
    silent = {
        name: changed
        for name, changed in found.items()
        if SETTINGS.get(name, Setting()).kind == "no effect"
        and any(SETTINGS[field].kind != "no effect" for field in changed)
    }
    assert silent.pop("bias_swiglu_fusion", None) in (None, ["bias_activation_fusion"])  # SiLU in both kernels
    assert not silent


def test_table_lists_defaults_of_megatron_core():
    """A version that adds or changes a setting needs a row: scripts/make_megatron_settings.py."""
    missing = {
        name: default
        for name, default in read_config_defaults().items()
        if name not in SETTINGS or default not in SETTINGS[name].defaults
    }
    assert not missing
