"""What servers that are started for tests and by hand have in common."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

HOST = "127.0.0.1"
SHARED = ExitStack()
"""Servers that all tests of a process share; closed when these end, whatever way the process goes then."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind((HOST, 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for_interrupt() -> None:
    """Return when the user presses Ctrl-C."""
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
