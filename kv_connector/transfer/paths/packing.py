"""Between pieces on the device and rows as they lie in host blocks: a kernel for what is raw, one for what is coded.

A coded piece may not fit, and the kernel that finds out says so in page-locked memory, an entry for each row of a copy:
whoever reads it waits for the event behind the copy first.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...triton_kernels.code_pieces import decode_pieces, encode_pieces
from ...triton_kernels.coded_rows import coded_bytes
from ...triton_kernels.copy_pieces import RegionTable, gather_pieces, scatter_pieces
from ..cuda.allocations import device_tensor, page_locked_int64
from ..cuda.uploads import upload_table
from ..memory.host_form import PIECE_ALIGN, HostForm
from .base import Int64s

SLAB_ROWS = 1 << 18
"""Of saves under way at once, 1 MiB. Where copies have more, a larger slab is made."""


@dataclass(frozen=True, slots=True)
class PartTables:
    """Of some consecutive regions: the table of those that are raw, and of those that are coded, where there are any.
    `start` is where the first of them begins in a host block."""

    raw: tuple[RegionTable, ...]
    coded: tuple[RegionTable, ...]
    start: int


class Verdicts:
    """Which rows of one save did not fit, once it has completed."""

    def __init__(self, slab: torch.Tensor) -> None:
        self.memory = slab
        self.memory.zero_()

    def refused(self, host_ids: Int64s) -> list[int]:
        """Those of the host blocks, which are in the order of rows."""
        refused: list[int] = host_ids[np.flatnonzero(self.memory.numpy()[: len(host_ids)])].tolist()
        return refused


class Packing:
    """The kernels of a form, and their tables; each part is made once."""

    def __init__(self, form: HostForm) -> None:
        self._form = form
        self._device = form.layout.device
        self._tables: list[tuple[list[int], RegionTable]] = []  # of raw ones, then of coded ones: which, and theirs
        for coded in (False, True):
            chosen = [index for index, is_coded in enumerate(form.is_coded) if is_coded is coded]
            if chosen:
                regions = tuple(form.layout.regions[index] for index in chosen)
                self._tables.append((chosen, upload_table(regions, [form.offsets[index] for index in chosen])))
        self.may_refuse = bool(form.name)
        self.no_verdicts = Verdicts(torch.zeros(0, dtype=torch.int32, device="cpu"))  # of what always fits
        self._slab = _Slab(SLAB_ROWS if self.may_refuse else 1, self._device)

    def part(self, regions: range) -> PartTables:
        """The tables of these consecutive regions."""
        found: dict[bool, tuple[RegionTable, ...]] = {False: (), True: ()}
        for chosen, table in self._tables:
            first, stop = bisect_left(chosen, regions.start), bisect_left(chosen, regions.stop)
            if first < stop:
                found[self._form.is_coded[chosen[0]]] = (table.narrow(first, stop - first),)
        return PartTables(found[False], found[True], self._form.offsets[regions.start])

    def verdicts(self, num_rows: int) -> Verdicts:
        """For a save of so many rows, one at least; what it takes is used again once nobody holds it."""
        return self._slab.take(num_rows)

    def pack(
        self,
        tables: PartTables,
        block_ids: torch.Tensor,
        rows: torch.Tensor,
        verdicts: Verdicts,
        first: int,
        count: int,
        stream: Any,
    ) -> None:
        """Write the pieces of blocks `block_ids[first : first + count]` into these rows, on `stream`."""
        for table in tables.raw:
            gather_pieces(table, block_ids, rows, first=first, count=count, flat_shift=-tables.start, stream=stream)
        for table in tables.coded:
            encode_pieces(
                table,
                block_ids,
                rows,
                verdicts.memory,
                first=first,
                count=count,
                flat_shift=-tables.start,
                stream=stream,
            )

    def unpack(
        self, tables: PartTables, block_ids: torch.Tensor, rows: torch.Tensor, first: int, count: int, stream: Any
    ) -> None:
        """Write these rows into the pieces of blocks `block_ids[first : first + count]`, on `stream`."""
        for table in tables.raw:
            scatter_pieces(table, block_ids, rows, first=first, count=count, flat_shift=-tables.start, stream=stream)
        for table in tables.coded:
            decode_pieces(table, block_ids, rows, first=first, count=count, flat_shift=-tables.start, stream=stream)

    def compile(self, stream: Any) -> None:
        """Compile all kernels, on bytes that stay what they are, or on nobody's: blocks until they have run."""
        for chosen, table in self._tables:
            if self._form.is_coded[chosen[0]]:
                # What is compiled follows from the lengths of a table's pieces.
                lengths = sorted({self._form.layout.regions[index].piece_bytes for index in chosen})
                for sizes in [[length] for length in lengths] + [lengths] * (len(lengths) > 1):
                    self._compile_coded(sizes, stream)
            else:
                first = PartTables((table.narrow(0, 1),), (), self._form.offsets[chosen[0]])
                self._run(first, -(-table.host_sizes[0] // PIECE_ALIGN) * PIECE_ALIGN, stream)

    def _compile_coded(self, sizes: list[int], stream: Any) -> None:
        """Kernels for pieces of these lengths, in memory of their own: what did not fit would not come back."""
        offsets = [0, *accumulate(coded_bytes(size) for size in sizes)]
        pieces = [device_tensor((1, size), torch.uint8, self._device).zero_() for size in sizes]
        columns = device_tensor((4, len(sizes)), torch.int64, self._device)
        self._run(PartTables((), (RegionTable.upload(pieces, offsets[:-1], columns),), 0), offsets[-1], stream)

    def _run(self, tables: PartTables, row_bytes: int, stream: Any) -> None:
        """Pack and unpack block 0 by these tables."""
        rows = device_tensor((1, row_bytes), torch.uint8, self._device)
        ids, verdicts = device_tensor((1,), torch.int64, self._device).zero_(), self.verdicts(1)
        torch.cuda.current_stream().synchronize()
        for _ in range(2):  # the second call is the one that service makes
            self.pack(tables, ids, rows, verdicts, 0, 1, stream)
            self.unpack(tables, ids, rows, 0, 1, stream)
        stream.synchronize()  # what they use goes


class _Slab:
    """Page-locked memory that goes round; a larger one is made where it is too small."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._taken: deque[tuple[int, int, weakref.ref[Verdicts]]] = deque()
        self._make(num_rows)

    def take(self, num_rows: int) -> Verdicts:
        """So many rows, all zero."""
        while self._taken and self._taken[0][2]() is None:
            self._taken.popleft()
        start = self._free_start(num_rows)
        if start is None:
            self._make(2 * max(num_rows, len(self._memory)))  # the old memory goes with those who hold a part of it
            self._taken.clear()
            start = 0
        verdicts = Verdicts(self._memory[start : start + num_rows])
        self._taken.append((start, start + num_rows, weakref.ref(verdicts)))
        return verdicts

    def _make(self, num_rows: int) -> None:
        memory: NDArray[np.int32] = page_locked_int64(-(-num_rows // 2), self._device).view(np.int32)
        self._memory = torch.from_numpy(memory)

    def _free_start(self, num_rows: int) -> int | None:
        """Where so many fit behind those that were taken last; None where they do not."""
        if not self._taken:
            return 0 if num_rows <= len(self._memory) else None
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest > oldest:
            if newest + num_rows <= len(self._memory):
                return newest
            return 0 if num_rows < oldest else None
        return newest if newest + num_rows < oldest else None
