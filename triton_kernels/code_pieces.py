"""Pieces of scattered blocks to or from their coded form in rows of flat memory: kernels and launchers.

`coded_rows` has the format and the reference, `encoding` and `decoding` the kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton import knobs

from .coded_rows import ALIGN, CHUNK, ELEMENT_BYTES, LEAST_BYTES, SEGMENT_CHUNKS, chunks_of, segment_chunks
from .copy_pieces import RegionTable, checked_count, flat_rows
from .decoding import decode_kernel
from .encoding import encode_kernel
from .launch import Launch, is_observed, launch_of

NUM_WARPS = 128
"""Warps of all programs together, unless the caller says how many programs: those of short pieces have one warp each,
others up to eight. 16 programs of eight were measured (H200, `lossless_h200.json`)."""
CHUNKS_PER_WARP = 2
"""Of a segment: 32 words in each thread, and as many of the next segment's on their way. Four are 20 % slower, one
is no faster, and without the next segment on its way 16 programs code at 0.80 and decode at 0.85 of the rate (H200,
`lossless_h200.json`)."""
_CHUNK_BYTES = CHUNK * ELEMENT_BYTES
_launches: dict[tuple[Any, ...], Launch] = {}
"""Of compiled kernels: see `copy_pieces`."""


def encode_pieces(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    verdicts: torch.Tensor,
    flat_ids: torch.Tensor | None = None,
    *,
    first: int = 0,
    count: int | None = None,
    flat_first: int = 0,
    flat_shift: int = 0,
    num_programs: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Write the coded pieces of block `block_ids[first + i]` into row `flat_ids[flat_first + i]` of `flat`.

    As `gather_pieces`, with a table of regions that `can_code`, whose addresses, strides and offsets are multiples of
    `ALIGN`, as are the row's. `verdicts` is int32 of shape (at least first + count,), on the GPU or page-locked: 1 is
    written at `first + i` where a piece of that block does not fit, and nothing otherwise, so clear it before. Raises
    ValueError where the table, rows, ids or verdicts are not so, RuntimeError where the launch fails.
    """
    _launch(table, block_ids, flat, verdicts, flat_ids, first, count, flat_first, flat_shift, num_programs, stream)


def decode_pieces(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    flat_ids: torch.Tensor | None = None,
    *,
    first: int = 0,
    count: int | None = None,
    flat_first: int = 0,
    flat_shift: int = 0,
    num_programs: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Write row `flat_ids[flat_first + i]` of `flat` into the pieces of block `block_ids[first + i]`: `encode_pieces`
    in reverse. Rows may hold any bytes: nothing outside the pieces is written. Raises as `encode_pieces`."""
    _launch(table, block_ids, flat, None, flat_ids, first, count, flat_first, flat_shift, num_programs, stream)


def _launch(
    table: RegionTable,
    block_ids: torch.Tensor,
    flat: torch.Tensor,
    verdicts: torch.Tensor | None,
    flat_ids: torch.Tensor | None,
    first: int,
    count: int | None,
    flat_first: int,
    flat_shift: int,
    num_programs: int | None,
    stream: torch.cuda.Stream | None,
) -> None:
    flat_base, row_bytes = flat_rows(flat, flat_shift)
    count = checked_count(block_ids, flat_ids, first, count, flat_first)
    _check(table, flat_base, row_bytes, verdicts, first + count)
    num_regions, chunks = len(table.host_sizes), chunks_of(table.largest)
    segments = -(-chunks // SEGMENT_CHUNKS)
    num_items = count * num_regions * segments
    if num_items == 0:
        return
    to_flat, in_order = verdicts is not None, flat_ids is None
    whole = table.unit % _CHUNK_BYTES == 0
    rows = triton.next_power_of_2(segment_chunks(table.largest))
    num_warps = max(1, rows // CHUNKS_PER_WARP)
    programs = min(NUM_WARPS // num_warps if num_programs is None else num_programs, num_items)
    told = () if verdicts is None else (verdicts.data_ptr() + 4 * first,)
    counts = *told, flat_base, row_bytes, num_items, num_regions, segments, table.total
    constants = in_order, whole, rows, _assembly(block_ids.device)
    key = (block_ids.get_device(), to_flat, num_warps, *constants)
    launch = _launches.get(key)
    if launch is None or is_observed():
        columns = table.bases, table.strides, table.sizes, table.offsets
        ids = block_ids[first:]
        sides = ids, ids if flat_ids is None else flat_ids[flat_first:]
        with torch.cuda.stream(stream):
            kernel = (encode_kernel if to_flat else decode_kernel)[(programs,)](
                *sides, *columns, *counts, *constants, num_warps=num_warps
            )
        if kernel is not None and launch is None:  # the interpreter compiles nothing
            _launches[key] = launch_of(kernel, constants)
        return
    ids_address = block_ids.data_ptr() + 8 * first
    flat_ids_address = ids_address if flat_ids is None else flat_ids.data_ptr() + 8 * flat_first
    handle = torch.cuda.current_stream().cuda_stream if stream is None else stream.cuda_stream
    launch(programs, handle, [ids_address, flat_ids_address, *table.addresses, *counts])


def _check(
    table: RegionTable, flat_base: int, row_bytes: int, verdicts: torch.Tensor | None, num_verdicts: int
) -> None:
    """Raise ValueError where a kernel would fault, or the format has no such piece."""
    if table.align < ALIGN or table.unit % LEAST_BYTES:
        raise ValueError(
            f"pieces of {set(table.host_sizes)} bytes, at multiples of {table.align}: coded ones have multiples of "
            f"{LEAST_BYTES} bytes, at multiples of {ALIGN} on both sides"
        )
    if flat_base % ALIGN or row_bytes % ALIGN:
        raise ValueError(f"rows of {row_bytes} bytes from {flat_base:#x} on: both have to be multiples of {ALIGN}")
    if verdicts is None:
        return
    if verdicts.dtype != torch.int32 or not verdicts.is_contiguous():
        raise ValueError(f"verdicts are {verdicts.dtype} of strides {verdicts.stride()}: give adjacent int32")
    if verdicts.shape[0] < num_verdicts:
        raise ValueError(f"{verdicts.shape[0]} verdicts where {num_verdicts} are needed")


@cache
def _assembly(device: torch.device) -> int:
    """Which of the GPU's own instructions kernels use there: see `coded_segments`."""
    if knobs.runtime.interpret or device.type != "cuda":
        return 0
    return 2 if torch.cuda.get_device_capability(device) >= (9, 0) else 1
