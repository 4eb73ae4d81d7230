"""A new run from the weights alone of another: `train.py --init`."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import mjax
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands import cli
from mjax.config import LlamaConfig, MeshConfig, OptimizerConfig, save_config
from mjax.data.indexed import digest_folder
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError
from mjax.generation.inference import open_run
from mjax.interop.convert import write_run
from mjax.models.build import abstract_weights
from mjax.parallel.mesh import make_mesh
from mjax.run import loop
from mjax.run.agreement import collect_facts
from mjax.run.continuing import Origin, choose_origin, read_origin, with_positions
from mjax.run.start import first_state
from mjax.step.step import build_program
from tests.against_reference import in_layer_order
from tests.interop.whole_weights import reader_of
from tests.small import named
from tests.tiny_config import config as tiny
from tests.training.test_trainer import losses

CONFIG = replace(
    tiny,
    model=replace(tiny.model, attention="xla", hidden_dropout=0.0, attention_dropout=0.0),
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", clip_norm=0.0),
    train=replace(tiny.train, steps=4, eval_interval=0, seed=7),
)
LLAMA = replace(CONFIG, model=LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, sequence=16, vocabulary=257))


@pytest.fixture(scope="module", autouse=True)
def one_program(quick_runs):
    """Share one program: the differences between the runs here are not in it."""
    program = build_program(CONFIG, make_mesh(CONFIG.mesh))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_program", lambda *_, **__: program)
        patch.setattr(loop, "check_devices", lambda *_: None)
        yield


def train(folder, steps=4, **options):
    return mjax.Trainer(replace(CONFIG, train=replace(CONFIG.train, steps=steps)), folder, **options).train().step


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "source"
    assert train(folder, steps=2, show=False) == 2
    return folder


@pytest.mark.parametrize("mesh", [MeshConfig(pipe=2, data=2, model=2, zero=1), MeshConfig(data=4, model=2, zero=3)])
def test_every_mesh_starts_from_same_weights(mesh, source, tmp_path):
    config = replace(CONFIG, mesh=mesh, train=replace(CONFIG.train, micro_batch=1))
    program = build_program(config, make_mesh(mesh))
    with Checkpoints(tmp_path / "none", on_notice=lambda line: None) as none:
        start, state, origin, _ = first_state(none, program, Origin(str(source), None, {}), lambda line: None)
    assert (start, origin.step, int(state.step), int(state.samples)) == (0, 2, 0, 0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))
    kept, found = named(open_run(source).weights), in_layer_order(state.model, config)
    assert found.keys() == kept.keys()
    assert all(np.array_equal(found[name], kept[name]) for name in kept)


def test_same_command_continues_and_does_not_restart(source, tmp_path, capsys):
    run, whole = tmp_path / "new", tmp_path / "whole"
    assert train(whole, steps=4, init=source) == 4
    assert f"Loaded weights from {source}, checkpoint 2; starting with fresh" in capsys.readouterr().out
    assert read_origin(whole) == Origin(str(source), 2, {})
    assert train(run, steps=2, init=source) == 2
    capsys.readouterr()
    away = source.rename(source.with_name("away"))  # not needed any more
    try:
        assert train(run, init=source) == 4
    finally:
        away.rename(source)
    said = capsys.readouterr().out
    assert "continued after step 2" in said
    assert "Loaded weights" not in said
    assert losses(run) == losses(whole)
    assert len(losses(run)) == 4
    for arguments, words in (
        ((run, CONFIG, tmp_path / "x"), r"began from .*source, checkpoint 2, not from .*x; add --name NEW"),
        ((run, CONFIG, source, 1), r"began from .* not from .*source, checkpoint 1"),
        ((source, CONFIG, source), "is the folder of this run; add --name NEW"),
        ((source, CONFIG, run), "began without --init, not from"),
    ):
        with pytest.raises(UsageError, match=words):
            choose_origin(*arguments)


def test_command_starts_from_a_converted_checkpoint(source, tmp_path, capsys):
    """It takes the tokenizer along, and tells what differs."""
    run = tmp_path / "converted"
    write_run(run, CONFIG, load_tokenizer("bytes"), reader_of(open_run(source).weights))
    save_config(CONFIG, tmp_path / "c.json")
    new = ["train", "--config", str(tmp_path / "c.json"), "--runs", str(tmp_path), "--name", "new", "--init", str(run)]
    assert cli.main([*new, "--train.steps", "1", "--model.hidden-dropout", "0.1"]) == 0
    changed = "(model.hidden_dropout 0.0, now 0.1)"
    assert f"Loaded weights from {run}, checkpoint 0 {changed}; starting with" in capsys.readouterr().out
    assert digest_folder(tmp_path / "new" / "tokenizer") == digest_folder(run / "tokenizer")


def test_processes_agree_on_the_origin(source, tmp_path):
    for name, lines in (("same", 0), ("other", 1)):
        shutil.copytree(source, tmp_path / name)
        manifest = tmp_path / name / "checkpoints" / "2" / "manifest.json"
        manifest.write_text(manifest.read_text() + "\n" * lines)
    folders = source, tmp_path / "same", tmp_path / "other"
    here, same, other = (collect_facts(CONFIG, origin=Origin(str(folder), None, {}))["--init"][0] for folder in folders)
    assert here == same != other
    assert "--init" not in collect_facts(CONFIG)


@pytest.fixture
def there(source, tmp_path):
    shutil.copytree(source, tmp_path / "there")
    return tmp_path / "there"


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (CONFIG, {"layers": 4}, r"\(model.layers 2, here 4\); type --model.layers 2, or --config .*config.json --name"),
        (CONFIG, {"sequence": 32}, r"\(model.sequence 16, here 32\); type --model.sequence 16"),
        (
            CONFIG,
            {"vocabulary": 400},
            r"has an embedding of other ids \(model.vocabulary 257, here 400\); .* --tokenizer run:",
        ),
        (
            CONFIG,
            {"layers": 4, "embedding_layernorm": True},
            r"layernorm False, here True\); type --config ",
        ),
        (LLAMA, {"kv_heads": 4, "tie_embeddings": True}, r"type --model.kv-heads 2 --model.no-tie-embeddings, or"),
    ],
)
def test_weights_of_another_model_are_refused(config, changes, words, there):
    save_config(config, there / "config.json")
    with pytest.raises(UsageError, match=words):
        choose_origin(there / "new", replace(config, model=replace(config.model, **changes)), there)


@pytest.mark.parametrize(
    ("saved", "typed", "positions"),
    [
        ((16, None), (8, None), 16),  # of a run from before the field, or that began here
        ((8, 16), (8, None), 16),
        ((8, 16), (4, 8), 8),
        ((16, None), (16, None), None),
        ((16, 16), (16, None), 16),
        ((16, None), (32, None), None),
    ],
)
def test_positions_are_those_of_the_weights(saved, typed, positions, there, tmp_path):
    before, now = (
        replace(CONFIG, model=replace(CONFIG.model, sequence=sequence, max_position_embeddings=most))
        for sequence, most in (saved, typed)
    )
    save_config(before, there / "config.json")
    for folder, init in ((tmp_path / "new", there), (there, None), (there, tmp_path / "gone")):
        assert with_positions(now, folder, init).model.max_position_embeddings == positions
    assert with_positions(now, tmp_path / "new", None) == now


def test_shorter_samples_keep_learned_positions(there, tmp_path):
    save_config(CONFIG, there / "config.json")
    shorter = with_positions(replace(CONFIG, model=replace(CONFIG.model, sequence=8)), tmp_path / "new", there)
    assert choose_origin(tmp_path / "new", shorter, there).changed == {"model.sequence": ("16", "8")}
    assert abstract_weights(shorter.model) == abstract_weights(CONFIG.model)


def test_fields_not_seen_in_weights_may_differ(there, tmp_path):
    save_config(LLAMA, there / "config.json")
    longer = replace(LLAMA.model, sequence=32, rope_theta=1e6, window=8, vocabulary=200, feed_forward=256, head_dim=8)
    origin = choose_origin(tmp_path / "new", replace(LLAMA, model=longer), there)
    assert origin.changed == {
        "model.sequence": ("16", "32"),
        "model.vocabulary": ("257", "200"),
        "model.rope_theta": ("10000.0", "1000000.0"),
        "model.window": ("None", "8"),
    }
    with pytest.raises(UsageError, match="holds a Llama and this config describes a GPT; choose a config of the same"):
        choose_origin(tmp_path / "new", CONFIG, there)
