"""The tiny run under a launcher without patience.

It sends SIGTERM at step 5 (SIGUSR1 to one process of several), again and again while that is saved, and at the exit.
When the run is started again, it sends SIGKILL while checkpoint 8 is saved: all of it is written, and only its name is
missing.
"""

import atexit
import os
import signal
import sys
import threading
import time

from tests.tiny_config import config  # noqa: F401

told = threading.Event()  # the first SIGTERM was sent
waiting = threading.Event()  # the main thread waits for the save


def terminate(number=signal.SIGTERM):
    if told.is_set():
        os.kill(os.getpid(), number)


def change_the_run():
    """Have the run send itself signals; JAX must not be imported before the command line does so."""
    while "mjax.run.loop" not in sys.modules:
        time.sleep(0.01)
    import jax

    from mjax.checkpoint import checkpoint
    from mjax.run.loop import Display

    commit, settle = checkpoint.Checkpoints._commit, checkpoint.Checkpoints.wait_until_finished
    put, show = checkpoint.put, Display.show

    def terminated_at_5(self, record):
        show(self, record)
        if record.step == 5 and jax.process_index() == 0:  # one process of several
            told.set()
            terminate(signal.SIGUSR1 if jax.process_count() > 1 else signal.SIGTERM)

    def terminated_while_writing(self, *arguments):
        if told.is_set():
            waiting.wait(60)
            terminate()
        return commit(self, *arguments)

    def terminated_while_waiting(self):
        if self._pending is not None and told.is_set():
            waiting.set()
            terminate()
        settle(self)

    def killed_while_saving_8(written, place):
        if place.name == "8" and not told.is_set():
            os.kill(os.getpid(), signal.SIGKILL)
        put(written, place)

    checkpoint.Checkpoints._commit = terminated_while_writing
    checkpoint.Checkpoints.wait_until_finished = terminated_while_waiting
    checkpoint.put, Display.show = killed_while_saving_8, terminated_at_5


threading.Thread(target=change_the_run, daemon=True).start()
atexit.register(terminate)
