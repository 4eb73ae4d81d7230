"""Many processes on one machine, as the servers of a cluster would run train.py: what they compute and how they die.

Each compiles for itself. Of a persistent cache only process 0 would profit, and Gloo, which
carries the collectives between CPUs, waits no longer than half a minute for the others.
"""

import os
import re
import signal
import subprocess
import time

import pytest

from mjax.checkpoint.folders import checkpoint_steps
from tests.ports import free_port
from tests.test_train_command import IMPATIENT, command, environment, losses, run_here

pytestmark = pytest.mark.usefixtures("quick_runs")

MESH = ["--mesh.data", "2", "--mesh.model", "2"]
LONG = ["--train.steps", "100000", "--train.eval-interval", "0", "--checkpoint.interval", "0"]
LONG += ["--optimizer.schedule", "constant"]


def _environment():
    return environment() | {"JAX_ENABLE_COMPILATION_CACHE": "0"}


class Group:
    """The processes of one run; whatever happens, none outlives the test."""

    def __init__(self, folder, *flags, count=4, host="127.0.0.1", prefixes=None, only=None, differing=None):
        """`count` processes with `flags`, or of these `only` some, with the flags that `differing` has for each."""
        address = f"{host}:{free_port()}"
        where = ["--distributed.coordinator", address, "--distributed.processes", str(count)]
        where += ["--simulate", str(4 // count)]
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.logs = [folder / f"{index}.log" for index in only or range(count)]
        self.processes = []
        for index, log in zip(only or range(count), self.logs, strict=True):
            prefix = prefixes[index] if prefixes else []
            own = ["--distributed.process", str(index), *(differing or {}).get(index, [])]
            argv = [*prefix, *command(folder, *MESH, *where, *flags, *own)]
            with log.open("w") as file:
                self.processes.append(subprocess.Popen(argv, env=_environment(), stdout=file, stderr=subprocess.STDOUT))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_step(self, step, checkpoint=0):
        """Until `step` is logged and, on a slow disk perhaps later, the checkpoint of that or a later step is whole."""
        deadline = time.monotonic() + 200
        run = self.folder / "run"
        while max(losses(self.folder), default=0) < step or max(checkpoint_steps(run), default=0) < checkpoint:
            assert all(process.poll() is None for process in self.processes), self.outputs()
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.02)

    def ends(self, seconds=300):
        """Exit codes."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def outputs(self):
        return [log.read_text() for log in self.logs]

    def finish(self, code=0):
        assert self.ends() == [code] * len(self.processes), "\n=====\n".join(self.outputs())
        return self.outputs()


def changed(folder, constants):
    """The flags of the tiny run with other constants of mjax."""
    file = folder / "changed.py"
    file.write_text(
        f"from mjax.cluster import processes, watchdog\nfrom tests.tiny_config import config\n{constants}\n"
    )
    return ["--config", str(file)]


def test_two_processes_compute_and_stop_as_one(tmp_path, capsys):
    """SIGUSR1 and then SIGTERM, sent again and again to one of them, stop both after the same saved step."""
    with Group(tmp_path / "two", *LONG, *IMPATIENT, count=2) as group:
        first, second = group.finish(code=75)
    last = max(losses(tmp_path / "two"))
    assert f"stopped by SIGTERM after step {last}" in first
    assert f"checkpoint {last} saved" in first
    assert "step" not in second, "process 0 speaks for all"
    # Their checkpoint opens in one process, on one device.
    longer = [*LONG, "--train.steps", str(last + 2)]
    capsys.readouterr()
    run_here(tmp_path / "two", *longer)
    assert "changed mesh.data: 2 → 1" in capsys.readouterr().out
    run_here(tmp_path / "one", *longer)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.ci
def test_processes_share_the_positions_of_sequences(tmp_path):
    """A process has a part of the positions of every sequence."""
    mesh = ["--mesh.data", "1", "--mesh.model", "1", "--mesh.context", "4", "--train.steps", "4"]
    run_here(tmp_path / "one", *mesh)
    with Group(tmp_path / "two", *mesh, count=2) as group:
        group.finish()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.ci
def test_run_of_four_processes_survives_a_killed_one(tmp_path):
    steps = ["--train.steps", "40"]  # enough that some are left when the checkpoint of step 4 is whole
    with Group(tmp_path / "four", *steps) as group:
        group.finish()
    uninterrupted, tmp_path = losses(tmp_path / "four"), tmp_path / "killed"
    with Group(tmp_path, *steps) as group:
        group.wait_for_step(5, checkpoint=4)
        killed = group.processes[3]
        killed.kill()
        codes = group.ends(60)
        outputs = group.outputs()
    assert codes == [1, 1, 1, -signal.SIGKILL], outputs
    for output in outputs[:3]:
        died = rf"^mjax: error: process 3 on \S+ \(pid {killed.pid}\) died, its last heartbeat was at step \d+; "
        assert re.search(died, output, re.MULTILINE)
        assert "Traceback" not in output
    assert losses(tmp_path).keys() < uninterrupted.keys()
    with Group(tmp_path, *steps) as group:
        first, *_ = group.finish()
    assert "continued after step" in first
    assert losses(tmp_path) == uninterrupted


@pytest.mark.ci
def test_stopped_process_is_reported_then_given_up(tmp_path):
    hasty = changed(tmp_path, "processes.HEARTBEAT_TIMEOUT = 12\nwatchdog.STRAGGLER_TIMEOUT = 4")
    with Group(tmp_path, *LONG, *hasty, count=2) as group:
        first, stopped = group.processes
        group.wait_for_step(5)
        stopped.send_signal(signal.SIGSTOP)
        name = rf"process 1 on \S+ \(pid {stopped.pid}\)"
        assert first.wait(60) == 1
        output, _ = group.outputs()
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) != 0, "one that comes back finds the others gone"
    assert re.search(rf"no step has been finished for \d+ s: {name} is at .*, no heartbeat for \d+ s", output)
    assert re.search(rf"{name} has sent no heartbeat for \d+ s, since step \d+; at 12 s the run ends", output)
    assert re.search(rf"mjax: error: {name} has sent no heartbeat for \d+ s, since step \d+", output)


@pytest.fixture
def hosts():
    """Two network namespaces with an address each, joined by a pair of virtual interfaces."""
    names = [f"mjax{os.getpid()}{letter}" for letter in "ab"]
    steps = [*(f"netns add {name}" for name in names), "link add {0} netns {0} type veth peer {1} netns {1}"]
    for number, name in enumerate(names, start=1):
        steps.append(f"-n {name} address add 10.77.0.{number}/24 dev {name}")
        steps += [f"-n {name} link set {device} up" for device in (name, "lo")]
    commands = " && ".join(f"ip {step.format(*names)}" for step in steps)
    made = subprocess.run(["sh", "-c", commands], capture_output=True, text=True)
    try:
        if made.returncode:
            pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["sh", "-c", f"ip netns delete {name}"], capture_output=True)


@pytest.mark.ci
def test_cut_cable_between_two_hosts_ends_both(hosts, tmp_path):
    # Gloo meets at the address of the host's name, so each has a separate name and /etc/hosts.
    (tmp_path / "hosts").write_text("".join(f"10.77.0.{i} {name}\n" for i, name in enumerate(hosts, start=1)))
    own = f'mount --bind {tmp_path / "hosts"} /etc/hosts && hostname $0 && exec "$@"'
    prefixes = [["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", own, name] for name in hosts]
    hasty = changed(tmp_path, "processes.HEARTBEAT_TIMEOUT = 6")
    with Group(tmp_path, *LONG, *hasty, count=2, host="10.77.0.1", prefixes=prefixes) as group:
        group.wait_for_step(5)
        subprocess.run(["ip", "-n", hosts[1], "link", "set", hosts[1], "down"], check=True)
        codes = group.ends(60)
        first, second = group.outputs()
    assert codes == [1, 1], (first, second)
    assert re.search(rf"mjax: error: process 1 on {hosts[1]} \(pid \d+\) has sent no heartbeat for \d+ s", first)
    assert re.search(rf"mjax: error: process 0 on {hosts[0]} \(pid \d+\) has sent no heartbeat for \d+ s", second)


@pytest.mark.ci
def test_unjoined_processes_end_after_start_timeout(tmp_path):
    """One that waits for another, and one that waits for process 0: JAX's client would abort both."""
    short = ["--distributed.start-timeout", "5"]
    with Group(tmp_path / "a", *short, count=2, only=[0]) as first, Group(tmp_path / "b", *short, only=[1]) as other:
        (waiting,), (alone,) = first.finish(code=2), other.finish(code=2)
    late = "mjax: error: the processes of this run did not come together within --distributed.start-timeout 5 s: "
    assert re.fullmatch(rf"{late}process 0 listens at 127.0.0.1:\d+, and not all of 2 connected; check .*\n", waiting)
    assert re.fullmatch(
        rf"{late}this one on \S+ cannot reach process 0 at 127.0.0.1:\d+ \(Connection refused\); .*\n", alone
    )


@pytest.mark.ci
def test_disagreeing_processes_end_before_the_first_step(tmp_path):
    """Unnoticed, another learning rate is trained on with, and other steps hang."""
    with Group(tmp_path, count=2, differing={1: ["--optimizer.learning-rate", "0.02", "--train.steps", "9"]}) as group:
        outputs = group.finish(code=2)
    differences = (
        r"--optimizer.learning-rate 0.01 on process 0 on \S+, 0.02 on process 1 on \S+; "
        r"--train.steps 12 on process 0 on \S+, 9 on process 1 on \S+; start all with the same"
    )
    for output in outputs:
        assert re.search(rf"^mjax: error: the processes of this run do not agree: {differences}", output, re.MULTILINE)
    assert not (tmp_path / "run").exists()


FAILING = """
import sys, threading, time
from tests.tiny_config import config

def change_the_run():
    while not hasattr(sys.modules.get("mjax.run.loop"), "train"):
        time.sleep(0.01)
    from mjax.checkpoint import checkpoint
    put, fails = checkpoint.put, {fails}

    def failing(folder, final):
        if final.name in fails:
            fails.remove(final.name)
            raise OSError(5, "Input/output error")
        put(folder, final)

    checkpoint.put = failing

threading.Thread(target=change_the_run, daemon=True).start()
"""


@pytest.mark.ci
@pytest.mark.parametrize(("fails", "code"), [(["8"], 0), (["4", "8"], 1)])
def test_processes_agree_on_saves_that_fail(fails, code, tmp_path):
    """Only process 0 knows of it: it gives checkpoints their names."""
    (tmp_path / "config.py").write_text(FAILING.format(fails=fails))
    with Group(tmp_path / "two", "--config", str(tmp_path / "config.py"), count=2) as group:
        first, second = group.finish(code=code)
    assert f"checkpoint {fails[0]} could not be saved in" in first
    assert "the next save is tried" in " ".join(first.split())
    ended = "mjax: error: two saves in a row failed: checkpoint 8 could not be saved in"
    assert [ended in output for output in (first, second)] == [bool(code)] * 2
    assert checkpoint_steps(tmp_path / "two" / "run") == ([] if code else [4, 12])
