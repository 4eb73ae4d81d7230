"""`mjax evaluate` on a small run: what it prints, on which devices, and what it rejects."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import tyro

from mjax import cli
from mjax.commands.evaluate import EvaluateArguments, evaluate
from mjax.config import save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.models.build import build_model
from mjax.state.checkpoint import Checkpoints
from tests.small import QUICKLY, small_config

POEM = "Whose woods these are I think I know . \n His house is in the village though . \n"
FILES = {"wikitext103": "wiki.test.tokens", "lambada": "lambada.jsonl", "perplexity": "poem.txt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a model of bytes, with checkpoints 10 and 20, one without a tokenizer, and a file for each task."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = small_config(vocabulary=257, sequence=64, attention="auto", micro_batch=2, layers=2)
    build = partial(build_model, 5, config.model)
    model = jax.tree.map(lambda weight: 4 * weight, jax.jit(build, compiler_options=QUICKLY)())
    with Checkpoints(folder / "run" / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": model, "step": jnp.int32(10)})
        checkpoints.save(20, {"model": jax.tree.map(lambda weight: -weight, model), "step": jnp.int32(20)})
    for name in ("run", "bare"):
        (folder / name).mkdir(exist_ok=True)
        save_config(config, folder / name / "config.json")
    ByteTokenizer().save(folder / "run" / "tokenizer")
    (folder / "wiki.test.tokens").write_text(POEM)
    (folder / "poem.txt").write_text(POEM)
    passages = ["Whose woods these are I think I know", "His house is in the village though"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    return folder


def argv(folder, task, *flags, run="run"):
    data = folder / FILES.get(task, "poem.txt")
    return [str(word) for word in ("--checkpoint", folder / run, "--task", task, "--data", data, *flags)]


def printed(capsys, folder, task, *flags):
    assert evaluate(tyro.cli(EvaluateArguments, args=argv(folder, task, *flags, "--json"))) == 0
    return json.loads(capsys.readouterr().out)


def test_evaluate_prints_json_of_newest_checkpoint(folder, capsys):
    found = printed(capsys, folder, "perplexity", "--overlap", 8)
    assert (found["task"], found["step"], found["checkpoint"]) == ("perplexity", 20, str(folder / "run"))
    assert found["data"] == str(folder / "poem.txt")
    assert found["tokens"] == found["bytes"] == len(POEM)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.mark.ci
def test_evaluate_uses_given_step_dtype_and_mesh(folder, capsys):
    newest = printed(capsys, folder, "lambada")
    older = printed(capsys, folder, "lambada", "--step", 10)
    assert older["step"] == 10
    assert abs(older["perplexity"] - newest["perplexity"]) > 1e-3
    half = printed(capsys, folder, "lambada", "--precision.compute", "bf16", "--train.micro-batch", 1)
    assert half["perplexity"] != newest["perplexity"]
    assert half["perplexity"] == pytest.approx(newest["perplexity"], rel=5e-2)
    mesh = ("--mesh.data", 2, "--mesh.model", 2, "--mesh.pipe", 2, "--mesh.sequence-parallel", "--mesh.zero", 3)
    many = printed(capsys, folder, "lambada", *mesh)
    assert many["correct"] == newest["correct"]
    assert many["perplexity"] == pytest.approx(newest["perplexity"], rel=1e-4)


def test_evaluate_table_says_which_perplexity_to_compare(folder, capsys):
    assert evaluate(tyro.cli(EvaluateArguments, args=argv(folder, "wikitext103"))) == 0
    out = capsys.readouterr().out
    assert f"wikitext103 on {folder / 'wiki.test.tokens'}: {folder / 'run'}, step 20" in out
    (adjusted,) = [line for line in out.splitlines() if line.startswith("adjusted perplexity  ")]
    assert adjusted.rstrip().endswith("per original word: compare this one")
    assert any(line.startswith("perplexity ") and "raw: per token" in line for line in out.splitlines())
    assert "\x1b" not in out


WRONG = [
    ("wikitext", (), "no task 'wikitext', did you mean 'wikitext103'?; use wikitext103, lambada,"),
    ("perplexity", ("--overlap", 65), "--overlap 65 does not fit a model of 64 positions"),
    ("lambada", ("--overlap", 2), "--overlap is for long texts"),
    ("lambada", ("--predictions", "x"), "--predictions is for mnli, qqp, race, squad1.1 or squad2.0; leave it out"),
    ("mnli", ("--overlap", 3), "--overlap is for wikitext103, lambada or perplexity; leave it out"),
    ("perplexity", ("--step", 15), "has no checkpoint 15; there are 10, 20"),
    ("perplexity", ("--mesh.model", 3), "--mesh.model 3 does not divide heads 8; use 1, 2, 4 or 8"),
    ("perplexity", ("--mesh.data", 17), "--mesh.data 17 needs 17 devices; 16 found: use --mesh.data 1"),
    ("perplexity", ("--simulate", 0), "--simulate is 0; it must be at least 1"),
    ("perplexity", ("--train.micro-batch", 0), "--train.micro-batch is 0; it must be at least 1"),
    ("perplexity", ("--figure", "x.png"), "--figure is for positions or needle; leave it out, perplexity has no"),
    ("needle", ("--overlap", 8), "--overlap is for wikitext103, lambada or perplexity; leave it out, needle cuts"),
    ("needle", ("--figure", "needle.jpg"), "--figure needle.jpg is not a picture"),
    ("needle", ("--needle.depths", 1), "--needle.depths is 1; it must be at least 2"),
    ("needle", ("--needle.lengths", 65), "--needle.lengths 65 is longer than the model's sequence of 64 tokens"),
    ("needle", ("--positions.bins", 3), "flags that begin with --positions are for --task positions; leave them"),
    ("positions", ("--positions.length", 65), "--positions.length 65 does not fit a model of 64 positions; use"),
]


@pytest.mark.parametrize(("task", "flags", "words"), WRONG)
def test_evaluate_rejects_wrong_flags(folder, capsys, task, flags, words):
    assert cli.main(["evaluate", *argv(folder, task, *flags)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        ("none", (), "config.json does not exist"),
        ("bare", (), "has no tokenizer; add the one its model was trained with: --tokenizer KIND:FILES"),
        ("bare", ("--tokenizer", "bytes"), "has no checkpoint; give a run that has saved one"),
    ],
)
def test_evaluate_names_what_run_lacks(folder, capsys, run, flags, words):
    assert cli.main(["evaluate", *argv(folder, "perplexity", *flags, run=run)]) == 2
    assert words in capsys.readouterr().err
