"""A new run from the weights alone of another: `train.py --init`."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import mjax
from mjax import cli
from mjax.config import LlamaConfig, MeshConfig, OptimizerConfig, read_config, save_config
from mjax.data.metadata import digest_of_folder
from mjax.data.samples import MockDataset
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError
from mjax.inference import open_run
from mjax.interop.convert import write_run
from mjax.parallel.mesh import make_mesh
from mjax.state.checkpoint import Checkpoints
from mjax.training.agreement import disagreement, facts_of
from mjax.training.beginning import first_state
from mjax.training.metrics import read_metrics
from mjax.training.optimizer import is_decayed
from mjax.training.origin import Origin, choose_origin, origin_of
from mjax.training.step import build_program
from tests import reference
from tests.against_reference import in_layer_order
from tests.interop.whole_weights import reader_of
from tests.products import one_in
from tests.small import named
from tests.tiny_config import config as tiny

pytestmark = pytest.mark.usefixtures("quick_runs")

CONFIG = replace(
    tiny,
    model=replace(tiny.model, attention="xla", hidden_dropout=0.0, attention_dropout=0.0),
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", clip_norm=0.0),
    train=replace(tiny.train, steps=4, micro_batch=1, eval_interval=0, seed=7),
)
MESHES = {
    "one device": MeshConfig(),
    "pipeline and ZeRO-1": MeshConfig(pipe=2, data=2, model=2, zero=1),
    "ZeRO-3": MeshConfig(data=4, model=2, zero=3),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of another seed on a mesh of its own."""
    folder = tmp_path_factory.mktemp("runs") / "source"
    config = replace(CONFIG, mesh=MeshConfig(data=8, model=2), train=replace(CONFIG.train, steps=2, seed=1))
    assert mjax.Trainer(config, folder, show=False).train().exit_code == 0
    return folder


def serial_losses(weights, config, steps):
    """AdamW of the whole weights on one device, from `weights`."""
    samples, size = MockDataset(config.model.vocabulary, config.model.sequence, config.train.seed), 8
    decayed = {name: is_decayed(name) for name in weights}
    adam = optax.adamw(config.optimizer.learning_rate, 0.9, 0.999, 1e-8, weight_decay=0.01, mask=decayed)
    state, losses = adam.init(weights), []
    for step in range(steps):
        rows = np.stack([samples[index] for index in range(size * step, size * (step + 1))])
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        loss, gradients = reference.loss_and_gradients(weights, config.model, batch)
        updates, state = adam.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("mesh", one_in(3, ["ZeRO-3", "pipeline and ZeRO-1", "one device"]))
def test_losses_after_init_are_those_of_a_serial_model_with_the_same_weights(
    mesh, source, tmp_path, fewer_devices, capsys
):
    config = replace(CONFIG, mesh=MESHES[mesh])
    assert mjax.Trainer(config, tmp_path / "new", init=source).train().exit_code == 0
    assert f"Loaded weights from {source}, checkpoint 2; starting with fresh optimizer state" in capsys.readouterr().out
    found = [record["loss"] for record in read_metrics(tmp_path / "new" / "metrics.jsonl")]
    np.testing.assert_allclose(found, serial_losses(named(open_run(source).weights), CONFIG, 4), rtol=2e-6)
    assert origin_of(tmp_path / "new") == Origin(str(source), 2, {})


def test_every_mesh_starts_from_the_same_bits(source, tmp_path):
    states = []
    for mesh in MESHES.values():
        config = replace(CONFIG, mesh=mesh)
        program = build_program(config, make_mesh(mesh))
        with Checkpoints(tmp_path / "none", on_notice=lambda line: None) as none:
            start, state, origin = first_state(none, program, Origin(str(source), None, {}), lambda line: None)
        assert (start, origin.step, int(state.step), int(state.samples)) == (0, 2, 0, 0)
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))
        states.append(in_layer_order(state.model, config))
    kept = named(open_run(source).weights)
    for state in states:
        assert state.keys() == kept.keys()
        assert all(np.array_equal(state[name], kept[name]) for name in kept)


def test_the_same_command_continues_and_does_not_start_again(source, tmp_path, fewer_devices, capsys):
    run = tmp_path / "new"
    train = replace(CONFIG.train, steps=6)
    assert mjax.Trainer(replace(CONFIG, train=train), tmp_path / "whole", init=source, show=False).train().step == 6
    assert mjax.Trainer(CONFIG, run, init=source, show=False).train().step == 4
    capsys.readouterr()
    away = source.rename(source.with_name("away"))  # not needed any more
    try:
        assert mjax.Trainer(replace(CONFIG, train=train), run, init=source).train().step == 6
    finally:
        away.rename(source)
    assert "Loaded weights" not in (said := capsys.readouterr().out)
    assert "continued after step 4" in said
    for other in (run, tmp_path / "whole"):
        assert len(read_metrics(other / "metrics.jsonl")) == 6
    assert [r["loss"] for r in read_metrics(run / "metrics.jsonl")] == [
        r["loss"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl")
    ]
    with pytest.raises(UsageError, match=r"began from .*source, checkpoint 2, not from .*elsewhere; add --name NEW"):
        choose_origin(run, CONFIG, tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"began from .* not from .*source, checkpoint 1"):
        choose_origin(run, CONFIG, source, 1)
    with pytest.raises(UsageError, match="is the folder of this run; add --name NEW"):
        choose_origin(source, CONFIG, source)
    with pytest.raises(UsageError, match="began with weights of its own, not from"):
        choose_origin(source, CONFIG, run)


def test_the_command_starts_from_a_chosen_checkpoint_takes_the_tokenizer_along_and_runs_shows_it(
    source, tmp_path, fewer_devices, capsys, monkeypatch
):
    run = tmp_path / "converted"
    write_run(run, CONFIG, load_tokenizer("bytes"), reader_of(open_run(source).weights))
    save_config(CONFIG, tmp_path / "c.json")
    new = ["train", "--config", str(tmp_path / "c.json"), "--runs", str(tmp_path), "--name", "new", "--init", str(run)]
    assert cli.main([*new, "--step", "7"]) == 2
    assert f"--step 7: {run} has no such checkpoint; use 0" in capsys.readouterr().err
    assert cli.main([*new, "--step", "0", "--model.hidden-dropout", "0.1"]) == 0
    changed = "(model.hidden_dropout 0.0, now 0.1)"
    assert f"Loaded weights from {run}, checkpoint 0 {changed}; starting with" in capsys.readouterr().out
    assert digest_of_folder(tmp_path / "new" / "tokenizer") == digest_of_folder(run / "tokenizer")
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(["runs", "--runs", str(tmp_path)]) == 0
    assert "converted 0" in capsys.readouterr().out
    assert cli.main(["train", "--run", str(tmp_path / "new"), "--init", str(run)]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_processes_that_start_from_other_weights_do_not_agree(source, tmp_path):
    for name, lines in (("same", 0), ("other", 1)):
        shutil.copytree(source, tmp_path / name)
        manifest = tmp_path / name / "checkpoints" / "2" / "manifest.json"
        manifest.write_text(manifest.read_text() + "\n" * lines)
    given = [
        {"host": "a", "facts": facts_of(CONFIG, origin=folder and Origin(str(folder), None, {}))}
        for folder in (source, tmp_path / "same", tmp_path / "other", None)
    ]
    assert disagreement(given[:2]) == ""
    assert "--init " in disagreement(given[1:3])
    assert "absent on process 1" in disagreement(given[2:])


LLAMA = replace(CONFIG, model=LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, sequence=16, vocabulary=257))


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (CONFIG, {"layers": 4}, r"\(model.layers 2, here 4\); type --model.layers 2, or --config .*config.json --name"),
        (CONFIG, {"sequence": 32}, r"\(model.sequence 16, here 32\); type --model.sequence 16"),
        (CONFIG, {"vocabulary": 400}, r"\(model.vocabulary 257, here 400\)"),
        (LLAMA, {"feed_forward": 64}, r"\(model.feed_forward 256, here 64\)"),
        (LLAMA, {"kv_heads": 4, "tied": True}, r"type --model.kv-heads 2 --model.no-tied, or"),
        (LLAMA, {"norms": "post"}, r"\(model.norms pre, here post\); type --model.norms pre"),
    ],
)
def test_weights_of_another_model_are_refused_by_field(config, changes, words, source, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(source, there)
    save_config(config, there / "config.json")
    with pytest.raises(UsageError, match=words):
        choose_origin(tmp_path / "new", replace(config, model=replace(config.model, **changes)), there)


def test_what_the_weights_do_not_show_may_differ_and_is_told(source, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(source, there)
    save_config(LLAMA, there / "config.json")
    longer = replace(LLAMA.model, sequence=32, rope_theta=1e6, window=8, vocabulary=200, feed_forward=256, head_dim=8)
    origin = choose_origin(tmp_path / "new", replace(LLAMA, model=longer), there)
    assert origin.changed == {
        "model.sequence": ["16", "32"],
        "model.vocabulary": ["257", "200"],
        "model.rope_theta": ["10000.0", "1000000.0"],
        "model.window": ["None", "8"],
    }
    with pytest.raises(UsageError, match="holds a Llama and this config describes a GPT; choose a config of the same"):
        choose_origin(tmp_path / "new", CONFIG, there)
    with pytest.raises(UsageError, match="has no checkpoint; give the folder of a run, or convert"):
        choose_origin(tmp_path / "new", CONFIG, tmp_path)
    assert read_config(there / "config.json") == LLAMA
