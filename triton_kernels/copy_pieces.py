"""Pieces of scattered blocks to or from rows of flat memory: kernel, launchers and torch reference.

A block is spread over regions; a flat row holds its pieces at fixed offsets. The flat side is a staging ring on the
device, or host memory that is page-locked, which the GPU reads and writes over the link:

    regions   | region 0: block 0, block 1, ... |   | region 1: block 0, block 1, ... |
                             \\___________________________________/
    flat row                  | piece 0 | piece 1 | ...  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

# Persistent programs, from one H200 on PCIe 5 (2026-11-21). Over the link, 8 reading and 4 writing already reach 51 and
# 52 of 55 GB/s; more only take multiprocessors from the model (+57 % for its products at 8 writing). On the device, 16
# to 64 keep ahead of the link.
LINK_LOAD_PROGRAMS = 8
LINK_SAVE_PROGRAMS = 4
STAGED_PROGRAMS = 32
CHUNK_BYTES = 64 << 10
"""A piece is shared out in chunks of this many bytes, so that few large pieces still occupy every program."""
STEP = 2048
"""Words that one program moves at a time: with 8 warps, 64 bytes in flight for each thread."""
NUM_WARPS = 8
_INT32_MAX = (1 << 31) - 1
_compiled: dict[tuple[int, bool, bool, bool], Any] = {}
"""Compiled kernels by device and all that they are specialised on. Triton's own way to one, through signature, options
and cache key, takes several times as long as the launch."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable:
    """Where the pieces of a block lie. Upload it once; `narrow` gives a layer's or a group's part without a copy.

    bases, strides, sizes, offsets: int64 of shape (num_regions,) on the GPU: address of block 0's piece, bytes from
    block to block, bytes of a piece, offset of the piece in a flat row.
    host_sizes: `sizes` again, for the launcher, with their `largest` and `total`. words: whether bases, strides and
    offsets allow 8-byte words.
    """

    bases: torch.Tensor
    strides: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    host_sizes: tuple[int, ...]
    words: bool
    largest: int = field(init=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", max(self.host_sizes))
        object.__setattr__(self, "total", sum(self.host_sizes))

    @classmethod
    def upload(cls, views: Sequence[torch.Tensor], offsets: Sequence[int]) -> RegionTable:
        """The table of uint8 `views` of shape (num_blocks, piece_bytes), on their device; blocks until it is there."""
        columns = [
            [view.data_ptr() for view in views],
            [view.stride(0) for view in views],
            [view.shape[1] for view in views],
            list(offsets),
        ]
        aligned = all(value % 8 == 0 for column in (columns[0], columns[1], columns[3]) for value in column)
        table = torch.tensor(columns, dtype=torch.int64).to(views[0].device)
        return cls(table[0], table[1], table[2], table[3], tuple(columns[2]), aligned)

    def narrow(self, first: int, count: int) -> RegionTable:
        """Regions [first, first + count)."""
        part = slice(first, first + count)
        return RegionTable(
            self.bases[part],
            self.strides[part],
            self.sizes[part],
            self.offsets[part],
            self.host_sizes[part],
            self.words,
        )


def gather_pieces(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor,
    *,
    flat_shift: int = 0,
    num_programs: int = STAGED_PROGRAMS,
) -> None:
    """Copy the pieces of block `block_ids[i]` into row `flat_ids[i]` of `flat`, on the current stream.

    `flat` is uint8 of shape (num_rows, row_bytes), on the GPU or page-locked; the ids are int64 of shape (num_blocks,)
    on the GPU, in range and distinct on the side that is written. A piece lies at `offset + flat_shift` in its row.
    Bytes between pieces stay as they are.
    """
    _launch(table, block_ids, flat, flat_ids, flat_shift, num_programs, to_flat=True)


def scatter_pieces(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor,
    *,
    flat_shift: int = 0,
    num_programs: int = STAGED_PROGRAMS,
) -> None:
    """Copy row `flat_ids[i]` of `flat` into the pieces of block `block_ids[i]`: the reverse of `gather_pieces`."""
    _launch(table, block_ids, flat, flat_ids, flat_shift, num_programs, to_flat=False)


def copy_pieces_reference(
    views: Sequence[torch.Tensor],
    offsets: Sequence[int],
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor,
    to_flat: bool,
) -> None:
    """What both launchers do, with torch, on uint8 `views` of shape (num_blocks, piece_bytes)."""
    for view, offset in zip(views, offsets, strict=True):
        column = flat[:, offset : offset + view.shape[1]]
        if to_flat:
            column[flat_ids] = view[block_ids].to(flat.device)
        else:
            view[block_ids] = column[flat_ids].to(view.device)


def _launch(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor,
    flat_shift: int,
    num_programs: int,
    to_flat: bool,
) -> None:
    if flat.dtype != torch.uint8 or flat.ndim != 2 or flat.stride(1) != 1:
        raise ValueError(f"flat is {flat.dtype} of shape {tuple(flat.shape)}: give rows of uint8, bytes adjacent")
    if block_ids.dtype != torch.int64 or flat_ids.dtype != torch.int64 or block_ids.shape != flat_ids.shape:
        raise ValueError(f"ids are {block_ids.dtype} and {flat_ids.dtype}, {block_ids.shape} and {flat_ids.shape}")
    flat_base, row_bytes = flat.data_ptr() + flat_shift, flat.stride(0)
    chunks = -(-table.largest // CHUNK_BYTES)
    num_items = len(block_ids) * len(table.host_sizes) * chunks
    if num_items == 0:
        return
    grid = (min(num_programs, num_items), 1, 1)
    words = table.words and flat_base % 8 == 0 and row_bytes % 8 == 0
    total_bytes = len(block_ids) * table.total
    arguments = (
        block_ids,
        flat_ids,
        table.bases,
        table.strides,
        table.sizes,
        table.offsets,
        flat_base,
        row_bytes,
        num_items,
        len(table.host_sizes),
        chunks,
        total_bytes,
        to_flat,
        words,
        CHUNK_BYTES,
        STEP,
    )
    key = (table.bases.get_device(), to_flat, words, total_bytes > _INT32_MAX)
    kernel = _compiled.get(key)
    if kernel is not None:
        kernel[grid](*arguments)
        return
    kernel = _copy_pieces[grid](*arguments, num_warps=NUM_WARPS)
    if kernel is not None:  # the interpreter compiles nothing
        _compiled[key] = kernel


def _launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    direction = "gather" if args["TO_FLAT"] else "scatter"
    return {"name": f"{kernel.name}_{direction}", "bytes": 2 * args["total_bytes"]}


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    source,
    target,
    size,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP_SIZE: tl.constexpr,
):
    lanes = tl.arange(0, STEP_SIZE)
    source_ptr = source.to(tl.pointer_type(TYPE))
    target_ptr = target.to(tl.pointer_type(TYPE))
    count = size // WIDTH
    for start in range(0, count, STEP_SIZE):
        mask = start + lanes < count
        tl.store(target_ptr + start + lanes, tl.load(source_ptr + start + lanes, mask=mask), mask=mask)


# Counts, addresses and the alignment of slices change from call to call: specialising on them would compile during
# service.
@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=_launch_metadata,
    do_not_specialize=["flat_base", "row_bytes", "num_items", "num_regions", "chunks", "total_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"],
)
def _copy_pieces(  # type: ignore[no-untyped-def]
    block_ids,
    flat_ids,
    bases,
    strides,
    sizes,
    offsets,
    flat_base,
    row_bytes,
    num_items,
    num_regions,
    chunks,
    total_bytes,  # for launch_metadata only
    TO_FLAT: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP_SIZE: tl.constexpr,
):
    tl.static_assert(CHUNK % 8 == 0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        chunk = item % chunks
        region = item // chunks % num_regions
        block = item // chunks // num_regions
        done = chunk.to(tl.int64) * CHUNK
        # A region of smaller pieces has fewer chunks: its last ones are empty.
        size = tl.maximum(tl.minimum(tl.load(sizes + region) - done, CHUNK), 0)
        piece = tl.load(bases + region) + tl.load(block_ids + block) * tl.load(strides + region) + done
        row = flat_base + tl.load(flat_ids + block) * row_bytes + tl.load(offsets + region) + done
        source = piece if TO_FLAT else row
        target = row if TO_FLAT else piece
        if WORDS:
            _move(source, target, size, tl.int64, 8, STEP_SIZE)
            whole = size // 8 * 8
            _move(source + whole, target + whole, size - whole, tl.uint8, 1, 8)
        else:
            _move(source, target, size, tl.uint8, 1, STEP_SIZE)
