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
    """Why a call is answered with an error: a status of HTTP, and the value, the limit and the fix in a sentence."""

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
    """Whose a prefix is: the tenant's of this name, and without one that of requests with this salt."""

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
    """One thing to do between two steps. It takes about as long as a call of the engine does, and waits for nothing."""

    def run(self, engine: SteeredEngine) -> Answer:
        """Called from the engine's thread. Raises KVConnectorError, and has changed nothing, where it cannot be."""


class Prefixes(Protocol):
    """How the engine names what it caches. Called from server threads: nothing of the engine is touched."""

    def token_ids(self, text: str) -> Sequence[int]:
        """As the engine reads a prompt of this text. Raises Refusal where it has no tokenizer."""

    def hashes(self, token_ids: Sequence[int], cache_salt: str) -> list[BlockHash]:
        """Of every full block, in order, as a request with these tokens and this salt ("" for none) has them."""
