"""Servers on loopback that answer as engines do, or fail as they may, and the proxy in front of them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from integration.pd_proxy.app import make_app
from integration.pd_proxy.completions import Limits
from integration.pd_proxy.engines import Engine, Turns

PATIENCE = 120.0
"""Seconds that a test waits for what has to come."""


class Scripted:
    """An engine: `asked` are the bodies that came. A prefill engine answers `params`, a decode engine `text`."""

    def __init__(self, text: str = "", params: dict[str, Any] | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.health = 200
        self._answer = {"choices": [{"text": text}], "kv_transfer_params": params}
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self._complete, methods=["POST"]) for path in paths]
        routes += [Route("/health", self._show_health), Route("/v1/models", self._show_models)]
        self.app = Starlette(routes=routes)

    async def respond(self, _: Request) -> Response:
        """To a completion; for tests to replace."""
        return JSONResponse(self._answer)

    async def _complete(self, request: Request) -> Response:
        self.asked.append(json.loads(await request.body()))
        self.headers.append(dict(request.headers))
        return await self.respond(request)

    async def _show_health(self, _: Request) -> Response:
        return Response(status_code=self.health)

    async def _show_models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})


class Streaming(Scripted):
    """Sends `parts`, the second and later ones each when `go_on` is set; `gone` is set when it is cut off."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self.parts = parts
        self.num_sent = 0
        self.go_on, self.gone = threading.Event(), threading.Event()

    async def respond(self, _: Request) -> Response:
        engine = self

        class Watched(StreamingResponse):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    if engine.num_sent < len(engine.parts):
                        engine.gone.set()

        return Watched(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            while self.num_sent and not self.go_on.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)  # what was cut off is noticed between two parts
            yield part
            self.num_sent += 1


class Silent(Scripted):
    """Takes a request and answers nothing until its client is gone; `gone` is set then."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gone = threading.Event(), threading.Event()

    async def respond(self, request: Request) -> Response:
        self.begun.set()
        while not await request.is_disconnected():
            await asyncio.sleep(0.005)
        self.gone.set()
        return Response()


class Proxy:
    """A proxy that is served at `url`, and what it says of itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])

    def complete(self, body: Any = None, **more: Any) -> httpx.Response:
        """Ask for a completion; `body` as JSON, or `content` as it is."""
        asked = {"json": {"prompt": "x", "max_tokens": 9} if body is None else body}
        return httpx.post(f"{self.url}/v1/completions", timeout=PATIENCE, **({} if "content" in more else asked) | more)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where there is none."""
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{inside}}} " if inside else f"{name} "
        lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text.splitlines()
        return next((float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), 0.0)

    def is_healthy(self, engine: str) -> bool:
        """Whether an engine gets requests."""
        engines = httpx.get(f"{self.url}/health", timeout=PATIENCE).json()["engines"]
        return next(bool(each["healthy"]) for each in engines if each["url"] == engine)


@contextmanager
def served(app: ASGIApp, port: int = 0, **settings: Any) -> Iterator[str]:
    """Its URL."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_config=None, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    for name, value in settings.items():
        setattr(config, name, value)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        scheme = "https" if "ssl_certfile" in settings else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def proxy_of(
    prefill: Sequence[str | Scripted], decode: Sequence[str | Scripted], limits: Limits | None = None, **settings: Any
) -> Iterator[Proxy]:
    """A proxy in front of engines, which are served here unless they are given as URLs (`URL,HOST:PORT` with a peer).
    They are not checked again while a test runs, unless it says so."""
    with ExitStack() as stack:

        def engines(role: Any, given: Sequence[str | Scripted]) -> Turns:
            made = []
            for each in given:
                text = each if isinstance(each, str) else stack.enter_context(served(each.app))
                url, _, peer = text.partition(",")
                host, _, port = peer.rpartition(":")
                made.append(Engine(role, url, (host, int(port)) if peer else None))
            return Turns(made)

        settings = {"check_seconds": 3600.0} | settings
        app = make_app(engines("prefill", prefill), engines("decode", decode), limits or Limits(), **settings)
        yield Proxy(stack.enter_context(served(app)))


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Until it holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
