"""The path of machines without a GPU: copies at once, with torch."""

from __future__ import annotations

from typing import Protocol

import torch

from ...errors import TransferError
from ...triton_kernels.coded_rows import decode_reference, encode_reference
from ...types import Direction
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from ..memory.layout import Region
from .base import SLICE_BYTES, BlockCopy


class TorchPath:
    """Copies at once with torch, on a machine without a GPU (see `CopyPath`)."""

    def __init__(self, form: HostForm, host: HostPool) -> None:
        layout = form.layout
        if layout.device.type != "cpu":
            raise TransferError(f"the torch path copies on the CPU; the cache lies on {layout.device}")
        with torch.inference_mode(False):  # views made in that mode cannot be written outside of it
            regions = zip(layout.regions, form.columns(host.tensor), form.is_coded, strict=True)
            self._pieces = [_piece(*entry) for entry in regions]
        self._may_refuse = any(form.is_coded)

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`."""
        device_index, host_index = (torch.tensor(ids, device="cpu") for ids in (copy.device_ids, copy.host_ids))
        pieces = self._pieces[copy.regions.start : copy.regions.stop]
        if copy.direction is Direction.LOAD:
            for piece in pieces:
                piece.load(device_index, host_index)
            return
        fits = [piece.save(device_index, host_index) for piece in pieces]
        if self._may_refuse:
            refused = host_index[~torch.stack(fits).all(0)].tolist()
            copy.refusals.append(lambda: refused)

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`."""
        return SLICE_BYTES

    def close(self) -> None:
        """Drop the views."""
        self._pieces = []


class _Piece(Protocol):
    """The pieces of a region on both sides."""

    def load(self, device_index: torch.Tensor, host_index: torch.Tensor) -> None:
        """From these host blocks to these device blocks."""

    def save(self, device_index: torch.Tensor, host_index: torch.Tensor) -> torch.Tensor:
        """From these device blocks to these host blocks; by block, whether it fits."""


class _Raw:
    """The same bytes on both sides: as int64 words where both allow it, an eighth of the elements."""

    def __init__(self, region: Region, column: torch.Tensor) -> None:
        start = region.view.storage_offset()
        sizes = start, region.piece_bytes, region.block_stride, column.stride(0)
        dtype = torch.int64 if all(size % 8 == 0 for size in sizes) else torch.uint8
        self._view, self._column = region.view.view(dtype), column.view(dtype)

    def load(self, device_index: torch.Tensor, host_index: torch.Tensor) -> None:
        """See `_Piece.load`."""
        self._view.index_copy_(0, device_index, self._column.index_select(0, host_index))

    def save(self, device_index: torch.Tensor, host_index: torch.Tensor) -> torch.Tensor:
        """See `_Piece.save`: it always does."""
        self._column.index_copy_(0, host_index, self._view.index_select(0, device_index))
        return torch.ones(len(host_index), dtype=torch.bool, device="cpu")


class _Coded:
    """The column has pieces in their coded form."""

    def __init__(self, region: Region, column: torch.Tensor) -> None:
        self._view, self._column = region.view, column

    def load(self, device_index: torch.Tensor, host_index: torch.Tensor) -> None:
        """See `_Piece.load`."""
        coded = self._column.index_select(0, host_index)
        self._view.index_copy_(0, device_index, decode_reference(coded, self._view.shape[1]))

    def save(self, device_index: torch.Tensor, host_index: torch.Tensor) -> torch.Tensor:
        """See `_Piece.save`."""
        encoded: tuple[torch.Tensor, torch.Tensor] = encode_reference(self._view.index_select(0, device_index))
        coded, fits = encoded
        self._column.index_copy_(0, host_index, coded)
        return fits


def _piece(region: Region, column: torch.Tensor, is_coded: bool) -> _Piece:
    return _Coded(region, column) if is_coded else _Raw(region, column)
