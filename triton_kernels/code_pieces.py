"""Pieces of scattered blocks to or from their coded form in rows of flat memory: kernels and launchers.

`coded_rows` has the format, and the reference. A program moves a segment at a time, each warp whole chunks of it, with
four words of every quarter in each thread: loads and stores are as wide as they can be, and what a chunk needs is found
within a warp. The words of its next segment are on their way meanwhile. Exceptions are numbered by prefix sums, without
atomics, so that the same piece always has the same bytes; every element is read once, so that one that changes
meanwhile spoils no other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from .coded_rows import ALIGN, CHUNK, ELEMENT_BYTES, SEGMENT_CHUNKS, chunks_of, segment_chunks
from .copy_pieces import RegionTable, checked_count, flat_rows
from .launch import Launch, is_observed, launch_of

ENCODE_PROGRAMS = 16
DECODE_PROGRAMS = 16
CHUNKS_PER_WARP = 2
"""Of a segment: 64 words in each thread, of which the next segment's are on their way."""
AHEAD = True
"""Whether the next segment is read before this one is written."""
_CHUNK_BYTES = CHUNK * ELEMENT_BYTES
_launches: dict[tuple[Any, ...], Launch] = {}
"""Of compiled kernels: see `copy_pieces`."""
_IS_INTERPRETED = knobs.runtime.interpret


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
    num_programs: int = ENCODE_PROGRAMS,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Write the coded pieces of block `block_ids[first + i]` into row `flat_ids[flat_first + i]` of `flat`.

    As `gather_pieces`, with a table of regions that `can_code`, whose addresses, strides and offsets are multiples of
    `ALIGN`, as are the row's. `verdicts` is int32 of shape (at least first + count,), on the GPU or page-locked: 1 is
    written at `first + i` where a piece of that block does not fit, and nothing otherwise.
    """
    if verdicts.dtype != torch.int32 or not verdicts.is_contiguous():
        raise ValueError(f"verdicts are {verdicts.dtype} of strides {verdicts.stride()}: give adjacent int32")
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
    num_programs: int = DECODE_PROGRAMS,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Write row `flat_ids[flat_first + i]` of `flat` into the pieces of block `block_ids[first + i]`: `encode_pieces`
    in reverse. Rows may hold anything: what is written stays within the pieces."""
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
    num_programs: int,
    stream: torch.cuda.Stream | None,
) -> None:
    flat_base, row_bytes = flat_rows(flat, flat_shift)
    count = checked_count(block_ids, flat_ids, first, count, flat_first)
    if flat_base % ALIGN or row_bytes % ALIGN:
        raise ValueError(f"rows of {row_bytes} bytes from {flat_base:#x} on: both have to be multiples of {ALIGN}")
    if verdicts is not None and verdicts.shape[0] < first + count:
        raise ValueError(f"{verdicts.shape[0]} verdicts for {count} blocks from {first} on")
    num_regions, chunks = len(table.host_sizes), chunks_of(table.largest)
    segments = -(-chunks // SEGMENT_CHUNKS)
    num_items = count * num_regions * segments
    if num_items == 0:
        return
    to_flat, in_order = verdicts is not None, flat_ids is None
    whole = all(size % _CHUNK_BYTES == 0 for size in table.host_sizes)
    rows = triton.next_power_of_2(segment_chunks(table.largest))
    num_warps = max(1, rows // CHUNKS_PER_WARP)
    programs = min(num_programs, num_items)
    counts = flat_base, row_bytes, num_items, num_regions, segments, table.total
    constants = in_order, whole, rows, not _IS_INTERPRETED, AHEAD
    key = (block_ids.get_device(), to_flat, num_warps, *constants)
    launch = _launches.get(key)
    if launch is None or is_observed():
        columns = table.bases, table.strides, table.sizes, table.offsets
        ids = block_ids[first:]
        sides = ids, ids if flat_ids is None else flat_ids[flat_first:]
        with torch.cuda.stream(stream):
            if verdicts is None:
                kernel = _decode_pieces[(programs,)](*sides, *columns, *counts, *constants, num_warps=num_warps)
            else:
                kernel = _encode_pieces[(programs,)](
                    *sides, *columns, verdicts[first:], *counts, *constants, num_warps=num_warps
                )
        if kernel is not None and launch is None:  # the interpreter compiles nothing
            _launches[key] = launch_of(kernel, constants)
        return
    ids_address = block_ids.data_ptr() + 8 * first
    flat_ids_address = ids_address if flat_ids is None else flat_ids.data_ptr() + 8 * flat_first
    handle = torch.cuda.current_stream().cuda_stream if stream is None else stream.cuda_stream
    told = [] if verdicts is None else [verdicts.data_ptr() + 4 * first]
    launch(programs, handle, [ids_address, flat_ids_address, *table.addresses, *told, *counts])


def _launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    count = args["num_items"] // (args["num_regions"] * args["segments"])
    return {"name": kernel.name, "bytes": count * args["block_bytes"] * 7 // 4}


@triton.jit  # type: ignore[untyped-decorator]
def _exponents_of(r0, r1, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of two rotated words each: bytes 1 of both, then bytes 3."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7351;", "=r,r,r", [r0, r1], dtype=tl.uint32, is_pure=True, pack=1
        )
    return ((r0 >> 8) & 0x00FF00FF) | (r1 & 0xFF00FF00)


@triton.jit  # type: ignore[untyped-decorator]
def _rest_of(r0, r1, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signs and mantissas of two rotated words each: bytes 0 of both, then bytes 2."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6240;", "=r,r,r", [r0, r1], dtype=tl.uint32, is_pure=True, pack=1
        )
    return (r0 & 0x00FF00FF) | ((r1 << 8) & 0xFF00FF00)


@triton.jit  # type: ignore[untyped-decorator]
def _first_of(rest, exponents, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of two words that `_rest_of` and `_exponents_of` were taken of, rotated back."""
    if ASM:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6240;", "=r,r,r", [rest, exponents], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        word = (rest & 0x00FF00FF) | ((exponents << 8) & 0xFF00FF00)
    return (word >> 1) | (word << 31)


@triton.jit  # type: ignore[untyped-decorator]
def _second_of(rest, exponents, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The second of them."""
    if ASM:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7351;", "=r,r,r", [rest, exponents], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        word = ((rest >> 8) & 0x00FF00FF) | (exponents & 0xFF00FF00)
    return (word >> 1) | (word << 31)


@triton.jit  # type: ignore[untyped-decorator]
def _lowest_of(words):  # type: ignore[no-untyped-def]
    """Of each row of rotated words, as int32: the largest exponent less 15, at least 0."""
    # The upper element of each word decides a comparison of words, once of them and once of them shifted.
    largest = tl.max(tl.maximum(words, words << 16), axis=1)
    return tl.maximum((largest >> 24).to(tl.int32) - 15, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(words):  # type: ignore[no-untyped-def]
    return (words << 1) | (words >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _pattern(lowest):  # type: ignore[no-untyped-def]
    """Of the lowest exponents of a chunk's quarters, a byte each: those of the first two and of the last two, as they
    lie in words of exponents."""
    return ((lowest & 0xFFFF) * 0x10001)[:, None], ((lowest >> 16) * 0x10001)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _split(item, num_regions, segments):  # type: ignore[no-untyped-def]
    """Which segment of which region of which block."""
    return item % segments, item // segments % num_regions, item // segments // num_regions


@triton.jit  # type: ignore[untyped-decorator]
def _next(segment, region, block, step, num_regions, segments):  # type: ignore[no-untyped-def]
    """The one so many further on, without a division."""
    segment += step[0]
    carry = (segment >= segments).to(tl.int32)
    segment -= carry * segments
    region += step[1] + carry
    carry = (region >= num_regions).to(tl.int32)
    return segment, region - carry * num_regions, block + step[2] + carry


@triton.jit  # type: ignore[untyped-decorator]
def _put_exceptions(words, numbers, at, slots, exponents, number, is_out, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store those `exponents` that are exceptions in slot `at` of `words`, and `number` in that of `numbers`."""
    mask = (is_out != 0) & (at < slots)
    if ASM:  # by the threads that have them: few do, and `tl.store` would share all of them out anew
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b64 a, b;
            setp.ne.u32 p, $6, 0;
            mad.wide.u32 a, $3, 4, $1;
            mad.wide.u32 b, $3, 2, $2;
            @p st.global.u32 [a], $4;
            @p st.global.u16 [b], $5;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,r,r,r",
            [words.to(tl.int64), numbers.to(tl.int64), at, exponents, number, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(words + at, exponents, mask=mask)
        tl.store(numbers + at, number.to(tl.uint16), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _segment(  # type: ignore[no-untyped-def]
    block_ids,
    flat_ids,
    bases,
    strides,
    sizes,
    offsets,
    flat_base,
    row_bytes,
    block,
    region,
    segment,
    num_blocks,
    segments,
    IN_ORDER: tl.constexpr,
):
    """Address of a segment's elements and of its coded form, and its elements: none behind the last block."""
    there = block < num_blocks
    size = tl.load(sizes + region).to(tl.int32)
    block_id = tl.load(block_ids + block, mask=there, other=0)
    row_id = block.to(tl.int64) if IN_ORDER else tl.load(flat_ids + block, mask=there, other=0)
    piece = tl.load(bases + region) + block_id * tl.load(strides + region)
    row = flat_base + row_id * row_bytes + tl.load(offsets + region)
    step = (size + 2047) // 2048
    if segments > 1:  # a smaller piece may have fewer: its last ones are empty
        own = (step + 15) // 16
        step = (step + own - 1) // own
    first = segment * step
    elements = tl.where(there, tl.maximum(tl.minimum(size // 2 - first * 1024, step * 1024), 0), 0)
    # Of several segments each but the last has the same number of chunks, and more than one.
    piece = tl.multiple_of(piece + first.to(tl.int64) * 2048, 16)
    row = tl.multiple_of(row + first.to(tl.int64) * 1568, 16)
    return piece, row, elements


@triton.jit  # type: ignore[untyped-decorator]
def _shape(elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a segment's chunks: words of a quarter each, and which of ROWS times 128 of them there are."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, 128)[None, :]
    if WHOLE:
        quarter = tl.full((ROWS, 1), 128, tl.int32)
        there = (rows * 1024 < elements) & (columns >= 0)
    else:
        quarter = tl.multiple_of(tl.minimum(tl.maximum(elements - rows * 1024, 0), 1024) // 8, (4, 4))
        there = columns < quarter
    return quarter, there


@triton.jit  # type: ignore[untyped-decorator]
def _words(address):  # type: ignore[no-untyped-def]
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _load_words(piece, elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four quarters of a segment's chunks."""
    quarter, there = _shape(elements, ROWS, WHOLE)
    at = _words(piece) + tl.arange(0, ROWS)[:, None] * 512 + tl.arange(0, 128)[None, :]
    w0 = tl.load(at, mask=there, other=0)
    w1 = tl.load(at + quarter, mask=there, other=0)
    w2 = tl.load(at + 2 * quarter, mask=there, other=0)
    w3 = tl.load(at + 3 * quarter, mask=there, other=0)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def _load_coded(row, elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signs and mantissas, codes, lowest exponents and number of exceptions of a segment."""
    quarter, there = _shape(elements, ROWS, WHOLE)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    words = _words(row)
    rest = words + rows * 256 + columns
    s0 = tl.load(rest, mask=there, other=0)
    s1 = tl.load(rest + quarter, mask=there, other=0)
    codes = tl.load(tl.multiple_of(words + elements // 4, 16) + rows * 128 + columns, mask=there, other=0)
    head = words + elements // 8 * 3
    row = tl.arange(0, ROWS)
    lowest = tl.load(head + row, mask=row * 1024 < elements, other=0)
    total = tl.load(head + (elements + 1023) // 1024, mask=elements > 0, other=0).to(tl.int32)
    return s0, s1, codes, lowest, total


@triton.jit  # type: ignore[untyped-decorator]
def _num_slots(chunks):  # type: ignore[no-untyped-def]
    """Exceptions for which a segment has room, and its head's words; none of what is not there."""
    head = tl.where(chunks > 0, tl.maximum(chunks * 8, 12), 0)
    return (head - chunks - 1) * 4 // 6, head


@triton.jit  # type: ignore[untyped-decorator]
def _list_exceptions(  # type: ignore[no-untyped-def]
    head, chunks, total, counts, is_out0, is_out1, e0, e1, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Write those words of exponents that are exceptions, in their order, and their numbers. `counts` are those of
    each chunk, `total` of all."""
    slots, _ = _num_slots(chunks)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    of_column = is_out0 + is_out1
    at = (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(of_column, 1) - of_column
    words = head + chunks + 1
    numbers = (words + slots).to(tl.pointer_type(tl.uint16))
    number = (rows * 128 + columns) * 2
    _put_exceptions(words, numbers, at, slots, e0, number, is_out0, ASM)
    _put_exceptions(words, numbers, at + is_out0, slots, e1, number + 1, is_out1, ASM)


@triton.jit  # type: ignore[untyped-decorator]
def _patch_exceptions(  # type: ignore[no-untyped-def]
    words, rest, head, elements, total, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Write the two words of each exception again, to what holds the others already."""
    chunks = (elements + 1023) // 1024
    slots, _ = _num_slots(chunks)
    slot = tl.arange(0, 8 * ROWS)
    listed = head + chunks + 1
    used = (slot < slots) & (slot < total)
    exponents = tl.load(listed + slot, mask=used, other=0)
    number = tl.load((listed + slots).to(tl.pointer_type(tl.uint16)) + slot, mask=used, other=0).to(tl.int32)
    chunk, column, half = number >> 8, (number >> 1) & 127, number & 1
    quarter = tl.minimum(tl.maximum(elements - chunk * 1024, 0), 1024) // 8
    used = used & (column < quarter)
    own = tl.load(rest + chunk * 256 + half * quarter + column, mask=used, other=0)
    at = words + chunk * 512 + half * 2 * quarter + column
    tl.store(at, _first_of(own, exponents, ASM), mask=used)
    tl.store(at + quarter, _second_of(own, exponents, ASM), mask=used)


@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=_launch_metadata,
    do_not_specialize=["flat_base", "row_bytes", "num_items", "num_regions", "segments", "block_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets", "verdicts"],
)
def _encode_pieces(  # type: ignore[no-untyped-def]
    block_ids,
    flat_ids,
    bases,
    strides,
    sizes,
    offsets,
    verdicts,
    flat_base,
    row_bytes,
    num_items,
    num_regions,
    segments,
    block_bytes,  # for launch_metadata only
    IN_ORDER: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    num_blocks = num_items // num_regions // segments
    segment, region, block = _split(tl.program_id(0), num_regions, segments)
    step = _split(tl.num_programs(0), num_regions, segments)
    piece, row, elements = _segment(
        block_ids, flat_ids, bases, strides, sizes, offsets,
        flat_base, row_bytes, block, region, segment, num_blocks, segments, IN_ORDER,
    )  # fmt: skip
    w0, w1, w2, w3 = _load_words(piece, elements, ROWS, WHOLE)
    for _ in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment, region, next_block = _next(segment, region, block, step, num_regions, segments)
        next_piece, next_row, next_elements = _segment(
            block_ids, flat_ids, bases, strides, sizes, offsets,
            flat_base, row_bytes, next_block, region, segment, num_blocks, segments, IN_ORDER,
        )  # fmt: skip
        if AHEAD:
            n0, n1, n2, n3 = _load_words(next_piece, next_elements, ROWS, WHOLE)
        r0, r1, r2, r3 = _rotated(w0), _rotated(w1), _rotated(w2), _rotated(w3)
        lowest = _lowest_of(r0) | (_lowest_of(r1) << 8) | (_lowest_of(r2) << 16) | (_lowest_of(r3) << 24)
        lowest = lowest.to(tl.uint32)
        low0, low1 = _pattern(lowest)
        e0, e1 = _exponents_of(r0, r1, ASM), _exponents_of(r2, r3, ASM)
        t0, t1 = e0 - low0, e1 - low1
        quarter, there = _shape(elements, ROWS, WHOLE)
        words = _words(row)
        rest = words + rows * 256 + columns
        tl.store(rest, _rest_of(r0, r1, ASM), mask=there)
        tl.store(rest + quarter, _rest_of(r2, r3, ASM), mask=there)
        codes = (t0 & 0x0F0F0F0F) | ((t1 << 4) & 0xF0F0F0F0)
        tl.store(tl.multiple_of(words + elements // 4, 16) + rows * 128 + columns, codes, mask=there)
        is_out0 = tl.minimum(t0 & 0xF0F0F0F0, 1).to(tl.int32)
        is_out1 = tl.minimum(t1 & 0xF0F0F0F0, 1).to(tl.int32)
        if not WHOLE:  # what is not there has exponent 0
            is_out0, is_out1 = tl.where(there, is_out0, 0), tl.where(there, is_out1, 0)
        counts = tl.sum(is_out0 + is_out1, 1)
        total = tl.sum(counts, 0)
        chunks = (elements + 1023) // 1024
        slots, head_words = _num_slots(chunks)
        head = words + elements // 8 * 3
        chunk = tl.arange(0, ROWS)
        tl.store(head + chunk, lowest, mask=chunk < chunks)
        tl.store(head + chunks, total.to(tl.uint32), mask=chunks > 0)
        slot = tl.arange(0, 8 * ROWS)
        listed = head + chunks + 1
        is_free = slot >= tl.minimum(total, slots)
        tl.store(listed + slot, tl.zeros((8 * ROWS,), tl.uint32), mask=is_free & (slot < slots))
        numbers = (listed + slots).to(tl.pointer_type(tl.uint16))
        halves = 2 * (head_words - chunks - 1 - slots)
        tl.store(numbers + slot, tl.zeros((8 * ROWS,), tl.uint16), mask=is_free & (slot < halves))
        if total > 0:
            _list_exceptions(head, chunks, total, counts, is_out0, is_out1, e0, e1, ROWS, ASM)
            if total > slots:
                tl.store(verdicts + block, 1)
        if not AHEAD:
            n0, n1, n2, n3 = _load_words(next_piece, next_elements, ROWS, WHOLE)
        piece, row, elements, block = next_piece, next_row, next_elements, next_block
        w0, w1, w2, w3 = n0, n1, n2, n3


@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=_launch_metadata,
    do_not_specialize=["flat_base", "row_bytes", "num_items", "num_regions", "segments", "block_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"],
)
def _decode_pieces(  # type: ignore[no-untyped-def]
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
    segments,
    block_bytes,  # for launch_metadata only
    IN_ORDER: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    num_blocks = num_items // num_regions // segments
    segment, region, block = _split(tl.program_id(0), num_regions, segments)
    step = _split(tl.num_programs(0), num_regions, segments)
    piece, row, elements = _segment(
        block_ids, flat_ids, bases, strides, sizes, offsets,
        flat_base, row_bytes, block, region, segment, num_blocks, segments, IN_ORDER,
    )  # fmt: skip
    s0, s1, codes, lowest, total = _load_coded(row, elements, ROWS, WHOLE)
    for _ in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment, region, next_block = _next(segment, region, block, step, num_regions, segments)
        next_piece, next_row, next_elements = _segment(
            block_ids, flat_ids, bases, strides, sizes, offsets,
            flat_base, row_bytes, next_block, region, segment, num_blocks, segments, IN_ORDER,
        )  # fmt: skip
        if AHEAD:
            n0, n1, next_codes, next_lowest, next_total = _load_coded(next_row, next_elements, ROWS, WHOLE)
        low0, low1 = _pattern(lowest)
        e0, e1 = (codes & 0x0F0F0F0F) + low0, ((codes >> 4) & 0x0F0F0F0F) + low1
        quarter, there = _shape(elements, ROWS, WHOLE)
        words = _words(piece)
        at = words + rows * 512 + columns
        tl.store(at, _first_of(s0, e0, ASM), mask=there)
        tl.store(at + quarter, _second_of(s0, e0, ASM), mask=there)
        tl.store(at + 2 * quarter, _first_of(s1, e1, ASM), mask=there)
        tl.store(at + 3 * quarter, _second_of(s1, e1, ASM), mask=there)
        if total != 0:
            tl.debug_barrier()  # other threads have written these words
            rest = _words(row)
            _patch_exceptions(words, rest, rest + elements // 8 * 3, elements, total, ROWS, ASM)
        if not AHEAD:
            n0, n1, next_codes, next_lowest, next_total = _load_coded(next_row, next_elements, ROWS, WHOLE)
        piece, row, elements, block = next_piece, next_row, next_elements, next_block
        s0, s1, codes, lowest, total = n0, n1, next_codes, next_lowest, next_total
