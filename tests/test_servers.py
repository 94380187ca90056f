"""Ports for servers that start later."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from integration.servers import HOST, free_ports

ROOT = Path(__file__).parents[1]


def test_a_free_port_is_given_to_nobody_else() -> None:
    """Neither by the system, nor by another process that asks for some: both parts of `make -j 2 test` do."""
    program = "from integration.servers import free_ports; print(*free_ports(200)); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = free_ports(200)
        other.communicate("\n")
    assert len(theirs) == len(set(ours)) == 200 and theirs.isdisjoint(ours)
    least, most = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(least <= port <= most for port in [*ours, *theirs])


def test_a_server_can_be_started_again_at_its_port() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        with socket.create_server((HOST, port)), socket.create_connection((HOST, port)):
            pass
