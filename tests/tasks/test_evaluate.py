"""`mjax evaluate` on a small run: what it prints, on which devices, and what it rejects."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import tyro

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands import cli
from mjax.commands.evaluate import EvaluateArguments, evaluate, report
from mjax.config import save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.models.build import build_model
from tests.small import QUICKLY, small_config

POEM = "Whose woods these are I think I know . \n His house is in the village though . \n"


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
    (folder / "poem.txt").write_text(POEM)
    return folder


def argv(folder, task, *flags, run="run"):
    given = ("--run", folder / run, "--task", task, "--data", folder / "poem.txt", *flags)
    return [str(word) for word in given]


def printed(capsys, folder, task, *flags):
    evaluate(tyro.cli(EvaluateArguments, args=argv(folder, task, *flags, "--json")))
    return json.loads(capsys.readouterr().out)


def test_report_without_metrics_says_why(tmp_path, capsys):
    """A file without labels gives predictions only."""
    report(EvaluateArguments(run=tmp_path, task="mnli", data="test_matched.tsv"), 20, [])
    assert "no metrics: the file has no labels" in capsys.readouterr().out


def test_evaluate_prints_json_of_newest_checkpoint(folder, capsys):
    found = printed(capsys, folder, "perplexity", "--stride", 8)
    assert (found["task"], found["step"], found["checkpoint"]) == ("perplexity", 20, str(folder / "run"))
    assert found["data"] == str(folder / "poem.txt")
    assert found["tokens"] == found["bytes"] == len(POEM)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    older = printed(capsys, folder, "perplexity", "--stride", 8, "--step", 10, "--precision.compute", "bf16")
    assert older["step"] == 10
    assert abs(older["loss"] - found["loss"]) > 1e-3


WRONG = [  # task, flags, words of the message, and the run if it lacks something
    ("wikitext", (), "no task wikitext; did you mean wikitext103?"),
    ("perplexity", ("--stride", 65), "--stride 65 does not fit 64 positions"),
    ("lambada", ("--predictions", "x"), "--predictions is for mnli, qqp, race, squad1.1 or squad2.0; remove it"),
    ("mnli", ("--stride", 3), "--stride is for wikitext103, lambada or perplexity; remove it"),
    ("perplexity", ("--step", 15), "has no checkpoint 15; there are 10, 20"),
    ("perplexity", ("--mesh.model", 3), "--mesh.model 3 does not divide heads 8; use 1, 2, 4 or 8"),
    ("perplexity", ("--mesh.data", 17), "--mesh.data 17 needs 17 devices; 16 available: use --mesh.data 1"),
    ("perplexity", ("--figure", "x.png"), "--figure is for positions; remove it"),
    ("positions", ("--figure", "loss.jpg"), "--figure loss.jpg is not a picture"),
    ("perplexity", ("--positions.bins", 3), "--positions.bins is for positions; remove it"),
    ("positions", ("--positions.length", 65), "--positions.length 65 does not fit a model of 64 positions"),
    ("perplexity", (), "does not exist", "none"),
    ("perplexity", (), "has no tokenizer; add the one its model was trained with: --tokenizer KIND:FILES", "bare"),
    ("perplexity", ("--tokenizer", "bytes"), "has no checkpoint; give a run that has saved one", "bare"),
]


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_evaluate_rejects_wrong_flags_and_runs(folder, capsys, case):
    task, flags, words, *run = case
    assert cli.main(["evaluate", *argv(folder, task, *flags, run=run[0] if run else "run")]) == 2
    assert words in capsys.readouterr().err
