"""`kv-connector admin` against an endpoint."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.servers import free_ports
from kv_connector.admin.commands import add
from kv_connector.errors import ConfigError
from tests.admin.stepping import TOKEN, stepping
from tests.storage.storages import HeldStorage

SYSTEM = list(range(100, 116))


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers(required=True))
    options = parser.parse_args(["admin", *arguments])
    status: int = options.run(options)
    return status


@contextmanager
def answering(path: str, status: str, body: bytes) -> Iterator[None]:
    """A server at this socket that answers the first request so, whatever it asks."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(head + body)
            while connection.recv(1 << 16):
                pass

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        yield
        server.join()


def test_an_operator_pins_looks_and_unpins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--socket", str(tmp_path / "admin.sock"))
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(SYSTEM))
    with stepping(admin={"socket": where[1]}, write_policy="write_through") as (engine, _):
        engine.generate([[*SYSTEM, 1]])
        assert run("pin", *where, "--tokens", str(tokens), "--ttl", "1000", "--json") == 0
        pin = json.loads(capsys.readouterr().out)
        assert run("pins", *where) == 0
        header, line = capsys.readouterr().out.splitlines()
        assert header.split() == ["id", "blocks", "seconds", "left"]
        assert line.split()[:2] == [pin["id"], "4"] and 0 < int(line.split()[2]) <= 1000
        assert run("stats", *where) == 0
        shown = capsys.readouterr().out
        assert "tenant default" in shown and "  pinned_blocks" in shown and "host_memory_bytes" in shown
        assert run("unpin", *where, pin["id"]) == 0
        assert run("unpin", *where, pin["id"]) == 2
        assert "404: no pin has this id" in capsys.readouterr().err


def test_an_operator_resizes_resets_and_clears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--socket", str(tmp_path / "admin.sock"))
    with stepping(admin={"socket": where[1]}, write_policy="write_through") as (engine, _):
        engine.generate([[*SYSTEM, 1]])
        assert run("resize", *where, "32KiB") == 0
        assert capsys.readouterr().out == "host capacity blocks: 8\nhost memory bytes: 32,768\n"
        assert run("resize", *where, "all") == 0
        assert run("clear", *where, "default") == 0
        assert "num blocks: " in capsys.readouterr().out
        assert run("reset", *where) == 0
        assert capsys.readouterr().out == "done: True\n"
        assert run("clear", *where, "nobody") == 2
        assert "404: " in capsys.readouterr().err


def test_an_operator_drains_and_warms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--socket", str(tmp_path / "admin.sock"))
    storage = {"path": str(tmp_path / "store"), "capacity": "8MiB"}
    settings = {"write_policy": "write_through", "storage": storage, "admin": {"socket": where[1]}}
    with stepping([HeldStorage()], **settings) as (engine, _):
        engine.generate([[*SYSTEM, 1]])
        assert run("drain", *where) == 0
        assert capsys.readouterr().out == "done: True\nremaining blocks: 0\n"
        assert run("warm", *where, "--text", "a system prompt that storage has never seen") == 0
        assert "started: " in capsys.readouterr().out


def test_a_drain_that_is_not_over_in_time_says_so_to_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who restarts the engine after it looks at the exit status: blocks are to be written yet."""
    path = str(tmp_path / "admin.sock")
    with answering(path, "202 Accepted", b'{"done": false, "remaining_blocks": 7}'):
        assert run("drain", "--socket", path, "--timeout", "0") == 1
    assert capsys.readouterr().out == "done: False\nremaining blocks: 7\n"


def test_a_port_will_do_and_the_token_may_be_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both sides: neither is in the environment or the settings then."""
    file = tmp_path / "token"
    file.write_text("another-token-in-a-file\n")
    file.chmod(0o600)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    config = {"bind": address, "token_file": str(file)}
    with stepping(admin=config) as _:
        assert run("reset", "--url", f"http://{address}", "--token-file", str(file)) == 0
        assert run("reset", "--url", f"http://{address}") == 2  # with the token of the environment
        assert "401: wrong token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats",), "no single endpoint: give one of --url and --socket"),
        (("stats", "--url", "127.0.0.1:7200"), "--url '127.0.0.1:7200': give a scheme, an address and a port"),
        (("stats", "--url", "https://127.0.0.1:7200"), "give a scheme, an address and a port, such as"),
        (("stats", "--url", "http://127.0.0.1"), "give a scheme, an address and a port, such as"),
        (("stats", "--url", "http://[::1"), "give a scheme, an address and a port, such as"),
        (("stats", "--url", "http://127.0.0.1:1", "--token-env", "NOT_SET"), "names is not set in this process: s"),
        (("pin", "--url", "http://127.0.0.1:1", "--tokens", "FILE"), "--tokens '.*' is not JSON: Exp"),
        (("pin", "--url", "http://127.0.0.1:1", "--hashes", "LATIN"), "^--hashes '[^']*' is not UTF-8: 'utf-8' codec"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    file = tmp_path / "file"
    file.write_text("no json")
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xe4\xf6")
    files = {"FILE": str(file), "LATIN": str(latin)}
    with pytest.raises(ConfigError, match=message):
        run(*(files.get(argument, argument) for argument in arguments))


@pytest.mark.parametrize("command", ["stats", "pins", "drain"])
@pytest.mark.parametrize(
    "answer", [b"{}", b'{"pins": 5, "tiers": 5, "tenants": {}}', b'{"pins": [{}], "tiers": {"a": 1}}', b"[" * 100_000]
)
def test_a_server_of_another_kind_is_said_to_be_one(tmp_path: Path, command: str, answer: bytes) -> None:
    path = str(tmp_path / "other.sock")
    with answering(path, "200 OK", answer), pytest.raises(ConfigError, match="does not answer as an admin endpoint"):
        run(command, "--socket", path)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"unix:.*admin.sock cannot be reached: No such file or directory"):
        run("stats", "--socket", str(tmp_path / "admin.sock"))


def test_the_token_is_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as wrong:
        run("stats", "--socket", str(tmp_path / "admin.sock"), "--token-env", TOKEN)
    assert TOKEN not in str(wrong.value) + "".join(capsys.readouterr())
