"""The proxy as an ASGI application."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import anyio
import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .completions import NO_DECODE_ENGINE, Completions, Limits
from .engines import BROKEN, Turns
from .messages import passed_on, refusal, stripped
from .metrics import ProxyMetrics

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
_CONNECT_SECONDS = 3.0
"""Within which an engine has to take a connection, of the two tries that it gets."""


def make_app(
    prefill: Turns,
    decode: Turns,
    limits: Limits,
    engine_seconds: float = 300.0,
    check_seconds: float = 5.0,
    verify: ssl.SSLContext | bool = True,
) -> Starlette:
    """Serves completions, `/v1/models`, `/health` and `/metrics`. An engine may be silent for `engine_seconds` in the
    middle of an answer, and is checked every `check_seconds`. `verify`: whom to trust behind https."""
    metrics = ProxyMetrics()
    client = httpx.AsyncClient(
        # Without these, httpx would offer to take what the client cannot read.
        headers={"accept-encoding": "identity"},
        # What an engine sets for one client is no other's.
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        timeout=httpx.Timeout(engine_seconds, connect=min(_CONNECT_SECONDS, engine_seconds), pool=None),
        transport=httpx.AsyncHTTPTransport(
            verify=verify,
            trust_env=False,
            # No connection is used twice: a server may close one that rests while the next request is on its way, and
            # httpcore 1.0 closes what has rested for too long even where it has just begun to be used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            retries=1,  # of connecting only: a proxy that stood still for a while finds its own deadline over
        ),
        trust_env=False,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client, anyio.create_task_group() as tasks:
            for engine in (*prefill.engines, *decode.engines):
                tasks.start_soon(engine.watch, client, check_seconds, metrics)
            yield
            tasks.cancel_scope.cancel()

    async def show_models(request: Request) -> Response:
        asked = [(name, value) for name, value in stripped(request.headers) if name == b"authorization"]
        for engine in decode.order():
            try:
                answer = await client.get(engine.url + request.scope["path"], headers=asked)
            except BROKEN as error:
                engine.failed(error, metrics)
                continue
            response = Response(answer.content, answer.status_code)
            response.raw_headers = passed_on(answer.headers.raw)
            return response
        return refusal(503, NO_DECODE_ENGINE, {"retry-after": "2"})

    async def show_health(_: Request) -> Response:
        engines = [
            {"role": engine.role, "url": engine.url, "healthy": engine.is_healthy}
            for engine in (*prefill.engines, *decode.engines)
        ]
        status = "ok" if decode.any_healthy else "no decode engine answers"
        return JSONResponse({"status": status, "engines": engines}, 200 if decode.any_healthy else 503)

    async def show_metrics(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def not_served(request: Request, _: Exception) -> Response:
        return refusal(404, f"{request.scope['path']} is not served: {', '.join(COMPLETIONS)} are")

    async def not_allowed(request: Request, _: Exception) -> Response:
        return refusal(405, f"{request.scope['path']} takes no {request.method}")

    completions = Completions(client, prefill, decode, limits, metrics)
    routes = [Route(path, completions, methods=["POST"]) for path in COMPLETIONS]
    routes += [Route("/v1/models", show_models), Route("/health", show_health), Route("/metrics", show_metrics)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: not_served, 405: not_allowed})
