"""How a run is told to stop."""

import signal
from dataclasses import replace

import pytest

from mjax.training import loop
from mjax.training.display import Display
from mjax.training.watchdog import Watchdog
from tests.tiny_config import config as tiny

pytestmark = pytest.mark.usefixtures("quick_runs", "fewer_devices")


@pytest.mark.parametrize(("moment", "last"), [("while a step runs", 4), ("before the next is dispatched", 5)])
def test_ctrl_c_saves_after_the_steps_in_flight(moment, last, tmp_path, monkeypatch, capfd):
    shown = []

    def show(self, record):
        shown.append(record.step)
        if record.step == 3 and moment == "while a step runs":
            signal.raise_signal(signal.SIGINT)

    def at(self, step, doing=None):
        if shown == [1, 2, 3] and doing == "waiting for its batch" and moment == "before the next is dispatched":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "show", show)
    monkeypatch.setattr(Watchdog, "at", at)
    config = replace(tiny, train=replace(tiny.train, eval_interval=0), checkpoint=replace(tiny.checkpoint, interval=0))
    result = loop.train(config, tmp_path / "run")
    assert (result.exit_code, result.step, shown[-1]) == (loop.PREEMPTED, last, last)
    assert "Ctrl-C: saving after the steps in flight, two at most; " in capfd.readouterr().err
