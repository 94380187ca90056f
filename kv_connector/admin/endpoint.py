"""One engine's endpoint: its inbox, its pins and its server, opened and closed together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import AdminConfig
from .base import Prefixes, SteeredEngine
from .inbox import Inbox
from .listeners import listen
from .pins import PinBook
from .routes import Routes
from .server import AdminServer

if TYPE_CHECKING:
    from ..scheduler import SchedulerHalf

logger = logging.getLogger("kv_connector.admin")


class Endpoint:
    """Made, served and closed by the engine's thread."""

    def __init__(
        self,
        config: AdminConfig,
        replica: int,
        half: SchedulerHalf,
        host_memory: int,
        prefixes: Prefixes,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For data-parallel engine `replica`; `clock` is that of the half, `wake` as for `Inbox`. Raises ConfigError
        where the address is taken or the token is bad."""
        self.inbox = Inbox(wake)
        self._engine = SteeredEngine(half, host_memory, PinBook(half, clock))
        token = config.token()
        listener = listen(config, replica)
        self._server = AdminServer(listener, Routes(self.inbox.ask, prefixes), token)
        logger.info("admin: listening at %s", listener.where)

    @property
    def has_waiting(self) -> bool:
        """Whether `serve` has something to do."""
        return self.inbox.has_waiting

    def serve(self) -> None:
        """Carry out one command, if any waits. Called between two steps: see `Inbox.serve`."""
        self.inbox.serve(self._engine)

    def close(self) -> None:
        """Whoever waits is told, and nobody connects any more. Idempotent."""
        self.inbox.close()
        self._server.close()
