"""Two processes with two simulated devices each, as two servers of a cluster would run train.py."""

import signal
import socket
import subprocess

import pytest

from mjax.training.metrics import read_metrics
from tests.test_train_command import command, environment, losses, run

MESH = ["--mesh.data", "2", "--mesh.model", "2"]


def _start(folder, *flags):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    where = ["--simulate", "2", "--distributed.coordinator", address, "--distributed.processes", "2"]
    return [
        subprocess.Popen(
            command(folder, *MESH, *where, "--distributed.process", str(index), *flags),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]


def _finish(processes, code=0):
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [code, code], "\n=====\n".join(outputs)
    return outputs


def test_two_processes_train_and_save_what_one_does(tmp_path):
    run(tmp_path / "one", *MESH, "--simulate", "4")
    first, second = _finish(_start(tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert "step 12/12" in first
    assert "step" not in second, "process 0 speaks for all"
    # What they saved opens in one process, on one device.
    output = run(tmp_path / "two", "--train.steps", "14", "--train.eval-interval", "0")
    assert "continued after step 12" in output.stdout
    assert [record["step"] for record in read_metrics(tmp_path / "two" / "run" / "metrics.jsonl")] == list(range(1, 15))


def test_sigterm_to_one_process_stops_both_after_the_same_saved_step(tmp_path):
    processes = _start(tmp_path, "--train.steps", "4000", "--checkpoint.interval", "0", "--train.eval-interval", "0")
    while max(losses(tmp_path), default=0) < 5:
        assert processes[0].poll() is None, processes[0].communicate()[0]
    processes[1].send_signal(signal.SIGTERM)
    first, _ = _finish(processes, code=75)
    assert "stopped by SIGTERM after step" in first
    assert f"checkpoint {max(losses(tmp_path))} saved" in first


def test_flags_that_go_together_are_asked_for_together(tmp_path, capsys):
    from mjax import cli

    assert cli.main(["train", *command(tmp_path)[2:], "--distributed.processes", "2"]) == 2
    assert "go together" in capsys.readouterr().err
