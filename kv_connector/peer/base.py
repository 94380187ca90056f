"""What a peer backend offers: links to other engines' ranks, short messages over them, and pushes of whole blocks.

    A (pushes)                                     B (is pushed to)
    connect(host, port)  ---- handshake ---->      both get Connected: identity and secret are equal, by the
                                                   handshake
    send(link, message)  ---- message ------>      Message(link, message)
                         <--- message -------      grant(link, number, block_ids), send(link, message)
    push(link, push)     ---- blocks ------->      Arrived(link, number, first, count, regions): every byte is there
    Pushed(number, ok)                             revoke(link, number)

Memory model: the pool is registered once, as regions of equal pieces, one a block. A push names blocks of both pools
and a run of regions, and moves of their pieces the KV heads that both ranks hold; it goes to positions of a grant, the
list of blocks that the receiver has set aside for it. Where `is_one_sided`, the pusher's own copies write into the
receiver's pool: after `revoke` they may still do so until the pusher has said that it stopped, or until `quiet_in` is 0
where the link was lost. Elsewhere the receiver copies, and nothing is written behind `revoke`.

Lifecycle: each push ends exactly once, in Pushed, also where the link is lost. A link is lost once, in Lost, and is
never used again; a new connection is another link.

Threading model: no threads of its own. One thread, the peer thread of a worker's process, makes every call except
`wake`, which any thread may make; all input and output happens in `poll`, and no other call blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import KVConnectorError
from ..transfer.cuda.driver import Copier
from .shards import Shard

if TYPE_CHECKING:
    from .wire.messages import WireMessage

VERSION = 5
"""Of the messages between peers; both sides must speak the same."""

Ids = NDArray[np.int64]


class PeerError(KVConnectorError):
    """A peer is incompatible, or broke the protocol: its link is closed, and nothing else fails."""


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """Block b's piece begins at `address + b * block_stride` and has `piece_bytes` bytes: `num_runs` runs of equal
    length, which begin `run_stride` bytes apart.

    `num_heads` is the number of this rank's KV heads in a piece, 0 where unknown: `head_bytes` of each head in turn,
    repeated to the end of the piece. A piece that every rank holds alike counts as one head.
    """

    address: int
    block_stride: int
    piece_bytes: int
    num_heads: int = 0
    head_bytes: int = 0
    num_runs: int = 1
    run_stride: int = 0

    def part(self, heads: range) -> PoolRegion:
        """The region of these heads alone; the piece must be one run."""
        if len(heads) == self.num_heads:
            return self
        stride = self.num_heads * self.head_bytes
        return replace(
            self,
            address=self.address + heads.start * self.head_bytes,
            piece_bytes=self.piece_bytes // self.num_heads * len(heads),
            num_heads=len(heads),
            num_runs=self.piece_bytes // stride,
            run_stride=stride,
        )


class Writer(Protocol):
    """Enqueues writes of blocks of this pool into one other pool (`transfer.paths.peer_writes.RemoteWriter`)."""

    def write(self, source_ids: Ids, target_ids: Ids, regions: range, may_write: Callable[[], bool]) -> bool:
        """Block `source_ids[i]` to the other pool's block `target_ids[i]`, in these regions; ids are in range.
        `may_write` is asked right before the copies; if it says no, nothing is enqueued, and the answer is False."""


class Marker(Protocol):
    """A point in a device's work, with the names of torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the work in front of it has completed; never blocks."""


class SlotCoder(Protocol):
    """Codes blocks of this pool into rows of host memory, and back, behind what the pool's stream holds
    (`transfer.paths.coded_slots`).

    A row has `row_bytes` bytes, whatever its content; the row of a block whose content does not fit is invalid.
    `locked` says that the memory is page-locked.
    """

    form: str
    """Name of the format of a row: two coders with the same name read each other's rows."""

    def row_bytes(self, regions: range) -> int:
        """Coded bytes of one block's pieces in these consecutive regions, at most the raw bytes rounded up to 16."""

    def encode(self, block_ids: Ids, regions: range, address: int, locked: bool) -> Callable[[], bool]:
        """Write rows behind one another from `address` on; the answer, once the copy has completed, is whether all of
        the blocks fit. Raises TransferError."""

    def decode(self, block_ids: Ids, regions: range, address: int, locked: bool) -> None:
        """The reverse. Rows may hold anything: nothing but these blocks is written. Raises TransferError, before
        anything is written, where a row says of itself that it does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerPool:
    """The device blocks that peers may be sent and may fill; valid until the transport is closed.

    `arrangement` says what their bytes are: see `CacheLayout`. `device` is -1 for the CPU's memory, else the index of a
    CUDA device; then `copy`, `writer` and `mark` are given: a copier, a maker of writers into a pool that is mapped
    here, and a maker of markers behind what was enqueued so far, all on `stream`, a stream of the driver's that is
    ours. `coder` makes the coder for slots of a number of bytes, with `peer.wire_form`. The thread that drives the
    transport calls `prepare_thread` first, so that it never invalidates a CUDA graph capture. `keeps` keeps the memory
    alive.
    """

    num_blocks: int
    regions: tuple[PoolRegion, ...]
    arrangement: str = ""
    device: int = -1
    copy: Copier | None = None
    writer: Callable[[Sequence[PoolRegion]], Writer] | None = None
    mark: Callable[[], Marker] | None = None
    coder: Callable[[int], SlotCoder] | None = None
    prepare_thread: Callable[[], None] | None = None
    stream: int = 0
    keeps: object = None

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes of one block in each region."""
        return tuple(region.piece_bytes for region in self.regions)

    def bytes_of(self, regions: range) -> int:
        """Bytes of one block in these regions."""
        return sum(self.regions[index].piece_bytes for index in regions)


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Blocks `source_ids` of this pool to `target_ids` of the peer's, which are positions `first` and following of the
    peer's grant `grant`; in each of `regions`, of the heads that both hold. `number` is chosen by the caller, and
    unique among pushes in progress."""

    number: int
    grant: int
    first: int
    source_ids: Ids
    target_ids: Ids
    regions: range


@dataclass(frozen=True, slots=True)
class Connected:
    """A link is open. `engine_id` names the peer's engine start, `num_blocks` is the size of its pool, `shard` the part
    of its engine's cache that it holds."""

    link: int
    engine_id: str
    num_blocks: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the peer; every field has been checked against the limits of its kind."""

    link: int
    message: WireMessage


@dataclass(frozen=True, slots=True)
class Arrived:
    """Positions `first` to `first + count` of a grant hold the peer's bytes in each of `regions`."""

    link: int
    grant: int
    first: int
    count: int
    regions: range


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push has ended; with `ok` its bytes have arrived or will before anything that is sent from now on."""

    number: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A link is gone, or was never made."""

    link: int
    reason: str


PeerEvent = Connected | Message | Arrived | Pushed | Lost


@dataclass(slots=True)
class PeerCounters:
    """Sums since the transport was opened."""

    sent_bytes: int = 0
    received_bytes: int = 0
    slot_bytes: int = 0  # of what was sent through host memory, as it lay there: fewer where it was coded
    refused_links: int = 0  # of peers that failed the handshake
    lost_links: int = 0  # that were open
    link_faults: int = 0  # errors of this side that cost a link


class PeerTransport(Protocol):
    """See the module for the order of calls."""

    is_one_sided: bool
    counters: PeerCounters

    @property
    def port(self) -> int:
        """The TCP port at which peers reach this side."""

    def connect(self, host: str, port: int) -> int:
        """Begin to connect; returns the link's number. Connected or Lost follows from `poll`."""

    def send(self, link: int, message: WireMessage) -> None:
        """Queue a message, delivered in order; does nothing on a link that is lost.

        Raises PeerError where the message is over the bound.
        """

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """Let the peer fill these blocks, position by position. `number` is unique among a link's open grants."""

    def revoke(self, link: int, number: int) -> None:
        """End a grant; see `is_one_sided` for writes that may still land."""

    def push(self, link: int, push: Push) -> None:
        """Begin to push. Ids must lie in the pools: an assertion here, and refused by the peer."""

    def cancel(self, number: int) -> None:
        """Skip the parts of a push that have not begun; Pushed still follows, once none of it is in flight."""

    def drop(self, link: int, reason: str) -> None:
        """Close a link; Lost comes with the reason."""

    def quiet_in(self, link: int) -> float:
        """Seconds until no write of a lost link's peer can land here any more; 0 from then on, which is reached after a
        bounded number of calls, however slow this side runs. It may shrink, when the peer's process ends, and grow,
        when this side was paused. May be called after `close`; call it at least twice a second while waiting."""

    def poll(self, timeout: float) -> list[PeerEvent]:
        """Do all input and output, and return events; blocks up to `timeout` seconds while there are none."""

    def wake(self) -> None:
        """Make a blocked `poll` return; from any thread."""

    def close(self) -> None:
        """Close every link and free everything. Idempotent."""
