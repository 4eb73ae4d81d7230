"""`mjax convert` both ways for each family: what becomes of every tensor, every setting and the tokenizer."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.numpy import bfloat16

from mjax.commands import cli, convert
from mjax.config import read_config, save_config
from mjax.data.tokenizers import SentencePieceTokenizer, load_tokenizer, tokenizer_from_folder
from mjax.interop import model_folder
from mjax.interop.convert import find_family
from mjax.interop.model_folder import new_folder
from mjax.interop.tokenizer_files import open_tokenizer
from mjax.models.build import build_model
from mjax.models.huggingface.family import config_values, model_config
from tests.data.vocabularies import bert_file, foreign_model, gpt2_files
from tests.interop.folders import BERT, BLOOM, CONFIG, LLAMA, MEGATRON_BERT, read_folder, tensors_of, write_folder
from tests.interop.whole_weights import assert_same, folder_weights, weights_of
from tests.small import named
from tests.tiny_config import config as tiny

CONFIGS = {"gpt2": CONFIG, "bert": BERT, "megatron-bert": MEGATRON_BERT, "bloom": BLOOM, "llama": LLAMA}


def to_hf(run, out, *flags):
    return cli.main(["convert", "to-hf", str(run), str(out), *flags])


def from_hf(source, run, *flags):
    return cli.main(["convert", "from-hf", str(source), str(run), *flags])


def settings_in(folder, file="config.json"):
    return json.loads((folder / file).read_text())


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model folder of each family."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: write_folder(folder / name, config, tensors_of(config)) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def runs(sources, tmp_path_factory):
    """The run folders made of them; the tests below only read them."""
    folder = tmp_path_factory.mktemp("runs")
    for name, source in sources.items():
        assert from_hf(source, folder / name, "--vocabulary-multiple", "64") == 0
    return {name: folder / name for name in sources}


# --- Tensors ----------------------------------------------------------------------------------------------------------


def linear(tensors, name, *shape):
    """A matrix of `torch.nn.Linear` as [in, …]."""
    return tensors[f"{name}.weight"].T.reshape(-1, *shape)


def by_hand(name, tensors):
    """Some of our weights of layer 1; tests/parity compares what all of them compute with `transformers`."""
    if name == "bloom":  # rows are head by head, and of a head its queries, keys and values; 3 heads of 4 numbers
        qkv = "transformer.h.1.self_attention.query_key_value"
        return {
            "blocks.attention.qkv.kernel": linear(tensors, qkv, 3, 3, 4).swapaxes(1, 2),
            "blocks.attention.qkv.bias": tensors[f"{qkv}.bias"].reshape(3, 3, 4).swapaxes(0, 1),
        }
    layer = "model.layers.1"
    halves = [linear(tensors, f"{layer}.self_attn.{part}_proj", 2, 4) for part in "kv"]
    gates = [linear(tensors, f"{layer}.mlp.{part}_proj", 24) for part in ("gate", "up")]
    return {
        "blocks.attention.query.kernel": linear(tensors, f"{layer}.self_attn.q_proj", 4, 4),
        "blocks.attention.key_value.kernel": np.stack(halves, axis=1),
        "blocks.mlp.up.kernel": np.stack(gates, axis=1),
    }


@pytest.mark.parametrize(
    ("name", "table"), [("bloom", "transformer.word_embeddings.weight"), ("llama", "model.embed_tokens.weight")]
)
def test_import_puts_every_tensor_in_place(sources, runs, name, table):
    theirs, ours = read_folder(sources[name]), weights_of(runs[name])
    for weight, tensor in by_hand(name, theirs).items():
        np.testing.assert_array_equal(ours[weight][1], tensor, err_msg=weight)
    embedding = ours["embedding.table"]
    np.testing.assert_array_equal(embedding[:257], theirs[table])
    assert embedding.shape[0] == 320
    assert not embedding[257:].any(), "rows of zeros pad the vocabulary"


@pytest.mark.parametrize("name", CONFIGS)
def test_export_equals_import_bit_for_bit(sources, runs, name, tmp_path, capsys):
    assert to_hf(runs[name], tmp_path / "out", "--shard-size", "8KB") == 0
    assert f"as {CONFIGS[name]['architectures'][0]}," in capsys.readouterr().out
    tensors = read_folder(sources[name])
    assert_same(read_folder(tmp_path / "out"), tensors)
    assert CONFIGS[name].items() <= settings_in(tmp_path / "out").items()
    assert (tmp_path / "out" / "generation_config.json").exists() == ("bert" not in name)
    assert from_hf(tmp_path / "out", tmp_path / "again", "--vocabulary-multiple", "64") == 0
    assert_same(weights_of(tmp_path / "again"), weights_of(runs[name]))
    assert read_config(tmp_path / "again" / "config.json") == read_config(runs[name] / "config.json")

    index = settings_in(tmp_path / "out", "model.safetensors.index.json")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    sizes = [[tensors[each].nbytes for each, place in index["weight_map"].items() if place == file] for file in files]
    assert all(sum(held) <= 8000 or len(held) == 1 for held in sizes)


def without_prefix(tensors):
    return {name.partition(".")[2] if name.startswith(("tr", "bert")) else name: each for name, each in tensors.items()}


def with_masks(tensors):
    mask = np.tril(np.ones((1, 1, 16, 16), np.uint8))
    return tensors | {f"transformer.h.{i}.attn.{name}": mask for i in range(2) for name in ("bias", "masked_bias")}


def stored_twice(tensors):
    """Store tied tensors twice, and buffers, like versions of transformers before 4.31."""
    return tensors | {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].copy(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].copy(),
        "bert.embeddings.position_ids": np.arange(16)[None],
    }


def of_tensorflow(tensors):
    names = {name: name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in tensors}
    return {names[name].replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gpt2", without_prefix),
        ("gpt2", with_masks),
        ("bloom", without_prefix),
        ("bert", stored_twice),
        ("megatron-bert", of_tensorflow),
    ],
)
def test_older_files_give_same_weights(sources, name, form, tmp_path):
    source = write_folder(tmp_path / "in", CONFIGS[name], form(tensors_of(CONFIGS[name])), parts=3)
    assert_same(folder_weights(source), folder_weights(sources[name]))


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_half_precision_is_widened_without_loss(tmp_path, dtype):
    """The embedding is read in two parts."""
    config = CONFIG | {"vocab_size": 5000}
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors_of(config).items()}
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    found = folder_weights(write_folder(tmp_path / "in", config, tensors))
    assert_same(found, folder_weights(write_folder(tmp_path / "wide", config, wide)))
    np.testing.assert_array_equal(found["embedding.table"][:5000], wide["transformer.wte.weight"])


def test_bf16_export_rounds_and_names_dtype(sources, runs, tmp_path):
    assert to_hf(runs["gpt2"], tmp_path / "out", "--dtype", "bf16") == 0
    rounded = {name: tensor.astype(bfloat16) for name, tensor in read_folder(sources["gpt2"]).items()}
    assert_same(read_folder(tmp_path / "out"), rounded)
    assert settings_in(tmp_path / "out")["torch_dtype"] == "bfloat16"


# --- Heads of a BERT --------------------------------------------------------------------------------------------------

HEADS = {"mlm.": "the head for masked tokens", "pooler.": "the pooler", "order.": "the order head"}


@pytest.mark.parametrize(
    ("lost", "form", "drawn"),
    [
        (("cls.", "bert.pooler."), without_prefix, HEADS),  # as BertModel stores it
        (("cls.seq_relationship", "bert.pooler."), dict, ("pooler.", "order.")),  # as BertForMaskedLM does
    ],
    ids=["all", "some"],
)
def test_missing_heads_are_drawn_on_request(lost, form, drawn, runs, tmp_path, capsys):
    tensors = {name: each for name, each in tensors_of(BERT).items() if not name.startswith(lost)}
    source, names = write_folder(tmp_path / "in", BERT, form(tensors)), ", ".join(HEADS[each] for each in drawn)
    assert from_hf(source, tmp_path / "run") == 2
    assert f"{names}; its encoder is complete, so add --init-missing-heads" in capsys.readouterr().err
    assert from_hf(source, tmp_path / "run", "--init-missing-heads", "--vocabulary-multiple", "64") == 0
    assert f"initialised from seed 1234: {names}\n" in capsys.readouterr().out
    found, whole = weights_of(tmp_path / "run"), weights_of(runs["bert"])
    initial = named(jax.jit(partial(build_model, 1234, read_config(runs["bert"] / "config.json").model))())
    for name in found:
        expected = initial if name.startswith(tuple(drawn)) else whole
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


# --- Settings ---------------------------------------------------------------------------------------------------------

RATES = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "initializer_range": 0.01}


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (CONFIG, {"n_inner": 20, "activation_function": "gelu", "layer_norm_epsilon": 1e-6} | RATES),
        (BERT, {"intermediate_size": 48, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
        (BLOOM, {"seq_length": 24, "attention_dropout": 0.1}),
    ],
)
def test_settings_survive_import_and_export(config, change):
    config = config | change
    family = find_family(config, Path("config.json"))
    model = model_config(family, config, "config.json", 128)
    written = config_values(family, model)
    assert written.items() >= {name: config[name] for name in config.keys() - {"model_type", "architectures"}}.items()


# --- Training goes on -------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_imported_model_trains_and_is_exported(tmp_path, capsys):
    # Shape and settings are those of the other tests of the command line, which share the compiled step.
    config = CONFIG | {"n_embd": 32, "n_head": 4, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    source, run = write_folder(tmp_path / "in", config, tensors_of(config)), tmp_path / "run"
    assert from_hf(source, run, "--tokenizer", "bytes", "--vocabulary-multiple", "64") == 0
    imported = read_config(run / "config.json").model
    assert imported == replace(tiny.model, max_position_embeddings=tiny.model.sequence)
    save_config(replace(tiny, model=imported), run / "config.json")
    mesh = ["--mesh.data", "8", "--mesh.model", "2", "--train.micro-batch", "1", "--train.steps", "4"]
    assert cli.main(["train", "--run", str(run), *mesh]) == 0
    assert "starting with fresh optimizer state" in capsys.readouterr().out
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["0", "4"]

    assert to_hf(run, tmp_path / "trained") == 0
    trained, before = read_folder(tmp_path / "trained"), read_folder(source)
    moved = [float(np.abs(trained[name] - before[name]).max()) for name in before]
    assert all(0 < far < 0.05 for far in moved), "the first steps lead away from the model, not far"


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def test_gpt2_tokenizer_survives_import_and_export(tmp_path):
    files = gpt2_files(tmp_path)
    given = load_tokenizer("gpt2:" + ",".join(map(str, files)))
    config = CONFIG | {"vocab_size": given.vocabulary}
    source = write_folder(tmp_path / "in", config, tensors_of(config))
    for file in files:
        shutil.copy(file, source)
    assert from_hf(source, tmp_path / "run") == 0
    assert tokenizer_from_folder(tmp_path / "run" / "tokenizer").encode("The café") == given.encode("The café")
    assert to_hf(tmp_path / "run", tmp_path / "out") == 0
    for file in files:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert settings_in(tmp_path / "out", name)["eos_token_id"] == given.eod
    described = settings_in(tmp_path / "out", "tokenizer_config.json")
    assert (described["tokenizer_class"], described["model_max_length"]) == ("PreTrainedTokenizerFast", 16)


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (None, None),
        ({"do_lower_case": True, "strip_accents": False}, None),
        ({"do_lower_case": True}, "bert-uncased"),
    ],
)
def test_vocabulary_is_read_if_its_case_is_known(said, scheme, tmp_path):
    bert_file(tmp_path, True)
    if said is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert getattr(open_tokenizer(tmp_path, None), "scheme", None) == scheme


def test_run_without_tokenizer_gets_one_at_export(runs, tmp_path, capsys):
    run, out = runs["gpt2"], tmp_path / "out"
    assert to_hf(run, out) == 0
    assert "has no tokenizer" in capsys.readouterr().out
    assert not (out / "tokenizer.json").exists()
    assert to_hf(run, out, "--tokenizer", "bytes", "--overwrite") == 0
    assert open_tokenizer(out, None).scheme == "bytes"
    assert settings_in(out, "generation_config.json")["pad_token_id"] == 256


def test_tokenizer_without_counterpart_stops_export_early(runs, tmp_path, capsys, monkeypatch):
    stranger, out = shutil.copytree(runs["gpt2"], tmp_path / "run"), tmp_path / "out"
    SentencePieceTokenizer(foreign_model(), "x.model").save(stranger / "tokenizer")
    monkeypatch.setattr(convert.Checkpoints, "find", lambda *_, **__: pytest.fail("the weights were read"))
    assert to_hf(stranger, out) == 2
    assert "--tokenizer none" in capsys.readouterr().err
    monkeypatch.undo()
    assert to_hf(stranger, out, "--tokenizer", "none") == 0
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(file.name for file in out.iterdir()) == files


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        (from_hf, ("--vocabulary-multiple", "0"), "--vocabulary-multiple is 0"),
        (to_hf, ("--shard-size", "5apples"), "--shard-size '5apples' is not a size"),
        (to_hf, ("--step", "7"), "has no checkpoint 7; there are 0"),
    ],
)
def test_impossible_flags_are_refused(command, flags, words, sources, runs, tmp_path, capsys):
    assert command((sources if command is from_hf else runs)["gpt2"], tmp_path / "out", *flags) == 2
    assert words in capsys.readouterr().err


# --- Whole or not at all ----------------------------------------------------------------------------------------------


def test_names_lead_to_what_to_type(runs, tmp_path, monkeypatch, capsys):
    """A model that is not here, and an import that is: from its folder to a run of one's own."""
    monkeypatch.chdir(tmp_path)
    assert from_hf("Qwen/Qwen3-0.6B", "run") == 2
    assert "type `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`" in capsys.readouterr().err
    to_hf(runs["gpt2"], "gpt2", "--tokenizer", "bytes")
    assert from_hf("gpt2", "my run") == 0
    said = capsys.readouterr().out
    assert "prepare corpus.jsonl --output data/corpus --tokenizer 'run:my run'\n" in said
    assert "python train.py --config 'my run/config.json' --init 'my run' --name NEW --data.path data/corpus" in said
    assert said.endswith("\non chats     mjax sft --data chat.jsonl --init 'my run' --name NEW\n")
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 90)
    assert cli.main(["prepare", "text.jsonl", "--output", "data", "--tokenizer", "run:my run"]) == 0
    assert "--config 'my run/config.json' --init 'my run' --name NEW" in capsys.readouterr().out


def test_export_replaces_models_only_on_request(runs, tmp_path, capsys):
    run, out, mine = runs["gpt2"], tmp_path / "out", tmp_path / "mine"
    assert to_hf(run, out) == 0
    (out / "stray.txt").touch()
    assert to_hf(run, out) == 2
    assert "out exists; --overwrite replaces it; or give" in capsys.readouterr().err
    assert to_hf(run, out, "--overwrite") == 0
    assert not (out / "stray.txt").exists()
    mine.mkdir()
    (mine / "thesis.txt").touch()
    for other in (run, mine):
        assert to_hf(run, other, "--overwrite") == 2
        assert "replaces models only" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "out"]


def test_stop_between_renames_restores_old_model(tmp_path, monkeypatch):
    out, beside = tmp_path / "out", tmp_path / "out.replaced"
    for folder in (out, beside):
        folder.mkdir()
        (folder / "mine").touch()
    rename = os.replace

    def stopped(path, target):
        if Path(target) == out and path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt), new_folder(out) as folder:
        (folder / "theirs").touch()
    left = {str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")}
    assert left == {"out", "out/mine", "out.replaced", "out.replaced/mine"}


def test_folder_reaches_disk_before_its_rename(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(model_folder, "to_disk", lambda place: written.extend(file.name for file in place.iterdir()))
    rename = model_folder.rename
    monkeypatch.setattr(model_folder, "rename", lambda old, new: (written.append("renamed"), rename(old, new)))
    with new_folder(tmp_path / "out") as folder:
        (folder / "theirs").touch()
    assert written == ["theirs", "renamed"]


@pytest.mark.parametrize(
    ("command", "module", "name"),
    [("from-hf", "mjax.interop.convert", "write_checkpoint"), ("to-hf", "mjax.commands.convert", "write_tensors")],
)
def test_failed_conversion_leaves_nothing(sources, runs, tmp_path, monkeypatch, command, module, name):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{module}.{name}", fail)
    (tmp_path / "out").mkdir()
    given = sources["gpt2"] if command == "from-hf" else runs["gpt2"]
    assert cli.main(["convert", command, str(given), str(tmp_path / "out")]) == 1
    assert [str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")] == ["out"]
