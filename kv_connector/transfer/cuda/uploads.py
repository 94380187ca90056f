"""What kernels read beside the blocks: the table of regions, and the ids of each copy's blocks.

All of it lies in memory of the driver's (`allocations.py`), made at start.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...triton_kernels.copy_pieces import RegionTable
from ..memory.host_form import HostForm
from ..memory.layout import Region
from .allocations import device_tensor, page_locked_int64
from .copier import driver_copier
from .streams import Event, Events, make_events

SLAB_IDS = 1 << 17
"""Ids that may be under way at once in one direction, 1 MiB on either side. Where copies have more, which takes a
device that stands still, a larger slab is made, which takes milliseconds."""
UPLOAD_BYTES = 16 << 10
"""Of one upload of ids. On an H200, driver 580 (2026-11-21), uploads up to this size reach the device in 20 us beside a
load, larger ones, from 32 KiB on at the latest, queue behind all of its copies: 13.8 ms behind 805 MB."""


def upload_table(regions: tuple[Region, ...], offsets: list[int]) -> RegionTable:
    """The table of these regions, with those offsets in a flat row; sent on the current stream, and waited for."""
    views = [region.view for region in regions]
    return RegionTable.upload(views, offsets, device_tensor((4, len(views)), torch.int64, views[0].device))


class RegionTables:
    """A form's region table on the device, and its parts; each part is made once."""

    def __init__(self, form: HostForm) -> None:
        self._table = upload_table(form.layout.regions, list(form.offsets))
        self._parts: dict[range, RegionTable] = {}

    def part(self, regions: range) -> RegionTable:
        """The table of these consecutive regions."""
        if regions not in self._parts:
            self._parts[regions] = self._table.narrow(regions.start, len(regions))
        return self._parts[regions]


@dataclass(slots=True, eq=False)
class UploadedIds:
    """Pairs of block ids: on the host, and int64 on the device, whose first `len(host_ids)` entries are device block
    ids; as many host block ids follow, where both were asked for."""

    host_ids: NDArray[np.int64]
    there: torch.Tensor


class _Slab:
    """As much page-locked memory as device memory; what lies in the one is sent to the same place in the other."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.num_ids = num_ids
        self.here = page_locked_int64(num_ids, device)
        self.there = device_tensor((num_ids,), torch.int64, device)
        self.addresses = self.here.ctypes.data, self.there.data_ptr()


@dataclass(slots=True, eq=False)
class _Use:
    """Ids `start` to `stop` of a slab, until kernels have read them: `end` comes behind those, once it is known."""

    slab: _Slab
    start: int
    stop: int
    end: Event | None = None


class IdUploads:
    """Sends block ids to the device through a slab that goes round: a part is used again once its kernels are done.

    The arrays of the last upload are remembered: the groups of one load upload their ids once. Never blocks. For one
    direction: whose copies are on one stream, and come one after the other.
    """

    def __init__(self, device: torch.device, sides: int, in_order: bool, num_ids: int = SLAB_IDS) -> None:
        """`sides` is 2 where kernels need host block ids too, 1 otherwise; `in_order` sorts pairs by those."""
        self._device = device
        self._sides = sides
        self._in_order = in_order
        self._is_on_cpu = device.type == "cpu"
        self._copy = _copy_now if self._is_on_cpu else driver_copier().copy_one
        self._events: Events = make_events(device)
        self._slab = _Slab(num_ids, device)
        self._uses: deque[_Use] = deque()  # the last is that of the last upload
        self._source: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._uploaded: UploadedIds | None = None

    def get(self, device_ids: NDArray[np.int64], host_ids: NDArray[np.int64], stream: Any) -> UploadedIds:
        """The ids on the device, sent on `stream`. Call `used` once the kernels that read them are launched.

        Only read-only arrays are remembered: their content cannot have changed since. Raises TransferError.
        """
        uploaded, source = self._uploaded, self._source
        if uploaded is not None and source is not None and source[0] is device_ids and source[1] is host_ids:
            return uploaded
        if self._in_order:
            order = np.argsort(host_ids, kind="stable")
            sent, host_ids_sent = device_ids[order], host_ids[order]
        else:
            sent, host_ids_sent = device_ids, host_ids
        count, total = len(sent), len(sent) * self._sides
        use = self._place(total, stream)
        use.slab.here[use.start : use.start + count] = sent
        use.slab.here[use.start + count : use.stop] = host_ids_sent[: total - count]
        here, there = (address + 8 * use.start for address in use.slab.addresses)
        handle = 0 if self._is_on_cpu else stream.cuda_stream
        for start in range(0, 8 * total, UPLOAD_BYTES):
            self._copy(there + start, here + start, min(UPLOAD_BYTES, 8 * total - start), handle)
        uploaded = UploadedIds(host_ids_sent, use.slab.there[use.start : use.stop])
        is_lasting = not (device_ids.flags.writeable or host_ids.flags.writeable)
        self._source, self._uploaded = (device_ids, host_ids) if is_lasting else None, uploaded
        return uploaded

    def used(self, stream: Any) -> None:
        """Everything that reads the last upload is on `stream` now."""
        self._end(self._uses[-1], stream)

    def close(self) -> None:
        """Let go of the memory; nothing may be under way. `get` may not be called any more."""
        self._uses.clear()
        self._source = self._uploaded = None
        del self._slab

    def _end(self, use: _Use, stream: Any) -> None:
        if use.end is not None:
            self._events.recycle([use.end])
        use.end = self._events.mark(stream)

    def _place(self, num_ids: int, stream: Any) -> _Use:
        """Room for so many ids, which nothing reads any more; the last of all uses from now on."""
        self._source = self._uploaded = None
        if self._uses and self._uses[-1].end is None:
            self._end(self._uses[-1], stream)  # a copy that failed before it could say so
        while self._uses and (end := self._uses[0].end) is not None and end.query():
            self._events.recycle([end])
            self._uses.popleft()
        start = self._free_start(num_ids)
        if start is None:
            self._slab = _Slab(1 << (2 * max(num_ids, self._slab.num_ids) - 1).bit_length(), self._device)
            start = 0  # the old slab goes with its last use
        self._uses.append(_Use(self._slab, start, start + num_ids))
        return self._uses[-1]

    def _free_start(self, num_ids: int) -> int | None:
        """Where so many ids fit into the slab, behind those that were placed last; None where they do not."""
        if not self._uses or self._uses[-1].slab is not self._slab:
            return 0 if num_ids <= self._slab.num_ids else None
        oldest = next(use.start for use in self._uses if use.slab is self._slab)
        newest = self._uses[-1].stop
        if newest > oldest:  # free: behind the newest, and in front of the oldest
            if newest + num_ids <= self._slab.num_ids:
                return newest
            return 0 if num_ids < oldest else None  # less than all, or they would look as if none were there
        return newest if newest + num_ids < oldest else None


def _copy_now(target: int, source: int, num_bytes: int, stream: int) -> None:
    ctypes.memmove(target, source, num_bytes)
