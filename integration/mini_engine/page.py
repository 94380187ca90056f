"""The demo on a page of this machine's browser: one file of HTML, and a stream of what happens.

`page.html` draws what it is told, and nothing else: every number on it comes from the demo's process.
"""

from __future__ import annotations

import json
import os
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from integration.servers import HOST, wait_for_interrupt

PAGE = Path(__file__).with_name("page.html")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Show(Protocol):
    """Who is told what happens in the demo."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """One event; `page.html` knows its kinds."""


def show_nobody(kind: str, **fields: Any) -> None:
    """Where there is no page."""


class Page:
    """Serves the page on loopback until left: then every browser that is there has been told all of it, and where it
    is to `stay`, until Ctrl-C. Raises OSError where nobody can listen at the port."""

    def __init__(self, port: int, stay: bool) -> None:
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as error:
            raise OSError(f"--port {port}: {error.strerror}; give another one, or 0 for any that is free") from error
        self._stay = stay
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Page:
        self._thread.start()
        url = f"http://{HOST}:{self._server.server_address[1]}/"
        print(f"page: {url}", flush=True)
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._stay and error is None:
            print("the page stays until Ctrl-C", flush=True)
            wait_for_interrupt()
        self._server.end()
        self._thread.join()

    def show(self, kind: str, **fields: Any) -> None:
        """Tell every page, and those that come later."""
        self._server.add(json.dumps({"kind": kind} | fields))


class _Server(ThreadingHTTPServer):
    """Every browser has a thread, which it is told all events by, from the first one on."""

    daemon_threads = False  # so that `server_close` waits until all are told

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._events: list[str] = []
        self._is_over = False
        self._changed = threading.Condition()
        super().__init__(address, handler)

    def add(self, event: str) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def behind(self, number: int) -> list[str]:
        """Events behind so many, as soon as there are some; none when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > number or self._is_over)
            return self._events[number:]

    def end(self) -> None:
        """Nothing more is told; returns when all that was told has been sent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5  # seconds: a browser that does not read, or says nothing, keeps nobody waiting for longer
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/":
            self._begin("text/html; charset=utf-8")
            self.wfile.write(PAGE.read_bytes())
        elif self.path == "/events":
            self._begin("text/event-stream")
            self._tell()
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal shows the demo."""

    def _begin(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()

    def _tell(self) -> None:
        number = 0
        try:
            while events := self.server.behind(number):
                self.wfile.write("".join(f"data: {event}\n\n" for event in events).encode())
                number += len(events)
        except OSError:
            return  # that page was closed
