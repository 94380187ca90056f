"""What servers that are started for tests and by hand have in common."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

HOST = "127.0.0.1"
_START_SECONDS = 60.0
SHARED = ExitStack()
"""Servers that all tests of a process share; closed when these end, whatever way the process goes then."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at, and that are this process's until it ends.

    They are none that the system gives to whoever asks for any: it would give them away again before a server is up, or
    while one is restarted.
    """
    return [_free_port() for _ in range(count)]


def _free_port() -> int:
    for port in random.SystemRandom().sample(_ports_nobody_is_given(), 1000):
        with socket.socket() as listener, suppress(OSError):
            listener.bind((HOST, port))
            _hold(port)
            return port
    raise RuntimeError("all ports that were tried are taken")


def _ports_nobody_is_given() -> range:
    """Below those that Linux gives to whoever asks for any, or the usual ones where it does not say."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    least = int(given.read_text().split()[0]) if given.exists() else 32768
    return range(10000, least) if least > 12000 else range(61000, 65536)


def _hold(port: int) -> None:
    """Raises OSError where another process holds the port so. Linux forgets it with this process."""
    if sys.platform == "linux":
        held = socket.socket(socket.AF_UNIX)
        SHARED.callback(held.close)
        held.bind(f"\0kv-connector-port-{port}")


def comes_up(process: subprocess.Popen[bytes], look: Callable[[], None]) -> bool:
    """Whether a server is up within a minute, as long as its process lives: `look` raises OSError until it is."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            look()
            return True
        except OSError:
            time.sleep(0.02)
    return False


def wait_for_interrupt() -> None:
    """Return when the user presses Ctrl-C."""
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
