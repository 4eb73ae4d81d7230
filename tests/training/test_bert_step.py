"""What a BERT reports: two losses, over masked tokens and over pairs."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax import cli
from mjax.batch_size import BatchSizes
from mjax.data.batches import of_positions
from mjax.models.build import build_model
from mjax.parallel.mesh import make_mesh
from mjax.training import loop
from mjax.training.metrics import read_metrics
from mjax.training.optimizer import backward_order, gradient_names
from mjax.training.step import build_program
from tests import reference
from tests.small import batch_of, gradient_program, named, small_config
from tests.test_train_command import command
from tests.test_train_command import run as train

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def run():
    """A run on a pipeline, and weights for it."""
    config = small_config(2, 1, mesh={"pipe": 2}, dropout=0.0, kind="bert")
    config = replace(config, train=replace(config.train, eval_batches=2))
    mesh = make_mesh(config.mesh)
    return loop.Run(config, mesh, build_program(config, mesh), None, None, None, None), gradient_program(config)[1]()


def _expected(run, weights, batch):
    whole = {name: jnp.asarray(value) for name, value in named(weights).items()}
    return np.asarray(reference.loss_and_gradients(whole, run.config.model, batch)[0])


def test_evaluation_weighs_masked_tokens_by_number_and_pairs_alike(run):
    run, weights = run
    batches = [batch_of(run.config, seed) for seed in range(2)]
    batches[1]["loss_mask"] &= np.arange(16) < 3
    counts = [int(batch["loss_mask"].sum()) for batch in batches]
    assert counts[0] > 2 * counts[1] > 0

    class Validation:
        sizes = BatchSizes.constant(8)

        def at(self, step, rows=slice(None), positions=slice(None)):
            return of_positions({name: array[rows] for name, array in batches[step].items()}, positions)

    loss, metrics = run.evaluate(1, weights, Validation())
    each = np.stack([_expected(run, weights, batch) for batch in batches])
    masked, (_, order, found) = np.average(each[:, 0], weights=counts), each.mean(0)
    guessed = np.concatenate([batch["labels"][batch["loss_mask"]] for batch in batches])
    entropy = -np.mean([math.log(np.mean(guessed == label)) for label in guessed])
    assert metrics == pytest.approx(
        {"mlm_loss": masked, "order_loss": order, "order_accuracy": found, "unigram_entropy": entropy}, rel=1e-5
    )
    assert loss == pytest.approx(masked + order, rel=1e-5)


def test_batch_without_masks_has_the_order_loss_alone(run):
    run, weights = run
    batch = batch_of(run.config) | {"loss_mask": np.zeros((8, 16), bool)}
    found = run.program.eval_step(weights, run.program.on_devices(batch))
    assert float(found.means["mlm_loss"]) == 0.0
    assert float(found.loss) == float(found.means["order_loss"]) > 0.1


def test_gradients_of_heads_are_reached_first():
    config = small_config(kind="bert")
    names = gradient_names(jax.eval_shape(lambda: build_model(0, config.model)), config.mesh)
    order = [names[index].partition(".")[0] for index in backward_order(names)]
    assert set(order[:11]) == {"final_norm", "mlm", "order", "pooler"}
    assert set(order[11:-3]) == {"blocks"}
    assert set(order[-3:]) == {"embedding", "positions", "token_types"}


@pytest.mark.ci
def test_run_records_both_losses_and_the_order_accuracy(tmp_path, fewer_devices, capfd):
    flags = ["--model.kind", "bert", "--model.layernorm", "post"]
    assert cli.main(["train", *command(tmp_path)[2:], *flags]) == 0
    output = capfd.readouterr().out
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    for record in records:
        assert record["loss"] == pytest.approx(record["mlm_loss"] + record["order_loss"], rel=1e-5)
        assert (record["order_accuracy"] * 8) % 1 == pytest.approx(0, abs=1e-4)
    last = records[-1]
    assert last["val_loss"] == pytest.approx(last["val_mlm_loss"] + last["val_order_loss"], rel=1e-5)
    assert f"validation mlm {last['val_mlm_loss']:.4f}" in output
    assert f"({last['val_order_accuracy']:.0%} right)" in output
    assert f"validation perplexity {math.exp(last['val_mlm_loss']):.2f} of masked tokens" in output
    assert f"by their frequency alone {math.exp(last['val_unigram_entropy']):.2f}" in output
    assert f"order       {last['val_order_accuracy']:.1%} ± " in output
    assert cli.main(["generate", "--checkpoint", str(tmp_path / "run"), "--prompt", "x"]) == 2
    assert "holds a BERT, which generates no text" in capfd.readouterr().err


@pytest.mark.all
def test_bert_learns_masked_tokens_and_order_of_new_text(tmp_path):
    flags = (
        "--model.kind bert --model.layernorm post --model.hidden 64 --model.sequence 32 --model.vocabulary 200 "
        "--model.hidden-dropout 0 "
        "--model.attention-dropout 0 --train.steps 500 --train.global-batch 64 --train.micro-batch 64 "
        "--train.eval-interval 500 --optimizer.learning-rate 3e-3 --optimizer.min-learning-rate 1e-5 "
        "--optimizer.warmup-steps 50 --optimizer.schedule linear --checkpoint.interval 0"
    )
    train(tmp_path, *flags.split())
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["val_mlm_loss"] < math.log(198) - 2  # all 198 ids of text are as frequent
    assert last["val_order_accuracy"] > 0.8
