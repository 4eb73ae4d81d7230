"""Callbacks that tests give to a run."""

import mjax


class Records(mjax.Callback):
    """The metrics of each step, in `records`."""

    def __init__(self):
        self.records = []

    def on_step(self, run, step, metrics):
        self.records.append(metrics)


class StopAt(mjax.Callback):
    """Ends the run at a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, run, step, metrics):
        if step == self.step:
            run.stop()
