"""The path of machines without a GPU: copies at once, with torch."""

from __future__ import annotations

import torch

from ...errors import TransferError
from ...types import Direction
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from ..memory.layout import Region
from .base import SLICE_BYTES, BlockCopy


class TorchPath:
    """Copies at once with torch, on a machine without a GPU."""

    def __init__(self, form: HostForm, host: HostPool) -> None:
        layout = form.layout
        if layout.device.type != "cpu":
            raise TransferError(f"the torch path copies on the CPU; the cache lies on {layout.device}")
        with torch.inference_mode(False):  # views made in that mode cannot be written outside of it
            columns = form.columns(host.tensor)
            self._views = [_as_words(*pair) for pair in zip(layout.regions, columns, strict=True)]

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`."""
        device_index, host_index = (torch.tensor(ids, device="cpu") for ids in (copy.device_ids, copy.host_ids))
        for device_view, host_view in self._views[copy.regions.start : copy.regions.stop]:
            if copy.direction is Direction.LOAD:
                device_view.index_copy_(0, device_index, host_view.index_select(0, host_index))
            else:
                host_view.index_copy_(0, host_index, device_view.index_select(0, device_index))

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`."""
        return SLICE_BYTES

    def close(self) -> None:
        """Drop the views."""
        self._views = []


def _as_words(region: Region, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The region and its column of the host pool, as int64 words where both allow it: an eighth of the elements."""
    start = region.view.storage_offset()
    if all(value % 8 == 0 for value in (start, region.piece_bytes, region.block_stride, column.stride(0))):
        return region.view.view(torch.int64), column.view(torch.int64)
    return region.view, column
