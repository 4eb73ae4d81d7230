"""Many processes on one machine, as the servers of a cluster would run train.py: what they compute and how they die.

Each compiles for itself. Of a persistent cache only process 0 would profit, and Gloo, which
carries the collectives between CPUs, waits no longer than half a minute for the others.
"""

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from mjax import cli
from mjax.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.test_train_command import command, environment, losses

MESH = ["--mesh.data", "2", "--mesh.model", "2"]
LONG = ["--train.steps", "100000", "--train.eval-interval", "0", "--checkpoint.interval", "0"]


def _environment():
    return environment() | {"JAX_ENABLE_COMPILATION_CACHE": "0"}


@pytest.fixture
def alone(fewer_devices, capsys):
    """One process, this one: what it prints."""

    def run(folder, *flags):
        assert cli.main(["train", *command(folder, *flags)[2:]]) == 0
        return capsys.readouterr().out

    return run


class Group:
    """The processes of one run; whatever happens, none outlives the test."""

    def __init__(self, folder, *flags, count=4, host="127.0.0.1", prefixes=None, only=None, differing=None):
        """`count` processes with `flags`, or of these `only` some, with the flags that `differing` has for each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"{host}:{probe.getsockname()[1]}"
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

    def wait_for(self, condition, seconds=200):
        deadline = time.monotonic() + seconds
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.outputs()
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.02)

    def wait_for_step(self, step):
        self.wait_for(lambda: max(losses(self.folder), default=0) >= step)

    def ends(self, seconds=300):
        """Exit codes."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def outputs(self):
        return [log.read_text() for log in self.logs]

    def finish(self, code=0):
        assert self.ends() == [code] * len(self.processes), "\n=====\n".join(self.outputs())
        return self.outputs()


@pytest.mark.ci
@pytest.mark.parametrize(
    "mesh",
    [
        MESH,
        # A process has a part of the positions of every sequence, and reads no others.
        pytest.param(["--mesh.data", "1", "--mesh.model", "1", "--mesh.context", "4"], marks=pytest.mark.ci),
    ],
    ids=lambda flags: "-".join(flags),
)
def test_two_processes_train_and_save_what_one_does(mesh, alone, tmp_path):
    alone(tmp_path / "one", *mesh)
    with Group(tmp_path / "two", *mesh, count=2) as group:
        first, second = group.finish()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert "step 12/12" in first
    assert "step" not in second, "process 0 speaks for all"
    # What they saved opens in one process, on one device.
    output = alone(tmp_path / "two", "--train.steps", "14", "--train.eval-interval", "0")
    assert "continued after step 12" in output
    assert [record["step"] for record in read_metrics(tmp_path / "two" / "run" / "metrics.jsonl")] == list(range(1, 15))


@pytest.mark.ci
def test_sigterm_sent_again_and_again_to_one_process_stops_both_after_the_same_saved_step(tmp_path):
    impatient = str(ROOT / "tests" / "impatient_launcher.py")
    with Group(tmp_path, *LONG, "--config", impatient, count=2) as group:
        first, _ = group.finish(code=75)
    assert "stopped by SIGTERM after step" in first
    assert f"checkpoint {max(losses(tmp_path))} saved" in first


@pytest.mark.ci
def test_four_processes_compute_what_one_does_and_a_killed_one_is_named_and_its_run_continues_bit_for_bit(
    alone, tmp_path
):
    alone(tmp_path / "one", *MESH)
    with Group(tmp_path / "four") as group:
        group.finish()
    uninterrupted, tmp_path = losses(tmp_path / "four"), tmp_path / "killed"
    assert uninterrupted == pytest.approx(losses(tmp_path.parent / "one"), rel=1e-6)
    with Group(tmp_path) as group:
        group.wait_for_step(5)
        killed = group.processes[3]
        killed.kill()
        codes = group.ends(60)
        outputs = group.outputs()
    assert codes == [1, 1, 1, -signal.SIGKILL], outputs
    for output in outputs[:3]:
        assert re.search(
            rf"^mjax: error: process 3 on \S+ \(pid {killed.pid}\) died, last heard of at step \d+; ",
            output,
            re.MULTILINE,
        )
        assert "Traceback" not in output
    assert losses(tmp_path).keys() < uninterrupted.keys()
    with Group(tmp_path) as group:
        first, *_ = group.finish()
    assert "continued after step" in first
    assert losses(tmp_path) == uninterrupted


@pytest.mark.ci
def test_a_stopped_process_is_reported_and_then_given_up(tmp_path):
    with Group(tmp_path, *LONG, "--distributed.heartbeat", "12", "--distributed.watchdog", "4", count=2) as group:
        first, stopped = group.processes
        group.wait_for_step(5)
        stopped.send_signal(signal.SIGSTOP)
        name = rf"process 1 on \S+ \(pid {stopped.pid}\)"
        assert first.wait(60) == 1
        output, _ = group.outputs()
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) != 0, "one that comes back finds the others gone"
    assert re.search(rf"no step has been finished for \d+ s: {name} is at .*, not heard of for \d+ s", output)
    assert re.search(rf"{name} has not been heard of for \d+ s, since step \d+; at 12 s the run ends", output)
    assert re.search(rf"mjax: error: {name} has not been heard of for \d+ s, since step \d+", output)


@pytest.mark.ci
def test_an_error_in_one_process_ends_the_others_with_its_words(tmp_path):
    (tmp_path / "run").mkdir()
    with Group(tmp_path, count=2) as group:
        group.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        (tmp_path / "run" / "checkpoints").write_text("a file where the folder of checkpoints is to be")
        codes = group.ends(120)
        outputs = group.outputs()
    assert codes == [1, 1], outputs
    assert "checkpoint 4 could not be saved" in outputs[0]
    assert re.search(r"process 0 on \S+ \(pid \d+\) ended at step 4 with an error: checkpoint 4 could not", outputs[1])


@pytest.fixture
def hosts():
    """Two network namespaces with an address each, joined by a pair of virtual interfaces."""
    names = [f"mjax{os.getpid()}{letter}" for letter in "ab"]
    steps = [["netns", "add", name] for name in names]
    steps += [["link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1]]]
    for number, name in enumerate(names, start=1):
        steps += [
            ["-n", name, "address", "add", f"10.77.0.{number}/24", "dev", name],
            ["-n", name, "link", "set", name, "up"],
            ["-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for step in steps:
            result = subprocess.run(["ip", *step], capture_output=True, text=True, check=False)
            if result.returncode:
                pytest.skip(f"this machine makes no network namespaces: {result.stderr.strip()}")
        yield names
    except FileNotFoundError:
        pytest.skip("this machine makes no network namespaces: there is no `ip` command")
    finally:
        for name in names:
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.ci
def test_processes_on_two_hosts_meet_and_a_cut_cable_ends_both(hosts, tmp_path):
    # Gloo meets at the address of the host's name, so each has a name and an /etc/hosts of its own.
    (tmp_path / "hosts").write_text("".join(f"10.77.0.{i} {name}\n" for i, name in enumerate(hosts, start=1)))
    own = f'mount --bind {tmp_path / "hosts"} /etc/hosts && hostname $0 && exec "$@"'
    prefixes = [["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", own, name] for name in hosts]
    with Group(tmp_path, *LONG, "--distributed.heartbeat", "6", count=2, host="10.77.0.1", prefixes=prefixes) as group:
        group.wait_for_step(5)
        subprocess.run(["ip", "-n", hosts[1], "link", "set", hosts[1], "down"], check=True)
        codes = group.ends(60)
        first, second = group.outputs()
    assert codes == [1, 1], (first, second)
    assert re.search(rf"mjax: error: process 1 on {hosts[1]} \(pid \d+\) has not been heard of for \d+ s", first)
    assert re.search(rf"mjax: error: process 0 on {hosts[0]} \(pid \d+\) has not been heard of for \d+ s", second)


@pytest.mark.ci
def test_processes_that_nobody_joins_end_after_the_start_timeout_with_a_sentence(tmp_path):
    """One that waits for another, and one that waits for process 0: JAX's client would abort both."""
    short = ["--distributed.start-timeout", "5"]
    with Group(tmp_path / "a", *short, count=2, only=[0]) as first, Group(tmp_path / "b", *short, only=[1]) as other:
        (waiting,), (alone,) = first.finish(code=2), other.finish(code=2)
    late = "mjax: error: the processes of this run did not come together within --distributed.start-timeout 5 s: "
    assert re.fullmatch(rf"{late}process 0 listens at 127.0.0.1:\d+, and not all of 2 connected; check .*\n", waiting)
    assert re.fullmatch(
        rf"{late}this one on \S+ cannot reach process 0 at 127.0.0.1:\d+ \(Connection refused\); .*\n", alone
    )


def test_processes_that_disagree_end_before_the_first_step_and_say_in_what(tmp_path):
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


@pytest.mark.ci
def test_a_run_folder_that_two_processes_do_not_share_is_found_at_the_start(tmp_path):
    with Group(tmp_path, count=2, differing={1: ["--runs", str(tmp_path / "elsewhere")]}) as group:
        outputs = group.finish(code=2)
    for output in outputs:
        assert f"process 0 on {socket.gethostname()} has its run folder at {tmp_path / 'run'}, and process 1" in output
        assert f"cannot see it at {tmp_path / 'elsewhere' / 'run'}; use --runs" in output
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.ci
def test_what_one_process_refuses_before_it_starts_ends_the_others_with_its_words(tmp_path):
    with Group(tmp_path, count=2, differing={1: ["--train.stepz", "9"]}) as group:
        first, second = group.finish(code=2)
    sentence = "mjax train has no --train.stepz"
    assert second.count(sentence) == 1
    assert re.search(rf"mjax: error: process 1 on \S+ \(pid \d+\) ended at step 0 with an error: {sentence}", first)


def test_flags_that_go_together_are_asked_for_together(tmp_path, capsys):
    assert cli.main(["train", *command(tmp_path)[2:], "--distributed.processes", "2"]) == 2
    assert "go together" in capsys.readouterr().err
