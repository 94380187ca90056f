"""NIXL, direct: one agent for each rank, which writes into the peer's pool over whatever UCX finds.

The whole pool is registered once, and a descriptor list over all of its pieces is prepared once on either side, so that
a push is two lists of indices. The notification that NIXL delivers behind the last byte is what tells the receiver; who
may be written to, and everything else that is said, goes over the side channel. Nothing here unpickles.

A write that has not landed within the longest transfer is given up, which costs its link, and so is one a while after
its link was lost. NIXL cannot call it back: over TCP it may go on for as long as a window is shut, out of blocks that
hold something else by then. That harms nobody: the notification leaves when this side finds the write done
(`check_xfer_state`), and what is given up is never looked at again. So the receiver is never told of it, and its blocks
rest behind the fence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..base import Ids, PeerError, PeerPool, Push, Pushed
from ..wire.fields import check_int, check_text
from ..wire.messages import MAX_MESSAGE, Written, decode, encode
from ..wire.peer_info import PeerInfo
from .nixl_agent import DROP_SECONDS, LONGEST_TRANSFER_SECONDS, add_remote, encode_metadata, foreign
from .one_sided import OneSided
from .over_channel import Endpoint

_POLL_SECONDS = 0.0005
_MOST_NOTE_BYTES = 1024
logger = logging.getLogger("kv_connector.peer")


@dataclass(slots=True)
class _Remote:
    """The agent behind a link, and the list of its pieces."""

    name: str
    pieces: Any
    num_blocks: int


@dataclass(slots=True)
class _Writing:
    """A push under way; `due` is when it is given up."""

    link: int
    push: Push
    handle: Any
    due: float
    is_lost: bool = False  # its link


class NixlTransport(OneSided):
    """See `PeerTransport`."""

    transport = "nixl"
    poll_seconds = _POLL_SECONDS
    longest_transfer_seconds = LONGEST_TRANSFER_SECONDS

    def __init__(self, agent: Any, pool: PeerPool, endpoint: Endpoint) -> None:
        """Raises PeerError where NIXL cannot register the pool, and ConfigError where the address cannot be used."""
        self._pool = pool  # what registers it comes before the links
        self._agent = agent
        self._name = str(agent.name)
        self._memory = "DRAM" if pool.device < 0 else "VRAM"
        self._registered = self._register()
        own = [(region.address, region.block_stride) for region in pool.regions]
        # NIXL joins entries that are neighbours in memory where they follow one another.
        self._by_block = all(r.address + r.piece_bytes == then.address for r, then in pairwise(pool.regions))
        self._pieces = self._prepare("NIXL_INIT_AGENT", own, pool.num_blocks, pool.device)
        metadata = encode_metadata(self._agent.get_agent_metadata())
        extra = {"agent": self._name, "metadata": metadata, "regions": own, "device": pool.device}
        super().__init__(pool, extra, endpoint)
        self._remotes: dict[int, _Remote] = {}
        self._writing: list[_Writing] = []

    def _post(self, link: int, push: Push, may_write: Callable[[], bool]) -> bool:
        remote, ids, targets = self._remotes[link], push.source_ids, push.target_ids
        assert 0 <= targets.min() <= targets.max() < remote.num_blocks, f"{targets} of {remote.num_blocks}"
        regions = push.regions
        told = Written(push.grant, push.first, len(ids), regions.start, regions.stop)
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                self._pieces,
                _indices(ids, regions, self._pool.num_blocks, self._by_block),
                remote.pieces,
                _indices(targets, regions, remote.num_blocks, self._by_block),
                encode(told),
            )
            if not may_write():
                self._agent.release_xfer_handle(handle)
                return False
            self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001 - NIXL has exceptions of its own: the seam where they become a lost link
            self._events.append(Pushed(push.number, False))
            self.drop(link, f"NIXL cannot write to it: {type(error).__name__}: {error}")
            return True
        self._writing.append(_Writing(link, push, handle, self._clock.monotonic() + self.longest_transfer_seconds))
        return True

    def _release(self) -> None:
        for link in list(self._remotes):
            self._forget(link)
        try:
            self._agent.release_dlist_handle(self._pieces)
            for registered in self._registered:
                self._agent.deregister_memory(registered)
        except Exception as error:  # noqa: BLE001 - as above; nothing is left to do about it
            logger.warning("NIXL did not deregister its memory: %s: %s", type(error).__name__, error)

    def _register(self) -> list[Any]:
        """Register every byte of the pool once; regions may be interleaved.

        Spans that only touch stay apart: two allocations of a device may be neighbours, and have an IPC handle each.
        """
        spans: list[list[int]] = []
        last = self._pool.num_blocks - 1
        for region in sorted(self._pool.regions, key=lambda region: region.address):
            stop = region.address + last * region.block_stride + region.piece_bytes
            if spans and region.address < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], stop)
            else:
                spans.append([region.address, stop])
        device = max(0, self._pool.device)
        registered: list[Any] = []
        try:
            for start, stop in spans:
                registered.append(self._agent.register_memory([(start, stop - start, device, "")], self._memory))
        except Exception as error:
            for entry in registered:
                self._agent.deregister_memory(entry)
            raise PeerError(
                f"NIXL cannot register this engine's {self._memory}: {type(error).__name__}: {error}"
            ) from error
        return registered

    def _prepare(self, agent: str, regions: Sequence[tuple[int, int]], num_blocks: int, device: int) -> Any:
        """The list of all pieces: block b of region r is entry r * num_blocks + b."""
        rows = np.empty((len(regions), num_blocks, 3), dtype=np.uint64)
        blocks = np.arange(num_blocks, dtype=np.uint64)
        for row, (address, stride), piece in zip(rows, regions, self._pool.pieces, strict=True):
            row[:, 0] = np.uint64(address) + blocks * np.uint64(stride)
            row[:, 1] = piece
            row[:, 2] = max(0, device)
        return self._agent.prep_xfer_dlist(agent, rows.reshape(-1, 3), "DRAM" if device < 0 else "VRAM")

    def _is_busy(self) -> bool:
        return bool(self._writing or self._num_granted)

    def _advance(self) -> None:
        super()._advance()
        if self._num_granted or self._remotes:
            self._take_notifications()

    def _lost(self, link: int) -> None:
        super()._lost(link)
        self._forget(link)

    def _meet(self, link: int, info: PeerInfo) -> None:
        super()._meet(link, info)
        name, regions = check_text(info.extra, "agent"), info.extra.get("regions")
        if not isinstance(regions, list) or len(regions) != len(self._pool.regions):
            raise PeerError(f"its pool is not {len(self._pool.regions)} regions")
        if name == self._name:
            raise PeerError("it is this engine itself: kv_transfer_params name the wrong host or port")
        places = [_place(region) for region in regions]
        device = check_int(info.extra, "device", least=-1, most=1024)
        if add_remote(self._agent, check_text(info.extra, "metadata", MAX_MESSAGE)) != name:
            raise PeerError("its agent has another name than it says")
        with foreign("NIXL does not accept it"):
            pieces = self._prepare(name, places, info.num_blocks, device)
        self._remotes[link] = _Remote(name, pieces, info.num_blocks)

    def _forget(self, link: int) -> None:
        remote = self._remotes.pop(link, None)
        due = self._clock.monotonic() + DROP_SECONDS
        for writing in self._writing:
            if writing.link == link:
                writing.due, writing.is_lost = min(writing.due, due), True
        if remote is None:
            return
        try:
            self._agent.release_dlist_handle(remote.pieces)
            if remote.name not in {other.name for other in self._remotes.values()}:
                self._agent.remove_remote_agent(remote.name)
        except Exception as error:  # noqa: BLE001 - it is gone either way
            logger.debug("NIXL had forgotten %s: %s", remote.name, error)

    def _finish_writing(self) -> bool:
        left, now = [], self._clock.monotonic()
        for writing in self._writing:
            try:
                state = self._agent.check_xfer_state(writing.handle)
            except Exception as error:  # noqa: BLE001 - the peer is gone, or the transport failed
                state = "ERR"
                self.drop(writing.link, f"NIXL failed to write to it: {type(error).__name__}")
            if state == "PROC" and now < writing.due:
                left.append(writing)
                continue
            if state != "DONE":  # some of it may land yet: over this link nothing is told to be over
                reason = f"has not arrived within {self.longest_transfer_seconds:g} s" if state == "PROC" else "failed"
                self.drop(writing.link, f"what NIXL writes to it {reason}")
            is_ok = state == "DONE" and not writing.is_lost
            if is_ok:
                self.counters.sent_bytes += len(writing.push.source_ids) * self._pool.bytes_of(writing.push.regions)
            self._events.append(Pushed(writing.push.number, is_ok))
            try:
                self._agent.release_xfer_handle(writing.handle)
            except Exception as error:  # noqa: BLE001 - as above
                logger.debug("NIXL did not release a transfer: %s", error)
        self._writing = left
        return bool(left)

    def _take_notifications(self) -> None:
        """They name the agent, which may have a link from either side: the one with the grant is meant."""
        for agent, notes in self._agent.get_new_notifs().items():
            for link in [link for link, remote in self._remotes.items() if remote.name == agent]:
                for note in notes:
                    if not self._guarded(link, self._hear_note, link, note):
                        break

    def _hear_note(self, link: int, note: bytes) -> None:
        told = decode(note) if len(note) <= _MOST_NOTE_BYTES else None
        if not isinstance(told, Written):
            raise PeerError("a notification does not say what was written")
        self._hear_written(link, told)


def _indices(block_ids: Ids, regions: range, num_blocks: int, by_block: bool) -> Any:
    """Entries of the list of pieces, block by block or region by region."""
    starts = np.arange(regions.start, regions.stop, dtype=np.int64) * num_blocks
    entries = starts[:, None] + block_ids[None, :]
    return (entries.T if by_block else entries).reshape(-1).astype(np.int32)


def _place(region: object) -> tuple[int, int]:
    if not isinstance(region, list) or len(region) != 2 or not all(type(v) is int and 0 <= v < 1 << 63 for v in region):
        raise PeerError("a region of its pool is not an address and a stride")
    return region[0], region[1]
