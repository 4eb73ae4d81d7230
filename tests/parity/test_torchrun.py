"""Two processes that torchrun starts train one run."""

import subprocess
import sys

import pytest

from tests.ports import free_port
from tests.test_train_command import command, environment, losses, run_here

pytest.importorskip("torch", reason="torch is not installed: make test-ci")
pytestmark = pytest.mark.parity


def test_torchrun_starts_a_run(tmp_path):
    flags = ("--mesh.data", "2", "--mesh.model", "2", "--train.steps", "3", "--train.eval-interval", "0")
    # mjax listens at the port above: with --standalone both are of those that the system gives to other tests
    meeting = ("--master-addr", "localhost", "--master-port", str(free_port()))
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "2"]
    argv = [*launcher, *command(tmp_path, *flags, "--simulate", "2")[1:]]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (tmp_path / "alone").mkdir()
    run_here(tmp_path / "alone", *flags[4:])
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
