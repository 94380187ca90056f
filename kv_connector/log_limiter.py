"""Limits the rate of log lines about peers (layer 0): one for each episode of faults, however often a peer tries."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("kv_connector.peer")

_MOST_REMEMBERED = 256
_MOST_REASONS = 8
_MOST_CHARACTERS = 300
_SECONDS = 60.0


class LogLimiter:
    """Peers with faults, by a name such as a host. An episode ends when the peer works again, or after a minute; a few
    different faults of each episode are logged."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, set[str]]] = {}  # since when, and what

    def fault(self, who: str, what: str, example: str = "") -> None:
        """Log a fault of a peer, unless the same one was logged in this episode. `example` is logged with it, and may
        differ every time. Texts from peers are shortened and kept to one line."""
        now = self._clock()
        since, told = self._told.pop(who, (now, set()))
        if now - since >= _SECONDS:
            since, told = now, set()
        is_new = what not in told and len(told) < _MOST_REASONS
        if not told and len(self._told) >= _MOST_REMEMBERED:
            del self._told[next(iter(self._told))]
        self._told[who] = since, told
        if not is_new:
            return
        told.add(what)
        logger.warning("peer %s: %s", _one_line(who), _one_line(f"{what} ({example})" if example else what))

    def well(self, who: str) -> None:
        """The peer works: its episode ends."""
        self._told.pop(who, None)


def _one_line(text: str) -> str:
    shown = (character if character.isprintable() else ascii(character)[1:-1] for character in text[:_MOST_CHARACTERS])
    return "".join(shown) + ("..." if len(text) > _MOST_CHARACTERS else "")
