"""An answer that breaks off at an engine breaks off at the proxy: a client never takes a part of one for all of it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from integration.pd_proxy import Proxy, Upstream

BODY = b'{"choices": []}'


def engine_that_sends(headers: dict[str, str], body: bytes) -> ThreadingHTTPServer:
    """Every request gets these headers and bytes, and then the end of the connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Connection", self.headers["Connection"])
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(headers: dict[str, str], body: bytes) -> bytes:
    """What a client of a proxy in front of such an engine reads."""
    with served(engine_that_sends(headers, body)) as engine:
        upstream = Upstream.parse(f"http://127.0.0.1:{engine}")
        with served(Proxy(("127.0.0.1", 0), [], [upstream])) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
                return connection.getresponse().read()
            finally:
                connection.close()


LENGTH = {"Content-Length": str(len(BODY))}
CHUNKED = {"Transfer-Encoding": "chunked"}
CHUNK = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n"


@pytest.mark.parametrize(("headers", "sent"), [(LENGTH, BODY), (CHUNKED, CHUNK + b"0\r\n\r\n")])
def test_a_whole_answer_is_passed_on(headers: dict[str, str], sent: bytes) -> None:
    assert ask(headers, sent) == BODY


@pytest.mark.parametrize(
    ("headers", "sent"),
    [(LENGTH, b""), (LENGTH, BODY[:7]), (CHUNKED, b""), (CHUNKED, CHUNK), (CHUNKED, CHUNK[:9])],
)
def test_an_answer_that_breaks_off_is_an_error_for_the_client(headers: dict[str, str], sent: bytes) -> None:
    with pytest.raises(http.client.HTTPException):
        ask(headers, sent)
