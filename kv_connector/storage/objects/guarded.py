"""A store client behind a breaker: after faults calls return at once, and a thread of its own probes the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..breaker import Breaker, BreakerState
from .client import Answer, StoreClient, StoreUnreachable, Transfer

T = TypeVar("T")
logger = logging.getLogger("kv_connector.storage")


class GuardedClient:
    """The calls of `StoreClient`; all raise StoreUnreachable at once while the breaker is open.

    An unreachable store opens the breaker, and so do three calls in a row in which an owner of memory did not answer.
    """

    def __init__(
        self,
        name: str,
        client: StoreClient,
        regions: Sequence[tuple[int, int]],
        clock: Callable[[], float],
        note_fault: Callable[[str, BaseException], None],
    ) -> None:
        """Connects in the background, see `StoreClient.connect`; `note_fault` is told where that fails. `name` is what
        logs call the store."""
        self.breaker = Breaker(clock, is_open=True)
        self.connected = threading.Event()
        """Set when the store was reached for the first time."""
        self._name = name
        self._client = client
        self._regions = regions
        self._note_fault = note_fault
        self._is_closed = False
        self._wake = threading.Event()
        self._prober = threading.Thread(target=self._keep_connected, name=f"kv-{name}-probe", daemon=True)
        self._prober.start()

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See `StoreClient.exist`."""
        return self._ask(lambda: self._client.exist(names)) if names else []

    def get(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """See `StoreClient.get`."""
        return self._ask(lambda: self._client.get(transfers)) if transfers else []

    def put(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """See `StoreClient.put`."""
        return self._ask(lambda: self._client.put(transfers)) if transfers else []

    def remove(self, names: Sequence[str]) -> list[bool]:
        """See `StoreClient.remove`."""
        return self._ask(lambda: self._client.remove(names)) if names else []

    def last_fault(self) -> str:
        """See `StoreClient.last_fault`."""
        return self._client.last_fault()

    def stats(self) -> dict[str, float]:
        """Gauges of the breaker."""
        is_open = self.breaker.state is not BreakerState.CLOSED
        return {"breaker_is_open": is_open, "breaker_opened_times": self.breaker.num_opened}

    def close(self) -> None:
        """Probe no more, and leave the store. Idempotent."""
        self._is_closed = True
        self._wake.set()
        self._prober.join()
        self._client.close()

    def _ask(self, call: Callable[[], list[T]]) -> list[T]:
        if not self.breaker.allows:
            raise StoreUnreachable("the store is left alone after a fault")
        try:
            answers = call()
        except StoreUnreachable:
            self.breaker.failed(at_once=True)
            self._wake.set()
            raise
        if Answer.FAULT in answers:
            self.breaker.failed()
            self._wake.set()
        else:
            self.breaker.succeeded()
        return answers

    def _keep_connected(self) -> None:
        while not self._is_closed:
            self._wake.wait(self.breaker.seconds_to_probe())
            self._wake.clear()
            if not self._is_closed and self.breaker.begin_probe():
                self.breaker.end_probe(self._probe())

    def _probe(self) -> bool:
        try:
            self._client.connect(self._regions)
        except OSError as error:
            self._note_fault("no connection, it will be tried again", error)
            return False
        logger.info("%s storage: connected", self._name)
        self.connected.set()
        return True
