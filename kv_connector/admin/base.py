"""Types that cross between the endpoint's server threads and the engine's thread, which owns the halves.

    server thread                              engine's thread
    a request is read and checked
    Inbox.ask(command) ----------------------> Inbox.serve(engine)     between two of its steps
    it waits, for so long and no longer          command.run(engine)
    answer, or Refusal <---------------------- what came of it

A command is frozen, picklable data: where every rank schedules for itself each of them runs it at the same point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import KVConnectorError
from ..types import BlockHash

if TYPE_CHECKING:
    from ..scheduler import SchedulerHalf
    from .pins import PinBook

Answer = Mapping[str, Any]
"""A JSON object."""


class Refusal(KVConnectorError):
    """An error answer to a call: an HTTP status, and a sentence with the value, the limit and the fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class SteeredEngine:
    """What commands work on; the engine's thread owns it. `host_memory`: bytes that the engine was started with."""

    half: SchedulerHalf
    host_memory: int
    pins: PinBook


@dataclass(frozen=True, slots=True)
class Prefix:
    """Hashes of a prompt's blocks, from its first one on. `are_given`: an operator says so, not the engine."""

    block_hashes: tuple[BlockHash, ...]
    are_given: bool


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant of a prefix: by this name, or without one by the salt of its requests."""

    tenant: str | None
    cache_salt: str

    def name(self, half: SchedulerHalf) -> str:
        """The tenant's. Raises Refusal where none of this name is configured."""
        if self.tenant is None:
            return half.tenant_of(self.cache_salt)
        try:
            return half.tenant_named(self.tenant)
        except KVConnectorError as error:
            raise Refusal(404, str(error)) from error


class Command(Protocol):
    """A command that is carried out between two steps. It takes about as long as a call of the engine does, and never
    blocks."""

    def run(self, engine: SteeredEngine) -> Answer:
        """Carry it out; called from the engine's thread. Raises KVConnectorError, with nothing changed, where that is
        impossible."""


class Prefixes(Protocol):
    """Computes block hashes as the engine does. Called from server threads: it touches no state of the engine."""

    def token_ids(self, text: str) -> Sequence[int]:
        """Token ids of this prompt as the engine reads it. Raises Refusal where it has no tokenizer."""

    def hashes(self, token_ids: Sequence[int], cache_salt: str) -> list[BlockHash]:
        """Hashes of every full block, in order, of a request with these tokens and this salt ("" for none)."""
