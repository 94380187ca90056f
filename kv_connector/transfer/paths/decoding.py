"""The fallback path to the device for coded host blocks: the CPU decodes, and the driver copies."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import TransferError
from ...triton_kernels.coded_rows import decode_reference
from ...types import Direction
from ..cuda.copier import driver_copier
from ..cuda.driver import Copier
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from .base import SLICE_BYTES, BlockCopy


class DecodingPath:
    """Loads without kernels, staging or page-locked memory, for those that have failed on another path (see
    `CopyPath`). The caller waits for the CPU."""

    def __init__(self, form: HostForm, host: HostPool, copier: Copier | None = None) -> None:
        """`copier` replaces the CUDA driver in tests."""
        self._form = form
        self._columns = form.columns(host.tensor)
        self._copier = copier if copier is not None else driver_copier()

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`. Raises TransferError for a save."""
        if copy.direction is Direction.SAVE:
            raise TransferError("a path that decodes has no way to the host")
        host_index = torch.tensor(copy.host_ids, device="cpu")
        handle = None if copy.stream is None else copy.stream.cuda_stream
        for index in copy.regions:
            region = self._form.layout.regions[index]
            pieces = self._columns[index].index_select(0, host_index)
            if self._form.is_coded[index]:
                pieces = decode_reference(pieces, region.piece_bytes)
            targets = region.data_ptr + copy.device_ids * region.block_stride
            sources = pieces.data_ptr() + np.arange(len(targets), dtype=np.int64) * region.piece_bytes
            sizes = np.full(len(targets), region.piece_bytes, dtype=np.int64)
            arrays = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
            # Memory that is not page-locked: the driver has read it when the call returns.
            self._copier(*arrays, len(targets), False, handle)

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`."""
        return SLICE_BYTES

    def close(self) -> None:
        """Drop the views."""
        self._columns = []
