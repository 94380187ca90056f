"""Blocks coded into slots of host memory on their way to other engines, and back (`peer.base.SlotCoder`).

A row is a host block's pieces of some regions, as `HostForm` has them, whatever form this engine's own host has. There
is nothing between them: each is a multiple of 16 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import ConfigError, TransferError
from ...triton_kernels.coded_rows import decode_reference, encode_reference, pieces_fit
from ..cuda.allocations import device_tensor
from ..cuda.copier import driver_copier
from ..cuda.driver import Copier
from ..cuda.streams import Lane
from ..cuda.uploads import IdUploads
from ..memory.host_form import PIECE_ALIGN, HostForm, coded_form
from ..memory.layout import CacheLayout
from .base import Int64s


class _Stretch(NamedTuple):
    """Neighbouring regions whose pieces are alike: `at` is where the first one's begins in a row."""

    views: list[torch.Tensor]  # in words of eight bytes, as pieces are multiples of 16
    is_coded: bool
    at: int
    stored_bytes: int  # of a piece
    piece_bytes: int  # on the device

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows: shape (rows, pieces, stored bytes)."""
        stop = self.at + len(self.views) * self.stored_bytes
        return rows[:, self.at : stop].view(len(rows), len(self.views), self.stored_bytes)


class Rows:
    """What lies where in rows of some consecutive regions."""

    def __init__(self, form: HostForm, regions: range) -> None:
        start, self.row_bytes = form.host_slice(regions)
        self.stretches: list[_Stretch] = []
        for (stored, is_coded, piece), group in groupby(regions, key=partial(_kind, form)):
            own = list(group)
            views = [form.layout.regions[index].view.view(torch.int64) for index in own]
            self.stretches.append(_Stretch(views, is_coded, form.offsets[own[0]] - start, stored, piece))

    def memory(self, address: int, count: int) -> torch.Tensor:
        """So many rows from an address on, uint8 of shape (count, row_bytes)."""
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * (count * self.row_bytes)).from_address(address))
        return torch.from_numpy(flat).view(count, self.row_bytes)

    def check(self, rows: torch.Tensor) -> None:
        """Raise TransferError where rows in host memory say that their blocks do not fit: nobody sends such."""
        for stretch in self.stretches:
            if stretch.is_coded and not pieces_fit(stretch.columns(rows), stretch.piece_bytes).all():
                raise TransferError("what is to be decoded is no block that fits: other bytes have come")


def _kind(form: HostForm, index: int) -> tuple[int, bool, int]:
    return form.stored_bytes[index], form.is_coded[index], form.layout.regions[index].piece_bytes


class HostCoder:
    """See `SlotCoder`; of a cache on the CPU, with torch, at once."""

    def __init__(self, form: HostForm) -> None:
        self.form = form.arrangement
        self._rows = cache(partial(Rows, form))

    def row_bytes(self, regions: range) -> int:
        """See `SlotCoder.row_bytes`."""
        return self._rows(regions).row_bytes

    def encode(self, block_ids: Int64s, regions: range, address: int, locked: bool) -> Callable[[], bool]:
        """See `SlotCoder.encode`."""
        rows, index = self._rows(regions), torch.tensor(block_ids, device="cpu")
        memory, all_fit = rows.memory(address, len(block_ids)), True
        for stretch in rows.stretches:
            pieces = torch.stack([view.index_select(0, index) for view in stretch.views], dim=1).view(torch.uint8)
            if stretch.is_coded:
                encoded: tuple[torch.Tensor, torch.Tensor] = encode_reference(pieces.flatten(0, 1))
                pieces, fits = encoded[0].view(len(index), len(stretch.views), -1), encoded[1]
                all_fit = all_fit and bool(fits.all())
            stretch.columns(memory).copy_(pieces)
        return lambda: all_fit

    def decode(self, block_ids: Int64s, regions: range, address: int, locked: bool) -> None:
        """See `SlotCoder.decode`."""
        rows, index = self._rows(regions), torch.tensor(block_ids, device="cpu")
        there = rows.memory(address, len(block_ids))
        memory = torch.empty_like(there, device="cpu").copy_(there)  # the peer may go on writing there
        rows.check(memory)
        for stretch in rows.stretches:
            pieces = stretch.columns(memory)
            if stretch.is_coded:
                decoded = decode_reference(pieces.reshape(-1, stretch.stored_bytes), stretch.piece_bytes)
                pieces = decoded.view(len(index), len(stretch.views), -1)
            words = pieces.contiguous().view(torch.int64)
            for view, column in zip(stretch.views, words.unbind(1), strict=True):
                view.index_copy_(0, index, column)


class DeviceCoder:
    """See `SlotCoder`; by kernels, into rows of device memory that one copy moves. All of it is on one stream, so that
    one slot's worth of such memory serves every link, both ways: kernels run at many times the rate of any link."""

    def __init__(self, form: HostForm, lane: Lane, slot_bytes: int, copier: Copier | None = None) -> None:
        """`copier` replaces the CUDA driver in tests. Raises TransferError without memory."""
        from .packing import Packing  # only this needs Triton

        device = form.layout.device
        self.form = form.arrangement
        self._lane = lane
        self._copier = copier if copier is not None else driver_copier()
        self._packing = Packing(form)
        self._ids = IdUploads(device, sides=1, in_order=False)
        self._memory = device_tensor((slot_bytes,), torch.uint8, device)
        self._rows = cache(partial(Rows, form))
        self._tables = cache(self._packing.part)
        if device.type == "cuda":
            with lane.on_device():
                self._packing.compile(lane.stream)

    def row_bytes(self, regions: range) -> int:
        """See `SlotCoder.row_bytes`."""
        return self._rows(regions).row_bytes

    def encode(self, block_ids: Int64s, regions: range, address: int, locked: bool) -> Callable[[], bool]:
        """See `SlotCoder.encode`."""
        count = len(block_ids)
        verdicts = self._packing.verdicts(count)
        with self._lane.on_device():
            rows, there, stream = self._begin(block_ids, regions)
            try:
                self._packing.pack(self._tables(regions), there, rows, verdicts, 0, count, stream)
            finally:
                self._ids.used(stream)
            self._copy(address, rows.data_ptr(), rows.numel(), locked)
        return lambda: not verdicts.refused(block_ids)

    def decode(self, block_ids: Int64s, regions: range, address: int, locked: bool) -> None:
        """See `SlotCoder.decode`."""
        count = len(block_ids)
        self._rows(regions).check(self._rows(regions).memory(address, count))
        with self._lane.on_device():
            rows, there, stream = self._begin(block_ids, regions)
            try:
                self._copy(rows.data_ptr(), address, rows.numel(), locked)
                self._packing.unpack(self._tables(regions), there, rows, 0, count, stream)
            finally:
                self._ids.used(stream)

    def _begin(self, block_ids: Int64s, regions: range) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Rows on the device, the ids there, and the stream of both."""
        stream, row_bytes = self._lane.stream, self.row_bytes(regions)
        rows = self._memory[: len(block_ids) * row_bytes].view(len(block_ids), row_bytes)
        return rows, self._ids.get(block_ids, block_ids, stream).there, stream

    def _copy(self, target: int, source: int, num_bytes: int, locked: bool) -> None:
        targets, sources, sizes = (np.array([value], dtype=np.int64) for value in (target, source, num_bytes))
        arrays = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
        self._copier(*arrays, 1, locked, self._lane.handle)


def make_coder(layout: CacheLayout, lane: Lane) -> Callable[[int], HostCoder | DeviceCoder]:
    """A maker of what codes blocks into slots of so many bytes. Raises ConfigError where no block can be."""
    form = coded_form(layout)
    if not form.name or any(stored % PIECE_ALIGN for stored in form.stored_bytes):
        raise ConfigError(
            "peer.wire_form='lossless' gains nothing here: no cache tensor has bf16 elements in pieces of whole "
            "multiples of 64 bytes, or others have none of 16; give 'raw'"
        )
    if layout.device.type == "cpu":
        return lambda slot_bytes: HostCoder(form)
    return partial(DeviceCoder, form, lane)
