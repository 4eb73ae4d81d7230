"""One program in many processes: start-up, broadcasts and barriers between them, and stop requests.

It builds on `jax.distributed`: every process runs the same program over the same mesh and owns the devices of its host,
or one of them. Process 0 writes the records of a run; each reads its rows of a batch and writes its part of a
checkpoint.

JAX reads the number of processes, this process's index and the address of process 0 from the environment of Slurm, Open
MPI (before 5) and Kubernetes. For torchrun, SkyPilot and Kubeflow's Trainer mjax reads them. This file decides which
GPUs a process owns. JAX uses the GPU with the process's index on its host. That is wrong if the launcher shows each
process one GPU only (as `srun --gpus-per-task=1` does), and leaves GPUs unused if one process is to use all GPUs of a
host.
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
from mjax.cluster.launch import Distributed, enable_compilation_cache, find_launcher, read_number, simulate_devices
from mjax.errors import UsageError

MESSAGE_BYTES = 2048  # of broadcast_bytes
HEARTBEAT_TIMEOUT = 25  # seconds without a heartbeat after which a process is lost; a death is noticed immediately
JAX_TIMEOUT_MARGIN = 60  # seconds by which JAX's limits are longer than ours, which have a better message
STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop a run like SIGTERM: of a closed terminal, and of launchers before a time limit."""
FLAGS_OF_EACH = "give each --distributed.coordinator HOST:PORT, --distributed.processes N and --distributed.process I"


def start(distributed: Distributed, simulate: int | None = None) -> None:
    """Enable the compilation cache, and join the other processes, if a launcher or the flags say that there are any.

    Call it before any device is used.

    Args:
      distributed: rendezvous of the processes.
      simulate: number of CPU devices of this process.

    Raises:
      UsageError: the flags do not go together, or the others could not be reached.
    """
    if simulate is not None:
        simulate_devices(simulate)
    enable_compilation_cache(distributed.is_multiprocess)
    trim_memory()
    distributed, launcher = distributed.with_launcher(), find_launcher()
    address, processes, process = distributed.coordinator, distributed.processes, distributed.process
    is_given = [value is not None for value in (address, processes, process)]
    if any(is_given) and not (all(is_given) or (launcher and is_given == [True, False, False])):
        flags = "--distributed.coordinator HOST:PORT, --distributed.processes N and --distributed.process I"
        raise UsageError(f"{flags} go together; a launcher such as srun or torchrun needs none of them")
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise UsageError(f"--distributed.coordinator {address} has no port; use HOST:PORT, such as node0:1234")
    if not any(is_given) and not launcher:
        return
    if processes is None and os.environ.get("OMPI_COMM_WORLD_SIZE"):  # JAX 0.10 does not read those of Open MPI 5
        processes = read_number("OMPI_COMM_WORLD_SIZE", 1)
        process = read_number("OMPI_COMM_WORLD_RANK", 0, processes - 1)
    if process == 0 or (process is None and os.environ.get("SLURM_PROCID") == "0"):
        _check_port(distributed.coordinator_port())
    timeout = distributed.start_timeout
    try:
        with _time_limit(timeout, lambda: _describe_missing(distributed, processes, process)):
            jax.distributed.initialize(
                address,
                processes,
                process,
                local_device_ids=local_devices(),
                initialization_timeout=timeout + JAX_TIMEOUT_MARGIN,
                # A fallback for mjax/cluster/watchdog.py, which should report first: JAX may send only one heartbeat
                # in half of its timeout.
                heartbeat_timeout_seconds=2 * HEARTBEAT_TIMEOUT + 10,
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        alone = "for a single pod unset JOB_COMPLETION_INDEX, else " if launcher == ("Kubernetes", None) else ""
        problem = f"the processes of this run could not find each other ({reason})"
        raise UsageError(f"{problem}; {alone}{FLAGS_OF_EACH}") from error
    forward_stop_signals()
    _check_devices_per_process()


def _check_port(port: int | None) -> None:
    """Reject a port at which process 0 cannot listen: JAX would end in a segmentation fault."""
    try:
        if port is not None:
            _server(port).close()
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "it must be at most 65535"
        fix = "give every process --distributed.coordinator HOST:PORT with another port"
        raise UsageError(f"process 0 cannot use port {port} of {socket.gethostname()} ({reason}); {fix}") from None


def _server(port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens on all addresses; port 0: the system chooses one."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def forward_stop_signals() -> None:
    """Turn `STOP_SIGNALS` that are not ignored or handled into SIGTERM, which JAX reports to the other processes."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # signals belong to the main thread
                signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


@functools.cache
def trim_memory() -> None:
    """Return memory that XLA's compiler frees to the system, after every program that compiled for a second or more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others return memory immediately

    def on_compiled(event: str, seconds: float, **_) -> None:
        if trim is not None and seconds >= 1 and event.endswith("/backend_compile_duration"):
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(on_compiled)


@contextlib.contextmanager
def _time_limit(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """End this process with a sentence if the block takes longer.

    JAX's client would abort it with a stack of C++, and nothing in Python can catch that.
    """

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


def _describe_missing(distributed: Distributed, count: int | None, process: int | None) -> str:
    """Describe why the processes did not connect, as far as one of them knows."""
    address = distributed.coordinator
    limit = f"--distributed.start-timeout {distributed.start_timeout} s"
    problem = f"the processes of this run did not come together within {limit}"
    if address is None:  # JAX has the address of process 0 from the launcher
        return f"{problem}; see the output of the others for one that ended, or {FLAGS_OF_EACH}"
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        name = f"process 0 itself on {socket.gethostname()}" if process == 0 else f"this one on {socket.gethostname()}"
        return (
            f"{problem}: {name} cannot reach process 0 at {address} ({error.strerror or error}); start process 0 on "
            "that host, or give a host and port that can be reached"
        )
    if process == 0:
        return (
            f"{problem}: process 0 listens at {address}, and not all of {count} connected; check that all were "
            "started with this address, and that the port is open between the hosts"
        )
    return f"{problem}: this one reached process 0 at {address}, another did not; see its output"


def _check_devices_per_process() -> None:
    """Reject processes with different numbers of devices: the mesh needs equal numbers.

    Raises:
      UsageError: they do; in every process.
    """
    counts = Counter(device.process_index for device in jax.devices())
    usual = Counter(counts.values()).most_common(1)[0][0]
    other = [f"{count} on process {process}" for process, count in sorted(counts.items()) if count != usual]
    if other:
        fix = "give each the same with CUDA_VISIBLE_DEVICES, JAX_LOCAL_DEVICE_IDS or --simulate"
        numbers = f"different numbers of devices: {', '.join(other[:8])}, {usual} on the others"
        raise UsageError(f"the processes see {numbers}; {fix}")


def local_devices() -> list[int] | None:
    """The GPUs of this process, as indices from 0 among the visible ones; None: JAX_LOCAL_DEVICE_IDS sets them.

    The GPUs are divided in order among the processes of the host; a process that sees only one uses that one. An empty
    list means all devices, of whatever kind.

    Raises:
      UsageError: they cannot be divided evenly.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    rank, count = local_rank_and_size()
    visible = _visible_gpus() if count > 1 else 0
    if visible <= 1:
        return []
    if visible % count:
        fix = "start one process per GPU or one per host"
        raise UsageError(f"{count} processes on this host cannot divide its {visible} GPUs evenly; {fix}")
    share = visible // count
    return list(range(rank * share, (rank + 1) * share))


def local_rank_and_size() -> tuple[int, int]:
    """Index of this process among those the launcher started on this host, and their number.

    Raises:
      UsageError: a variable of the launcher is wrong.
    """
    open_mpi = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    for rank, size in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), open_mpi):  # torchrun's first
        if rank in os.environ and size in os.environ:
            count = read_number(size, 1)
            return read_number(rank, 0, count - 1), count
    if "SLURM_STEP_TASKS_PER_NODE" in os.environ and "SLURM_LOCALID" in os.environ:
        counts: list[int] = []  # of each node, from strings like "8(x63),4"
        for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"]):
            counts += [int(tasks)] * int(nodes or 1)
        count = counts[read_number("SLURM_NODEID", 0, len(counts) - 1)]
        return read_number("SLURM_LOCALID", 0, count - 1), count
    return 0, 1


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
    """True if this process writes the records of the run."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Return when every process has reached this point."""
    multihost_utils.sync_global_devices(name)


def broadcast_int(number: int) -> int:
    """Process 0's `number` (32 bits), in every process."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def any_process(flag: bool) -> bool:
    """True in every process if `flag` is true in one of them."""
    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))


def broadcast_bytes(message: bytes) -> bytes:
    """Process 0's `message`, at most 2048 bytes without a zero at the end, in every process."""
    assert len(message) <= MESSAGE_BYTES
    padded = np.frombuffer(message.ljust(MESSAGE_BYTES, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes().rstrip(b"\0")


def stop_agreed(step: int) -> bool:
    """True if the processes have agreed to stop after `step`, because one of them got SIGTERM.

    All must call this at every step. With a single process it is always False: `StopSignal` handles its signals.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


class StopSignal:
    """Turns SIGTERM, `STOP_SIGNALS` and Ctrl-C into a request to stop after the steps in flight.

    A second Ctrl-C stops immediately. `STOP_SIGNALS` that are ignored, as SIGHUP under `nohup`, or have another handler
    are left alone. Several processes have to agree on the step, so there JAX handles SIGTERM (`stop_agreed`),
    `STOP_SIGNALS` become SIGTERM, and Ctrl-C stops immediately.

    Leave the context when the save is committed. After a stop request these signals are ignored from then on:
    launchers send them again, and must see the exit code for a saved run.

    Attributes:
      name: of the signal or caller that requested it; "" if there is no request.
    """

    def __init__(self):
        self.name = ""
        self._previous_handlers: dict[int, object] = {}
        self._interrupts = 0

    @property
    def requested(self) -> bool:
        """True if the run is to end after the step dispatched last."""
        return bool(self.name)

    def __enter__(self) -> StopSignal:
        if jax.process_count() > 1:
            forward_stop_signals()
            return self
        unhandled = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            for number in (signal.SIGTERM, signal.SIGINT, *unhandled):
                self._previous_handlers[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, kind, *_) -> None:
        saved = self.requested and kind is None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if saved:
            with contextlib.suppress(ValueError):  # not in the main thread
                for number in {signal.SIGTERM, *self._previous_handlers} - {signal.SIGINT}:
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
        remaining = "once more" if self._interrupts else "twice"
        with contextlib.suppress(OSError):  # stderr may no longer be read
            # Written directly: a handler may run while the console is in the middle of a line.
            os.write(2, f"\n{status}; Ctrl-C {remaining} stops at once\n".encode())


# --- Connections to process 0 -----------------------------------------------------------------------------------------
#
# Process 0 listens on a port chosen by the system and sends its addresses, the port and a token to the others through
# JAX. A client that does not know the token is rejected.

MESSAGE_TIMEOUT = 5.0  # seconds
RETRY_INTERVAL = 0.5  # seconds between two attempts to connect

Broadcast = Callable[[bytes], bytes]


class JsonConnection:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(MESSAGE_TIMEOUT)
        self.connection, self._partial = connection, b""
        self._send_lock = threading.Lock()  # both threads of a process send

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message) -> None:
        with self._send_lock:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict]:
        """The messages received, at least one unless only a part of one has arrived.

        Raises:
          OSError: the other end is gone.
        """
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("closed")
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


Peers = dict[int, tuple[JsonConnection, str]]  # with their names, by index


def listen(distributed: Distributed, count: int, name: str, broadcast: Broadcast) -> Peers:
    """Wait in process 0 for all others."""
    peers: Peers = {}
    deadline = time.monotonic() + distributed.start_timeout
    with _server(0, backlog=count) as server, selectors.DefaultSelector() as selector:
        token, port, hosts = secrets.token_hex(16), server.getsockname()[1], _addresses(distributed)
        broadcast(json.dumps({"hosts": hosts, "port": port, "token": token, "name": name}).encode())
        selector.register(server, selectors.EVENT_READ)
        while len(peers) < count - 1:
            if time.monotonic() >= deadline:
                missing = ", ".join(str(index) for index in range(1, count) if index not in peers)
                first = f"process 0 at port {port} of {' or '.join(hosts)} within {distributed.start_timeout} s"
                raise UsageError(f"processes {missing} did not reach {first}; open the port range between the hosts")
            # No blocking read: a client that connects and sends nothing must not delay the others.
            for key, _ in selector.select(max(0.01, deadline - time.monotonic())):
                if key.fileobj is server:
                    selector.register(JsonConnection(server.accept()[0]), selectors.EVENT_READ)
                else:
                    selector.unregister(key.fileobj)
                    peers |= _accept_handshake(key.fileobj, token)
        for key in list(selector.get_map().values()):
            key.fileobj.close()
    return peers


# Any client may connect and send bytes that are not JSON, JSON too deep for the parser, or another object.
HANDSHAKE_ERRORS = OSError, ValueError, LookupError, TypeError, RecursionError


def _accept_handshake(connection: JsonConnection, token: str) -> Peers:
    """The process that has just sent a message, if it knows the token; other clients are rejected."""
    with contextlib.suppress(*HANDSHAKE_ERRORS):
        handshake = connection.receive()[0]
        if secrets.compare_digest(handshake["token"], token):
            connection.send(token=token)
            return {handshake["index"]: (connection, handshake["name"])}
    connection.close()
    return {}


def connect(distributed: Distributed, index: int, name: str, broadcast: Broadcast) -> Peers:
    """Connect process `index` to process 0: the connection, and its name, by its index. Arguments as for `listen`."""
    server = json.loads(broadcast(b""))
    hosts, port = server["hosts"], server["port"]
    deadline = time.monotonic() + distributed.start_timeout
    while time.monotonic() < deadline:
        for host in hosts:
            with contextlib.suppress(*HANDSHAKE_ERRORS):  # try the next host
                connection = JsonConnection(socket.create_connection((host, port), timeout=MESSAGE_TIMEOUT))
                connection.send(token=server["token"], index=index, name=name)
                if connection.receive()[0]["token"] == server["token"]:
                    return {0: (connection, server["name"])}
        time.sleep(RETRY_INTERVAL)
    where = f"process 0 at port {port} of {' or '.join(hosts)}; type --distributed.coordinator with a host it reaches"
    raise UsageError(f"process {index} on {socket.gethostname()} cannot reach {where}")


def _addresses(distributed: Distributed) -> list[str]:
    """Addresses at which the others may reach process 0, best first."""
    hosts = [distributed.coordinator.rsplit(":", 1)[0].strip("[]")] if distributed.coordinator else []
    hosts.append(socket.gethostname())
    with contextlib.suppress(OSError):
        hosts += [info[4][0] for info in socket.getaddrinfo(hosts[-1], None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: chooses the address of the default route
        hosts.append(probe.getsockname()[0])
    return list(dict.fromkeys(hosts))[:8]
