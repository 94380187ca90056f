"""The same-host backend for pools on CUDA devices: the pusher's own copies write into the other process's pool.

Each side tells the CUDA IPC handles of the allocations that its pool lies in; the other opens them once a link is open.
A push is one kernel, or one call of the driver where pieces are long. What has arrived is told over the side channel
behind the copy's event. A handle names a whole allocation, so a region is its allocation and an offset. Memory that was
mapped piece by piece (expandable segments, sleep mode) has no handle: such a pool goes through shared memory.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import KVConnectorError, TransferError
from ...transfer.cuda.driver import check, libcuda, primary_context
from ..base import Marker, PeerError, PeerPool, PoolRegion, Push, Pushed, Writer
from ..wire.fields import check_int
from ..wire.messages import WireMessage, Written
from ..wire.peer_info import PeerInfo
from .one_sided import OneSided
from .over_channel import Endpoint

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_POLL_SECONDS = 0.0002
logger = logging.getLogger("kv_connector.peer")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class Driver:
    """The driver's IPC calls. Every call that needs one makes the device's primary context current first."""

    def __init__(self, device: int) -> None:
        """Raises PeerError where there is no driver or no such device."""
        try:
            self._cuda, self._context = libcuda(), primary_context(device)
        except TransferError as error:
            raise PeerError(str(error)) from error
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]

    def use(self) -> None:
        """Make the context current on this thread."""
        self._check(self._cuda.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def export(self, address: int) -> tuple[str, int]:
        """The handle of the allocation that holds an address, in hexadecimal, and the address's offset in it."""
        self.use()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._check(code, "cuMemGetAddressRange")
        handle = _Handle()
        self._check(self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), base), "cuIpcGetMemHandle")
        return bytes(handle.reserved).hex(), address - base.value

    def open(self, handle: str) -> int:
        """Map another process's allocation; its address here. Raises PeerError."""
        self.use()
        raw = bytes.fromhex(handle)
        address = ctypes.c_uint64()
        code = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(raw), _LAZY_PEER_ACCESS)
        self._check(code, "cuIpcOpenMemHandle")
        return address.value

    def size_of(self, address: int) -> int:
        """Bytes of the allocation that begins at an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._check(code, "cuMemGetAddressRange")
        return size.value - (address - base.value)

    def close(self, address: int) -> None:
        """Unmap what `open` has mapped; nothing may use it."""
        self.use()
        self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def _check(self, code: int, call: str) -> None:
        check(code, call, PeerError)


@dataclass(slots=True)
class _Remote:
    """The peer's pool as it is mapped here, and the allocations to unmap."""

    num_blocks: int
    writer: Writer
    mapped: list[int]
    is_lost: bool = False


@dataclass(slots=True)
class _Writing:
    link: int
    push: Push
    marker: Marker
    ok: bool
    """Whether all of it was enqueued in front of the marker."""


class CudaIpcTransport(OneSided):
    """See `PeerTransport`."""

    transport = "cuda_ipc"
    poll_seconds = _POLL_SECONDS
    longest_transfer_seconds = 5.0
    """A copy of many gigabytes, behind many others."""

    def __init__(self, pool: PeerPool, endpoint: Endpoint, driver: Callable[[int], Driver] = Driver) -> None:
        """Raises PeerError where the pool has no handles, and ConfigError where the address cannot be used."""
        self._driver = driver(pool.device)
        exported = [self._driver.export(region.address) for region in pool.regions]
        handles = sorted({handle for handle, _ in exported})
        places = [
            [handles.index(h), offset, r.block_stride] for (h, offset), r in zip(exported, pool.regions, strict=True)
        ]
        extra = {"handles": handles, "regions": places}
        super().__init__(pool, extra, endpoint)
        self._remotes: dict[int, _Remote] = {}
        self._writing: list[_Writing] = []

    def _post(self, link: int, push: Push, may_write: Callable[[], bool]) -> bool:
        remote, targets = self._remotes[link], push.target_ids
        assert 0 <= targets.min() <= targets.max() < remote.num_blocks, f"{targets} of {remote.num_blocks}"
        assert self._pool.mark is not None
        self._driver.use()
        ok = False
        try:
            if not remote.writer.write(push.source_ids, push.target_ids, push.regions, may_write):
                return False
            ok = True
        except Exception as error:  # noqa: BLE001 - torch's and the writer's: the seam where they become a lost link
            self.drop(link, f"a copy to it failed: {error}")
        try:  # also of what failed a part may be under way, and the peer's pool stays mapped until that has ended
            self._writing.append(_Writing(link, push, self._pool.mark(), ok))
        except RuntimeError as error:  # the device is lost: nothing runs there any more
            self._events.append(Pushed(push.number, False))
            self.drop(link, f"a copy to it failed: {error}")
        return True

    def _release(self) -> None:
        for remote in self._remotes.values():
            remote.is_lost = True
        self._unmap_lost()

    def _is_busy(self) -> bool:
        return bool(self._writing)

    def _lost(self, link: int) -> None:
        super()._lost(link)
        if link in self._remotes:
            self._remotes[link].is_lost = True

    def _hear(self, link: int, message: WireMessage) -> bool:
        if not isinstance(message, Written):
            return super()._hear(link, message)
        self._hear_written(link, message)
        return True

    def _meet(self, link: int, info: PeerInfo) -> None:
        """Map the peer's allocations, and check that its regions lie within them."""
        super()._meet(link, info)
        handles, places = info.extra.get("handles"), info.extra.get("regions")
        if not isinstance(handles, list) or not all(_is_handle(handle) for handle in handles):
            raise PeerError("its pool has no CUDA IPC handles: it must lie on a GPU of this machine")
        if not isinstance(places, list) or len(places) != len(self._pool.regions):
            raise PeerError(f"its pool is not {len(self._pool.regions)} regions")
        mapped: list[int] = []
        assert self._pool.writer is not None
        try:
            mapped.extend(self._driver.open(handle) for handle in handles)
            sizes = [self._driver.size_of(address) for address in mapped]
            regions = tuple(
                _region(place, piece, mapped, sizes, info.num_blocks)
                for place, piece in zip(places, self._pool.pieces, strict=True)
            )
            self._remotes[link] = _Remote(info.num_blocks, self._pool.writer(regions), mapped)
        except (KVConnectorError, RuntimeError) as error:  # the writer's and torch's, where memory is short
            for address in mapped:
                self._driver.close(address)
            raise PeerError(str(error)) from error

    def _finish_writing(self) -> bool:
        # Copies run one behind the other.
        while self._writing and self._has_ended(self._writing[0]):
            writing = self._writing.pop(0)
            push, remote = writing.push, self._remotes[writing.link]
            count, regions = len(push.source_ids), push.regions
            arrives = writing.ok and not remote.is_lost
            if arrives:
                try:
                    told = Written(push.grant, push.first, count, regions.start, regions.stop)
                    self._channel.send(writing.link, told)
                except PeerError as error:
                    self.drop(writing.link, str(error))
                self.counters.sent_bytes += count * self._pool.bytes_of(regions)
            self._events.append(Pushed(push.number, arrives))
        self._unmap_lost()
        return bool(self._writing)

    def _has_ended(self, writing: _Writing) -> bool:
        try:
            return writing.marker.query()
        except RuntimeError as error:  # the device is lost: nothing has arrived
            self._remotes[writing.link].is_lost = True
            self.drop(writing.link, f"a copy to it failed: {error}")
            return True

    def _unmap_lost(self) -> None:
        """Once nothing is written to it any more."""
        busy = {writing.link for writing in self._writing}
        for link in [link for link, remote in self._remotes.items() if remote.is_lost and link not in busy]:
            for address in self._remotes.pop(link).mapped:
                self._driver.close(address)


def _is_handle(value: object) -> bool:
    if type(value) is not str or len(value) != 2 * _HANDLE_BYTES:
        return False
    try:
        return len(bytes.fromhex(value)) == _HANDLE_BYTES
    except ValueError:
        return False


def _region(place: object, piece: int, mapped: Sequence[int], sizes: Sequence[int], num_blocks: int) -> PoolRegion:
    if not isinstance(place, list) or len(place) != 3:
        raise PeerError("a region of its pool is not an allocation, an offset and a stride")
    named = dict(zip(("allocation", "offset", "stride"), place, strict=True))
    allocation = check_int(named, "allocation", 0, len(mapped) - 1)
    offset, stride = check_int(named, "offset"), check_int(named, "stride", 1)
    if offset + (num_blocks - 1) * stride + piece > sizes[allocation]:
        raise PeerError(f"a region of its pool ends behind its allocation of {sizes[allocation]} bytes")
    return PoolRegion(mapped[allocation] + offset, stride, piece)
