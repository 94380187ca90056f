"""The direct path: one kernel reads or writes page-locked host memory itself."""

from __future__ import annotations

import torch

from ...errors import ConfigError, TransferError
from ...triton_kernels.copy_pieces import LINK_LOAD_PROGRAMS, LINK_SAVE_PROGRAMS, gather_pieces, scatter_pieces
from ...types import Direction
from ..cuda.allocations import device_tensor
from ..cuda.uploads import IdUploads, RegionTables
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from .base import LONG_SLICE_BYTES, BlockCopy


class DirectPath:
    """One kernel a copy, over the link (see `CopyPath`): fast at any piece size, but it slows the model."""

    def __init__(self, form: HostForm, host: HostPool) -> None:
        """Raises ConfigError for host memory that is not to be page-locked: the GPU cannot reach it."""
        if not host.is_pinned:
            raise ConfigError(
                "copy_path='direct' needs page-locked host memory, and pin_memory is false: give pin_memory=true, or "
                "copy_path='auto'"
            )
        self._host = host
        device = form.layout.device
        self._tables = RegionTables(form)
        self._ids = {way: IdUploads(device, sides=2, in_order=False) for way in Direction}
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._compile(device)

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`. Raises TransferError where page locking has failed since."""
        if not self._host.is_pinned:
            raise TransferError(
                "the direct path needs page-locked host memory, and locking it has failed: raise `ulimit -l`, or give "
                "copy_path='auto'"
            )
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

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`: one kernel each, in front of which its ids are sent."""
        return LONG_SLICE_BYTES

    def close(self) -> None:
        """See `CopyPath.close`."""
        for uploads in self._ids.values():
            uploads.close()
        self._ids = {}

    def _compile(self, device: torch.device) -> None:
        """Compile both kernels, on bytes that stay what they are, whether or not they were measured: the first copy of
        service would hold up all that is queued behind it."""
        row = device_tensor((1, self._host.block_bytes), torch.uint8, device)
        ids = device_tensor((1,), torch.int64, device).zero_()
        for _ in range(2):  # the second call is the one that service makes
            for move in (gather_pieces, scatter_pieces):
                move(self._tables.part(range(1)), ids, row, ids)
        torch.cuda.current_stream().synchronize()
