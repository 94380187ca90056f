"""Servers for a test, with answers of its own."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server on this machine whose requests this handles, without a word in the log; its URL."""

    class Quiet(handler):  # type: ignore[misc, valid-type]  # a class that is passed in
        def log_message(self, format: str, *args: object) -> None:
            """Tests look at what is answered."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
