"""The kernel that codes pieces.

The words of the program's next segment are on their way meanwhile. Exceptions are numbered by prefix sums, without
atomics, so that the same piece always has the same bytes; every element is read once, so that one that changes
meanwhile spoils no other.
"""

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
    rotated,
    segment_of,
    shape_of,
    split_item,
    words_at,
)


@triton.jit
def _larger_halves(a, b):  # type: ignore[no-untyped-def]
    """Of two words, each half's larger, on Hopper and later."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def _lowest_of(words, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of rotated words, as int32: the largest exponent less 15, at least 0."""
    # The upper element of each word decides a comparison of words, once of them and once of them shifted.
    if ASM == 2:
        words = tl.reduce(words, 2, _larger_halves)
        largest = tl.max(tl.maximum(words, words << 16), axis=0)
    else:
        largest = tl.max(tl.max(tl.maximum(words, words << 16), axis=2), axis=0)
    return tl.maximum((largest >> 24).to(tl.int32) - 15, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _lowest_of_quarters(r0, r1, r2, r3, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A byte for each quarter, of each chunk."""
    lowest = (
        _lowest_of(r0, ASM) | (_lowest_of(r1, ASM) << 8) | (_lowest_of(r2, ASM) << 16) | (_lowest_of(r3, ASM) << 24)
    )
    return lowest.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _exceptions_of(t0, t1, there, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which exponents less the lowest do not fit into a code, of two words each."""
    is_out0 = tl.minimum(t0 & 0xF0F0F0F0, 1).to(tl.int32)
    is_out1 = tl.minimum(t1 & 0xF0F0F0F0, 1).to(tl.int32)
    if not WHOLE:  # what is not there has exponent 0
        is_out0, is_out1 = tl.where(there, is_out0, 0), tl.where(there, is_out1, 0)
    return is_out0, is_out1


@triton.jit  # type: ignore[untyped-decorator]
def _store_head(head, head_words, chunks, slots, lowest, total, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lowest exponents and the number of exceptions, and zeros in the slots that no exception takes."""
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
def _load_words(piece, elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four quarters of a segment's chunks."""
    quarter, there = shape_of(elements, ROWS, WHOLE)
    rows, columns = places(ROWS)
    at = words_at(piece) + rows * 512 + columns
    w0 = tl.load(at, mask=there, other=0)
    w1 = tl.load(at + quarter, mask=there, other=0)
    w2 = tl.load(at + 2 * quarter, mask=there, other=0)
    w3 = tl.load(at + 3 * quarter, mask=there, other=0)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def _list_exceptions(  # type: ignore[no-untyped-def]
    head, chunks, is_out0, is_out1, e0, e1, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Write those words of exponents that are exceptions, in their order, and their numbers."""
    slots, _ = num_slots(chunks)
    rows, columns = places(ROWS)
    of_column = is_out0 + is_out1
    of_thread = tl.reshape(tl.trans(tl.sum(of_column, 2)), (ROWS * 32,))
    before = tl.trans(tl.reshape(tl.cumsum(of_thread, 0) - of_thread, (ROWS, 32)))[:, :, None]
    at = before + tl.cumsum(of_column, 2) - of_column
    words = head + chunks + 1
    numbers = (words + slots).to(tl.pointer_type(tl.uint16))
    number = (rows * 128 + columns) * 2
    _put_exceptions(words, numbers, at, slots, e0, number, is_out0, ASM)
    _put_exceptions(words, numbers, at + is_out0, slots, e1, number + 1, is_out1, ASM)


@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=launch_metadata,
    do_not_specialize=["verdicts", "flat_base", "row_bytes", "num_items", "num_regions", "segments", "block_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"],
)
def encode_kernel(  # type: ignore[no-untyped-def]
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
):
    rows, columns = places(ROWS)
    num_blocks = num_items // num_regions // segments
    segment, region, block = split_item(tl.program_id(0), num_regions, segments)
    step = split_item(tl.num_programs(0), num_regions, segments)
    piece, row, elements = segment_of(
        block_ids, flat_ids, bases, strides, sizes, offsets,
        flat_base, row_bytes, block, region, segment, num_blocks, segments, IN_ORDER,
    )  # fmt: skip
    w0, w1, w2, w3 = _load_words(piece, elements, ROWS, WHOLE)
    for _ in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment, region, next_block = next_item(segment, region, block, step, num_regions, segments)
        next_piece, next_row, next_elements = segment_of(
            block_ids, flat_ids, bases, strides, sizes, offsets,
            flat_base, row_bytes, next_block, region, segment, num_blocks, segments, IN_ORDER,
        )  # fmt: skip
        n0, n1, n2, n3 = _load_words(next_piece, next_elements, ROWS, WHOLE)
        r0, r1, r2, r3 = rotated(w0), rotated(w1), rotated(w2), rotated(w3)
        lowest = _lowest_of_quarters(r0, r1, r2, r3, ASM)
        low0, low1 = pattern(lowest)
        e0, e1 = odd_bytes(r0, r1, ASM), odd_bytes(r2, r3, ASM)
        t0, t1 = e0 - low0, e1 - low1
        quarter, there = shape_of(elements, ROWS, WHOLE)
        words = words_at(row)
        rest = words + rows * 256 + columns
        tl.store(rest, even_bytes(r0, r1, ASM), mask=there)
        tl.store(rest + quarter, even_bytes(r2, r3, ASM), mask=there)
        codes = (t0 & 0x0F0F0F0F) | ((t1 << 4) & 0xF0F0F0F0)
        tl.store(tl.multiple_of(words + (elements >> 2), 16) + rows * 128 + columns, codes, mask=there)
        is_out0, is_out1 = _exceptions_of(t0, t1, there, WHOLE)
        total = tl.sum(tl.sum(tl.sum(is_out0 + is_out1, 2), 0), 0)
        chunks = (elements + 1023) >> 10
        slots, head_words = num_slots(chunks)
        head = words + (elements >> 3) * 3
        _store_head(head, head_words, chunks, slots, lowest, total, ROWS)
        if total > 0:
            _list_exceptions(head, chunks, is_out0, is_out1, e0, e1, ROWS, ASM)
            if total > slots:
                tl.store((verdicts + block.to(tl.int64) * 4).to(tl.pointer_type(tl.int32)), 1)
        piece, row, elements, block = next_piece, next_row, next_elements, next_block
        w0, w1, w2, w3 = n0, n1, n2, n3
