"""What lies below the transports: slots that two processes have mapped, NIXL's agent, a CUDA stream and its handles.

A one-sided write lands part by part, each at a time of its own, out of whatever the source holds by then, at the latest
one longest transfer behind its post. NIXL's waits while its target stands still, as over TCP, and that time does not
count. A process that dies takes the source along: what is under way lands soon from what was read, or not at all.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kv_connector.peer.base import Ids, Marker, PeerError, PeerPool, PoolRegion, Push
from kv_connector.peer.carriers.cuda_ipc import CudaIpcTransport, Driver
from kv_connector.peer.carriers.leases import GONE_SECONDS
from kv_connector.peer.carriers.nixl_agent import LONGEST_TRANSFER_SECONDS
from kv_connector.peer.carriers.staged import ring
from kv_connector.peer.wire.messages import RingMapped, RingOffered

from .clock import Event

if TYPE_CHECKING:
    from .network import End, Network
    from .peers import SimulatedPeers

_MOST_PARTS = 3
_LOOK_SECONDS = 0.1


class SharedSlots:
    """See `carriers.Carrier`: memory that both sides map, without the Unix socket over which it is handed over."""

    extra: Mapping[str, Any] = {}
    longest_transfer_seconds = 0.0
    _rings: ClassVar[dict[str, ring.Ring]] = {}  # of all processes, by token

    def __init__(self, network: Network) -> None:
        self._network = network
        self._ways: list[_Way] = []

    def start(self, watch: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        """See `Carrier.start`."""

    def offer(self, peer: Mapping[str, Any], num_slots: int, slot_bytes: int) -> tuple[_Way, str]:
        memory = ring.Ring(ring.create(num_slots, slot_bytes), num_slots, slot_bytes)
        token = str(self._network.rng.getrandbits(62))
        self._rings[token] = memory
        return self._way(memory, token), token

    def accept(self, offered: RingOffered) -> tuple[_Way, RingMapped]:
        memory = self._rings.get(offered.token)
        if memory is None:
            raise PeerError("shared memory was told of and never sent")
        return self._way(ring.Ring(os.dup(memory.fd), offered.slots, offered.slot_bytes), None), RingMapped(0, "")

    @property
    def left_behind(self) -> str:
        """What a close did not release."""
        return "" if all(way.is_closed for way in self._ways) else "slots"

    def abandon(self) -> None:
        """Its process is gone, and its mappings."""
        for way in self._ways:
            way.close(lambda: True)

    def close(self) -> None:
        """See `Carrier.close`."""

    def forget(self, token: str | None) -> None:
        if token is not None:
            self._rings.pop(token, None)

    def _way(self, memory: ring.Ring, token: str | None) -> _Way:
        self._ways = [way for way in self._ways if not way.is_closed]
        self._ways.append(_Way(self, memory, token))
        return self._ways[-1]


class _Way:
    """See `carriers.Outgoing` and `Incoming`."""

    def __init__(self, slots: SharedSlots, memory: ring.Ring, token: str | None) -> None:
        self.ring = memory
        self.is_closed = False
        self._slots = slots
        self._token = token

    def accepted(self, mapped: RingMapped) -> None:
        pass

    def carry(self, slot: int, num_bytes: int) -> Marker | None:
        return None

    def close(self, is_quiet: Callable[[], bool]) -> None:
        self.is_closed = True
        self._slots.forget(self._token)


@dataclass(eq=False)
class Write:
    """A one-sided write under way, of pieces from `sources` to `targets`, of `sizes` bytes each, to blocks that the
    consumer has granted under a number."""

    source: SimulatedPeers
    target: SimulatedPeers
    start: int  # of the target
    push: Push
    there: End | None  # of the link, on the consumer's side
    sources: Ids
    targets: Ids
    sizes: Ids
    then: Callable[[bool], None]
    until: float  # it lands before that or not at all
    note: bytes = b""
    is_over: bool = False
    is_failed: bool = False
    data: list[bytes] | None = None  # what was read before the source went
    events: list[Event] = field(default_factory=list)

    def land(self, part: Ids) -> None:
        """These pieces land now, out of what the source holds."""
        network = self.target.network
        if self.is_failed or not self.target.is_alive or self.target.start != self.start:
            self.is_failed = True
            return
        if network.time.now() > self.until:
            self.is_failed = True
            return
        assert self.target.accepts(self.start, self.push.grant), (
            f"{self.target.name}: a write lands behind the end of the job that had asked for it"
        )
        network.num_writes_behind_a_link += self.there is not None and not self.there.is_there
        for i in part.tolist():
            source = self.data[i] if self.data is not None else int(self.sources[i])
            ctypes.memmove(int(self.targets[i]), source, int(self.sizes[i]))
        self.target.on_write(self.push.target_ids)

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.then(not self.is_failed)

    def abandon(self) -> None:
        """The source's process is gone."""
        network = self.target.network
        self.then = lambda ok: None
        if self.is_over:
            return
        self.data = [ctypes.string_at(int(a), int(n)) for a, n in zip(self.sources, self.sizes, strict=True)]
        self.until = min(self.until, network.time.now() + GONE_SECONDS)
        for event in self.events:
            if network.rng.random() < 0.5:
                event.cancel()


class SimulatedAgent:
    """NIXL's agent of one process, with the calls that `NixlTransport` makes. Writes overtake one another, and so do
    their notifications, each of which leaves when this side finds its write done."""

    def __init__(self, process: SimulatedPeers, name: str) -> None:
        self.name = f"agent of {name}"
        self.push: tuple[Push, End | None] | None = None
        self._process = process
        self._network = process.network
        self._notes: dict[str, list[bytes]] = {}
        self._known: dict[str, tuple[SimulatedPeers, int]] = {}
        self._handles: set[int] = set()
        self._next = 0
        self._writes: list[Write] = []
        self._states: dict[int, str] = {}
        self._made: dict[int, Write] = {}
        self._untold: dict[int, Write] = {}

    @property
    def left_behind(self) -> str:
        """What a close did not release, beside writes that it did not wait for."""
        return "" if all(handle in self._states for handle in self._handles) else "registered memory"

    def abandon(self) -> None:
        for write in self._writes:
            write.abandon()

    def register_memory(self, entries: object, memory: str) -> int:
        return self._handle()

    def deregister_memory(self, handle: int) -> None:
        self._handles.remove(handle)

    def prep_xfer_dlist(self, agent: str, rows: Any, memory: str) -> tuple[int, str, Any]:
        return self._handle(), agent, rows.astype(np.int64)

    def release_dlist_handle(self, pieces: tuple[int, str, Any]) -> None:
        self._handles.remove(pieces[0])

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, self._network.processes.index(self._process), self._process.start]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, index, start = json.loads(metadata)
        process: Any = self._network.processes[index]
        self._known[name] = process, start
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        del self._known[name]

    def make_prepped_xfer(self, kind: str, here: Any, mine: Any, there: Any, theirs: Any, note: bytes) -> int:
        assert self.push is not None
        push, there_end = self.push
        target, start = self._known[there[1]]
        handle = self._handle()
        self._states[handle] = "PROC"
        own, other = here[2][mine], there[2][theirs]
        write = Write(
            self._process,
            target,
            start,
            push,
            there_end,
            own[:, 0],
            other[:, 0],
            own[:, 1],
            lambda ok: self._over(handle, ok),
            self._network.time.now() + LONGEST_TRANSFER_SECONDS,
            note,
        )
        self._made[handle] = write
        return handle

    def transfer(self, handle: int) -> None:
        write, network = self._made.pop(handle), self._network
        self._writes = [entry for entry in self._writes if not entry.is_over]
        self._writes.append(write)
        self._untold[handle] = write
        order = network.rng.sample(range(len(write.sizes)), len(write.sizes))
        parts = [part for part in np.array_split(np.array(order), network.rng.randint(1, _MOST_PARTS)) if len(part)]
        left = set(range(len(parts)))
        target = write.target

        def land(index: int) -> None:
            if target.is_alive and target.is_frozen:  # its own processor takes in what comes
                write.until += _LOOK_SECONDS
                again = network.time.call_after(_LOOK_SECONDS, lambda: land(index), "a write to who stands still")
                write.events.append(again)
                return
            if network.is_cut(self._process, target):  # it is tried again until it comes through, or NIXL gives up
                if network.time.now() < given_up:
                    write.events.append(network.time.call_after(0.1 * network.slow, lambda: land(index), "a write"))
                    return
                write.is_failed = True
            write.land(parts[index])
            left.discard(index)
            if left:
                return
            write.end()

        given_up = network.time.now() + network.rng.uniform(1, LONGEST_TRANSFER_SECONDS)
        for index in range(len(parts)):
            write.events.append(network.time.call_after(network.write_delay(), lambda i=index: land(i), "a write"))

    def check_xfer_state(self, handle: int) -> str:
        if self._states[handle] == "DONE" and handle in self._untold:
            self._tell(self._untold.pop(handle))
        return self._states[handle]

    def release_xfer_handle(self, handle: int) -> None:
        self._made.pop(handle, None)
        self._untold.pop(handle, None)
        self._handles.remove(handle)
        del self._states[handle]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notes, self._notes = self._notes, {}
        return notes

    def _tell(self, write: Write) -> None:
        network, target = self._network, write.target
        if target.is_alive and target.start == write.start:
            agent: Any = target._below
            network.time.call_after(network.delay(), lambda: agent._hear(self.name, write.note), "a notification")

    def _hear(self, name: str, note: bytes) -> None:
        self._notes.setdefault(name, []).append(note)
        self._process.wake()

    def _over(self, handle: int, ok: bool) -> None:
        if handle in self._states:
            self._states[handle] = "DONE" if ok else "ERR"
            self._process.wake()

    def _handle(self) -> int:
        self._next += 1
        self._handles.add(self._next)
        return self._next


class Stream:
    """A device's stream, on which this process's copies into other pools run one behind the other."""

    def __init__(self, process: SimulatedPeers) -> None:
        self.push: tuple[Push, End | None] | None = None
        self._process = process
        self._network = process.network
        self.driver: SimulatedDriver | None = None
        self._queue: list[Write] = []
        self._num_enqueued = 0
        self._num_done = 0

    @property
    def left_behind(self) -> str:
        """What a close did not release; memory that is still written to stays mapped."""
        return "mapped memory" if not self._queue and self.driver is not None and self.driver.num_mapped else ""

    def abandon(self) -> None:
        """The context is gone: what runs may land, and nothing behind it."""
        for write in self._queue[:1]:
            write.abandon()
        del self._queue[1:]

    def mark(self) -> Marker:
        return _Mark(self, self._num_enqueued)

    def writer(self, regions: Sequence[PoolRegion]) -> _StreamWriter:
        return _StreamWriter(self, regions)

    def enqueue(self, write: Write) -> None:
        self._num_enqueued += 1
        self._queue.append(write)
        if len(self._queue) == 1:
            self._begin()

    @property
    def num_done(self) -> int:
        return self._num_done

    @property
    def process(self) -> SimulatedPeers:
        return self._process

    def _begin(self) -> None:
        write, rng = self._queue[0], self._network.rng
        parts = np.array_split(np.arange(len(write.sizes)), rng.randint(1, _MOST_PARTS))

        def land(index: int) -> None:
            write.land(parts[index])
            if index + 1 < len(parts):
                go_on(index + 1)
                return
            write.end()
            self._num_done += 1
            if self._queue and self._queue[0] is write:
                del self._queue[0]
            self._process.wake()
            if self._queue:
                self._begin()

        def go_on(index: int) -> None:
            # A device that is slow still ends what it was given within the longest transfer.
            seconds = min(self._network.write_delay(), max(0.0, write.until - self._network.time.now()))
            write.events = [self._network.time.call_after(seconds, lambda: land(index), "a copy")]

        go_on(0)


@dataclass(frozen=True)
class _Mark:
    stream: Stream
    number: int

    def query(self) -> bool:
        return self.stream.num_done >= self.number


class _StreamWriter:
    """See `peer.base.Writer`."""

    def __init__(self, stream: Stream, regions: Sequence[PoolRegion]) -> None:
        self._stream = stream
        self._regions = regions
        self._target, self._start = Allocations.of(stream.process.network).owner(regions[0].address)

    def write(self, source_ids: Ids, target_ids: Ids, regions: range, may_write: Callable[[], bool]) -> bool:
        process = self._stream.process
        if not may_write():
            return False
        assert self._stream.push is not None
        push, there = self._stream.push
        own = process._transport._pool.regions
        sources = [own[r].address + source_ids * own[r].block_stride for r in regions]
        targets = [self._regions[r].address + target_ids * self._regions[r].block_stride for r in regions]
        sizes = np.repeat([own[r].piece_bytes for r in regions], len(source_ids))
        write = Write(
            process,
            self._target,
            self._start,
            push,
            there,
            np.concatenate(sources),
            np.concatenate(targets),
            sizes,
            lambda ok: None,
            process.network.time.now() + CudaIpcTransport.longest_transfer_seconds,
        )
        self._stream.enqueue(write)
        return True


class Allocations:
    """Device memory of all processes, by the handle under which others map it."""

    def __init__(self) -> None:
        self._entries: list[tuple[SimulatedPeers, int, int, int]] = []  # owner, start, address and bytes

    @classmethod
    def of(cls, network: Network) -> Allocations:
        """A network's."""
        found = getattr(network, "allocations", None)
        if found is None:
            found = network.allocations = cls()  # type: ignore[attr-defined]
        return found

    def export(self, process: SimulatedPeers, address: int, size: int) -> str:
        entry = process, process.start, address, size
        if entry not in self._entries:
            self._entries.append(entry)
        return f"{self._entries.index(entry):0128x}"

    def open(self, handle: str) -> int:
        process, start, address, _ = self._entries[int(handle, 16)]
        if not process.is_alive or process.start != start:
            raise PeerError("cuIpcOpenMemHandle failed with CUDA error 201: invalid device context")
        return address

    def owner(self, address: int) -> tuple[SimulatedPeers, int]:
        return next((process, start) for process, start, own, _ in reversed(self._entries) if own == address)

    def size(self, address: int) -> int:
        return next(size for _, _, own, size in reversed(self._entries) if own == address)


class SimulatedDriver(Driver):
    """The driver's IPC calls: what is mapped has the address that it has."""

    def __init__(self, allocations: Allocations, process: SimulatedPeers, pool: PeerPool) -> None:
        self._allocations = allocations
        self._process = process
        self._sizes = {r.address: (pool.num_blocks - 1) * r.block_stride + r.piece_bytes for r in pool.regions}
        self.num_mapped = 0

    def use(self) -> None:
        pass

    def export(self, address: int) -> tuple[str, int]:
        return self._allocations.export(self._process, address, self._sizes[address]), 0

    def open(self, handle: str) -> int:
        address = self._allocations.open(handle)
        self.num_mapped += 1
        return address

    def size_of(self, address: int) -> int:
        return self._allocations.size(address)

    def close(self, address: int) -> None:
        self.num_mapped -= 1
        assert self.num_mapped >= 0, "memory is unmapped twice"
