"""The engines behind the proxy: which of them may be asked, and the checks that say so."""

from __future__ import annotations

import itertools
import logging
import ssl
from collections.abc import Sequence
from typing import Literal

import anyio
import httpx

from .metrics import ProxyMetrics

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0
"""Seconds between two checks of an engine that failed one: twice as many after each, up to these."""
MISSED_CHECKS = 2
"""In a row, after which an engine gets no more requests: one may be slow when it is busy."""
CHECK_SECONDS = 10.0
"""Within which an engine has to answer a check, all of it, connecting included."""

BROKEN = httpx.RequestError, httpx.InvalidURL, UnicodeError, ssl.SSLError
"""What is raised where an engine cannot be reached, breaks off, or points to what is no URL. What TLS finds wrong
behind the handshake, such as that the engine wants a certificate of who asks, httpx 0.28 hands on as it is, and so it
does with most of what is wrong with a URL."""


class Engine:
    """An engine's server. `peer` is where its ranks listen for other engines, if that is known."""

    def __init__(self, role: Role, url: str, peer: tuple[str, int] | None = None) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.peer = peer
        self.is_healthy = True
        self._doubt = anyio.Event()

    def failed(self, error: Exception, metrics: ProxyMetrics) -> None:
        """A request found it dead, or it broke off: it gets no more of them until it has passed a check."""
        metrics.failures.labels(self.url, self.role).inc()
        self._set_healthy(False, describe(error), metrics)
        self._doubt.set()

    async def watch(self, client: httpx.AsyncClient, seconds: float, metrics: ProxyMetrics) -> None:
        """Check it every so many seconds, and at once where a request failed, until cancelled. Who fails a check is
        checked again after a pause that doubles."""
        missed = 0
        metrics.healthy.labels(self.url, self.role).set(1)
        while True:
            self._doubt = anyio.Event()
            if (fault := await self.check(client)) is None:
                missed = 0
                self._set_healthy(True, "", metrics)
                with anyio.move_on_after(seconds):
                    await self._doubt.wait()
            else:
                missed += 1
                if missed >= MISSED_CHECKS:
                    self._set_healthy(False, fault, metrics)
                await anyio.sleep(min(FIRST_PAUSE * 2 ** min(missed - 1, 10), LONGEST_PAUSE))

    async def check(self, client: httpx.AsyncClient) -> str | None:
        """What is wrong with it, if anything is."""
        try:
            with anyio.fail_after(CHECK_SECONDS):
                response = await client.get(f"{self.url}/health")
        except TimeoutError:
            return f"/health does not answer within {CHECK_SECONDS:g} s"
        except Exception as error:  # noqa: BLE001 - a check's top: those of the other engines go on
            return describe(error)
        return None if response.status_code < 400 else f"/health answers {response.status_code}"

    def _set_healthy(self, is_healthy: bool, fault: str, metrics: ProxyMetrics) -> None:
        if is_healthy is not self.is_healthy:
            logger.warning("%s engine %s %s", self.role, self.url, "is back" if is_healthy else f"is out: {fault}")
        self.is_healthy = is_healthy
        metrics.healthy.labels(self.url, self.role).set(is_healthy)


class Turns:
    """Engines of one role, taken in turns."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._firsts = itertools.count()

    @property
    def any_healthy(self) -> bool:
        """Whether one of them may be asked."""
        return any(engine.is_healthy for engine in self.engines)

    def order(self) -> list[Engine]:
        """All that may be asked now, the one whose turn it is first."""
        healthy = [engine for engine in self.engines if engine.is_healthy]
        first = next(self._firsts) % max(len(healthy), 1)
        return healthy[first:] + healthy[:first]


def describe(error: Exception) -> str:
    """Some errors of httpx have no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
