"""What a model folder may get wrong: each is refused in one sentence that names it, and nothing is written."""

import json
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from mjax import cli
from mjax.config import save_config
from mjax.errors import UsageError
from mjax.interop.convert import family_of
from mjax.interop.gpt2 import GPT2
from mjax.interop.tensor_files import open_tensors, parse_size
from mjax.interop.weights import places
from tests import toy_model
from tests.interop.folders import CONFIG, tensors_of, write_folder
from tests.small import small_config


def _config(**changes):
    return lambda folder: write_folder(folder, {**CONFIG, **changes})


def _tensors(change):
    def write(folder):
        tensors = tensors_of(CONFIG)
        change(tensors)
        write_folder(folder, tensors=tensors)

    return write


def _set(name, make):
    return _tensors(lambda tensors: tensors.update({name: make(tensors)}))


def _bytes(file, change):
    """The folder with a file whose content is changed."""

    def write(folder):
        write_folder(folder)
        content = (folder / file).read_bytes() if (folder / file).exists() else b""
        (folder / file).write_bytes(change(content))

    return write


def _index(change):
    def write(folder):
        write_folder(folder, parts=2)
        file = folder / "model.safetensors.index.json"
        values = json.loads(file.read_text())
        change(folder, values["weight_map"])
        file.write_text(json.dumps(values))

    return write


def _only_a_pickle(folder):
    write_folder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _in_two_files(folder):
    write_folder(folder, parts=2)
    save_file(tensors_of(CONFIG), folder / "model-00001-of-00002.safetensors")


def _infinite(tensors):
    tensors["transformer.h.1.ln_2.bias"][3] = np.inf


def _tokenizer(folder):
    write_folder(folder, {**CONFIG, "vocab_size": 256}, tensors_of({**CONFIG, "vocab_size": 256}))


BIAS, WTE = "transformer.h.0.mlp.c_fc.bias", "transformer.wte.weight"
MISTAKES = {
    # config.json
    "layers scaled by their number": (
        _config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True",
    ),
    "scores that are not scaled": (_config(scale_attn_weights=False), "scale_attn_weights is False"),
    "cross attention": (_config(add_cross_attention=True), "add_cross_attention is True"),
    "an untied output layer": (_config(tie_word_embeddings=False), "tie_word_embeddings is False"),
    "an unknown setting": (_config(rotary_pct=0.25), "rotary_pct is 0.25, which mjax does not know"),
    "quantised weights": (_config(quantization_config={"bits": 4}), "quantization_config is {'bits': 4}"),
    "an unknown activation": (_config(activation_function="relu"), "activation_function is 'relu'"),
    "another family": (_config(model_type="t5"), "model_type is 't5'"),
    "no family": (_config(model_type=None), "model_type is None"),
    "two dropout rates": (_config(embd_pdrop=0.1), "embd_pdrop is 0.1 and resid_pdrop 0.0"),
    "a dropout rate of 1": (_config(attn_pdrop=1.0), "attention-dropout is 1.0"),
    "two numbers of positions": (_config(n_ctx=8), "n_ctx is 8 and n_positions 16"),
    "heads that do not divide": (_config(n_head=5), "n_head 5 does not divide n_embd 12"),
    "a number as text": (_config(n_layer="2"), "n_layer is '2', which is not a whole number"),
    "no layer": (_config(n_layer=0), "n_layer is 0"),
    "true as a number": (_config(n_head=True), "n_head is True"),
    "a width that is none": (_config(n_inner=-4), "n_inner is -4"),
    "config.json that is not JSON": (_bytes("config.json", lambda _: b"{"), "config.json is not JSON"),
    "config.json that is a list": (_bytes("config.json", lambda _: b"[]"), "config.json has no JSON object"),
    # tensors
    "a missing tensor": (_tensors(lambda tensors: tensors.pop(BIAS)), f"lacks the tensor {BIAS};"),
    "many missing tensors": (_config(n_layer=3), "lacks the tensor transformer.h.2.ln_1.weight and 11 more"),
    "an unknown tensor": (_set("score.weight", lambda _: np.ones((2, 12), np.float32)), "a tensor score.weight"),
    "more layers than config.json says": (_config(n_layer=1), "which is not part of GPT2LMHeadModel with 1 layers"),
    "a transposed weight": (
        _set("transformer.h.0.mlp.c_fc.weight", lambda tensors: np.ones((48, 12), np.float32)),
        "transformer.h.0.mlp.c_fc.weight has shape (48, 12), and config.json asks for (12, 48)",
    ),
    "another vocabulary": (_config(vocab_size=250), "(257, 12), and config.json asks for (250, 12)"),
    "integers": (_set(BIAS, lambda tensors: tensors[BIAS].astype(np.int8)), f"{BIAS} is of type I8"),
    "float64": (_set(BIAS, lambda tensors: tensors[BIAS].astype(np.float64)), f"{BIAS} is of type F64"),
    "an output layer of its own": (
        _set("lm_head.weight", lambda tensors: tensors[WTE] + 1), "lm_head.weight differs from transformer.wte.weight",
    ),
    "an output layer of another shape": (
        _set("lm_head.weight", lambda tensors: tensors[WTE][1:].copy()), "lm_head.weight differs",
    ),
    "a tensor under two names": (
        _set("wpe.weight", lambda tensors: tensors["transformer.wpe.weight"]),
        "both wpe.weight and transformer.wpe.weight",
    ),
    "a weight that is not finite": (_tensors(_infinite), "h.1.ln_2.bias holds numbers that are not finite"),
    # files
    "a truncated file": (_bytes("model.safetensors", lambda content: content[:-8]), "is truncated or not a"),
    "a truncated header": (_bytes("model.safetensors", lambda content: content[:50]), "is truncated or not a"),
    "an empty file": (_bytes("model.safetensors", lambda _: b""), "is truncated or not a"),
    "a header larger than the file": (
        _bytes("model.safetensors", lambda content: struct.pack("<Q", 2**40) + content[8:]), "is truncated or not a",
    ),
    "no tensors": (lambda folder: (write_folder(folder) / "model.safetensors").unlink(), "has no model.safetensors"),
    "a list for an activation": (_config(activation_function=["gelu"]), "activation_function is ['gelu']; mjax"),
    "a list for a model_type": (_config(model_type=["gpt2"]), "model_type is ['gpt2']; mjax supports"),
    "an output layer of another type": (
        _set("lm_head.weight", lambda tensors: tensors[WTE].astype(np.float64)), "lm_head.weight is of type F64",
    ),
    "no config.json": (lambda folder: (write_folder(folder) / "config.json").unlink(), "config.json does not exist"),
    "a pickle only": (_only_a_pickle, "in pytorch_model.bin only, a pickle"),
    "no folder": (lambda folder: None, "is not a folder"),
    "an index without its file": (
        _index(lambda folder, places: (folder / "model-00002-of-00002.safetensors").unlink()), "does not exist, though",
    ),
    "an index that leads elsewhere": (
        _index(lambda folder, places: places.update({WTE: "../in/config.json"})), "which is not a file beside it",
    ),
    "an index that expects what is not there": (
        _index(lambda folder, places: places.update({"more": places[WTE]})), "lacks the tensor more",
    ),
    "an index without places": (_index(lambda folder, places: places.clear()), "has no weight_map"),
    "a tensor in two files": (_in_two_files, "which is in another file too"),
    "a tokenizer larger than the embedding": (_tokenizer, "the tokenizer has 257 ids and the model's embedding 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_model_that_mjax_does_not_understand_is_refused_by_name(name, tmp_path, capsys):
    write, expected = MISTAKES[name]
    write(tmp_path / "in")
    flags = ["--tokenizer", "bytes"] if "tokenizer" in name else []
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out"), *flags]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.startswith("mjax: error: ")
    assert message.count("\n") == 1, "one line"
    assert not {entry.name for entry in tmp_path.iterdir()} - {"in"}


def test_settings_without_effect_and_empty_ones_are_no_hindrance(tmp_path):
    config = {**CONFIG, "task_specific_params": {"text-generation": {"max_length": 50}}, "use_cache": False}
    config |= {"reorder_and_upcast_attn": True, "pruned_heads": {}, "something_new": None, "n_ctx": 16}
    write_folder(tmp_path / "in", config)
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["from-hf", "in", "used"], "used exists"),
        (["from-hf", "in", "in/config.json"], "config.json exists"),
        (["from-hf", "in", "out", "--vocabulary-multiple", "0"], "--vocabulary-multiple is 0"),
        (["to-hf", "nowhere", "out"], "nowhere/config.json does not exist"),
        (["to-hf", "run", "out", "--shard-size", "5 apples"], "--shard-size '5 apples' is not a size"),
        (["to-hf", "run", "out", "--step", "7"], "has no checkpoint 7; there are 0"),
        (["to-hf", "run", "used"], "used exists"),
        (["to-hf", "run", "used", "--overwrite"], "--overwrite replaces models only"),
        (["form-hf", "in", "out"], "did you mean 'from-hf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_cannot_work_says_why(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "in")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").touch()
    assert cli.main(["convert", "from-hf", "in", "run"]) == 0
    capsys.readouterr()
    try:
        code = cli.main(["convert", *arguments])
    except SystemExit as stopped:  # tyro's own errors
        code = stopped.code
    assert code == 2
    assert expected in capsys.readouterr().err
    assert {entry.name for entry in tmp_path.iterdir()} == {"in", "run", "used"}


@pytest.mark.parametrize(("text", "size"), [("5GB", 5_000_000_000), ("1.5 mb", 1_500_000), ("64KB", 64_000)])
def test_sizes_are_read_in_powers_of_ten(text, size):
    assert parse_size(text) == size


def test_safetensors_are_preferred_to_a_pickle_beside_them(tmp_path):
    folder = write_folder(tmp_path / "in")
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert open_tensors(folder).kinds.keys() == tensors_of(CONFIG).keys()


@pytest.mark.parametrize("rows", [slice(0, 5), slice(250, 300), slice(255, None), slice(None)], ids=str)
def test_some_rows_of_a_tensor_are_those_of_numpy(tmp_path, rows):
    folder = write_folder(tmp_path / "in")
    np.testing.assert_array_equal(open_tensors(folder).read(WTE, rows), tensors_of(CONFIG)[WTE][rows])


def test_a_file_that_holds_something_else_than_tensors_by_name_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu128", "2.10.0", "2.11.0a0+git1234", "3.0.0"])
def test_a_pickle_is_read_by_torch_2_10_or_newer_only(version, tmp_path, monkeypatch):
    old = version.startswith(("1.", "2.9"))
    opened = []

    def load(file, **how):
        opened.append(how)
        raise RuntimeError("nothing to read")

    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(__version__=version, load=load, float32=0, float16=1, bfloat16=2)
    )
    _only_a_pickle(tmp_path / "in")
    with pytest.raises(UsageError) as error:
        open_tensors(tmp_path / "in", allow_pickle=True)
    assert (f"torch {version} reads files unsafely; type `pip install 'torch>=2.10'`" in str(error.value)) == old
    assert [how["weights_only"] for how in opened] == ([] if old else [True])


def test_a_pickle_without_torch_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    _only_a_pickle(tmp_path / "in")
    with pytest.raises(UsageError, match=r"--allow-pickle is for files that are read by torch, which is not installed"):
        open_tensors(tmp_path / "in", allow_pickle=True)


@pytest.mark.parametrize(
    "option",
    [
        {"positions": "alibi"},
        {"embedding_layernorm": True},
        {"positions": "alibi", "embedding_layernorm": True, "activation": "gelu_erf"},
        {"positions": "alibi", "embedding_layernorm": True, "feed_forward": 100},
        {"window": 8},
        {"positions": "alibi", "embedding_layernorm": True, "activation": "gelu_tanh", "window": 8},
    ],
    ids=str,
)
def test_an_export_of_what_no_class_of_transformers_has_is_refused(option, tmp_path, capsys):
    save_config(small_config(**option), tmp_path / "config.json")
    assert cli.main(["convert", "to-hf", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "transformers has no class for a GPT with --model.positions" in error
    for name, value in option.items():  # gelu_tanh is of both families
        assert f" --model.{name.replace('_', '-')} {value}" in error or value == "gelu_tanh"
    assert "; GPT2LMHeadModel has " in error
    assert "; BloomForCausalLM has " in error
    assert not (tmp_path / "out").exists()


def test_an_export_of_a_model_of_one_s_own_is_refused_by_its_title():
    with pytest.raises(UsageError, match="no table for a toy; convert a model of the kinds gpt, bert"):
        family_of(toy_model.config.model)


def test_a_table_without_a_name_for_a_weight_is_refused():
    names = {ours: name for ours, name in GPT2.names.items() if ours != "blocks.mlp_norm"}
    with pytest.raises(AssertionError, match=r"no name for blocks\.mlp_norm\.bias, blocks\.mlp_norm\.scale"):
        places(replace(GPT2, names=names), small_config().model)
