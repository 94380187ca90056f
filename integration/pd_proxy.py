"""A proxy for prefill and decode engines: OpenAI-compatible, streaming, with nothing but the standard library.

    python -m integration.pd_proxy --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Each completion is asked of a prefill engine for one token, with `do_remote_decode`, and what that answers in
`kv_transfer_params` goes with the same request to a decode engine, whose answer is passed on as it comes. Given where a
prefill engine's ranks listen for peers (`--prefill URL,HOST:PORT`), both are asked at once, under a transfer id of our
own. An engine that does not answer is left out for a while: without a prefill engine the decode engine computes the
prompt, without a decode engine the client gets 503. Several of each are taken in turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 64 << 20
PAUSE_SECONDS = 2.0
_ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(slots=True)
class Upstream:
    """An engine's server. `peer` is where its ranks listen for other engines, if that is known."""

    host: str
    port: int
    peer: tuple[str, int] | None = None
    out_until: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Upstream:
        """From `URL` or `URL,HOST:PORT`."""
        url, _, peer = text.partition(",")
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise argparse.ArgumentTypeError(f"{url!r} is no server: give one such as http://127.0.0.1:8100")
        host, _, port = peer.rpartition(":")
        return cls(parts.hostname, parts.port, (host, int(port)) if peer else None)


class Turns:
    """Engines of one kind, taken in turns; those that failed a moment ago last."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._upstreams = list(upstreams)
        self._lock = threading.Lock()
        self._next = 0

    def order(self) -> list[Upstream]:
        """All that may be asked now, the one whose turn it is first."""
        if not self._upstreams:
            return []
        with self._lock:
            self._next += 1
            turned = self._upstreams[self._next % len(self._upstreams) :]
            turned += self._upstreams[: self._next % len(self._upstreams)]
        return [upstream for upstream in turned if upstream.out_until <= time.monotonic()]


class UpstreamDown(Exception):
    """An engine did not answer."""


class Proxy(ThreadingHTTPServer):
    """Answers completions; every connection has a thread of its own. `counts` says what became of requests."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, address: tuple[str, int], prefill: Sequence[Upstream], decode: Sequence[Upstream], seconds: float = 300.0
    ) -> None:
        super().__init__(address, _Handler)
        self.prefill = Turns(prefill)
        self.decode = Turns(decode)
        self.seconds = seconds
        self.counts = {"handed_over": 0, "computed_by_decode": 0, "failed": 0, "cut_off": 0}
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        """One more of them."""
        with self._lock:
            self.counts[name] += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok", **self.server.counts})
            return
        for upstream in self.server.decode.order():
            try:
                response = self._ask(upstream, None)
            except UpstreamDown:
                continue
            self._pass_on(response)
            return
        self._answer(503, _error("no decode engine answers"))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.path not in PATHS:
            self._answer(404, _error(f"{self.path} is not served: {', '.join(PATHS)} are"))
            return
        if not 0 < length <= MAX_BODY:
            self._answer(413, _error(f"a body of {length} bytes: give 1 to {MAX_BODY}"))
            return
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._answer(400, _error("the body is not a JSON object"))
            return
        self._complete(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not logged."""

    def _complete(self, body: dict[str, Any]) -> None:
        request_id = self.headers.get("X-Request-Id") or uuid.uuid4().hex
        # Nobody is to compute a prompt that nobody continues.
        params = self._prefill(body, request_id) if self.server.decode.order() else None
        for upstream in self.server.decode.order():
            asked = {**body, "kv_transfer_params": params} if params else body
            try:
                response = self._ask(upstream, asked, request_id)
            except UpstreamDown:
                continue  # another one may be told the same: it will find out what is still there
            self.server.count("handed_over" if params else "computed_by_decode")
            self._pass_on(response)
            return
        self.server.count("failed")
        self._answer(503, _error("no decode engine answers"))

    def _prefill(self, body: dict[str, Any], request_id: str) -> dict[str, Any] | None:
        """What the decode engine has to be told; None where no prefill engine served."""
        short = {k: v for k, v in body.items() if k != "stream_options"}
        short |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            short["max_completion_tokens"] = 1
        for upstream in self.server.prefill.order():
            ask = dict(_ASK_PREFILL)
            if upstream.peer is not None:
                ask["transfer_id"] = request_id
                asked = {**short, "kv_transfer_params": ask}
                threading.Thread(target=self._prefill_beside, args=(upstream, asked, request_id), daemon=True).start()
                host, port = upstream.peer
                told = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": request_id}
                return told | {"remote_host": host, "remote_port": port}
            try:
                response = self._ask(upstream, {**short, "kv_transfer_params": ask}, request_id)
                answer = json.loads(response.read()) if response.status == 200 else {}
            except (UpstreamDown, OSError, http.client.HTTPException, ValueError):
                upstream.out_until = time.monotonic() + PAUSE_SECONDS
                continue
            params = answer.get("kv_transfer_params")
            return params if isinstance(params, dict) else None
        return None

    def _prefill_beside(self, upstream: Upstream, body: dict[str, Any], request_id: str) -> None:
        try:
            self._ask(upstream, body, request_id).read()
        except (UpstreamDown, OSError, http.client.HTTPException):
            upstream.out_until = time.monotonic() + PAUSE_SECONDS

    def _ask(self, upstream: Upstream, body: dict[str, Any] | None, request_id: str = "") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(upstream.host, upstream.port, timeout=self.server.seconds)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, "Connection": "close"}
        if "Authorization" in self.headers:
            headers["Authorization"] = self.headers["Authorization"]
        try:
            connection.request(self.command, self.path, json.dumps(body) if body is not None else None, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            upstream.out_until = time.monotonic() + PAUSE_SECONDS
            raise UpstreamDown(str(error)) from error

    def _pass_on(self, response: http.client.HTTPResponse) -> None:
        """The engine's answer as it comes. One that breaks off is broken off here too, so that the client knows."""
        self.close_connection = True
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
        self.send_header("Connection", "close")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for part in _parts(response):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.server.count("cut_off")
        finally:
            response.close()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _parts(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it comes. Raises OSError or HTTPException where it breaks off."""
    left = response.length  # None where chunks say where it ends: `read1` notices only those that are missing
    while part := response.read1(1 << 16):
        left = None if left is None else left - len(part)
        yield part
    if left:
        raise http.client.IncompleteRead(b"", left)


def _error(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "proxy_error"}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", type=Upstream.parse, action="append", default=[], metavar="URL[,HOST:PORT]")
    parser.add_argument("--decode", type=Upstream.parse, action="append", required=True, metavar="URL")
    options = parser.parse_args(arguments)
    prefill = options.prefill
    with Proxy((options.host, options.port), prefill, options.decode) as server:
        print(f"serving at http://{options.host}:{server.server_address[1]}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
