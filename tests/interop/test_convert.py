"""`mjax convert` both ways: what becomes of every tensor, every setting and the tokenizer."""

import json
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.numpy import bfloat16
from jax.sharding import PartitionSpec as P

from mjax import cli
from mjax.commands import convert
from mjax.config import MeshConfig, read_config, save_config
from mjax.data.tokenizers import SentencePieceTokenizer, load_tokenizer, tokenizer_from_folder
from mjax.interop.convert import abstract_weights
from mjax.interop.gpt2 import GPT2
from mjax.interop.model_folder import new_folder
from mjax.interop.settings import model_config
from mjax.interop.tensor_files import SafetensorsFiles, open_tensors
from mjax.interop.tokenizer_files import find_tokenizer
from mjax.interop.weights import find_tensors
from mjax.parallel.axes import DATA, MODEL
from mjax.parallel.mesh import make_mesh
from mjax.state.checkpoint import Checkpoints
from mjax.training.metrics import read_metrics
from mjax.training.step import build_program
from tests.data.vocabularies import foreign_model, gpt2_files, hf_unigram
from tests.interop.folders import CONFIG, read_folder, tensors_of, write_folder
from tests.interop.whole_weights import read_weights
from tests.small import named
from tests.tiny_config import config as tiny


def weights_of(run, config=None):
    config = config or read_config(run / "config.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        return checkpoints.restore(abstract_weights(config), field="model")[1]


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name, strict=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("source") / "gpt2")


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """The run folder made of it; the tests below only read it."""
    run = tmp_path_factory.mktemp("runs") / "gpt2"
    assert cli.main(["convert", "from-hf", str(source), str(run), "--tokenizer", "bytes"]) == 0
    return run


# --- Both ways --------------------------------------------------------------------------------------------------------


def test_every_tensor_finds_its_place(source, run):
    theirs, ours = read_folder(source), named(weights_of(run))
    assert ours["embedding.table"].shape == (384, 12)
    np.testing.assert_array_equal(ours["embedding.table"][:257], theirs["transformer.wte.weight"])
    np.testing.assert_array_equal(ours["positions"], theirs["transformer.wpe.weight"])
    fused = theirs["transformer.h.1.attn.c_attn.weight"]  # [h, q | k | v]
    for part, head in ((0, 0), (1, 2), (2, 1)):
        columns = fused[:, part * 12 + head * 4 : part * 12 + (head + 1) * 4]
        np.testing.assert_array_equal(ours["blocks.attention.qkv.kernel"][1, :, part, head], columns)
    np.testing.assert_array_equal(
        ours["blocks.attention.out.kernel"][0].reshape(12, 12), theirs["transformer.h.0.attn.c_proj.weight"]
    )
    np.testing.assert_array_equal(ours["blocks.mlp.down.bias"][0], theirs["transformer.h.0.mlp.c_proj.bias"])


def test_what_is_exported_is_what_was_imported_bit_for_bit(source, run, tmp_path):
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out")]) == 0
    assert_same(read_folder(tmp_path / "out"), read_folder(source))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: exported[name] for name in CONFIG} == CONFIG
    assert cli.main(["convert", "from-hf", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    assert_same(named(weights_of(tmp_path / "again")), named(weights_of(run)))
    assert read_config(tmp_path / "again" / "config.json") == read_config(run / "config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"n_inner": 20},
        {"activation_function": "gelu"},
        {"n_layer": 1, "n_head": 12, "vocab_size": 256},
        {
            "layer_norm_epsilon": 1e-6,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.2,
            "embd_pdrop": 0.2,
            "initializer_range": 0.01,
        },
    ],
    ids=str,
)
def test_every_setting_travels_both_ways(tmp_path, change):
    config = {**CONFIG, **change}
    source = write_folder(tmp_path / "in", config, tensors_of(config))
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: exported[name] for name in config} == config
    assert_same(read_folder(tmp_path / "out"), read_folder(source))


def test_what_config_json_leaves_out_is_as_in_transformers():
    model = model_config(GPT2, {"model_type": "gpt2"}, "config.json", 128)
    assert (model.layers, model.hidden, model.heads, model.sequence, model.vocabulary) == (12, 768, 12, 1024, 50257)
    assert (model.padded_vocabulary, model.feed_forward, model.activation) == (50304, None, "gelu_tanh")
    assert (model.hidden_dropout, model.attention_dropout, model.layernorm_epsilon) == (0.1, 0.1, 1e-5)


def _without_prefix(tensors):
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def _with_buffers_and_output(tensors):
    mask = np.tril(np.ones((1, 1, 16, 16), np.uint8))
    buffers = {f"transformer.h.{i}.attn.{name}": mask for i in range(2) for name in ("bias", "masked_bias")}
    return {**tensors, **buffers, "lm_head.weight": tensors["transformer.wte.weight"].copy()}


@pytest.mark.parametrize("form", [_without_prefix, _with_buffers_and_output])
def test_older_files_give_the_same_weights(tmp_path, run, form):
    source = write_folder(tmp_path / "in", tensors=form(tensors_of(CONFIG)))
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert_same(named(weights_of(tmp_path / "run")), named(weights_of(run)))


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_half_precision_is_widened_without_loss(tmp_path, dtype):
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors_of(CONFIG).items()}
    source = write_folder(tmp_path / "in", tensors=tensors)
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_same(read_folder(tmp_path / "out"), {name: tensor.astype(np.float32) for name, tensor in tensors.items()})


def test_bf16_rounds_and_says_so_in_config_json(source, run, tmp_path):
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert_same(
        read_folder(tmp_path / "out"), {name: tensor.astype(bfloat16) for name, tensor in read_folder(source).items()}
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


# --- Several files ----------------------------------------------------------------------------------------------------


def test_a_model_in_three_files_is_read_as_in_one(tmp_path, run):
    source = write_folder(tmp_path / "in", parts=3)
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert_same(named(weights_of(tmp_path / "run")), named(weights_of(run)))


def test_an_export_is_cut_at_the_shard_size_and_indexed(source, run, tmp_path):
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out"), "--shard-size", "8KB"]) == 0
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = read_folder(source)
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for file in files:
        sizes = [tensors[name].nbytes for name, place in index["weight_map"].items() if place == file]
        assert sum(sizes) <= 8000 or len(sizes) == 1
    assert_same(read_folder(tmp_path / "out"), tensors)


@pytest.mark.parametrize(
    "mesh", [MeshConfig(model=3), MeshConfig(data=2, model=3, zero=1), MeshConfig(pipe=2, data=2, zero=3)], ids=str
)
def test_tensors_are_read_straight_into_the_shards_of_a_mesh(source, run, mesh):
    config = read_config(run / "config.json")
    tensors = open_tensors(source)
    names = find_tensors(GPT2, tensors, config.model, "source")
    target = abstract_weights(config, mesh)
    found = read_weights(GPT2, tensors, names, config.model, target)
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        assert ours.sharding == wanted.sharding
        assert len(ours.sharding.device_set) == mesh.devices
    assert not found.blocks.mlp.up.kernel[...].is_fully_replicated
    assert_same(named(found), named(weights_of(run)))


def test_one_tensor_at_a_time_is_in_memory_beside_the_weights(source, run):
    config, alive = read_config(run / "config.json"), []

    class Watched(SafetensorsFiles):
        def read(self, name, rows=slice(None)):
            assert not [other for other, array in alive if array() is not None], name
            array = super().read(name, rows)
            alive.append((name, weakref.ref(array)))
            return array

    tensors = Watched({source / "model.safetensors": []})
    names = find_tensors(GPT2, tensors, config.model, "source")
    read_weights(GPT2, tensors, names, config.model, abstract_weights(config))
    assert {name for name, _ in alive} == tensors_of(CONFIG).keys()


# --- What a run made of it does ---------------------------------------------------------------------------------------


def test_rows_that_pad_the_vocabulary_change_no_loss_and_are_never_the_best(source, tmp_path):
    losses = []
    for multiple in (1, 128):
        folder = tmp_path / str(multiple)
        flags = ["--vocabulary-multiple", str(multiple)]
        assert cli.main(["convert", "from-hf", str(source), str(folder), *flags]) == 0
        config = read_config(folder / "config.json")
        config = replace(
            config,
            model=replace(config.model, attention="xla"),
            precision=replace(config.precision, compute="fp32"),
            train=replace(config.train, global_batch=2, micro_batch=2),
        )
        program, weights = build_program(config, make_mesh(MeshConfig())), weights_of(folder, config)
        rows = np.random.default_rng(0).integers(0, 257, (2, 17)).astype(np.int32)
        batch = program.on_devices({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
        losses.append(float(program.eval_step(weights, batch).loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_weights(config))
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=make_mesh(MeshConfig()),
        in_specs=(specs, P(DATA)),
        out_specs=P(DATA, None, MODEL),
    )
    logits = np.asarray(jax.jit(forward)(weights, rows[:, :-1]))
    assert logits.shape[-1] == 384
    assert logits[..., 257:].max() < -1e30


@pytest.mark.ci
def test_an_imported_model_is_trained_on_any_mesh_and_exported_again(tmp_path, capsys):
    # Shape and settings are those of the other tests of the command line, which share the compiled step.
    shape = {"n_embd": 32, "n_head": 4, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    source, run = write_folder(tmp_path / "in", {**CONFIG, **shape}, tensors_of({**CONFIG, **shape})), tmp_path / "run"
    flags = ["--tokenizer", "bytes", "--vocabulary-multiple", "64"]
    assert cli.main(["convert", "from-hf", str(source), str(run), *flags]) == 0
    imported = read_config(run / "config.json").model
    assert imported == tiny.model
    save_config(replace(tiny, model=imported), run / "config.json")
    mesh = ["--mesh.data", "8", "--mesh.model", "2", "--train.micro-batch", "1", "--train.steps", "4"]
    assert cli.main(["train", "--resume", str(run), *mesh]) == 0
    assert "starting with fresh optimizer state" in capsys.readouterr().out
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["0", "4"]

    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "trained")]) == 0
    trained, before = read_folder(tmp_path / "trained"), read_folder(source)
    moved = {name: float(np.abs(trained[name] - before[name]).max()) for name in before}
    assert all(0 < far < 0.05 for far in moved.values()), "the first steps lead away from the model, not far"
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "first"), "--step", "0"]) == 0
    assert_same(read_folder(tmp_path / "first"), before)
    assert "checkpoint 0 of" in capsys.readouterr().out


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def test_the_tokenizer_travels_along_both_ways(tmp_path):
    files = gpt2_files(tmp_path)
    given = load_tokenizer("gpt2:" + ",".join(map(str, files)))
    config = {**CONFIG, "vocab_size": given.vocabulary}
    source = write_folder(tmp_path / "in", config, tensors_of(config))
    for file in files:
        shutil.copy(file, source)
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert tokenizer_from_folder(tmp_path / "run" / "tokenizer").encode("The café") == given.encode("The café")
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for file in files:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == given.eod
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (described["tokenizer_class"], described["model_max_length"]) == (
        "PreTrainedTokenizerFast",
        16,
    )


def test_a_tokenizer_json_is_preferred_and_comes_back_as_it_went(tmp_path):
    library = hf_unigram()
    config = {**CONFIG, "vocab_size": 300}
    source = write_folder(tmp_path / "in", config, tensors_of(config))
    library.save(str(source / "tokenizer.json"))
    for file in gpt2_files(tmp_path):
        shutil.copy(file, source)
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert tokenizer_from_folder(tmp_path / "run" / "tokenizer").scheme == "hf"
    given = tokenizer_from_folder(tmp_path / "run" / "tokenizer")
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for description in (True, False):  # of mjax, or as it comes from elsewhere
        if not description:
            (tmp_path / "out" / "mjax_tokenizer.json").unlink()
        found = find_tokenizer(tmp_path / "out", None)
        assert (found.scheme, found.eod, found.encode("a</s> worst")) == ("hf", given.eod, given.encode("a</s> worst"))


def test_a_run_without_a_tokenizer_is_given_one_on_its_way_out(source, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["convert", "from-hf", str(source), str(run)]) == 0
    assert "convert again with --tokenizer KIND:FILES" in capsys.readouterr().out
    assert cli.main(["generate", "--checkpoint", str(run), "--prompt", "The"]) == 2
    ways = (
        "has no tokenizer; add the one its model was trained with: --tokenizer KIND:FILES, or convert the model again"
    )
    assert ways in capsys.readouterr().err
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    assert "has no tokenizer" in capsys.readouterr().out
    assert not (out / "tokenizer.json").exists()
    assert cli.main(["convert", "to-hf", str(run), str(out), "--tokenizer", "bytes", "--overwrite"]) == 0
    assert find_tokenizer(out, None).scheme == "bytes"
    assert json.loads((out / "generation_config.json").read_text())["pad_token_id"] == 256


def test_a_tokenizer_that_transformers_cannot_have_stops_an_export_before_the_weights(
    tmp_path, run, capsys, monkeypatch
):
    stranger, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, stranger)
    SentencePieceTokenizer(foreign_model(), "x.model").save(stranger / "tokenizer")
    monkeypatch.setattr(convert.Checkpoints, "find", lambda *_, **__: pytest.fail("the weights were read"))
    assert cli.main(["convert", "to-hf", str(stranger), str(out)]) == 2
    assert "--tokenizer none" in capsys.readouterr().err
    assert not out.exists()
    monkeypatch.undo()
    assert cli.main(["convert", "to-hf", str(stranger), str(out), "--tokenizer", "none"]) == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


# --- Whole or not at all ----------------------------------------------------------------------------------------------


def test_an_export_replaces_a_model_only_when_asked_to_and_nothing_else_ever(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    (out / "stray.txt").touch()
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["convert", "to-hf", str(run), str(out), "--overwrite"]) == 0
    assert not (out / "stray.txt").exists()
    assert cli.main(["convert", "to-hf", str(run), str(run), "--overwrite"]) == 2
    assert "replaces models only" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "mine"), "--overwrite"]) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "out"]


def test_a_model_is_there_again_when_its_replacement_is_stopped_between_the_renames(tmp_path, monkeypatch):
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
    assert {str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")} == {
        "out", "out/mine", "out.replaced", "out.replaced/mine",
    }  # fmt: skip


def test_a_link_to_a_model_stays_a_link_when_the_model_is_replaced(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    for name in ("first", "second"):
        with new_folder(tmp_path / "link") as folder:
            (folder / name).touch()
    assert (tmp_path / "link").is_symlink()
    assert [entry.name for entry in (tmp_path / "model").iterdir()] == ["second"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "model"]


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_a_conversion_that_fails_leaves_nothing_behind(source, run, tmp_path, monkeypatch, direction):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_tensors", fail)
    monkeypatch.setattr(Checkpoints, "save", fail)
    (tmp_path / "out").mkdir()
    given = source if direction == "from-hf" else run
    assert cli.main(["convert", direction, str(given), str(tmp_path / "out")]) == 1
    assert [str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")] == ["out"]
