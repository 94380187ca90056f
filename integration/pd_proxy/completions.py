"""One completion: a prefill engine, then a decode engine, then its answer to the client as it comes.

What may be tried again: a prefill, whatever happened to it, as the client has seen nothing of it; a decode engine that
did not answer. An answer that has begun is passed on or broken off, never begun again by another engine.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .engines import BROKEN, Engine, Turns, describe
from .messages import Completion, Refused, passed_on, read_body, refusal, told_beforehand
from .metrics import ProxyMetrics

logger = logging.getLogger(__name__)
NO_DECODE_ENGINE = "no decode engine answers: ask again in a few seconds"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a proxy takes on. `client_seconds` is how long a body may take, and a client not read its answer."""

    in_flight: int = 256
    body_bytes: int = 32 << 20
    client_seconds: float = 60.0


class Completions:
    """The ASGI endpoint of completions. All of it runs on one event loop, so that `_in_flight` needs no lock."""

    def __init__(
        self, client: httpx.AsyncClient, prefill: Turns, decode: Turns, limits: Limits, metrics: ProxyMetrics
    ) -> None:
        self._client = client
        self._prefill = prefill
        self._decode = decode
        self._limits = limits
        self._metrics = metrics
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refused at once where too many are under way: who waits here would hold memory and gain nothing."""
        if self._in_flight >= self._limits.in_flight:
            self._metrics.requests.labels("full").inc()
            text = f"{self._in_flight} requests are under way, the limit is {self._limits.in_flight}: ask again later"
            await refusal(429, text, {"retry-after": "1"})(scope, receive, send)
            return
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            outcome = await self._serve(Request(scope, receive), send)
        except Refused as refused:
            outcome = {503: "no_engine", 504: "timed_out"}.get(refused.status, "bad_request")
            headers = {"retry-after": "2"} if refused.status == 503 else {}
            await refusal(refused.status, str(refused), headers)(scope, receive, send)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)
        self._metrics.requests.labels(outcome).inc()

    async def _serve(self, request: Request, send: Send) -> str:
        """What became of it, by the names of `ProxyMetrics.requests`. A client that hangs up ends all that is asked."""
        try:
            with anyio.fail_after(self._limits.client_seconds):
                body = await read_body(request, self._limits.body_bytes)
        except TimeoutError as error:
            raise Refused(408, f"the body did not come within {self._limits.client_seconds:g} s") from error
        except ClientDisconnect:
            return "client_gone"
        exchange = Exchange(
            Completion(request.headers, body), request.scope["path"], self._client, self._metrics, self._limits
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_when_gone, request.receive, tasks)
            await exchange.run(self._prefill, self._decode, send, tasks)
            tasks.cancel_scope.cancel()
        if exchange.refused is not None:
            raise exchange.refused
        return exchange.outcome


class Exchange:
    """What is asked of engines for one completion, and the way of the answer."""

    def __init__(
        self, completion: Completion, path: str, client: httpx.AsyncClient, metrics: ProxyMetrics, limits: Limits
    ) -> None:
        self.outcome = "client_gone"
        self.refused: Refused | None = None
        self._completion = completion
        self._path = path
        self._client = client
        self._metrics = metrics
        self._limits = limits
        self._began = time.monotonic()

    async def run(self, prefill: Turns, decode: Turns, send: Send, tasks: TaskGroup) -> None:
        """Sets `outcome`, or `refused` where the client is still to be told why. What goes on beside it is in
        `tasks`."""
        try:
            if not decode.any_healthy:  # nobody is to compute a prompt that nobody continues
                raise Refused(503, NO_DECODE_ENGINE)
            told = await self._ask_prefill(prefill, tasks)
            engine, response = await self._ask_decode(decode, told)
        except Refused as refused:
            self.refused = refused
            return
        self.outcome = "transferred" if told else "computed_by_decode"
        try:
            await self._pass_on(engine, response, send)
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _ask_prefill(self, prefill: Turns, tasks: TaskGroup) -> dict[str, Any] | None:
        """What the decode engine has to be told; None where no prefill engine served."""
        for number, engine in enumerate(prefill.order()):
            if number:
                self._metrics.retries.labels("prefill").inc()
            if engine.peer is not None:
                transfer_id = uuid.uuid4().hex
                tasks.start_soon(self._compute_prompt, engine, self._completion.for_prefill(transfer_id))
                return told_beforehand(engine, transfer_id)
            response = await self._compute_prompt(engine, self._completion.for_prefill())
            if response is not None:
                return _told(response)
        return None

    async def _compute_prompt(self, engine: Engine, body: bytes) -> httpx.Response | None:
        """A prefill engine's answer; None where another one is worth asking."""
        began = time.monotonic()
        headers = self._completion.headers | {b"accept-encoding": b"identity"}
        try:
            response = await self._client.post(engine.url + self._path, content=body, headers=headers)
        except BROKEN as error:
            engine.failed(error, self._metrics)
            return None
        if response.status_code >= 500 or response.status_code == 429:
            self._metrics.failures.labels(engine.url, engine.role).inc()
            return None
        self._metrics.prefill_seconds.observe(time.monotonic() - began)
        return response

    async def _ask_decode(self, decode: Turns, told: dict[str, Any] | None) -> tuple[Engine, httpx.Response]:
        """The first that answers. Another one may be told the same: it finds out what is still there."""
        body = self._completion.for_decode(told)
        for number, engine in enumerate(decode.order()):
            if number:
                self._metrics.retries.labels("decode").inc()
            request = self._client.build_request(
                "POST", engine.url + self._path, content=body, headers=self._completion.headers
            )
            try:
                return engine, await self._client.send(request, stream=True)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                # It may be at work: a second one would only add to that.
                self._metrics.failures.labels(engine.url, engine.role).inc()
                raise Refused(504, f"the decode engine did not answer in time ({describe(error)})") from error
            except BROKEN as error:
                engine.failed(error, self._metrics)
        raise Refused(503, NO_DECODE_ENGINE)

    async def _pass_on(self, engine: Engine, response: httpx.Response, send: Send) -> None:
        """The answer as it comes, no faster than the client reads. One that breaks off is broken off here too (the
        server closes a connection whose answer is not complete), so that the client knows."""
        headers = passed_on(response.headers.raw)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        is_first = True
        try:
            async for part in response.aiter_raw():
                if is_first:
                    self._metrics.first_byte_seconds.observe(time.monotonic() - self._began)
                    is_first = False
                with anyio.fail_after(self._limits.client_seconds):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except BROKEN as error:
            logger.warning("decode engine %s broke off in the middle of an answer: %s", engine.url, describe(error))
            engine.failed(error, self._metrics)
            self._metrics.broken.labels("engine").inc()
            return
        except TimeoutError:
            self._metrics.broken.labels("client").inc()
            return
        except anyio.get_cancelled_exc_class():
            self._metrics.broken.labels("client").inc()
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._metrics.request_seconds.observe(time.monotonic() - self._began)


def _told(response: httpx.Response) -> dict[str, Any] | None:
    """A prefill engine that finds fault with a request says so, and so will the decode engine, to the client."""
    try:
        answer = response.json() if response.status_code == 200 else {}
    except (ValueError, RecursionError):
        answer = {}
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) else None


async def _end_when_gone(receive: Receive, tasks: TaskGroup) -> None:
    """The client's side of the connection has ended: so does all that was asked for it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    tasks.cancel_scope.cancel()
