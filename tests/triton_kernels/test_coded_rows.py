"""The coded form of bf16 pieces: sizes, and that every piece that fits comes back bit for bit."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_connector.triton_kernels.coded_rows import (
    ALIGN,
    FORMAT,
    can_code,
    chunks_of,
    coded_bytes,
    decode_reference,
    encode_reference,
    num_slots,
    segments_of,
)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Of bf16 elements given as integers: uint8."""
    return values.to(torch.int32).to(torch.int16).contiguous().view(torch.uint8)


def normal(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Pieces of normal numbers, uint8 of `shape`."""
    elements = torch.randn((shape[0], shape[1] // 2), generator=torch.Generator().manual_seed(seed))
    return elements.to(torch.bfloat16).view(torch.uint8)


def slow_exceptions(piece: torch.Tensor) -> int:
    """Words of exponents that the list has to hold, counted element by element as the format says."""
    exponents = [(bits >> 7) & 255 for bits in (piece.view(torch.int16).to(torch.int32) & 0xFFFF).tolist()]
    count = 0
    for start in range(0, len(exponents), 1024):
        chunk = exponents[start : start + 1024]
        size = len(chunk) // 4
        quarters = [chunk[k * size : (k + 1) * size] for k in range(4)]
        is_out = [[exponent < max(max(quarter) - 15, 0) for exponent in quarter] for quarter in quarters]
        for first, second in (is_out[:2], is_out[2:]):
            count += sum(any(first[i : i + 2] + second[i : i + 2]) for i in range(0, size, 2))
    return count


@pytest.mark.parametrize(
    ("piece_bytes", "stored"),
    [(64, 96), (2048, 1584), (4096, 3136), (6144, 4704), (32768, 25088), (65536, 50176), (2112, 1648), (36864, 28224)],
)
def test_bytes_that_a_piece_is_stored_in(piece_bytes: int, stored: int) -> None:
    assert coded_bytes(piece_bytes) == stored
    assert can_code(piece_bytes) is (stored < piece_bytes)


def test_most_pieces_are_stored_in_less_than_0_77_of_their_bytes() -> None:
    for piece_bytes in range(4096, 1 << 18, 2048):
        assert coded_bytes(piece_bytes) <= 0.77 * piece_bytes
        assert coded_bytes(piece_bytes) % ALIGN == 0
        assert sum(segments_of(piece_bytes)) == piece_bytes


@pytest.mark.parametrize("piece_bytes", [0, -64, 2, 100, 4095])
def test_other_lengths_are_refused(piece_bytes: int) -> None:
    assert not can_code(piece_bytes)
    with pytest.raises(ValueError, match="multiple of 64"):
        segments_of(piece_bytes)


def test_all_patterns_come_back() -> None:
    patterns = torch.arange(1 << 16)
    ordered = patterns[torch.argsort((patterns >> 7) & 255, stable=True)]
    for window in range(0, 256, 16):  # zeros and denormals are in the first, infinities and NaNs in the last
        piece = bits_of(ordered[window * 256 : (window + 16) * 256])[None]
        coded, fits = encode_reference(piece)
        assert fits.all()
        assert torch.equal(decode_reference(coded, piece.shape[1]), piece)


def test_every_pattern_comes_back_beside_any_other_exponent() -> None:
    """Far below the others it is an exception, far above them they are."""
    for other in (0x0000, 0x0001, 0x3F80, 0x7F7F, 0x7F80, 0xFFC1):
        for start in range(0, 1 << 16, 4096):
            piece = torch.full((4096, 32), other, dtype=torch.int32)
            piece[:, 5] = torch.arange(start, start + 4096)
            pieces = bits_of(piece)
            coded, fits = encode_reference(pieces)
            assert torch.equal(decode_reference(coded, 64)[fits], pieces[fits])
            near = ((piece[:, 5] >> 7) & 255) >= ((other >> 7) & 255) - 15
            # One that is above leaves the others of its quarter, four words at most.
            assert fits[near & (((piece[:, 5] >> 7) & 255) <= ((other >> 7) & 255) + 15)].all()
            assert fits[~near].all()


@pytest.mark.parametrize("piece_bytes", [64, 128, 1984, 2048, 2112, 4096, 6144, 32768, 34816, 36864, 65536 + 64])
def test_edge_lengths(piece_bytes: int) -> None:
    pieces = normal((5, piece_bytes))
    coded, fits = encode_reference(pieces)
    assert fits.all()
    assert coded.shape == (5, coded_bytes(piece_bytes))
    assert torch.equal(decode_reference(coded, piece_bytes), pieces)


def test_pieces_are_coded_one_by_one() -> None:
    pieces = normal((4, 6144))
    together, _ = encode_reference(pieces)
    assert torch.equal(together, torch.cat([encode_reference(piece[None])[0] for piece in pieces]))


@st.composite
def elements(draw: st.DrawFn) -> torch.Tensor:
    """A piece whose exponents have some spread, with some elements of any bits."""
    count = 32 * draw(st.integers(1, 80))
    seed = draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    lowest, spread = draw(st.integers(0, 240)), draw(st.integers(1, 20))
    exponents = (lowest + torch.randint(0, spread, (count,), generator=generator)).clamp(max=255)
    bits = (exponents << 7) | (torch.randint(0, 512, (count,), generator=generator) & 0x7F)
    bits |= torch.randint(0, 2, (count,), generator=generator) << 15
    strays = torch.randint(0, count, (draw(st.integers(0, 12)),), generator=generator)
    bits[strays] = torch.randint(0, 1 << 16, strays.shape, generator=generator)
    return bits_of(bits)


@settings(deadline=None)
@given(elements())
@example(bits_of(torch.zeros(1024)))
@example(bits_of(torch.full((1024,), 0xFFFF)))
def test_what_fits_comes_back_and_what_does_not_is_said(piece: torch.Tensor) -> None:
    (size,) = piece.shape
    coded, fits = encode_reference(piece[None])
    slots = [num_slots(chunks_of(part)) for part in segments_of(size)]
    assert len(slots) == 1
    assert bool(fits) is (slow_exceptions(piece) <= slots[0])
    if fits:
        assert torch.equal(decode_reference(coded, size)[0], piece)


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(0, 1 << 30))
def test_any_bytes_are_decoded_to_something(units: int, seed: int) -> None:
    size = 64 * units
    generator = torch.Generator().manual_seed(seed)
    coded = torch.randint(0, 256, (3, coded_bytes(size)), dtype=torch.uint8, generator=generator)
    assert decode_reference(coded, size).shape == (3, size)


def test_the_stored_bytes_of_this_format_do_not_change() -> None:
    """Blocks that were stored under its name are read as what they were: who changes a byte changes the name."""
    bits = (torch.arange(40000) * 40503) % (1 << 16)
    near = (bits & 0x807F) | ((120 + (bits >> 7) % 16) << 7)
    near[::997] &= 0x80FF
    piece = bits_of(near[: 36864 // 2])[None]
    coded, fits = encode_reference(piece)
    assert fits.all()
    digest = hashlib.sha256(coded.numpy().tobytes()).hexdigest()[:16]
    assert (FORMAT, digest) == ("bf16-4bit-1", "dba8f941013bea70")
