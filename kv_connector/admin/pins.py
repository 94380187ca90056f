"""Prefixes that are pinned through the endpoint, by names that can stand in a URL path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import KVConnectorError
from ..types import BlockHash
from .base import Prefix, Refusal

if TYPE_CHECKING:
    from ..scheduler import SchedulerHalf

_MOST_PINS = 4096
_SHOWN_DIGITS = 16


@dataclass(frozen=True, slots=True)
class _Pin:
    """A prefix, and when its pin ends by itself, if it does."""

    block_hashes: tuple[BlockHash, ...]
    ends: float | None


class PinBook:
    """Owned by the engine's thread. `clock` is that of the scheduler half, which ends pins by it."""

    def __init__(self, half: SchedulerHalf, clock: Callable[[], float]) -> None:
        self._half = half
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        for pin in half.pinned_prefixes():  # which the last start has left
            self._note(pin.block_hashes, pin.seconds)

    def pin(self, prefix: Prefix, ttl_s: float | None, tenant: str) -> str:
        """Keep the prefix, for `ttl_s` seconds from now or until `unpin`; returns its name. Again is not twice: the
        later word counts. `tenant` is configured. Raises KVConnectorError, and changes nothing, where there are too
        many, and for given hashes that the half refuses."""
        self._forget_ended()
        name = _name(prefix.block_hashes)
        if name not in self._pins and len(self._pins) >= _MOST_PINS:
            raise Refusal(409, f"{_MOST_PINS} prefixes are pinned already: unpin some, or give them a ttl_s")
        if name in self._pins:
            pinned = self._pins.pop(name)
            self._undo(pinned)
            prefix = Prefix(pinned.block_hashes, are_given=False)  # of one name is one prefix, and this was known
        self._half.pin_prefix(prefix.block_hashes, ttl_s, tenant, prefix.are_given)
        self._note(prefix.block_hashes, ttl_s)
        return name

    def unpin(self, name: str) -> int:
        """Undo a pin; returns the blocks of its prefix. Raises Refusal for a name that is none."""
        self._forget_ended()
        if name not in self._pins:
            raise Refusal(404, f"no pin has this id: GET /v1/pins lists the {len(self._pins)} that there are")
        pin = self._pins.pop(name)
        self._undo(pin)
        return len(pin.block_hashes)

    def listed(self) -> list[dict[str, Any]]:
        """The pins that have not ended, the oldest first."""
        self._forget_ended()
        now = self._clock()
        return [
            {
                "id": name,
                "num_blocks": len(pin.block_hashes),
                "seconds_left": None if pin.ends is None else round(pin.ends - now, 3),
            }
            for name, pin in self._pins.items()
        ]

    def _note(self, block_hashes: tuple[BlockHash, ...], ttl_s: float | None) -> None:
        self._pins[_name(block_hashes)] = _Pin(block_hashes, None if ttl_s is None else self._clock() + ttl_s)

    def _undo(self, pin: _Pin) -> None:
        with suppress(KVConnectorError):  # it has ended by itself
            self._half.unpin_prefix(pin.block_hashes)

    def _forget_ended(self) -> None:
        """The half lets go of them with its next step, and at once where they are not to be added to."""
        now = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.ends is not None and pin.ends <= now]:
            self._undo(self._pins.pop(name))


def _name(block_hashes: Sequence[BlockHash]) -> str:
    return f"{block_hashes[-1].hex()[:_SHOWN_DIGITS]}-{len(block_hashes)}"
