"""Loss by position: spans, metrics, and a model that finds what it has read."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands.evaluate import EvaluateArguments, evaluate
from mjax.config import LlamaConfig, save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import RunError, UsageError
from mjax.models.build import build_model
from mjax.tasks.zero_shot import PositionwiseLoss, mean_and_error
from tests.small import QUICKLY, small_config
from tests.tasks.lookup_model import LookupConfig, planted

BYTES = ByteTokenizer()
SEQUENCE = 256


def written(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def values_of(metrics):
    return {metric.name: metric.value for metric in metrics}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model that looks 120 tokens back."""
    folder = tmp_path_factory.mktemp("runs") / "near"
    config = small_config(vocabulary=257, sequence=SEQUENCE, attention="auto", micro_batch=4, layers=2)
    model = LookupConfig(
        layers=2, hidden=64, heads=8, sequence=SEQUENCE, vocabulary=257, vocabulary_multiple=64, init_std=1.0,
        hidden_dropout=0.0, attention_dropout=0.0, reach=120,
    )  # fmt: skip
    weights = planted(jax.jit(partial(build_model, 5, model), compiler_options=QUICKLY)())
    with Checkpoints(folder / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": weights, "step": jnp.int32(10)})
    save_config(replace(config, model=model), folder / "config.json")
    BYTES.save(folder / "tokenizer")
    return folder


def test_positions_cut_documents_into_whole_spans(tmp_path):
    data = written(tmp_path / "texts.jsonl", "abcdefghij", "klmno", "pqrs", "")
    task = PositionwiseLoss(str(data), BYTES, LlamaConfig(sequence=5), bins=2)
    texts = [(window.tokens.tolist(), window.counted) for window in task.passes[0]]
    assert texts == [([256, *b"abcde"], 5), ([*b"efghij"], 5), ([256, *b"klmno"], 5)]
    metrics = task.metrics([np.arange(15, dtype=np.float32).reshape(3, 5)])
    values, remarks = values_of(metrics), {metric.name: metric.note for metric in metrics}
    assert (values["documents"], values["spans"], values["tokens"]) == (2, 3, 15)
    assert remarks["documents"] == "of 3; shorter ones are left out"
    assert remarks["tokens"].startswith("and 4 left out")


def test_bin_error_is_over_spans(tmp_path):
    """Errors that the labels of a span share do not average out over them."""
    data = written(tmp_path / "texts.jsonl", "x" * 8 * 50)
    task = PositionwiseLoss(str(data), BYTES, LlamaConfig(sequence=8), bins=2)
    random = np.random.default_rng(0)
    of_stretch, of_label = random.normal(0, 1, (50, 1)), random.normal(0, 0.1, (50, 8))
    losses = np.float32(3 - 0.1 * np.arange(8) + of_stretch + of_label)
    first, last = task.bins(losses)
    assert (first["first"], first["last"], last["first"], last["last"]) == (1, 2, 3, 8)
    assert last["loss"] == pytest.approx(losses[:, 2:].mean(), rel=1e-6)
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-6)
    assert (first["tokens"], last["tokens"]) == (100, 300)
    assert last["standard_error"] == pytest.approx(np.std(losses[:, 2:].mean(1), ddof=1) / 50**0.5, rel=1e-6)
    values = values_of(task.metrics([losses]))
    assert values["gain"] == pytest.approx(0.4, abs=0.05)
    assert values["gain_error"] < 0.02, "paired: what a stretch adds to both halves cancels"
    assert mean_and_error(np.array([2.0])) == (2.0, None)
    with pytest.raises(RunError, match=r"not finite: try --precision\.compute fp32"):
        task.metrics([losses * np.float32("nan")])


@pytest.mark.parametrize("scaling", [{"rope_scaling": "yarn", "rope_original_length": 8}, {"rope_scaling": "linear"}])
def test_gain_of_scaled_model_splits_at_trained_length(tmp_path, scaling):
    data = written(tmp_path / "texts.jsonl", "x" * 64)
    losses = np.where(np.arange(64) < 8, 1.0, 3.0)[None].astype(np.float32)
    task = PositionwiseLoss(str(data), BYTES, LlamaConfig(sequence=64, rope_factor=8.0, **scaling))
    values = values_of(task.metrics([losses]))
    assert (values["loss_before"], values["loss_after"], values["gain"]) == (1.0, 3.0, -2.0)
    assert values["gain_error"] is None


def test_positions_show_that_context_helps(run, tmp_path, capsys):
    """A text repeats itself after 60 tokens: a model that looks further back knows what comes. With a picture."""
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefgh"), 60)) * 6 for _ in range(3)]
    data, picture = written(tmp_path / "repeated.jsonl", *texts, "short"), tmp_path / "positions.svg"
    given = ["--run", run, "--task", "positions", "--data", data, "--figure", picture, "--json"]
    evaluate(tyro.cli(EvaluateArguments, args=[str(word) for word in given]))
    found = json.loads(capsys.readouterr().out)
    bounds = [(row["first"], row["last"] + 1) for row in found["bins"]]  # every position is in one bin
    assert [0, *(end for _, end in bounds)] == [*(first - (first == 1) for first, _ in bounds), SEQUENCE + 1]
    early = [row["loss"] for row in found["bins"] if row["last"] <= 60]
    late = [row["loss"] for row in found["bins"] if row["first"] > 70]
    assert (found["documents"], found["spans"], len(late)) == (3, 3, 3)
    assert max(late) < 1e-3 < 5 < min(early)
    assert found["gain"] > 3
    assert "<svg" in picture.read_text()


def test_short_text_is_rejected_with_remedy(tmp_path):
    short, model = written(tmp_path / "short.jsonl", "a" * 100, "b" * 90), LlamaConfig(sequence=512)
    with pytest.raises(UsageError, match=r"no document of 512 tokens, the longest has 100; .* --positions.length 64$"):
        PositionwiseLoss(str(short), BYTES, model)
