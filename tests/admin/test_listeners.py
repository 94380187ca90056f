"""Where the endpoint listens: one engine at each place, and what a killed one has left is no obstacle."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from integration.servers import free_ports
from kv_connector.admin import listeners
from kv_connector.admin.listeners import listen
from kv_connector.config import AdminConfig
from kv_connector.errors import ConfigError


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_a_socket_is_its_owners_alone_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    listener = listen(AdminConfig(socket=str(path)), 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and connects(path)
    listener.close()
    listener.close()
    assert not path.exists() and not list(tmp_path.iterdir())


def test_what_a_killed_engine_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    code = (
        "import sys; from kv_connector.admin.listeners import listen; from kv_connector.config import AdminConfig\n"
        f"listener = listen(AdminConfig(socket={str(path)!r}), 0)\nprint('up', flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"up\n"
    with pytest.raises(ConfigError, match=r"admin.sock' is in use, another engine or program listens there: give"):
        listen(AdminConfig(socket=str(path)), 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
    assert path.exists() and not connects(path)
    listener = listen(AdminConfig(socket=str(path)), 0)
    assert connects(path)
    listener.close()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="notes' is there and no socket: give another path, or remove it"):
        listen(AdminConfig(socket=str(path)), 0)
    assert path.read_text() == "mine"


def test_an_engine_takes_nobody_elses_socket_away(tmp_path: Path) -> None:
    """Whoever has put another one in its place keeps it."""
    path = tmp_path / "admin.sock"
    first = listen(AdminConfig(socket=str(path)), 0)
    path.unlink()
    second = listen(AdminConfig(socket=str(path)), 0)
    first.close()
    assert connects(path)
    second.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_said_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be listened at: Permission denied; give a path in a folder"):
        listen(AdminConfig(socket=str(tmp_path / "admin.sock")), 0)


def test_who_keeps_the_folder_locked_holds_no_engine_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read the folder can, such as /tmp."""
    monkeypatch.setattr(listeners, "_LOCK_PAUSE_SECONDS", 0.0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="cannot be listened at: another program holds a lock on its folder"):
        listen(AdminConfig(socket=str(tmp_path / "admin.sock")), 0)
    os.close(descriptor)
    listen(AdminConfig(socket=str(tmp_path / "admin.sock")), 0).close()


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be listened at: No such file or directory; give a path in a folder"):
        listen(AdminConfig(socket=str(tmp_path / "run" / "admin.sock")), 0)


@pytest.mark.parametrize(("address", "shown"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_each_data_parallel_engine_has_a_port(address: str, shown: str) -> None:
    """And a port that is taken is said so."""
    (port,) = free_ports(1)
    config = AdminConfig(bind=f"{address}:{port - 1}")
    listener = listen(config, 1)
    assert listener.where == f"http://{shown}:{port}"
    with pytest.raises(ConfigError, match=f"admin.bind: port {port} of {shown} cannot be listened at: Address already"):
        listen(config, 1)
    listener.close()


def test_each_data_parallel_engine_has_a_socket(tmp_path: Path) -> None:
    config = AdminConfig(socket=str(tmp_path / "admin.sock"))
    listeners = [listen(config, replica) for replica in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["admin.sock", "admin.sock.1"]
    for listener in listeners:
        listener.close()
