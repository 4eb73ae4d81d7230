"""`mjax evaluate` on a small run: what it prints, on which devices, and what it refuses."""

import json
import math
import os
import socket
import subprocess
import sys
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest
import tyro

from mjax import cli
from mjax.commands.evaluate import EvaluateArguments, evaluate
from mjax.config import MeshConfig, save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.inference import inference_config
from mjax.models.build import build_model
from mjax.parallel.mesh import make_mesh
from mjax.state.checkpoint import Checkpoints
from mjax.tasks.perplexity import Perplexity
from mjax.tasks.scoring import Scorer
from tests.conftest import ROOT
from tests.products import one_in
from tests.small import QUICKLY, small_config

POEM = "Whose woods these are I think I know . \n His house is in the village though . \n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a model of bytes, with checkpoints 10 and 20, and a file for each task."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = small_config(vocabulary=257, sequence=64, attention="auto", micro_batch=2, layers=2)
    build = partial(build_model, 5, config.model)
    model = jax.tree.map(lambda weight: 4 * weight, jax.jit(build, compiler_options=QUICKLY)())
    with Checkpoints(folder / "run" / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": model, "step": jnp.int32(10)})
        checkpoints.save(20, {"model": jax.tree.map(lambda weight: -weight, model), "step": jnp.int32(20)})
    save_config(config, folder / "run" / "config.json")
    ByteTokenizer().save(folder / "run" / "tokenizer")
    (folder / "wiki.test.tokens").write_text(POEM)
    (folder / "poem.txt").write_text(POEM)
    passages = ["Whose woods these are I think I know", "His house is in the village though"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    return folder


FILES = {"wikitext103": "wiki.test.tokens", "lambada": "lambada.jsonl", "perplexity": "poem.txt"}


def arguments_of(folder, task, *flags, data=None):
    given = ["--checkpoint", folder / "run", "--task", task, "--data", data or folder / FILES[task], *flags]
    return tyro.cli(EvaluateArguments, args=[str(flag) for flag in given])


def printed(capsys, folder, task, *flags):
    assert evaluate(arguments_of(folder, task, *flags, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def test_perplexity_and_bits_per_byte_are_those_of_the_newest_checkpoint(folder, capsys):
    found = printed(capsys, folder, "perplexity", "--overlap", 8)
    assert (found["task"], found["step"], found["checkpoint"]) == ("perplexity", 20, str(folder / "run"))
    assert found["data"] == str(folder / "poem.txt")

    config = inference_config(small_config(vocabulary=257, sequence=64, micro_batch=2, layers=2), MeshConfig())
    scorer = Scorer(config, make_mesh(MeshConfig()))
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        _, model = checkpoints.restore(scorer.abstract_model, field="model")
    score = scorer.score(model, Perplexity(str(folder / "poem.txt"), ByteTokenizer(), 64, 8).passes[0])
    assert found["tokens"] == found["bytes"] == score.labels == len(POEM)
    assert found["loss"] == pytest.approx(score.mean, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(score.mean / math.log(2), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(score.mean), rel=1e-4)


MESHES = {
    "three axes": ("--mesh.data", 2, "--mesh.model", 2, "--mesh.pipe", 2, "--mesh.sequence-parallel", "--mesh.zero", 3),
    "heads over context": ("--mesh.context", 2, "--mesh.context-attention", "heads"),
    "positions over context": ("--mesh.context", 2, "--mesh.context-attention", "gather", "--mesh.data", 2),
}


@pytest.mark.parametrize(("task", "mesh"), one_in(4, product(FILES, MESHES)))
def test_a_mesh_prints_what_one_device_does(folder, capsys, task, mesh):
    one = printed(capsys, folder, task)
    many = printed(capsys, folder, task, *MESHES[mesh])
    assert many.keys() == one.keys()
    for name, value in one.items():
        assert many[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), name


def test_the_table_names_raw_and_adjusted_perplexity_and_says_which_to_compare(folder, capsys):
    assert evaluate(arguments_of(folder, "wikitext103")) == 0
    out = capsys.readouterr().out
    assert f"wikitext103 on {folder / 'wiki.test.tokens'}: {folder / 'run'}, step 20" in out
    (adjusted,) = [line for line in out.splitlines() if line.startswith("adjusted perplexity  ")]
    assert adjusted.rstrip().endswith("per original word: compare this one")
    assert any(line.startswith("perplexity ") and "raw: per token" in line for line in out.splitlines())
    assert "\x1b" not in out


def test_another_checkpoint_and_another_type_can_be_chosen(folder, capsys):
    newest = printed(capsys, folder, "perplexity")
    older = printed(capsys, folder, "perplexity", "--step", 10)
    assert older["step"] == 10
    assert abs(older["loss"] - newest["loss"]) > 1e-3
    half = printed(capsys, folder, "perplexity", "--precision.compute", "bf16", "--train.micro-batch", 1)
    assert half["loss"] != newest["loss"]
    assert half["loss"] == pytest.approx(newest["loss"], rel=2e-2)


@pytest.mark.parametrize(
    ("task", "flags", "sentence"),
    [
        ("wikitext", (), "there is no task 'wikitext', did you mean 'wikitext103'?; use wikitext103, lambada,"),
        ("perplexity", ("--overlap", 65), "--overlap 65 does not fit a model of 64 positions"),
        ("lambada", ("--overlap", 2), "--overlap is for long texts"),
        ("perplexity", ("--step", 15), "has no checkpoint 15; there are 10, 20"),
        ("perplexity", ("--mesh.model", 3), "--mesh.model 3 does not divide heads 8; use 1, 2, 4 or 8"),
        ("perplexity", ("--mesh.pipe", 3), "--mesh.pipe 3 does not divide 2 layers"),
        ("perplexity", ("--mesh.data", 17), "--mesh.data 17 needs 17 devices; 16 found: use --mesh.data 1"),
        ("perplexity", ("--simulate", 0), "--simulate is 0; it must be at least 1"),
        ("perplexity", ("--train.micro-batch", 0), "--train.micro-batch is 0; it must be at least 1"),
    ],
)
def test_a_flag_that_cannot_work_is_answered_with_a_sentence(folder, task, flags, sentence):
    with pytest.raises(UsageError) as refused:
        evaluate(arguments_of(folder, task, *flags, data=folder / FILES.get(task, "poem.txt")))
    assert sentence in str(refused.value)


def test_a_run_without_config_tokenizer_or_checkpoint_is_named(folder, tmp_path):
    (tmp_path / "run").mkdir()
    arguments = arguments_of(tmp_path, "perplexity", data=folder / "poem.txt")
    with pytest.raises(UsageError, match=r"config\.json does not exist; a run folder holds"):
        evaluate(arguments)
    (tmp_path / "run" / "config.json").write_text((folder / "run" / "config.json").read_text())
    with pytest.raises(UsageError, match=r"has no tokenizer; add the one .* trained with: --tokenizer KIND:FILES$"):
        evaluate(arguments)
    with pytest.raises(UsageError, match="has no checkpoint; give a run that has saved one"):
        evaluate(arguments_of(tmp_path, "perplexity", "--tokenizer", "bytes", data=folder / "poem.txt"))
    ByteTokenizer().save(tmp_path / "run" / "tokenizer")
    with pytest.raises(UsageError, match="has no checkpoint; give a run that has saved one"):
        evaluate(arguments)
    save_config(small_config(vocabulary=60), tmp_path / "run" / "config.json")
    with pytest.raises(UsageError, match=r"has 257 ids and the model of .* 60; add the one"):
        evaluate(arguments)


def start_command(folder, *flags):
    files = ["--checkpoint", folder / "run", "--task", "lambada", "--data", folder / "lambada.jsonl", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.Popen(
        [sys.executable, "-m", "mjax", "evaluate", *map(str, [*files, *flags])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_same(found, expected):
    assert found["correct"] == expected["correct"]
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)


def test_the_command_line_simulates_devices_and_prints_one_json_object(folder, capsys):
    files = ["--checkpoint", folder / "run", "--task", "lambada", "--data", folder / "lambada.jsonl"]
    assert cli.main(["evaluate", *map(str, files), "--json"]) == 0
    process = start_command(folder, "--simulate", 4, "--mesh.data", 2, "--mesh.model", 2)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    assert_same(json.loads(out), json.loads(capsys.readouterr().out))
    assert "\x1b" not in err


@pytest.mark.ci
def test_two_processes_print_once_what_one_does(folder, capsys):
    expected = printed(capsys, folder, "lambada")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    where = ("--distributed.coordinator", address, "--distributed.processes", 2, "--simulate", 1, "--mesh.data", 2)
    group = [start_command(folder, *where, "--distributed.process", number) for number in range(2)]
    try:
        ends = [process.communicate(timeout=200) for process in group]
    finally:
        for process in group:
            process.kill()
    assert [process.returncode for process in group] == [0, 0], ends
    # Gloo, which carries the collectives between CPUs, says something on stdout too.
    objects = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in ends]
    assert [len(lines) for lines in objects] == [1, 0]
    assert_same(json.loads(objects[0][0]), expected)
