"""One program in many processes: start-up, and agreement between them.

It builds on `jax.distributed`: every process runs the same program over the same mesh and owns the devices of its host,
or one of them. Process 0 writes the records of a run; all read their own rows of a batch and write their own part of a
checkpoint.

JAX reads the number of processes, the index of this one and the address of process 0 from the environment of Slurm,
Open MPI (before 5) and Kubernetes, and mjax reads those of torchrun, SkyPilot and Kubeflow's Trainer. Which GPUs a
process owns is decided here: JAX takes the one with the process's index on its host, which is wrong if the launcher
shows each process its own GPU only (as `srun --gpus-per-task=1` does) and leaves the others unused if one process is to
use all of a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import secrets
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pynvml
from jax.experimental import multihost_utils

from mjax.cluster.huge_pages import has_nvidia_gpu
from mjax.cluster.launch import Distributed, enable_compilation_cache, find_launcher, simulate_devices
from mjax.errors import UsageError

MESSAGE_BYTES = 2048  # of bytes_from_first
HEARTBEAT = 25  # seconds of silence after which a process is lost; one that dies is noticed at once
JAX_TIMEOUT_MARGIN = 60  # seconds by which JAX's limits are longer than ours, which have a better message
WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop a run like SIGTERM: of a closed terminal, and of launchers before a time limit."""
GIVE_EACH = "give each --distributed.coordinator HOST:PORT, --distributed.processes N and --distributed.process I"


def start(where: Distributed, simulate: int | None = None) -> None:
    """Keep compiled programs, and join the other processes, if a launcher or the flags say that there are any; before
    any device is used.

    Args:
      where: the others are.
      simulate: number of CPU devices of this process.

    Raises:
      UsageError: the flags do not go together, or the others could not be reached.
    """
    if simulate is not None:
        simulate_devices(simulate)
    enable_compilation_cache(where.several)
    trim_memory()
    where, launched = where.with_launcher(), find_launcher() is not None
    given = [value is not None for value in (where.coordinator, where.processes, where.process)]
    if any(given) and not (all(given) or (launched and given == [True, False, False])):
        raise UsageError(
            "--distributed.coordinator HOST:PORT, --distributed.processes N and --distributed.process I go together; "
            "a launcher such as srun or torchrun needs none of them"
        )
    if where.coordinator is not None and not re.fullmatch(r".+:\d+", where.coordinator):
        raise UsageError(
            f"--distributed.coordinator {where.coordinator} has no port; use HOST:PORT, such as node0:1234"
        )
    if not any(given) and not launched:
        return
    processes, process = where.processes, where.process
    if processes is None and os.environ.get("OMPI_COMM_WORLD_SIZE"):  # JAX 0.10 does not read those of Open MPI 5
        processes = _number("OMPI_COMM_WORLD_SIZE", 1)
        process = _number("OMPI_COMM_WORLD_RANK", 0, processes - 1)
    if process == 0 or (process is None and os.environ.get("SLURM_PROCID") == "0"):
        _check_port(where.listening_port())
    try:
        with _time_limit(where.start_timeout, lambda: _who_is_missing(where, processes, process)):
            jax.distributed.initialize(
                where.coordinator,
                processes,
                process,
                local_device_ids=local_devices(),
                initialization_timeout=where.start_timeout + JAX_TIMEOUT_MARGIN,
                # A fallback for mjax/cluster/watchdog.py, which should report first: JAX may send only one heartbeat
                # in half of its timeout.
                heartbeat_timeout_seconds=2 * HEARTBEAT + 10,
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        alone = "for a single pod unset JOB_COMPLETION_INDEX, else " if find_launcher() == ("Kubernetes", None) else ""
        raise UsageError(
            f"the processes of this run could not find each other ({reason}); {alone}{GIVE_EACH}"
        ) from error
    forward_warnings()
    _check_devices_per_process()


def _check_port(port: int | None) -> None:
    """Reject a port at which process 0 cannot listen: JAX would end in a segmentation fault."""
    try:
        if port is not None:
            _server(port).close()
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "it must be at most 65535"
        raise UsageError(
            f"process 0 cannot listen at port {port} of {socket.gethostname()} ({reason}); give every process "
            "--distributed.coordinator HOST:PORT with another port"
        ) from None


def _server(port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens on all addresses; port 0: the system chooses one."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def forward_warnings() -> None:
    """Turn `WARNINGS` into SIGTERM, which JAX reports to the other processes, unless they are ignored or handled."""
    for number in WARNINGS:
        if signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # signals belong to the main thread
                signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


@functools.cache
def trim_memory() -> None:
    """Return to the system what XLA's compiler frees, after every program that took it a second. The C library keeps
    that memory (0.2 GiB after a small train step), and on a CPU a step's arrays would come on top of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others return memory at once

    def listen(event: str, seconds: float, **_) -> None:
        if trim is not None and seconds >= 1 and event.endswith("/backend_compile_duration"):
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)


@contextlib.contextmanager
def _time_limit(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """End this process with a sentence if what is inside takes longer. JAX's client would abort it with a stack of C++,
    and nothing in Python can catch that."""

    def end() -> None:
        os.write(2, f"mjax: error: {explain()}\n".encode())
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _who_is_missing(where: Distributed, count: int | None, process: int | None) -> str:
    """Describe why the processes did not connect, as far as one of them can tell."""
    late = f"the processes of this run did not come together within --distributed.start-timeout {where.start_timeout} s"
    if where.coordinator is None:  # the launcher told JAX where process 0 is
        return f"{late}; see the output of the others for one that ended, or {GIVE_EACH}"
    host, port = where.coordinator.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        name = f"process 0 itself on {socket.gethostname()}" if process == 0 else f"this one on {socket.gethostname()}"
        return (
            f"{late}: {name} cannot reach process 0 at {where.coordinator} ({error.strerror or error}); start process "
            "0 on that host, or give a host and port that can be reached"
        )
    if process == 0:
        return (
            f"{late}: process 0 listens at {where.coordinator}, and not all of {count} connected; check that all were "
            "started with this address, and that the port is open between the hosts"
        )
    return f"{late}: this one reached process 0 at {where.coordinator}, another did not; see its output"


def _check_devices_per_process() -> None:
    """Refuse processes that own different numbers of devices: the mesh needs equal numbers.

    Raises:
      UsageError: they do; in every process.
    """
    counts = Counter(device.process_index for device in jax.devices())
    usual = Counter(counts.values()).most_common(1)[0][0]
    other = [f"{count} on process {process}" for process, count in sorted(counts.items()) if count != usual]
    if other:
        raise UsageError(
            f"the processes of this run see different numbers of devices: {', '.join(other[:8])}, {usual} on the "
            "others; give each the same with CUDA_VISIBLE_DEVICES, JAX_LOCAL_DEVICE_IDS or --simulate"
        )


def local_devices() -> list[int] | None:
    """The GPUs that this process owns, as indices from 0 among those it sees; None: JAX_LOCAL_DEVICE_IDS sets them.

    The GPUs are divided in order among the processes of the host; a process that sees only one owns that one. An empty
    list means all devices, of whatever kind.

    Raises:
      UsageError: they cannot be divided evenly.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    place, count = place_on_host()
    visible = _visible_gpus() if count > 1 else 0
    if visible <= 1:
        return []
    if visible % count:
        raise UsageError(
            f"{count} processes on this host cannot divide its {visible} GPUs evenly; start one process per GPU or one "
            "per host"
        )
    share = visible // count
    return list(range(place * share, (place + 1) * share))


def place_on_host() -> tuple[int, int]:
    """Index of this process among those the launcher started on this host, and their number.

    Raises:
      UsageError: a variable of the launcher is wrong.
    """
    of_open_mpi = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    for index, number in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), of_open_mpi):  # torchrun's first
        if index in os.environ and number in os.environ:
            count = _number(number, 1)
            return _number(index, 0, count - 1), count
    if "SLURM_STEP_TASKS_PER_NODE" in os.environ and "SLURM_LOCALID" in os.environ:
        counts: list[int] = []  # of each node, from strings like "8(x63),4"
        for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"]):
            counts += [int(tasks)] * int(nodes or 1)
        count = counts[_number("SLURM_NODEID", 0, len(counts) - 1)]
        return _number("SLURM_LOCALID", 0, count - 1), count
    return 0, 1


def _number(name: str, least: int, most: int = 999_999) -> int:
    """The number in a launcher's variable."""
    text = os.environ.get(name, "").strip()
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise UsageError(
            f"{name} is {text or 'not set'}, but must be a number from {least} to {most}; correct it, or unset the "
            "variables of the launcher to train with one process"
        )
    return int(text)


def _visible_gpus() -> int:
    """Number of NVIDIA GPUs that this process sees, without using them; 0 if it is to run on the CPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not has_nvidia_gpu():
        return 0
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len([name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()])
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:  # a container without the driver's library
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    accessible = 0
    for index in range(count):
        with contextlib.suppress(pynvml.NVMLError):  # of another job, on some systems
            pynvml.nvmlDeviceGetHandleByIndex(index)
            accessible += 1
    return accessible


def is_first() -> bool:
    """Whether this process writes the records of the run."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Return when every process has reached this point, named `what`."""
    multihost_utils.sync_global_devices(what)


def from_first(number: int) -> int:
    """Process 0's `number` (32 bits), in every process."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def any_process(flag: bool) -> bool:
    """True in every process if `flag` is true in one of them."""
    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))


def bytes_from_first(message: bytes) -> bytes:
    """Process 0's `message`, at most 2048 bytes without a zero at the end, in every process."""
    assert len(message) <= MESSAGE_BYTES
    padded = np.frombuffer(message.ljust(MESSAGE_BYTES, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes().rstrip(b"\0")


def stop_agreed(step: int) -> bool:
    """Whether the processes have agreed to stop after `step`, because one of them got SIGTERM.

    All must ask at every step. With a single process the answer is always no: it watches its own signals.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


class StopSignal:
    """Turns SIGTERM, `WARNINGS` and Ctrl-C into a request to stop after the steps in flight; a second Ctrl-C stops
    immediately. Warnings that are ignored, as SIGHUP under `nohup`, or have another handler are left alone.

    Several processes have to agree on the step, so there SIGTERM is handled by JAX (`stop_agreed`), warnings
    become one, and Ctrl-C stops immediately.

    Leave the context when the save is committed. After a stop request these signals are ignored from then on:
    launchers send them again, and must see the exit code that says "saved".

    Attributes:
      name: of what requested it; "" if nothing has.
    """

    def __init__(self):
        self.name = ""
        self._before: dict[int, object] = {}
        self._interrupts = 0

    @property
    def requested(self) -> bool:
        """True if the run is to end after the step dispatched last."""
        return bool(self.name)

    def __enter__(self) -> StopSignal:
        if jax.process_count() > 1:
            forward_warnings()
            return self
        free = [number for number in WARNINGS if signal.getsignal(number) == signal.SIG_DFL]
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            for number in (signal.SIGTERM, signal.SIGINT, *free):
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, kind, *_) -> None:
        saved = self.requested and kind is None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if saved:
            with contextlib.suppress(ValueError):  # not in the main thread
                for number in {signal.SIGTERM, *self._before} - {signal.SIGINT}:
                    signal.signal(number, signal.SIG_IGN)

    def _stop(self, number: int, frame) -> None:
        repeated = self.requested
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.name = self.name or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        # The host dispatches a step while the previous one runs, so up to two more steps are printed.
        status = "still saving" if repeated else f"{self.name}: saving after the steps in flight, two at most"
        left = "once more" if self._interrupts else "twice"
        with contextlib.suppress(OSError):  # stderr may no longer be read
            # Written directly: a handler may run while the console is in the middle of a line.
            os.write(2, f"\n{status}; Ctrl-C {left} stops at once\n".encode())


# --- Connections to process 0 -----------------------------------------------------------------------------------------
#
# Process 0 listens on a port chosen by the system and sends its addresses, the port and a token to the others through
# JAX. A client that does not know the token is rejected.

STALL = 5.0  # seconds for one message to go through
RETRY = 0.5  # seconds between two attempts to connect

Share = Callable[[bytes], bytes]


class JsonConnection:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(STALL)
        self.connection, self._rest = connection, b""
        self._sending = threading.Lock()  # both threads of a process send

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message) -> None:
        with self._sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict]:
        """The messages received, at least one unless only a part of one has arrived.

        Raises:
          OSError: the other end is gone.
        """
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


def listen(where: Distributed, count: int, name: str, share: Share) -> dict[int, tuple[JsonConnection, str]]:
    """In process 0: wait for all others.

    Args:
      where: the address known to the others.
      count: number of processes.
      name: of this one.
      share: returns process 0's bytes in every process.

    Returns:
      A connection to each of the others and its name, by index.

    Raises:
      UsageError: some did not connect.
    """
    met: dict[int, tuple[JsonConnection, str]] = {}
    deadline = time.monotonic() + where.start_timeout
    with _server(0, backlog=count) as server, selectors.DefaultSelector() as door:
        token, port, hosts = secrets.token_hex(16), server.getsockname()[1], _addresses(where)
        share(json.dumps({"hosts": hosts, "port": port, "token": token, "name": name}).encode())
        door.register(server, selectors.EVENT_READ)
        while len(met) < count - 1:
            if time.monotonic() >= deadline:
                missing = ", ".join(str(index) for index in range(1, count) if index not in met)
                raise UsageError(
                    f"processes {missing} did not reach process 0 at port {port} of {' or '.join(hosts)} "
                    f"within {where.start_timeout} s; open the port range between the hosts"
                )
            # Connections are not waited for: a stranger that connects and says nothing must not block the others.
            for key, _ in door.select(max(0.01, deadline - time.monotonic())):
                if key.fileobj is server:
                    door.register(JsonConnection(server.accept()[0]), selectors.EVENT_READ)
                else:
                    door.unregister(key.fileobj)
                    met |= _welcome(key.fileobj, token)
        for key in list(door.get_map().values()):
            key.fileobj.close()
    return met


# A stranger may send anything: bytes that are not JSON, JSON too deep for the parser, or another object.
STRANGE = OSError, ValueError, LookupError, TypeError, RecursionError


def _welcome(line: JsonConnection, token: str) -> dict[int, tuple[JsonConnection, str]]:
    """The process that has just sent a message, if it knows the token; others are rejected."""
    with contextlib.suppress(*STRANGE):
        hello = line.receive()[0]
        if secrets.compare_digest(hello["token"], token):
            line.send(token=token)
            return {hello["index"]: (line, hello["name"])}
    line.close()
    return {}


def connect(where: Distributed, index: int, name: str, share: Share) -> dict[int, tuple[JsonConnection, str]]:
    """In process `index`: the connection to process 0, and its name, by its index. Arguments as for `listen`.

    Raises:
      UsageError: it cannot be reached.
    """
    there = json.loads(share(b""))
    hosts, port = there["hosts"], there["port"]
    deadline = time.monotonic() + where.start_timeout
    while time.monotonic() < deadline:
        for host in hosts:
            with contextlib.suppress(*STRANGE):  # try the next host
                line = JsonConnection(socket.create_connection((host, port), timeout=STALL))
                line.send(token=there["token"], index=index, name=name)
                if line.receive()[0]["token"] == there["token"]:
                    return {0: (line, there["name"])}
        time.sleep(RETRY)
    raise UsageError(
        f"process {index} on {socket.gethostname()} cannot reach process 0 at port {port} of {' or '.join(hosts)}; "
        "set --distributed.coordinator to a host that it can reach"
    )


def _addresses(where: Distributed) -> list[str]:
    """Addresses at which the others may reach process 0, best first."""
    hosts = [where.coordinator.rsplit(":", 1)[0].strip("[]")] if where.coordinator else []
    hosts.append(socket.gethostname())
    with contextlib.suppress(OSError):
        hosts += [info[4][0] for info in socket.getaddrinfo(hosts[-1], None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the address of the default route
        hosts.append(probe.getsockname()[0])
    return list(dict.fromkeys(hosts))[:8]
