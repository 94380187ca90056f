"""What is said over a link: one frozen class for each kind of message, one `encode` and one `decode` for all of them.

On the wire a message is a JSON object in UTF-8, with its kind under "t"; bytes are in hexadecimal. Every field says in
its type how it is checked, so whoever holds a message holds values within these limits, whoever sent it. What only the
reader can know (pools, grants, slots) it checks itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, get_type_hints

from ..base import Arrived, PeerError
from .fields import check_hex, check_int, check_numbers, check_text
from .peer_info import PeerInfo

MAX_MESSAGE = 1 << 20
"""Bytes of a message."""
MAX_REASON = 4096
"""Characters."""
HASH_BYTES = 32

Number = Annotated[int, check_int]
Address = Annotated[int, partial(check_int, most=1 << 63)]
Text = Annotated[str, check_text]
Reason = Annotated[str, partial(check_text, most=MAX_REASON)]
Metadata = Annotated[str, partial(check_text, most=MAX_MESSAGE)]
Hash = Annotated[bytes, partial(check_hex, num_bytes=HASH_BYTES)]
BlockIds = Annotated[tuple[int, ...], check_numbers]
Info = Annotated[PeerInfo, lambda body, name: PeerInfo.decode(body.get(name))]


# The handshake (`handshake`).


@dataclass(frozen=True, slots=True)
class Hello:
    """The caller's first message."""

    version: Number
    nonce: Hash


@dataclass(frozen=True, slots=True)
class Challenge:
    """The listener answers, and proves that it knows the secret."""

    version: Number
    nonce: Hash
    proof: Hash


@dataclass(frozen=True, slots=True)
class Introduction:
    """The peer info of a side."""

    info: Info


@dataclass(frozen=True, slots=True)
class Denied:
    """The listener refuses the caller after its introduction."""

    reason: Reason


# KV transfers (`protocol`).


@dataclass(frozen=True, slots=True)
class Want:
    """Positions [first, stop) of a block group of a prompt are wanted in these blocks of the asker's pool, which it has
    granted under a number. `name` is that of the last; `engine` the producer's start, empty where that is not known."""

    transfer: Text
    engine: Text
    grant: Number
    first: Number
    stop: Number
    name: Hash
    blocks: BlockIds
    group: Number = 0

    def __post_init__(self) -> None:
        if not self.blocks or len(self.blocks) != self.stop - self.first:
            raise PeerError(f"it wants blocks {self.first} to {self.stop} and names {len(self.blocks)}")


@dataclass(frozen=True, slots=True)
class Nothing:
    """Nothing is wanted of a block group of a prompt; `name` is that of its last whole block."""

    transfer: Text
    engine: Text
    name: Hash
    group: Number = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """A grant is to be filled no more."""

    grant: Number


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer to `Stop`, once nothing writes there any more."""

    grant: Number


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a want that will not be served."""

    grant: Number
    reason: Reason


# Carriers (`carriers`).


@dataclass(frozen=True, slots=True)
class AskLease:
    """The sender asks to be allowed to write; `number` is its count of such questions."""

    number: Number


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer: it may, for so long from when it asked (`carriers.leases`)."""

    number: Number
    milliseconds: Number


@dataclass(frozen=True, slots=True)
class Filled:
    """Positions `first` to `first + count` of a grant, in regions [start, stop)."""

    grant: Number
    first: Number
    count: Number
    start: Number
    stop: Number

    def arrived(self, link: int, num_regions: int) -> Arrived:
        """As an event of a pool with so many regions. Raises PeerError where it has no such regions."""
        if not self.start < self.stop <= num_regions or not self.count:
            raise PeerError(f"it filled {self.count} blocks in regions {self.start} to {self.stop} of {num_regions}")
        return Arrived(link, self.grant, self.first, self.count, range(self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Written(Filled):
    """The sender's own copies have filled them."""


@dataclass(frozen=True, slots=True)
class SlotFilled(Filled):
    """Their bytes are in a slot of the sender's ring."""

    slot: Number


@dataclass(frozen=True, slots=True)
class CodedSlotFilled(SlotFilled):
    """They are coded there. Only to who has said that it decodes such slots: others do not know this message."""


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """A slot has been emptied."""

    slot: Number


@dataclass(frozen=True, slots=True)
class RingOffered:
    """The sender has slots; `token` is how their memory is found, where it is shared."""

    slots: Number
    slot_bytes: Number
    token: Text


@dataclass(frozen=True, slots=True)
class RingMapped:
    """The receiver has the other end of a ring, at `address` with the agent's `metadata` where it is another memory."""

    address: Address
    metadata: Metadata


_KINDS: dict[str, type[Any]] = {
    "hello": Hello,
    "challenge": Challenge,
    "introduction": Introduction,
    "denied": Denied,
    "want": Want,
    "nothing": Nothing,
    "stop": Stop,
    "stopped": Stopped,
    "refused": Refused,
    "ask_lease": AskLease,
    "lease": Lease,
    "written": Written,
    "slot_filled": SlotFilled,
    "coded_slot_filled": CodedSlotFilled,
    "slot_freed": SlotFreed,
    "ring_offered": RingOffered,
    "ring_mapped": RingMapped,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
WireMessage = (
    Hello
    | Challenge
    | Introduction
    | Denied
    | Want
    | Nothing
    | Stop
    | Stopped
    | Refused
    | AskLease
    | Lease
    | Written
    | SlotFilled
    | CodedSlotFilled
    | SlotFreed
    | RingOffered
    | RingMapped
)
_Check = Callable[[Mapping[str, Any], str], Any]


def _checks_of(kind: type[Any]) -> dict[str, _Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {part.name: hints[part.name].__metadata__[0] for part in fields(kind)}


_CHECKS: dict[str, dict[str, _Check]] = {name: _checks_of(kind) for name, kind in _KINDS.items()}


def encode(message: WireMessage) -> bytes:
    """As on the wire. Raises PeerError over the bound."""
    body = {part.name: _plain(getattr(message, part.name)) for part in fields(message)}
    text = json.dumps({"t": _NAMES[type(message)]} | body, separators=(",", ":")).encode()
    if len(text) > MAX_MESSAGE:
        raise PeerError(f"a message of {len(text)} bytes is over the bound of {MAX_MESSAGE}")
    return text


def decode(text: bytes) -> WireMessage:
    """The reverse of `encode`. Raises PeerError for anything that no `encode` writes."""
    try:
        body = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a message is not JSON: {type(error).__name__}") from None
    kind = body.get("t") if isinstance(body, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PeerError('a message is not an object with a known "t"')
    checks = _CHECKS[kind]
    if body.keys() - checks.keys() != {"t"}:
        raise PeerError(f"a message {kind!r} has fields that it should not have")
    message: WireMessage = _KINDS[kind](**{name: check(body, name) for name, check in checks.items()})
    return message


def _plain(value: object) -> object:
    if isinstance(value, PeerInfo):
        return value.encode()
    return value.hex() if isinstance(value, bytes) else value
