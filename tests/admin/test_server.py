"""What the endpoint lets in, and what callers can cost it: bounded in bytes, time and number, whoever calls."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kv_connector.admin import server as server_module
from kv_connector.admin.base import Answer, Command, Refusal
from kv_connector.admin.client import AdminClient
from kv_connector.admin.listeners import listen
from kv_connector.admin.routes import Routes
from kv_connector.admin.server import MOST_BODY_BYTES, MOST_CONNECTIONS, AdminServer, _Reader
from kv_connector.config import AdminConfig
from kv_connector.types import BlockHash
from tests.admin.stepping import TOKEN
from tests.waiting import until


class Echo:
    """Names a block after each four tokens."""

    def token_ids(self, text: str) -> list[int]:
        raise Refusal(400, "text: this engine runs without a tokenizer: send token_ids")

    def hashes(self, token_ids: Any, cache_salt: str) -> list[BlockHash]:
        return [BlockHash(bytes([start % 256])) for start in range(0, len(token_ids) - 3, 4)]


class Recorder:
    """An engine that does what it is asked at once, and keeps it."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def ask(self, command: Command, seconds: float) -> Answer:
        self.commands.append(command)
        return {"done": True}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "admin.sock")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def server(path: str, recorder: Recorder) -> Iterator[AdminServer]:
    server = serve(path, recorder, 30.0)
    yield server
    server.close()


def serve(path: str, recorder: Recorder, client_seconds: float) -> AdminServer:
    return AdminServer(
        listen(AdminConfig(socket=path), 0), Routes(recorder.ask, Echo()), TOKEN.encode(), client_seconds
    )


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(path)
    return connection


def read_all(connection: socket.socket) -> bytes:
    text = b""
    while part := connection.recv(1 << 16):
        text += part
    return text


def say(path: str, request: bytes) -> tuple[int, str, Any]:
    """Status, headers and object of the answer to these bytes."""
    with connect(path) as connection:
        connection.sendall(request)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert body.endswith(b"\n")
    return int(head.split()[1]), head.decode(), json.loads(body)


def ask(path: str, method: str, target: str, body: bytes = b"", *headers: str, token: str = TOKEN) -> tuple[int, Any]:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    lines += [f"Authorization: Bearer {token}"] if token else []
    status, _, answer = say(path, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)
    return status, answer


def test_who_shows_the_token_is_answered(server: AdminServer, path: str, recorder: Recorder) -> None:
    assert ask(path, "POST", "/v1/reset") == (200, {"done": True})
    assert len(recorder.commands) == 1


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "caf\xe9"])
@pytest.mark.parametrize("target", ["/v1/stats", "/v1/pins", "/nothing"])
def test_nobody_else_learns_or_does_anything(
    server: AdminServer, path: str, recorder: Recorder, token: str, target: str
) -> None:
    """Not even which paths there are."""
    status, answer = ask(path, "GET", target, token=token)
    assert status == 401
    assert answer["error"].startswith("wrong token" if token else "no token")
    assert TOKEN not in answer["error"] and not recorder.commands


@pytest.mark.parametrize("given", [f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}", "Bearer "])
def test_the_token_counts_in_its_place_alone(server: AdminServer, path: str, given: str) -> None:
    status, head, answer = say(path, f"GET /v1/stats HTTP/1.1\r\nAuthorization: {given}\r\n\r\n".encode())
    assert status == 401 and "WWW-Authenticate: Bearer" in head
    assert answer["error"].startswith("wrong token")


def test_health_needs_no_token_and_asks_the_engine_nothing(server: AdminServer, path: str, recorder: Recorder) -> None:
    assert ask(path, "GET", "/v1/health", token="") == (200, {"status": "ok"})
    assert ask(path, "POST", "/v1/health", token="")[0] == 401
    assert not recorder.commands


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "message"),
    [
        ("GET", "/v2/stats", b"", 404, "nothing is at '/v2/stats': there are /v1/health, /v1/stats, /v1/pins,"),
        ("GET", "/", b"", 404, "nothing is at '/'"),
        ("DELETE", "/v1/pins/", b"", 404, "nothing is at '/v1/pins/'"),
        ("PATCH", "/v1/stats", b"", 405, "PATCH is not for '/v1/stats': GET is"),
        ("PUT", "/v1/pins", b"{}", 405, "PUT is not for '/v1/pins': GET or POST is"),
        ("POST", "/v1/pins", b"{", 400, "the body is not JSON: Expecting property name"),
        ("POST", "/v1/pins", b"[" * 100_000, 400, "the body is not JSON"),
        ("POST", "/v1/pins", b"9" * 5_000, 400, "the body is not JSON: Exceeds the limit"),
        ("POST", "/v1/pins", b"\xff\xfe\xfd", 400, "the body is not JSON: 'utf-"),
        ("POST", "/v1/pins", b"[1, 2]", 400, "the body [1, 2] is no object"),
        ("POST", "/v1/pins", b'{"tokenids": [1]}', 400, "unknown field 'tokenids' (did you mean 'token_ids'?): known"),
        ("POST", "/v1/pins", b"{}", 400, "no prefix given: give one of token_ids, text and hashes"),
        ("POST", "/v1/pins", b'{"text": "a", "hashes": ["00"]}', 400, "text and hashes given: give one of"),
        ("POST", "/v1/pins", b'{"text": "a"}', 400, "text: this engine runs without a tokenizer: send token_ids"),
        ("POST", "/v1/pins", b'{"text": 3}', 400, "text=3: give text of at most 262144 characters"),
        ("POST", "/v1/pins", b'{"text": "a\\ud800"}', 400, "text has halves of characters (surrogates), which no"),
        ("POST", "/v1/pins", b'{"token_ids": "1"}', 400, "token_ids='1' is no list: give numbers such as [1, 2, 3]"),
        ("POST", "/v1/pins", b'{"token_ids": [1, -2]}', 400, "token_ids has -2: give integers of 0 and more"),
        ("POST", "/v1/pins", b'{"token_ids": [true]}', 400, "token_ids has True: give integers"),
        ("POST", "/v1/pins", b'{"token_ids": [1, 2, 3]}', 400, "a prefix of 3 tokens fills no block: give at least"),
        ("POST", "/v1/pins", b'{"hashes": ["zz"]}', 400, "hashes has what is no hash: give each as hexadecimal"),
        ("POST", "/v1/pins", b'{"hashes": ["00", "0000"]}', 400, "hashes have [1, 2] bytes: give those of one engine"),
        ("POST", "/v1/pins", b'{"hashes": []}', 400, "hashes=[]: give a list of hexadecimal digits, one hash at least"),
        ("POST", "/v1/pins", b'{"hashes": ["00"], "cache_salt": "a"}', 400, "cache_salt beside hashes: leave it out"),
        ("POST", "/v1/pins", b'{"token_ids": [1,2,3,4], "cache_salt": 1}', 400, "cache_salt=1 is no line of at most"),
        ("POST", "/v1/pins", b'{"token_ids": [1,2,3,4], "ttl_s": 0}', 400, "ttl_s=0: give a number of seconds over 0"),
        ("POST", "/v1/pins", b'{"token_ids": [1,2,3,4], "ttl_s": NaN}', 400, "ttl_s=nan: give a number of seconds"),
        ("POST", "/v1/pins", b'{"token_ids": [1,2,3,4], "ttl_s": "1h"}', 400, "ttl_s='1h': give a number of seconds"),
        ("POST", "/v1/resize", b'{"host_memory": "32 gallons"}', 400, "host_memory='32 gallons' is not a size: give"),
        ("POST", "/v1/resize", b"{}", 400, "host_memory='' is not a size: give"),
        ("POST", "/v1/resize", b'{"host_memory": -1}', 400, "host_memory=-1 is too small: give 0 or more"),
        ("POST", "/v1/reset", b'{"all": true}', 400, "unknown field 'all'"),
        ("POST", "/v1/drain", b'{"wait_s": false}', 400, "wait_s=False: give a number of seconds over 0"),
        ("POST", "/v1/drain", b'{"wait_s": 61}', 400, "wait_s=61: give a number of seconds over 0 and of at most 60"),
    ],
)
def test_one_clear_error_for_each_mistake(
    server: AdminServer,
    path: str,
    recorder: Recorder,
    method: str,
    target: str,
    body: bytes,
    status: int,
    message: str,
) -> None:
    given, answer = ask(path, method, target, body)
    assert (given, list(answer)) == (status, ["error"])
    assert answer["error"].startswith(message), answer
    assert len(answer["error"]) < 600 and not recorder.commands


@pytest.mark.parametrize(
    ("request_text", "status", "message"),
    [
        (b"POST /v1/reset HTTP/1.1\r\nContent-Length: many\r\nAUTH\r\n\r\n", 400, "Content-Length 'many' is no number"),
        (b"POST /v1/reset HTTP/1.1\r\nContent-Length: -1\r\nAUTH\r\n\r\n", 400, "Content-Length '-1' is no number"),
        (
            b"POST /v1/reset HTTP/1.1\r\nTransfer-Encoding: chunked\r\nAUTH\r\n\r\n0\r\n\r\n",
            411,
            "a body in chunks is not",
        ),
        (b"HELLO\r\n", 400, "Bad request syntax"),
        (b"GET /v1/stats HTTP/9.9\r\n\r\n", 505, "Invalid HTTP version"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414, "HTTP status 414"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431, "Too many headers"),
    ],
)
def test_what_is_no_request_is_refused(
    server: AdminServer, path: str, request_text: bytes, status: int, message: str
) -> None:
    auth = f"Authorization: Bearer {TOKEN}\r\n".encode()
    given, _, answer = say(path, request_text.replace(b"AUTH\r\n", auth))
    assert given == status
    assert answer["error"].startswith(message), answer


def test_a_large_body_is_refused_before_it_is_read(server: AdminServer, path: str, recorder: Recorder) -> None:
    """And who sends it all the same reads the answer."""
    status, answer = ask(path, "POST", "/v1/pins", b" " * (MOST_BODY_BYTES + 1))
    assert (status, answer) == (413, {"error": f"the body has {MOST_BODY_BYTES + 1} bytes: send at most 2097152"})
    assert ask(path, "POST", "/v1/reset", b" " * MOST_BODY_BYTES)[0] == 200
    assert len(recorder.commands) == 1


def test_a_client_that_waits_for_leave_to_send_gets_it(server: AdminServer, path: str) -> None:
    """As curl does with larger bodies."""
    body = json.dumps({"token_ids": list(range(4000))}).encode()
    with connect(path) as connection:
        head = f"POST /v1/pins HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nExpect: 100-continue\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(1 << 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("said", [b"", b"POST /v1/re", b"POST /v1/reset HTTP/1.1\r\nContent-Length: 5\r\nAUTH\r\n{"])
def test_a_slow_client_is_left(path: str, recorder: Recorder, said: bytes) -> None:
    """Wherever in its request it stops; nothing of it is done."""
    server = serve(path, recorder, 0.05)
    try:
        with connect(path) as connection:
            connection.sendall(said.replace(b"AUTH\r\n", f"Authorization: Bearer {TOKEN}\r\n".encode()))
            assert read_all(connection) == b""
    finally:
        server.close()
    assert not recorder.commands


def test_a_client_that_says_a_little_again_and_again_is_left() -> None:
    """The time is that of the whole request, not of each part of it: at the deadline it is over, whatever has come."""
    ours, theirs = socket.socketpair()
    times = iter([0.0, 1.0, 4.0, 9.0, 10.0, 11.0])
    with ours, theirs:
        reader = _Reader(ours, 10.0, lambda: next(times))
        theirs.sendall(b"GET /v1/stats")
        for left in (9.0, 6.0, 1.0):
            assert len(reader.read(1)) == 1
            assert ours.gettimeout() == left
        for _ in range(2):
            with pytest.raises(TimeoutError, match="did not arrive in time"):
                reader.read(1)


def test_what_follows_a_request_is_read_for_a_moment_only(path: str, recorder: Recorder) -> None:
    """Who sends without end is cut off: each look at the clock is a minute later."""
    minutes = count()
    listener = listen(AdminConfig(socket=path), 0)
    server = AdminServer(
        listener, Routes(recorder.ask, Echo()), TOKEN.encode(), 600.0, clock=lambda: 60.0 * next(minutes)
    )
    try:
        with connect(path) as connection:
            connection.sendall(b"GET /v1/health HTTP/1.1\r\n\r\n" + b"and more")
            assert read_all(connection).startswith(b"HTTP/1.1 200 OK")
            with suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    connection.sendall(b"x" * 4096)
    finally:
        server.close()


def test_who_tries_many_tokens_does_not_fill_the_log(
    server: AdminServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="kv_connector.admin"):
        for number in range(5):
            assert ask(path, "GET", "/v1/stats", token=f"guess {number}")[0] == 401
    assert [record.getMessage() for record in caplog.records] == [
        "admin: a call with a wrong token was refused; others are not logged for a minute"
    ]


def test_a_process_without_threads_left_serves_again_once_it_has_some(
    server: AdminServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint neither ends with that, nor loses its places for connections."""
    monkeypatch.setattr(server_module, "_PAUSE_SECONDS", 0.0)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(MOST_CONNECTIONS + 1):
            with connect(path) as connection:
                assert read_all(connection) == b""
    assert ask(path, "GET", "/v1/health", token="") == (200, {"status": "ok"})


def test_a_client_that_hangs_up_costs_nothing(server: AdminServer, path: str) -> None:
    for said in (b"", b"POST /v1/reset HTT", b"GET /v1/health HTTP/1.1\r\n\r\n"):
        with connect(path) as connection:
            connection.sendall(said)
    assert until_served(path) == (200, {"status": "ok"})


def test_too_many_connections_are_turned_away(server: AdminServer, path: str, recorder: Recorder) -> None:
    """They are told so, at once; when the others are gone, all is well again."""
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(connect(path))
        status, head, answer = say(path, b"")
        assert status == 503 and "Retry-After: 1" in head
        assert answer == {"error": "too many connections: ask again in a moment"}
    assert until_served(path) == (200, {"status": "ok"})


@pytest.mark.parametrize("size", [10, 500_000])
def test_who_is_turned_away_is_told_so_whatever_he_was_saying(server: AdminServer, path: str, size: int) -> None:
    """Not that the connection broke, as it does where what he has sent is never read."""
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(connect(path))
        body = {"text": "x" * size}
        for _ in range(MOST_CONNECTIONS):
            with pytest.raises(Refusal, match="too many connections: ask again in a moment") as refused:
                AdminClient("", path, TOKEN.encode()).call("POST", "/v1/pins", body)
            assert refused.value.status == 503
        # And so is who comes after as many, as soon as the server has heard that these have gone.
        answers = (read_all(stack.enter_context(connect(path))) for _ in range(1000))
        assert any(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)


def test_more_of_them_than_can_be_told_cost_no_more(
    server: AdminServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LINGER_SECONDS", 60.0)
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(connect(path))
        for _ in range(MOST_CONNECTIONS):
            assert read_all(stack.enter_context(connect(path))).startswith(b"HTTP/1.1 503 ")
        assert not read_all(stack.enter_context(connect(path))), "whom there is no thread to tell"


def until_served(path: str) -> tuple[int, Any]:
    """Of connections that have ended the server hears in its own time."""
    found: list[tuple[int, Any]] = []

    def is_served() -> bool:
        found.append(ask(path, "GET", "/v1/health", token=""))
        return found[-1][0] != 503

    until(is_served, told=lambda: found[-1])
    return found[-1]


def test_a_broken_route_is_an_error_and_no_end(path: str) -> None:
    def broken(command: Command, seconds: float) -> Answer:
        raise AssertionError("a fault of ours")

    server = AdminServer(listen(AdminConfig(socket=path), 0), Routes(broken, Echo()), TOKEN.encode())
    try:
        assert ask(path, "POST", "/v1/reset") == (500, {"error": "AssertionError; the engine's log has more"})
        assert ask(path, "GET", "/v1/health")[0] == 200
    finally:
        server.close()


def test_a_drain_waits_as_long_as_it_is_told_to() -> None:
    """It asks the engine anew until all is written, or says how far it is."""
    left = [7, 5, 0]
    times = iter(range(100))

    def ask(command: Command, seconds: float) -> Answer:
        remaining = left.pop(0)
        return {"done": not remaining, "remaining_blocks": remaining}

    routes = Routes(ask, Echo(), clock=lambda: float(next(times)), pause=lambda seconds: None)
    assert routes.answer("POST", "/v1/drain", {"wait_s": 0}) == (202, {"done": False, "remaining_blocks": 7})
    assert routes.answer("POST", "/v1/drain", {"wait_s": 60}) == (200, {"done": True, "remaining_blocks": 0})
    assert left == []
