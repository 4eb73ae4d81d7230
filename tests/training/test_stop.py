"""How a run is told to stop."""

import signal
from dataclasses import replace

import pytest

from mjax.training import loop
from mjax.training.display import Display
from mjax.training.watchdog import Watchdog
from tests.small import small_config

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.mark.parametrize("moment", ["while a step runs", "before the next is dispatched"])
def test_ctrl_c_waits_for_the_steps_under_way_which_are_two_at_most_and_says_so(moment, tmp_path, monkeypatch, capfd):
    config = small_config(2, 8, micro_batch=1)
    log, train = replace(config.log, tensorboard=False, sample_tokens=0), replace(config.train, eval_interval=0)
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
    result = loop.train(replace(config, log=log, train=replace(train, steps=12)), tmp_path / "run")
    assert result.exit_code == loop.PREEMPTED
    assert result.step == shown[-1] == {"while a step runs": 4, "before the next is dispatched": 5}[moment]
    assert "Ctrl-C: saving after the steps in flight, two at most; " in capfd.readouterr().err
