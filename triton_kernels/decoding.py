"""The kernel that decodes pieces. The next segment is on its way meanwhile; exceptions are written last."""

from __future__ import annotations

import triton
import triton.language as tl

from .coded_segments import (
    even_bytes,
    launch_metadata,
    next_item,
    num_slots,
    odd_bytes,
    pattern,
    places,
    rotated_back,
    segment_of,
    shape_of,
    split_item,
    words_at,
)


@triton.jit  # type: ignore[untyped-decorator]
def _load_coded(row, elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signs and mantissas, codes, lowest exponents and number of exceptions of a segment."""
    quarter, there = shape_of(elements, ROWS, WHOLE)
    rows, columns = places(ROWS)
    words = words_at(row)
    rest = words + rows * 256 + columns
    s0 = tl.load(rest, mask=there, other=0)
    s1 = tl.load(rest + quarter, mask=there, other=0)
    codes = tl.load(tl.multiple_of(words + (elements >> 2), 16) + rows * 128 + columns, mask=there, other=0)
    head = words + (elements >> 3) * 3
    row = tl.arange(0, ROWS)
    lowest = tl.load(head + row, mask=row * 1024 < elements, other=0)
    total = tl.load(head + ((elements + 1023) >> 10), mask=elements > 0, other=0).to(tl.int32)
    return s0, s1, codes, lowest, total


@triton.jit  # type: ignore[untyped-decorator]
def _patch_exceptions(  # type: ignore[no-untyped-def]
    words, rest, head, elements, total, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Write the two words of each exception again, to what holds the others already."""
    chunks = (elements + 1023) >> 10
    slots, _ = num_slots(chunks)
    slot = tl.arange(0, 8 * ROWS)
    listed = head + chunks + 1
    used = (slot < slots) & (slot < total)
    exponents = tl.load(listed + slot, mask=used, other=0)
    number = tl.load((listed + slots).to(tl.pointer_type(tl.uint16)) + slot, mask=used, other=0).to(tl.int32)
    chunk, column, half = number >> 8, (number >> 1) & 127, number & 1
    quarter = tl.minimum(tl.maximum(elements - chunk * 1024, 0), 1024) >> 3
    used = used & (column < quarter)
    own = tl.load(rest + chunk * 256 + half * quarter + column, mask=used, other=0)
    at = words + chunk * 512 + half * 2 * quarter + column
    tl.store(at, rotated_back(even_bytes(own, exponents, ASM)), mask=used)
    tl.store(at + quarter, rotated_back(odd_bytes(own, exponents, ASM)), mask=used)


@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=launch_metadata,
    do_not_specialize=["flat_base", "row_bytes", "num_items", "num_regions", "segments", "block_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"],
)
def decode_kernel(  # type: ignore[no-untyped-def]
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
):
    rows, columns = places(ROWS)
    num_blocks = num_items // num_regions // segments
    segment, region, block = split_item(tl.program_id(0), num_regions, segments)
    step = split_item(tl.num_programs(0), num_regions, segments)
    piece, row, elements = segment_of(
        block_ids, flat_ids, bases, strides, sizes, offsets,
        flat_base, row_bytes, block, region, segment, num_blocks, segments, IN_ORDER,
    )  # fmt: skip
    s0, s1, codes, lowest, total = _load_coded(row, elements, ROWS, WHOLE)
    for _ in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment, region, next_block = next_item(segment, region, block, step, num_regions, segments)
        next_piece, next_row, next_elements = segment_of(
            block_ids, flat_ids, bases, strides, sizes, offsets,
            flat_base, row_bytes, next_block, region, segment, num_blocks, segments, IN_ORDER,
        )  # fmt: skip
        n0, n1, next_codes, next_lowest, next_total = _load_coded(next_row, next_elements, ROWS, WHOLE)
        low0, low1 = pattern(lowest)
        e0, e1 = (codes & 0x0F0F0F0F) + low0, ((codes >> 4) & 0x0F0F0F0F) + low1
        quarter, there = shape_of(elements, ROWS, WHOLE)
        words = words_at(piece)
        at = words + rows * 512 + columns
        tl.store(at, rotated_back(even_bytes(s0, e0, ASM)), mask=there)
        tl.store(at + quarter, rotated_back(odd_bytes(s0, e0, ASM)), mask=there)
        tl.store(at + 2 * quarter, rotated_back(even_bytes(s1, e1, ASM)), mask=there)
        tl.store(at + 3 * quarter, rotated_back(odd_bytes(s1, e1, ASM)), mask=there)
        if total != 0:
            tl.debug_barrier()  # other threads have written these words
            rest = words_at(row)
            _patch_exceptions(words, rest, rest + (elements >> 3) * 3, elements, total, ROWS, ASM)
        piece, row, elements, block = next_piece, next_row, next_elements, next_block
        s0, s1, codes, lowest, total = n0, n1, next_codes, next_lowest, next_total
