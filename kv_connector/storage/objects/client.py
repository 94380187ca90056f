"""What `ObjectStorage` needs of a store: a few blocking calls on whole objects, by name and memory address.

A client may be called from any thread. What became of one object is an answer; that the store does not answer at all
is `StoreUnreachable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class StoreUnreachable(OSError):
    """The store does not answer."""


class Answer(Enum):
    """What became of one object."""

    OK = "ok"
    MISSING = "missing"
    DAMAGED = "damaged"  # is there, and is not what was written
    NO_ROOM = "no room"
    FAULT = "fault"


class Fragment(NamedTuple):
    """`num_bytes` of memory at `address`."""

    address: int
    num_bytes: int


class Transfer(NamedTuple):
    """One object and where its bytes are or go, all of them, in order."""

    name: str
    fragments: tuple[Fragment, ...]


class StoreClient(Protocol):
    """What `ObjectStorage` needs of a store; calls from any thread. All raise StoreUnreachable but `close` and
    `last_fault`."""

    def connect(self, regions: Sequence[tuple[int, int]]) -> None:
        """Make sure that the store answers; the first time, also join it. `regions`: address and length of all memory
        that transfers use."""

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which objects there are. A store may keep each one from eviction for seconds because it was asked for."""

    def get(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """Read whole objects into memory."""

    def put(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """Write objects; OK also where there was one of this name; one of both is kept."""

    def last_fault(self) -> str:
        """What became of an object whose answer is FAULT, for the log."""

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects, also those that were just read; which ones there were."""

    def close(self) -> None:
        """Leave the store. Idempotent."""
