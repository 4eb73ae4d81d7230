"""Ports of this machine at which processes of a test meet."""

from __future__ import annotations

import contextlib
import secrets
import socket

FIRST, END = 10_240, 32_768  # from END on the system gives ports to any process, between our look and our use


def free_port() -> int:
    """A port at which nothing listens, and that no other program is given by chance."""
    while True:
        port = FIRST + secrets.randbelow(END - FIRST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
