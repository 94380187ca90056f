"""Mooncake Store on this machine, without a container: a master on loopback, and owners that lend it memory.

`python -m integration.mooncake_master --memory 1GiB` runs both until it is interrupted, and prints what to configure.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from integration.servers import HOST, comes_up, free_ports, wait_for_interrupt
from kv_connector.config import StorageConfig
from kv_connector.values import parse_size

_CANNOT_LOAD = 127  # the exit status of a program whose libraries are not there
_OWN = (
    "import sys; from kv_connector.config import StorageConfig as C;"
    " from kv_connector.storage.mooncake.client import MooncakeClient as M, MooncakeOptions as O;"
    " client = M(O.of(C(kind='mooncake', master=sys.argv[1], segment_memory=int(sys.argv[2])), 1, 1));"
    " client.connect(()); print('ready', flush=True); sys.stdin.read(); client.close()"
)


@cache
def why_not() -> str | None:
    """Why Mooncake cannot run here, or None."""
    if find_spec("mooncake") is None:
        return "Mooncake has no wheel here or is not installed: pip install '.[mooncake]'"
    if (program := _program()) is None:
        return "mooncake_master is not beside the interpreter"
    started = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if started.returncode == _CANNOT_LOAD:
        return f"{started.stderr.strip()}: apt-get install libibverbs1 libnuma1 libcurl4"
    return None


class MooncakeMaster:
    """A `mooncake_master` on a free port of loopback, which can be killed and started again there."""

    def __init__(self, forgets_after: int = 60) -> None:
        """`forgets_after`: seconds in which nothing is heard of an owner, until it and what it has are forgotten."""
        self._forgets_after = forgets_after
        self.port, self._metrics_port = free_ports(2)
        self.address = f"{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens. Raises RuntimeError where it does not come up."""
        program = _program()
        assert program is not None, why_not()
        self._process = subprocess.Popen(
            [
                program,
                f"--rpc_address={HOST}",
                f"--rpc_port={self.port}",
                f"--metrics_host={HOST}",
                f"--metrics_port={self._metrics_port}",
                f"--client_ttl={self._forgets_after}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not comes_up(self._process, self._look):
            self.kill()
            raise RuntimeError(f"mooncake_master does not listen on {self.address}")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _look(self) -> None:
        socket.create_connection((HOST, self.port), 1).close()


class MemoryOwner:
    """A process that lends the store `num_bytes` of memory and does nothing else."""

    def __init__(self, master: str, num_bytes: int) -> None:
        """Returns when its memory is in the store."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OWN, master, str(num_bytes)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.kill()
            raise RuntimeError(f"no memory of {num_bytes} bytes could be lent to {master}")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def running_store(memory: int) -> Iterator[MooncakeMaster]:
    """A master and one owner of `memory` bytes."""
    with ExitStack() as stack:
        master = MooncakeMaster()
        stack.callback(master.kill)
        master.start()
        owner = MemoryOwner(master.address, memory)
        stack.callback(owner.kill)
        yield master


def store_config(master: MooncakeMaster) -> StorageConfig:
    """What an engine is given to use it."""
    return StorageConfig(kind="mooncake", master=master.address, hostname=HOST)


def _program() -> str | None:
    return shutil.which("mooncake_master", path=sysconfig.get_path("scripts")) or shutil.which("mooncake_master")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=parse_size, default=1 << 30, help="what the store may hold, such as 1GiB")
    options = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    with running_store(options.memory) as master:
        print(f'"storage": {{"kind": "mooncake", "master": "{master.address}"}}', flush=True)
        wait_for_interrupt()
    return 0


if __name__ == "__main__":
    sys.exit(main())
