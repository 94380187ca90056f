"""The direct path: one kernel reads or writes page-locked host memory itself. And what the kernel paths share."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError, TransferError
from ..triton_kernels.copy_pieces import (
    LINK_LOAD_PROGRAMS,
    LINK_SAVE_PROGRAMS,
    RegionTable,
    gather_pieces,
    scatter_pieces,
)
from ..types import Direction
from .copy_path import BlockCopy
from .dma import driver_copier
from .host_pool import HostPool
from .layout import CacheLayout
from .streams import Event, Lane, make_lane

_LEAST_IDS = 4096
_BUFFERS = 4  # made at start: page-locking one more during service takes milliseconds
UPLOAD_BYTES = 16 << 10
"""Of one upload of ids. On an H200, driver 580 (2026-11-21), uploads up to this size reach the device in 20 us beside a
load, larger ones, from 32 KiB on at the latest, queue behind all of its copies: 13.8 ms behind 805 MB."""


class RegionTables:
    """The layout's region table on the device, and its parts; each part is made once."""

    def __init__(self, layout: CacheLayout) -> None:
        self._table = RegionTable.upload(
            [region.view for region in layout.regions], [region.offset for region in layout.regions]
        )
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


@dataclass(slots=True, eq=False)
class _IdBuffer:
    here: torch.Tensor
    array: NDArray[np.int64]  # of the same memory
    there: torch.Tensor
    addresses: tuple[int, int]  # here and there
    last_use: Event | None = None


class IdUploads:
    """Sends block ids to the device through small page-locked buffers, which are reused once their kernels are done.

    The arrays of the last upload are remembered: the groups of one load upload their ids once. Never blocks. For one
    direction: whose copies are on one stream, and come one after the other.
    """

    def __init__(self, device: torch.device, sides: int, in_order: bool) -> None:
        """`sides` is 2 where kernels need host block ids too, 1 otherwise; `in_order` sorts pairs by those."""
        self._device = device
        self._sides = sides
        self._in_order = in_order
        self._copy = _copy_now if device.type == "cpu" else driver_copier().copy_one
        self._lane: Lane = make_lane(device, priority=0, timing=False)
        self._buffers = deque(self._new_buffer(_LEAST_IDS) for _ in range(_BUFFERS))
        self._source: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._uploaded: UploadedIds | None = None

    def get(self, device_ids: NDArray[np.int64], host_ids: NDArray[np.int64], stream: Any) -> UploadedIds:
        """The ids on the device, sent on `stream`. Call `used` once the kernels that read them are launched.

        Only read-only arrays are remembered: their content cannot have changed since.
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
        buffer = self._free_buffer(total)
        buffer.array[:count] = sent
        buffer.array[count:total] = host_ids_sent[: total - count]
        here, there = buffer.addresses
        handle = 0 if stream is None else stream.cuda_stream
        for start in range(0, 8 * total, UPLOAD_BYTES):
            self._copy(there + start, here + start, min(UPLOAD_BYTES, 8 * total - start), handle)
        uploaded = UploadedIds(host_ids_sent, buffer.there)
        is_lasting = not (device_ids.flags.writeable or host_ids.flags.writeable)
        self._source, self._uploaded = (device_ids, host_ids) if is_lasting else None, uploaded
        return uploaded

    def used(self, stream: Any) -> None:
        """Everything that reads the last upload is on `stream` now."""
        buffer = self._buffers[-1]
        if buffer.last_use is not None:
            self._lane.recycle([buffer.last_use])
        buffer.last_use = self._lane.mark(stream)

    def close(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
        self._source = self._uploaded = None

    def _free_buffer(self, num_ids: int) -> _IdBuffer:
        """The one that was used first if it is free, or a new one; the last of all from now on."""
        self._uploaded = None
        oldest = self._buffers[0]
        if oldest.last_use is not None and not oldest.last_use.query():
            self._buffers.append(self._new_buffer(num_ids))
        elif len(oldest.array) < num_ids:
            self._buffers.append(self._new_buffer(num_ids))
            self._buffers.popleft()
        else:
            self._buffers.rotate(-1)
        return self._buffers[-1]

    def _new_buffer(self, num_ids: int) -> _IdBuffer:
        length = max(_LEAST_IDS * self._sides, 1 << (num_ids - 1).bit_length())
        with torch.inference_mode(False):  # tensors of that mode could not be written to by a thread outside of it
            here = torch.empty(length, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            there = torch.empty(length, dtype=torch.int64, device=self._device)
        return _IdBuffer(here, here.numpy(), there, (here.data_ptr(), there.data_ptr()))


def _copy_now(target: int, source: int, num_bytes: int, stream: int) -> None:
    ctypes.memmove(target, source, num_bytes)


class DirectPath:
    """One kernel a copy, over the link (see `CopyPath`): fast at any piece size, but it slows the model."""

    def __init__(self, layout: CacheLayout, host: HostPool) -> None:
        """Raises ConfigError for host memory that is not to be page-locked: the GPU cannot reach it."""
        if not host.is_pinned:
            raise ConfigError('copy_path="direct" needs page-locked host memory: set pin_memory or another copy_path')
        self._host = host
        self._tables = RegionTables(layout)
        self._ids = {way: IdUploads(layout.device, sides=2, in_order=False) for way in Direction}

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`. Raises TransferError where page locking has failed since."""
        if not self._host.is_pinned:
            raise TransferError("the direct path needs page-locked host memory, and locking it has failed")
        load = copy.direction is Direction.LOAD
        move = scatter_pieces if load else gather_pieces
        uploads, count = self._ids[copy.direction], len(copy.device_ids)
        there = uploads.get(copy.device_ids, copy.host_ids, copy.stream).there
        try:
            move(
                self._tables.part(copy.regions),
                there,
                self._host.tensor,
                there,
                count=count,
                flat_first=count,
                num_programs=LINK_LOAD_PROGRAMS if load else LINK_SAVE_PROGRAMS,
                stream=copy.stream,
            )
        finally:
            uploads.used(copy.stream)

    def close(self) -> None:
        """See `CopyPath.close`."""
        for uploads in self._ids.values():
            uploads.close()
