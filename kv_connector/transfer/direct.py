"""The direct path: one kernel reads or writes page-locked host memory itself. And what the kernel paths share."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Pairs of block ids: on the host, and int64 of shape (num_blocks,) on the device.

    The second tensor has as many entries as were asked for: all or none.
    """

    host_ids: NDArray[np.int64]
    device_ids_there: torch.Tensor
    host_ids_there: torch.Tensor


@dataclass(slots=True, eq=False)
class _IdBuffer:
    here: torch.Tensor
    array: NDArray[np.int64]  # of the same memory
    there: torch.Tensor
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
        self._lane: Lane = make_lane(device, priority=0, timing=False)
        self._buffers = [self._new_buffer(_LEAST_IDS) for _ in range(_BUFFERS)]
        self._current = self._buffers[0]
        self._source: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._uploaded: UploadedIds | None = None

    def get(self, device_ids: NDArray[np.int64], host_ids: NDArray[np.int64]) -> UploadedIds:
        """The ids on the device, sent on the current stream. Call `used` once the kernels that read them are launched.

        Only read-only arrays are remembered: their content cannot have changed since.
        """
        source = (device_ids, host_ids)
        if self._uploaded is not None and self._source is not None:
            same = all(new is old for new, old in zip(source, self._source, strict=True))
            if same and not device_ids.flags.writeable and not host_ids.flags.writeable:
                return self._uploaded
        if self._in_order:
            order = np.argsort(host_ids, kind="stable")
            device_ids, host_ids = device_ids[order], host_ids[order]
        count, total = len(device_ids), len(device_ids) * self._sides
        self._current = buffer = self._free_buffer(total)
        buffer.array[:count] = device_ids
        buffer.array[count:total] = host_ids[: total - count]
        for start in range(0, total, UPLOAD_BYTES // 8):
            part = slice(start, min(start + UPLOAD_BYTES // 8, total))
            buffer.there[part].copy_(buffer.here[part], non_blocking=True)
        self._source = source
        self._uploaded = UploadedIds(host_ids, buffer.there[:count], buffer.there[count:total])
        return self._uploaded

    def used(self) -> None:
        """Everything that reads the last upload is on the current stream now."""
        if self._current.last_use is not None:
            self._lane.recycle([self._current.last_use])
        self._current.last_use = self._lane.mark()

    def close(self) -> None:
        """Drop the buffers."""
        self._buffers = []
        self._source = self._uploaded = None

    def _free_buffer(self, num_ids: int) -> _IdBuffer:
        self._uploaded = None
        for i, buffer in enumerate(self._buffers):
            if buffer.last_use is None or buffer.last_use.query():
                if len(buffer.here) < num_ids:
                    self._buffers[i] = self._new_buffer(num_ids)
                return self._buffers[i]
        self._buffers.append(self._new_buffer(num_ids))
        return self._buffers[-1]

    def _new_buffer(self, num_ids: int) -> _IdBuffer:
        length = max(_LEAST_IDS * self._sides, 1 << (num_ids - 1).bit_length())
        with torch.inference_mode(False):  # tensors of that mode could not be written to by a thread outside of it
            here = torch.empty(length, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            there = torch.empty(length, dtype=torch.int64, device=self._device)
        return _IdBuffer(here, here.numpy(), there)


class DirectPath:
    """One kernel a copy, over the link (see `paths.CopyPath`): fast at any piece size, but it slows the model."""

    def __init__(self, layout: CacheLayout, host: HostPool) -> None:
        """Raises ConfigError for host memory that is not to be page-locked: the GPU cannot reach it."""
        if not host.is_pinned:
            raise ConfigError('copy_path="direct" needs page-locked host memory: set pin_memory or another copy_path')
        self._host = host
        self._tables = RegionTables(layout)
        self._ids = {way: IdUploads(layout.device, sides=2, in_order=False) for way in Direction}

    def copy(
        self,
        direction: Direction,
        regions: range,
        device_ids: NDArray[np.int64],
        host_ids: NDArray[np.int64],
        urgent: bool = False,
    ) -> None:
        """See `CopyPath.copy`. Raises TransferError where page locking has failed since."""
        if not self._host.is_pinned:
            raise TransferError("the direct path needs page-locked host memory, and locking it has failed")
        load = direction is Direction.LOAD
        move = scatter_pieces if load else gather_pieces
        uploads = self._ids[direction]
        ids = uploads.get(device_ids, host_ids)
        try:
            move(
                self._tables.part(regions),
                ids.device_ids_there,
                self._host.tensor,
                ids.host_ids_there,
                num_programs=LINK_LOAD_PROGRAMS if load else LINK_SAVE_PROGRAMS,
            )
        finally:
            uploads.used()

    def close(self) -> None:
        """See `CopyPath.close`."""
        for uploads in self._ids.values():
            uploads.close()
