"""Grants that peers have stopped: each peer is told once nothing of it is on its way any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..wire.messages import Stopped, WireMessage


@dataclass(slots=True)
class _Stop:
    """A grant that is to be filled no more, and its pushes that have not ended."""

    link: int
    grant: int
    pushes: set[int]


class Stops:
    """Those that have not been answered; `say` sends a message over a link."""

    def __init__(self, say: Callable[[int, WireMessage], None]) -> None:
        self._say = say
        self._stops: list[_Stop] = []

    def __len__(self) -> int:
        return len(self._stops)

    def begin(self, link: int, grant: int, pushes: Iterable[int]) -> None:
        """A peer wants this grant to be filled no more, while these pushes fill it; `tell` answers."""
        self._stops.append(_Stop(link, grant, set(pushes)))

    def ended(self, push: int) -> None:
        """A push has ended."""
        for stop in self._stops:
            stop.pushes.discard(push)
        self.tell()

    def tell(self) -> None:
        """Answer those of which no push is left."""
        for stop in [stop for stop in self._stops if not stop.pushes]:
            self._stops.remove(stop)
            self._say(stop.link, Stopped(stop.grant))
