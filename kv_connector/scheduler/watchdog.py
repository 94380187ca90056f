"""Copies that some rank has not reported for a minute: logged once, and no new copies are planned meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .ledger import JobLedger

logger = logging.getLogger("kv_connector.scheduler")

OVERDUE_SECONDS = 60.0
"""The whole of a large host's memory crosses the slowest link in less."""
_LOOK_SECONDS = 1.0


class CopyWatchdog:
    """Looks after copies between device and host. While one is overdue requests are computed, and nothing is saved."""

    def __init__(self, ledger: JobLedger, clock: Callable[[], float]) -> None:
        self.hangs = False
        self._ledger = ledger
        self._clock = clock
        self._looked_at = clock()

    def look(self) -> None:
        """Called in every step; walks the open jobs once a second."""
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        overdue = self._ledger.overdue(OVERDUE_SECONDS)
        if overdue and not self.hangs:
            job_id, ranks = overdue[0]
            logger.warning(
                "copy job %d has not been reported by rank(s) %s for %g s: until it is, requests are computed and "
                "nothing is saved; look for a rank or a GPU that hangs",
                job_id,
                ", ".join(map(str, ranks)),
                OVERDUE_SECONDS,
            )
        elif self.hangs and not overdue:
            logger.warning("all copies have been reported again: hits are loaded as before")
        self.hangs = bool(overdue)
