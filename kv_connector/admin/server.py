"""HTTP/1.1 over the listener: one request a connection, each on a thread of its own, all of it within bounds.

What is bounded: connections at a time, bytes of a body, and the time that a client may take to say its request and to
read the answer, over all of its reads and writes. What a client does, or leaves out, costs one of the few threads for
as long, and the engine nothing: who shows no token reaches no further than this module.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from ..errors import KVConnectorError
from .base import Answer, Refusal
from .listeners import Listener
from .routes import HEALTH, Routes

logger = logging.getLogger("kv_connector.admin")

MOST_CONNECTIONS = 8
MOST_BODY_BYTES = 2 << 20
CLIENT_SECONDS = 10.0
"""For a whole request to arrive, and for its answer to be read."""
_LINGER_SECONDS = 1.0
_PAUSE_SECONDS = 1.0
"""After the process had no descriptor or thread left for a connection."""
_LOG_SECONDS = 60.0
"""Between two lines of the log about wrong tokens, however many are tried."""
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b'Retry-After: 1\r\n\r\n{"error": "too many connections: ask again in a moment"}\n'
)


class AdminServer:
    """Serves from when it is made until `close`. `token` is what callers show; `client_seconds` as CLIENT_SECONDS;
    `clock` gives seconds that never go back."""

    def __init__(
        self,
        listener: Listener,
        routes: Routes,
        token: bytes,
        client_seconds: float = CLIENT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routes = routes
        self.client_seconds = client_seconds
        self.clock = clock
        self._listener = listener
        self._token = token
        self._silent_until = -math.inf
        self._slots = threading.Semaphore(MOST_CONNECTIONS)
        self._slots_to_refuse = threading.Semaphore(MOST_CONNECTIONS)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-admin", daemon=True)
        self._thread.start()

    def is_token(self, shown: bytes) -> bool:
        """Whether this is the token; how long it takes does not tell how much of it is."""
        return hmac.compare_digest(shown, self._token)

    def note_wrong_token(self) -> None:
        """Who tries many does not fill the log."""
        if (now := self.clock()) >= self._silent_until:
            self._silent_until = now + _LOG_SECONDS
            logger.warning("admin: a call with a wrong token was refused; others are not logged for a minute")

    def close(self) -> None:
        """Nobody connects any more. Idempotent."""
        self._is_closing.set()
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.socket.accept()
                self._begin(connection)
            except (OSError, RuntimeError) as error:  # the latter where no thread can be had
                if not self._is_closing.is_set():
                    logger.warning("admin: no connection can be taken: %s", error)
                    self._is_closing.wait(_PAUSE_SECONDS)

    def _begin(self, connection: socket.socket) -> None:
        """Where all who may be served are, one is told so; where as many are being told, it ends."""
        if self._slots.acquire(blocking=False):
            self._start(self._serve, connection, self._slots)
        elif self._slots_to_refuse.acquire(blocking=False):
            self._start(self._refuse, connection, self._slots_to_refuse)
        else:
            connection.close()

    def _start(
        self, call: Callable[[socket.socket], None], connection: socket.socket, slots: threading.Semaphore
    ) -> None:
        """On a thread of its own, which closes it and gives its slot back. Raises RuntimeError where there is none."""
        try:
            threading.Thread(target=call, args=(connection,), name="kv-admin-call", daemon=True).start()
        except RuntimeError:
            connection.close()
            slots.release()
            raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            _Call(connection, "", self)  # type: ignore[arg-type]  # socketserver's protocol, without its server
        except OSError as error:  # the client is gone, or too slow
            logger.debug("admin: a connection ended: %s", error)
        except Exception:
            logger.exception("admin: a call failed")
        finally:
            connection.close()
            self._slots.release()

    def _refuse(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_LINGER_SECONDS)
            connection.sendall(_BUSY)
            _end(connection, self.clock)
        except OSError as error:  # the client is gone
            logger.debug("admin: a connection ended: %s", error)
        finally:
            connection.close()
            self._slots_to_refuse.release()


def _end(connection: socket.socket, clock: Callable[[], float]) -> None:
    """The answer is sent: read what is left of the request, or the client's machine may drop the answer."""
    connection.shutdown(socket.SHUT_WR)
    rest = _Reader(connection, _LINGER_SECONDS, clock)
    with suppress(TimeoutError):
        while rest.read(1 << 16):
            pass


class _Reader(io.RawIOBase):
    """What a client says, until the deadline. Raises TimeoutError."""

    def __init__(self, connection: socket.socket, seconds: float, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._deadline = clock() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Call(BaseHTTPRequestHandler):
    """One request and its answer."""

    protocol_version = "HTTP/1.1"
    server: AdminServer  # type: ignore[assignment]

    def setup(self) -> None:
        self.connection = self.request
        self.rfile = io.BufferedReader(_Reader(self.connection, self.server.client_seconds, self.server.clock))
        self.wfile = io.BytesIO()  # sent as a whole

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()

    def finish(self) -> None:
        self.connection.settimeout(self.server.client_seconds)
        self.connection.sendall(self.wfile.getvalue())  # type: ignore[attr-defined]
        _end(self.connection, self.server.clock)

    def version_string(self) -> str:
        return "kv-connector"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("admin: %s", format % args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library finds wrong, as every other error."""
        self._send(code, {"error": message or f"HTTP status {code}"})

    def handle_expect_100(self) -> bool:
        """Nothing is asked for that is not read anyway; and answers are sent as a whole."""
        self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def __getattr__(self, name: str) -> Callable[[], None]:
        """The standard library calls a method named after that of the request: all are answered alike."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self._answer

    def _answer(self) -> None:
        try:
            path = self.path.partition("?")[0]
            if (self.command, path) != HEALTH:
                self._check_token()
            status, answer = self.server.routes.answer(self.command, path, self._body())
        except Refusal as refusal:
            status, answer = refusal.status, {"error": str(refusal)}
        except KVConnectorError as error:
            status, answer = 400, {"error": str(error)}
        except OSError:  # the client is gone, or too slow
            raise
        except Exception as error:  # whatever goes wrong is an answer to the caller, and nothing to the engine
            logger.exception("admin: a call failed")
            status, answer = 500, {"error": f"{type(error).__name__}; the engine's log has more"}
        self._send(status, answer)

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "")
        scheme, _, token = given.partition(" ")
        if not given:
            raise Refusal(401, "no token: send the header Authorization: Bearer TOKEN")
        if scheme.lower() != "bearer" or not self.server.is_token(token.strip().encode("latin-1", "replace")):
            self.server.note_wrong_token()
            raise Refusal(401, "wrong token: send the engine's, as Authorization: Bearer TOKEN")

    def _body(self) -> Any:
        """The JSON object that came; an empty one where nothing did. Raises Refusal."""
        if self.headers.get("Transfer-Encoding"):
            raise Refusal(411, "a body in chunks is not taken: send Content-Length")
        text = self.headers.get("Content-Length", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise Refusal(400, f"Content-Length {text[:40]!r} is no number")
        length = int(text)
        if length > MOST_BODY_BYTES:
            raise Refusal(413, f"the body has {length} bytes: send at most {MOST_BODY_BYTES}")
        body = self.rfile.read(length)
        if len(body) < length:
            raise Refusal(400, f"the body ended after {len(body)} of {length} bytes")
        if not body.strip():
            return {}
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {str(error)[:200] or 'nested too deeply'}") from None

    def _send(self, status: int, answer: Answer) -> None:
        body = json.dumps(answer).encode() + b"\n"
        self.request_version = self.protocol_version  # also where the request had none: an answer has headers
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
