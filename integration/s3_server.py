"""An S3 server on this machine, without a container: moto's, on loopback, in a process of its own.

`python -m integration.s3_server` runs it until it is interrupted, and prints what to configure. It keeps objects in its
memory and asks nobody who they are: for tests.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from integration.servers import HOST, comes_up, free_ports, wait_for_interrupt

BUCKET = "kv-test"
ACCESS_KEY, SECRET_KEY = "AKIAKVCONNECTORTEST", "kv-connector-test-secret"
_CONNECTION_SECONDS = 10.0


def why_not() -> str | None:
    """Why neither server nor client can run here, or None."""
    missing = [name for name in ("obstore", "botocore", "moto", "flask", "flask_cors") if find_spec(name) is None]
    return f"{', '.join(missing)} not installed: pip install '.[s3,dev]'" if missing else None


class S3Server:
    """moto's server with one empty bucket, on a free port of loopback."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.endpoint = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the bucket is there. Raises RuntimeError where the server does not come up."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not comes_up(self._process, self._look):
            self.kill()
            raise RuntimeError(f"moto's server does not listen on {self.endpoint}")

    def make_bucket(self, name: str) -> None:
        """An empty one."""
        self._ask("PUT", name)

    def kill(self) -> None:
        """End it at once, with all that it holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _look(self) -> None:
        socket.create_connection((HOST, self.port), 1).close()
        self.make_bucket(BUCKET)

    def _ask(self, method: str, path: str) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        opener.open(request, timeout=_CONNECTION_SECONDS).close()


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """A server with an empty bucket. Its credentials, which any would do for, are in the environment meanwhile."""
    before = dict(os.environ)
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.kill()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del os.environ[name]
            if name in before:
                os.environ[name] = before[name]


def s3_settings(endpoint: str, **more: Any) -> dict[str, Any]:
    """What `storage` of an engine is given to use it. A busy machine that stands still for seconds is no fault."""
    settings = {"bucket": BUCKET, "endpoint": endpoint, "allow_http": True, "region": "us-east-1"}
    patience = {"timeout_ms": 60_000, "connect_timeout_ms": 60_000}
    return {"kind": "s3", "s3": settings | patience | more}


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    with running_s3() as server:
        print(f"export AWS_ACCESS_KEY_ID={ACCESS_KEY} AWS_SECRET_ACCESS_KEY={SECRET_KEY}")
        print(
            f'"storage": {{"kind": "s3", "s3": {{"bucket": "{BUCKET}", "endpoint": "{server.endpoint}", '
            '"allow_http": true}}',
            flush=True,
        )
        wait_for_interrupt()
    return 0


if __name__ == "__main__":
    sys.exit(main())
