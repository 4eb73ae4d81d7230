"""Connecting the processes of a run to process 0: the connections of the watchdog.

Process 0 listens on a port chosen by the system and sends its addresses, the port and a token to the others through
JAX. A client that does not know the token is rejected.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from mjax.cluster.launch import Distributed
from mjax.errors import UsageError

STALL = 5.0  # seconds for one message to go through
RETRY = 0.5  # seconds between two attempts to connect

Share = Callable[[bytes], bytes]


class Line:
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


def listen(where: Distributed, count: int, name: str, share: Share) -> dict[int, tuple[Line, str]]:
    """In process 0: wait for all others.

    Args:
      where: the address known to the others, and how long to wait.
      count: number of processes.
      name: of this one.
      share: returns process 0's bytes in every process.

    Returns:
      A connection to each of the others and its name, by index.

    Raises:
      UsageError: some did not connect.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=count, dualstack_ipv6=socket.has_dualstack_ipv6())
    token, port, hosts = secrets.token_hex(16), server.getsockname()[1], _addresses(where)
    share(json.dumps({"hosts": hosts, "port": port, "token": token, "name": name}).encode())
    met: dict[int, tuple[Line, str]] = {}
    deadline = time.monotonic() + where.start_timeout
    with server, selectors.DefaultSelector() as door:
        door.register(server, selectors.EVENT_READ)
        while len(met) < count - 1:
            # Connections are not waited for: a stranger that connects and says nothing must not block the others.
            for key, _ in door.select(max(0.01, deadline - time.monotonic())):
                if key.fileobj is server:
                    door.register(Line(server.accept()[0]), selectors.EVENT_READ)
                else:
                    door.unregister(key.fileobj)
                    met |= _welcome(key.fileobj, token)
            if time.monotonic() >= deadline and len(met) < count - 1:
                missing = ", ".join(str(index) for index in range(1, count) if index not in met)
                raise UsageError(
                    f"processes {missing} did not reach process 0 at port {port} of {' or '.join(hosts)} "
                    f"within {where.start_timeout} s; open the port range between the hosts"
                )
        for key in list(door.get_map().values()):
            if key.fileobj is not server:
                key.fileobj.close()
    return met


def _welcome(line: Line, token: str) -> dict[int, tuple[Line, str]]:
    """The process that has just sent a message, if it knows the token; others are rejected."""
    # A stranger may send anything: bytes that are not JSON, JSON too deep for the parser, or another object.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        hello = line.receive()[0]
        if secrets.compare_digest(hello["token"], token):
            line.send(token=token)
            return {hello["index"]: (line, hello["name"])}
    line.close()
    return {}


def connect(where: Distributed, index: int, name: str, share: Share) -> tuple[Line, str]:
    """In process `index`: the connection to process 0, and its name. Arguments as for `listen`.

    Raises:
      UsageError: it cannot be reached.
    """
    there = json.loads(share(b""))
    deadline = time.monotonic() + where.start_timeout
    while time.monotonic() < deadline:
        for host in there["hosts"]:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # try the next host
                line = Line(socket.create_connection((host, there["port"]), timeout=STALL))
                line.send(token=there["token"], index=index, name=name)
                if line.receive()[0]["token"] == there["token"]:
                    return line, there["name"]
        time.sleep(RETRY)
    raise UsageError(
        f"process {index} on {socket.gethostname()} cannot reach process 0 at port {there['port']} of "
        f"{' or '.join(there['hosts'])}; set --distributed.coordinator to a host that it can reach"
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
