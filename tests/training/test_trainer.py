"""The Python interface: a run with data, callbacks, a loss and an optimizer of the caller's."""

import signal
from dataclasses import replace

import numpy as np
import optax
import pytest

import mjax
from mjax.cluster.watchdog import Watchdog
from mjax.commands import cli
from mjax.config import DataConfig, MeshConfig, read_config
from mjax.data.samples import MockDataset
from mjax.errors import RunError, UsageError
from mjax.run.display import Display
from mjax.run.metrics import read_metrics
from mjax.step.optimizer import adamw
from tests.callbacks import Records, StopAt
from tests.tiny_config import config as tiny

pytestmark = pytest.mark.usefixtures("quick_runs", "fewer_devices")

CONFIG = replace(
    tiny,
    model=replace(tiny.model, attention="xla", hidden_dropout=0.0, attention_dropout=0.0),
    train=replace(tiny.train, steps=6, eval_interval=0),
    checkpoint=replace(tiny.checkpoint, interval=100),
)


def batch(step):
    samples = MockDataset(CONFIG.model.vocabulary, CONFIG.model.sequence, CONFIG.train.seed)
    rows = np.stack([samples[index] for index in range(8 * step, 8 * step + 8)])
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def losses(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run from the config's own data."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mjax.run.loop.check_devices", lambda *_: None)
        assert mjax.Trainer(replace(CONFIG, data=DataConfig(mock=True)), folder).train().exit_code == 0
    return folder


def test_callback_ends_a_run_that_continues_bit_for_bit(tmp_path, whole, capsys):
    seen = Records()
    stopped = mjax.Trainer(CONFIG, tmp_path, data=batch, callbacks=[seen, StopAt(2)]).train()
    assert stopped.exit_code == 75
    assert 2 <= stopped.step < 6
    assert mjax.Trainer(CONFIG, tmp_path, data=map(batch, range(6))).train().exit_code == 0  # an iterator, too
    assert losses(tmp_path) == losses(whole)
    assert [record.loss for record in seen.records] == losses(whole)[: stopped.step]
    assert read_config(tmp_path / "config.json").data.custom
    assert cli.main(["train", "--run", str(tmp_path), "--train.steps", "8"]) == 2
    assert "continue it there, or start from its weights with --init" in capsys.readouterr().err


class Calls(mjax.Callback):
    """Notes its calls; waits for step 2, and stops or fails at a later one."""

    def __init__(self, stops=None, fails=None):
        self.calls, self.stops, self.fails = [], stops, fails

    def on_start(self, run):
        self.calls.append(("start", run.step))

    def needs_state(self, run, step):
        return step == 2

    def on_step(self, run, step, metrics):
        self.calls.append((step, run.step, int(run.state.step)))
        if step == self.stops:
            run.stop()
        if step == self.fails:
            raise RunError("of the callback")

    def on_end(self, run):
        self.calls.append("end")

    def close(self):
        self.calls.append("close")


def test_callback_gets_the_state_it_waits_for(tmp_path):
    """The state of other steps is one ahead; only a run that is done has an end, and each is closed."""
    whole, stopped, failed = Calls(), Calls(stops=3), Calls(fails=3)
    mjax.Trainer(CONFIG, tmp_path / "whole", data=batch, callbacks=[whole]).train()
    begun, end = [("start", 0), (1, 2, 2), (2, 2, 2), (3, 4, 4)], ["end", "close"]
    assert whole.calls == [*begun, (4, 5, 5), (5, 6, 6), (6, 6, 6), *end]
    mjax.Trainer(CONFIG, tmp_path / "stopped", data=batch, callbacks=[stopped]).train()
    assert stopped.calls == [*begun, (4, 4, 4), "close"]
    with pytest.raises(RunError):
        mjax.Trainer(CONFIG, tmp_path / "failed", data=batch, callbacks=[failed]).train()
    assert failed.calls == [*begun, "close"]


@pytest.mark.parametrize(
    ("number", "moment", "last"),
    [
        (signal.SIGINT, "a step runs", 4),
        (signal.SIGINT, "waiting for its batch", 5),
        (signal.SIGHUP, "a step runs", 4),
        (signal.SIGUSR1, "a step runs", 4),
        (signal.SIGUSR2, "a step runs", 4),
    ],
)
def test_run_told_to_stop_saves_after_the_steps_in_flight(number, moment, last, tmp_path, monkeypatch, capfd):
    """The request comes while a step runs, or before the next one is dispatched."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # also under nohup
    shown = []

    def at(self, step, doing=None):
        if shown == [1, 2, 3] and doing == moment:
            signal.raise_signal(number)

    def show(self, record):
        shown.append(record.step)
        at(self, record.step, "a step runs")

    monkeypatch.setattr(Display, "show", show)
    monkeypatch.setattr(Watchdog, "record_step", at)
    result = mjax.Trainer(CONFIG, tmp_path, data=batch).train()
    assert (result.exit_code, result.step, shown[-1]) == (75, last, last)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"{name}: saving after the steps in flight" in capfd.readouterr().err


@pytest.mark.ci
def test_validation_is_measured_on_its_own_batches(tmp_path):
    config = replace(CONFIG, train=replace(CONFIG.train, eval_interval=3, eval_batches=2))
    result = mjax.Trainer(config, tmp_path, data=batch, validation=lambda index: batch(100 + index)).train()
    assert np.isfinite(result.validation_loss)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl") if "val_loss" in record] == [3, 6]


@pytest.mark.ci
def test_optimizer_replaces_adamw(tmp_path, whole):
    same = mjax.Trainer(CONFIG, tmp_path / "same", data=batch, optimizer=adamw(CONFIG.optimizer))
    assert same.train().exit_code == 0
    assert losses(tmp_path / "same") == losses(whole)
    split = replace(CONFIG, mesh=MeshConfig(pipe=2, data=2, zero=1))
    for name, used in (("lion", split), ("lion again", CONFIG)):
        mjax.Trainer(used, tmp_path / name, data=batch, optimizer=optax.scale_by_lion()).train()
    assert losses(tmp_path / "lion") == pytest.approx(losses(tmp_path / "lion again"), rel=1e-5)
    assert losses(tmp_path / "lion")[1:3] != losses(whole)[1:3]


def test_loss_replaces_the_models(tmp_path, whole):
    def twice(model, x, batch, context):
        return {name: 2 * total for name, total in type(model).loss(model, x, batch, context).items()}

    assert mjax.Trainer(CONFIG, tmp_path, data=batch, loss=twice).train().exit_code == 0
    assert losses(tmp_path)[0] == pytest.approx(2 * losses(whole)[0], rel=1e-6)
    in_chunks = replace(CONFIG, train=replace(CONFIG.train, loss_chunks=2))
    assert mjax.Trainer(in_chunks, tmp_path / "chunks", data=batch, loss=twice).train().exit_code == 0
    assert losses(tmp_path / "chunks") == pytest.approx(losses(tmp_path), rel=1e-5)

    def whole_logits(model, x, batch, context):
        return {"loss": model.logits(x, context.tokens).sum()}

    with pytest.raises(UsageError, match=r"train.loss_chunks 2 needs a loss that computes no logits; call self.output"):
        mjax.Trainer(in_chunks, tmp_path / "whole", data=batch, loss=whole_logits).train()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda step: {"tokens": np.zeros((8, 16), np.int32)}, "the batch of step 0 has tokens; the model takes"),
        (lambda step: dict.fromkeys(("tokens", "labels"), np.zeros((8, 3), np.int32)), r"give int32 \[8, 16\]"),
        (iter([batch(0)]), "ended after 1 batches; lower train.steps"),
        (
            lambda step: {**batch(0), "labels": np.full((8, 16), -100)},
            r'contains -100; for ignored labels .* "loss_mask" that is',
        ),
        (
            lambda step: {**batch(0), "tokens": np.full((8, 16), 300)},
            "tokens of step 0 contains 300; give values from 0 to",
        ),
    ],
)
def test_data_unfit_for_the_model_are_refused(tmp_path, source, words):
    with pytest.raises(UsageError, match=words):
        mjax.Trainer(CONFIG, tmp_path, data=source).train()
    assert (tmp_path / "config.json").exists() == ("after 1 batches" in words)  # it had begun


def test_loss_mask_selects_the_labels(tmp_path, whole):
    counted = np.arange(16) % 2 == np.arange(8)[:, None] % 2
    masks = {"all": np.ones((8, 16), bool), "half": counted, "others": ~counted}
    first = {}
    for name, mask in masks.items():
        masked = {**batch(0), "labels": np.where(mask, batch(0)["labels"], -100), "loss_mask": mask}
        short = replace(CONFIG, train=replace(CONFIG.train, steps=3))
        mjax.Trainer(short, tmp_path / name, data=lambda step, masked=masked: masked).train()
        first[name] = losses(tmp_path / name)[0]
    assert first["all"] == losses(whole)[0]
    assert (first["half"] + first["others"]) / 2 == pytest.approx(first["all"], rel=1e-6)
    assert first["half"] != first["others"]


def test_batch_of_a_loop_of_ones_own_is_checked():
    program = mjax.build_program(CONFIG, mjax.make_mesh(CONFIG.mesh))
    assert program.put_on_devices(batch(0))["tokens"].shape == (8, 16)
    with pytest.raises(UsageError, match=r"the batch has .*; the program takes labels, tokens; with data.custom=True"):
        program.put_on_devices({**batch(0), "loss_mask": np.ones((8, 16), bool)})
    with pytest.raises(UsageError, match="labels of the batch contains 300"):
        program.put_on_devices({**batch(0), "labels": np.full((8, 16), 300)})


def test_trainer_refuses_what_train_py_refuses(tmp_path):
    for config, words in (
        (replace(CONFIG, mesh=MeshConfig(model=3)), r"^mesh\.model 3 does not divide"),  # fields, not flags
        (tiny, "data is given and validation is not; give it, or set train.eval_interval to 0"),
    ):
        with pytest.raises(UsageError, match=words):
            mjax.Trainer(config, tmp_path, data=batch)
    with pytest.raises(UsageError, match=r"callbacks has <built-in .*; give objects of a subclass of mjax\.Callback"):
        mjax.Trainer(CONFIG, tmp_path, data=batch, callbacks=[print])
    short = replace(CONFIG, optimizer=replace(CONFIG.optimizer, warmup_steps=3000))
    assert mjax.Trainer(short, tmp_path, data=batch, show=False).config.optimizer.warmup_steps == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"the loss of the caller gives 'los'; give .* as the model does: 'loss'"):
        mjax.Trainer(CONFIG, tmp_path, data=batch, loss=lambda *_: {"los": 0.0}).train()


def test_run_is_opened_and_planned(whole):
    run = mjax.open_run(whole, mesh=MeshConfig(model=2))
    assert (run.step, run.config.model) == (6, CONFIG.model)
    assert run.weights.embedding.table.shape == (320, 32)
    with pytest.raises(UsageError, match="has no tokenizer"):
        mjax.generate(whole, "The")
    assert mjax.plan(replace(CONFIG, mesh=MeshConfig(data=2)), "h100")["memory"]["total"] > 0
    with pytest.raises(UsageError, match="there is no task"):
        mjax.evaluate(whole, "nothing", "x")
