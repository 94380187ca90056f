"""Pieces of scattered blocks to or from rows of flat memory: kernel, launchers and torch reference.

A block is spread over regions; a flat row holds its pieces at fixed offsets. The flat side is a staging ring on the
device, or host memory that is page-locked, which the GPU reads and writes over the link, or another GPU's pool, whose
regions are rows as long as the distance between its blocks:

    regions   | region 0: block 0, block 1, ... |   | region 1: block 0, block 1, ... |
                             \\___________________________________/
    flat row                  | piece 0 | piece 1 | ...  |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Launch, is_observed, launch_of

# Persistent programs, from one H200 on PCIe 5 (2026-11-21). Over the link, 8 reading and 4 writing already reach 51 and
# 52 of 55 GB/s; more only take multiprocessors from the model (+57 % for its products at 8 writing). On the device, 16
# keep ahead of the link, at 230 GB/s for pieces of 16 KiB, and slow large products by 1.3 % where 32 slow them by 2.1 %
# (2026-11-22). To another GPU over NVLink 4 (two H200s, 2026-11-22) 32 reach 0.82 of one large copy of 394 GB/s, 64
# 0.89 and 96 0.92, at pieces of 64 KiB.
LINK_LOAD_PROGRAMS = 8
LINK_SAVE_PROGRAMS = 4
STAGED_PROGRAMS = 16
PEER_PROGRAMS = 96
CHUNK_BYTES = 64 << 10
"""A piece is shared out in chunks of this many bytes, so that few large pieces still occupy every program: one of 1 MiB
is as many chunks as `STAGED_PROGRAMS`, and a chunk four steps of words of 8 bytes. No other size has been measured."""
STEP = 2048
"""Words that one program moves at a time, of several pieces where they are small: with 8 warps, 64 bytes in flight for
each thread, all that a program has on its way over the link, 16 KiB. No other size has been measured."""
LEAST_WIDTH = 32
"""Words of one piece in a step: a warp's, a word for each thread."""
NUM_WARPS = 8
_launches: dict[tuple[int, bool, bool, bool, int], Launch] = {}
"""Of compiled kernels, by device and all that they are specialised on: Triton's own way to one, through signature,
options and cache key, takes several times as long as the launch."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable:
    """Where the pieces of a block lie. Upload it once; `narrow` gives a layer's or a group's part without a copy.

    bases, strides, sizes, offsets: int64 of shape (num_regions,) on the GPU: address of block 0's piece, bytes from
    block to block, bytes of a piece, offset of the piece in a flat row.
    host_sizes: `sizes` again, for the launcher, with their `largest`, their `total`, and the `unit` that divides them
    all. align: the largest power of two, up to 16, that divides bases, strides and offsets. width: words of one piece
    that a step moves, a power of two; parts keep it, so that no part needs a kernel of its own.
    """

    bases: torch.Tensor
    strides: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    host_sizes: tuple[int, ...]
    align: int
    width: int
    largest: int = field(init=False)
    total: int = field(init=False)
    unit: int = field(init=False)
    addresses: tuple[int, ...] = field(init=False)  # of the four tensors: cheaper to pass on than these

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", max(self.host_sizes))
        object.__setattr__(self, "total", sum(self.host_sizes))
        object.__setattr__(self, "unit", math.gcd(*self.host_sizes))
        columns = (self.bases, self.strides, self.sizes, self.offsets)
        object.__setattr__(self, "addresses", tuple(column.data_ptr() for column in columns))

    @classmethod
    def upload(
        cls, views: Sequence[torch.Tensor], offsets: Sequence[int], table: torch.Tensor | None = None
    ) -> RegionTable:
        """The table of uint8 `views` of shape (num_blocks, piece_bytes), on their device; blocks until it is there.

        It is written to `table`, int64 of shape (4, num_regions) on that device, or to new memory of torch's.
        """
        columns = [
            [view.data_ptr() for view in views],
            [view.stride(0) for view in views],
            [view.shape[1] for view in views],
            list(offsets),
        ]
        align = math.gcd(16, *columns[0], *columns[1], *columns[3])
        content = torch.tensor(columns, dtype=torch.int64, device="cpu")
        table = content.to(views[0].device) if table is None else table.copy_(content)
        longest = -(-min(max(columns[2]), CHUNK_BYTES) // (8 if align >= 8 else 1))
        width = min(max(triton.next_power_of_2(longest), LEAST_WIDTH), STEP)
        return cls(table[0], table[1], table[2], table[3], tuple(columns[2]), align, width)

    def narrow(self, first: int, count: int) -> RegionTable:
        """Regions [first, first + count)."""
        part = slice(first, first + count)
        return RegionTable(
            self.bases[part],
            self.strides[part],
            self.sizes[part],
            self.offsets[part],
            self.host_sizes[part],
            self.align,
            self.width,
        )


def gather_pieces(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor | None = None,
    *,
    first: int = 0,
    count: int | None = None,
    flat_first: int = 0,
    flat_shift: int = 0,
    num_programs: int = STAGED_PROGRAMS,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy the pieces of block `block_ids[first + i]` into row `flat_ids[flat_first + i]` of `flat`, row i without
    `flat_ids`.

    `flat` is uint8 of shape (num_rows, row_bytes), on the GPU or page-locked; the ids are int64 of shape (num_ids,) on
    the GPU, in range and distinct on the side that is written. A piece lies at `offset + flat_shift` bytes in its row.
    Bytes between pieces stay as they are. `count` blocks are copied, or all from `first` on: slicing a tensor would
    take as long as the launch. Enqueues on `stream`, or the current one, which takes longer to find, and returns:
    tensors must stay allocated until the stream has passed. May be called from any thread. Raises ValueError for other
    dtypes or too few ids, RuntimeError where the launch fails; ids are not checked to be in range.
    """
    base, row_bytes = flat_rows(flat, flat_shift)
    _launch(table, block_ids, base, row_bytes, flat_ids, first, count, flat_first, num_programs, stream, to_flat=True)


def scatter_pieces(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor | None = None,
    *,
    first: int = 0,
    count: int | None = None,
    flat_first: int = 0,
    flat_shift: int = 0,
    num_programs: int = STAGED_PROGRAMS,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy row `flat_ids[flat_first + i]` of `flat` into the pieces of block `block_ids[first + i]`: `gather_pieces` in
    reverse, with the same arguments, errors and asynchrony."""
    base, row_bytes = flat_rows(flat, flat_shift)
    _launch(table, block_ids, base, row_bytes, flat_ids, first, count, flat_first, num_programs, stream, to_flat=False)


def send_pieces(
    table: RegionTable,
    ids: torch.Tensor,
    num_blocks: int,
    base: int,
    row_bytes: int,
    *,
    num_programs: int = PEER_PROGRAMS,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy the pieces of block `ids[i]` to block `ids[num_blocks + i]` of a pool elsewhere that the GPU reaches.

    There the piece of block b is at address `base + b * row_bytes` plus the table's offset, in bytes. Ids are int64 of
    shape (at least 2 * num_blocks,) on the GPU, in range, the second half distinct: that is not checked. Enqueues on
    `stream`, or the current one, and returns. Raises as `gather_pieces`.
    """
    _launch(table, ids, base, row_bytes, ids, 0, num_blocks, num_blocks, num_programs, stream, to_flat=True)


def copy_pieces_reference(
    views: Sequence[torch.Tensor],
    offsets: Sequence[int],
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor,
    to_flat: bool,
) -> None:
    """What `gather_pieces` (`to_flat`) and `scatter_pieces` do, in torch: uint8 `views` of shape (num_blocks,
    piece_bytes), `offsets` of pieces in a row in bytes, ids of shape (count,). For tests."""
    for view, offset in zip(views, offsets, strict=True):
        column = flat[:, offset : offset + view.shape[1]]
        if to_flat:
            column[flat_ids] = view[block_ids].to(flat.device)
        else:
            view[block_ids] = column[flat_ids].to(view.device)


def flat_rows(flat: torch.Tensor, shift: int) -> tuple[int, int]:
    """Address of the first row plus `shift` bytes, and bytes from row to row, of uint8 `flat` of shape (num_rows,
    row_bytes). Raises ValueError for another dtype, or rows whose bytes are not adjacent."""
    if flat.dtype != torch.uint8 or flat.ndim != 2 or flat.stride(1) != 1:
        raise ValueError(f"flat is {flat.dtype} of shape {tuple(flat.shape)}: give rows of uint8, bytes adjacent")
    return flat.data_ptr() + shift, flat.stride(0)


def _launch(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat_base: int,
    row_bytes: int,
    flat_ids: torch.Tensor | None,
    first: int,
    count: int | None,
    flat_first: int,
    num_programs: int,
    stream: torch.cuda.Stream | None,
    to_flat: bool,
) -> None:
    count = checked_count(block_ids, flat_ids, first, count, flat_first)
    words = table.align >= 8 and flat_base % 8 == 0 and row_bytes % 8 == 0
    width = table.width if words else STEP
    pieces = STEP // width
    num_regions, chunks = len(table.host_sizes), -(-table.largest // CHUNK_BYTES)
    num_items = count * num_regions * chunks
    if num_items == 0:
        return
    programs = min(num_programs, -(-num_items // pieces))
    counts = flat_base, row_bytes, num_items, num_regions, chunks, table.total
    constants = to_flat, words, flat_ids is None, CHUNK_BYTES, pieces, width
    key = (block_ids.get_device(), to_flat, words, flat_ids is None, width)
    launch = _launches.get(key)
    if launch is None or is_observed():
        columns = table.bases, table.strides, table.sizes, table.offsets
        ids = block_ids[first:]
        with torch.cuda.stream(stream):
            kernel = _copy_pieces[(programs,)](
                ids,
                ids if flat_ids is None else flat_ids[flat_first:],
                *columns,
                *counts,
                *constants,
                num_warps=NUM_WARPS,
            )
        if kernel is not None and launch is None:  # the interpreter compiles nothing
            _launches[key] = launch_of(kernel, constants)
        return
    # Addresses in place of tensors: the launcher would ask the driver about each of those.
    ids_address = block_ids.data_ptr() + 8 * first
    flat_ids_address = ids_address if flat_ids is None else flat_ids.data_ptr() + 8 * flat_first
    handle = torch.cuda.current_stream().cuda_stream if stream is None else stream.cuda_stream
    launch(programs, handle, [ids_address, flat_ids_address, *table.addresses, *counts])


def checked_count(
    block_ids: torch.Tensor, flat_ids: torch.Tensor | None, first: int, count: int | None, flat_first: int
) -> int:
    """How many blocks are copied: `count`, or all from `first` on. Raises ValueError for ids that are not int64, or too
    few."""
    if block_ids.dtype != torch.int64 or (flat_ids is not None and flat_ids.dtype != torch.int64):
        raise ValueError(
            f"ids are {block_ids.dtype} and {flat_ids.dtype if flat_ids is not None else None}: give int64"
        )
    num_ids = block_ids.shape[0] - first
    num_flat = num_ids if flat_ids is None else flat_ids.shape[0] - flat_first
    if count is None:
        count = max(num_ids, num_flat)
    if not 0 <= count <= min(num_ids, num_flat):
        raise ValueError(
            f"{count} blocks from {first} on: there are {num_ids} block_ids and {num_flat} flat_ids for them"
        )
    return count


def _launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    direction = "gather" if args["TO_FLAT"] else "scatter"
    count = args["num_items"] // (args["num_regions"] * args["chunks"])
    return {"name": f"{kernel.name}_{direction}", "bytes": 2 * count * args["block_bytes"]}


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    sources,
    targets,
    sizes,
    TYPE: tl.constexpr,
    ITEM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As many bytes as each entry's `sizes`, WIDTH items of them at a time."""
    lanes = tl.arange(0, WIDTH)[None, :]
    source_ptrs = sources.to(tl.pointer_type(TYPE))[:, None]
    target_ptrs = targets.to(tl.pointer_type(TYPE))[:, None]
    counts = (sizes // ITEM)[:, None]
    for start in range(0, tl.max(sizes) // ITEM, WIDTH):
        mask = start + lanes < counts
        tl.store(target_ptrs + start + lanes, tl.load(source_ptrs + start + lanes, mask=mask), mask=mask)


# Counts, addresses and the alignment of slices change from call to call: specialising on them would compile during
# service.
@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=_launch_metadata,
    do_not_specialize=["flat_base", "row_bytes", "num_items", "num_regions", "chunks", "block_bytes"],
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
    block_bytes,  # for launch_metadata only; the bytes of all blocks would change the argument's type, at 2 GiB
    TO_FLAT: tl.constexpr,
    WORDS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tl.static_assert(CHUNK % 8 == 0)
    for first in range(tl.program_id(0) * PIECES, num_items, tl.num_programs(0) * PIECES):
        item = first + tl.arange(0, PIECES)
        there = item < num_items
        chunk = item % chunks
        region = item // chunks % num_regions
        block = item // chunks // num_regions
        done = chunk.to(tl.int64) * CHUNK
        # A region of smaller pieces has fewer chunks: its last ones are empty.
        size = tl.maximum(tl.minimum(tl.load(sizes + region, mask=there, other=0) - done, CHUNK), 0)
        block_id = tl.load(block_ids + block, mask=there, other=0)
        row_id = block.to(tl.int64) if IN_ORDER else tl.load(flat_ids + block, mask=there, other=0)
        piece = tl.load(bases + region) + block_id * tl.load(strides + region) + done
        row = flat_base + row_id * row_bytes + tl.load(offsets + region) + done
        source = piece if TO_FLAT else row
        target = row if TO_FLAT else piece
        if WORDS:
            _move(source, target, size, tl.int64, 8, WIDTH)
            whole = size // 8 * 8
            _move(source + whole, target + whole, size - whole, tl.uint8, 1, 8)
        else:
            _move(source, target, size, tl.uint8, 1, WIDTH)
