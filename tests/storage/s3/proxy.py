"""A server between an S3 client and an S3 server, which spoils what passes as a test says."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from integration.servers import HOST

SECONDS = 120.0

Fault = Callable[[str, str], str | int | None]
"""Of a method and an object's name, what becomes of the request: it passes (None), is answered with a status, or

`hang`: gets no answer; `close`: loses its connection; `hold`: is held half-way until `go_on`, then passes on whatever
of it has come; `cut`: its answer ends half-way; `flip`: a bit of its answer's end is another; `short`: its answer is
that of a shorter object.
"""


class FaultProxy:
    """Passes requests on to `port` of this machine."""

    def __init__(self, port: int) -> None:
        self.fault: Fault = lambda method, name: None
        self.error = "<Error><Code>AccessDenied</Code></Error>"  # what is said with a status
        self.requests: list[tuple[str, str]] = []
        self.held = threading.Event()
        """Set when a request is held."""
        self._go_on = threading.Event()
        self._server = _Server((HOST, 0), self._handler(port))
        self.endpoint = f"http://{HOST}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """What hangs loses its connection, and what is held goes on."""
        self._go_on.set()

    def close(self) -> None:
        """Stop listening."""
        self.go_on()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self, port: int) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                fault = proxy.fault(self.command, self.path.partition("?")[0].rpartition("/")[2])
                proxy.requests.append((self.command, self.path))
                if fault is None or fault in ("cut", "flip", "short"):
                    self.answer(port, self.body(), fault)
                elif isinstance(fault, int):
                    self.body()
                    self.send_error_body(fault)
                else:
                    self.leave(port, str(fault))

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - names of the base class

            def body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def leave(self, port: int, fault: str) -> None:
                self.close_connection = True
                if fault == "hang":
                    proxy.held.set()
                    proxy._go_on.wait(SECONDS)
                elif fault == "hold":
                    half = self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
                    proxy.held.set()
                    proxy._go_on.wait(SECONDS)
                    upstream = self.forward(port, half)
                    upstream.close()

            def send_error_body(self, status: int) -> None:
                text = proxy.error.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def forward(self, port: int, body: bytes) -> http.client.HTTPConnection:
                upstream = http.client.HTTPConnection(HOST, port, timeout=SECONDS)
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    upstream.putheader(name, value)
                upstream.endheaders(body)
                return upstream

            def answer(self, port: int, body: bytes, fault: str | int | None) -> None:
                upstream = self.forward(port, body)
                response = upstream.getresponse()
                content = bytearray(response.read())
                length = int(response.getheader("Content-Length", len(content)))
                if content and fault == "flip":
                    content[-1] ^= 1
                if content and fault == "short":
                    content, length = content[: length // 2], length // 2
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.close_connection = fault == "cut"
                self.wfile.write(content[: length // 2] if fault == "cut" else content)
                upstream.close()

            def log_message(self, format: str, *arguments: Any) -> None:
                """Not on the terminal."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are gone are what it is for."""
