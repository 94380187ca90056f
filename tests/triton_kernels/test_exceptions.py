"""At the limit of exceptions: one more than a segment's list has room for, and the piece does not fit."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from kv_connector.triton_kernels.code_pieces import decode_pieces, encode_pieces
from kv_connector.triton_kernels.coded_rows import (
    CHUNK,
    chunks_of,
    coded_bytes,
    decode_reference,
    encode_reference,
    num_slots,
    segments_of,
)
from kv_connector.triton_kernels.copy_pieces import RegionTable

SIZES = [192, 2048, 2112, 4096, 32768, 34816, 65536 + 64]
ONE = 0x3F80  # exponent 127
FAR_BELOW = (0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x3780)  # exponents up to 111


def places_of(first: int, num_elements: int) -> list[int]:
    """Elements of a segment no two of which are in one word of exponents, in the order of their numbers."""
    places = []
    for start in range(0, num_elements, CHUNK):
        quarter = min(CHUNK, num_elements - start) // 4
        places += [first + start + half + 2 * i for i in range(quarter // 2) for half in (0, 2 * quarter)]
    return places


def at_the_limit(size: int) -> tuple[torch.Tensor, list[bool]]:
    """Pieces with one exception less than fits, as many, and one more, the first or the last of each segment; and which
    of them fit."""
    pieces, fit = [], []
    first = 0
    for segment in segments_of(size):
        places = places_of(first, segment // 2)
        slots = num_slots(chunks_of(segment))
        for more, from_end in product((-1, 0, 1), (False, True)):
            chosen = places[-(slots + more) :] if from_end else places[: slots + more]
            piece = torch.full((size // 2,), ONE, dtype=torch.int32)
            piece[chosen] = torch.tensor([value for value, _ in zip(cycle(FAR_BELOW), chosen, strict=False)]).int()
            pieces.append(piece)
            fit.append(more <= 0)
        first += segment // 2
    return torch.stack(pieces).to(torch.int16).view(torch.uint8), fit


@pytest.mark.parametrize("size", SIZES)
def test_the_reference_tells_what_does_not_fit(size: int) -> None:
    pieces, fit = at_the_limit(size)
    coded, fits = encode_reference(pieces)
    assert fits.tolist() == fit
    assert torch.equal(decode_reference(coded, size)[fits], pieces[fits])


@pytest.mark.parametrize("size", SIZES)
def test_the_kernels_tell_what_does_not_fit(size: int, device: torch.device) -> None:
    pieces, fit = at_the_limit(size)
    pieces = pieces.to(device)
    ids = torch.arange(len(fit), device=device)
    rows = torch.zeros((len(fit), coded_bytes(size)), dtype=torch.uint8, device=device)
    verdicts = torch.zeros(len(fit), dtype=torch.int32, device=device)
    encode_pieces(RegionTable.upload([pieces], [0]), ids, rows, verdicts, num_programs=3)
    assert [verdict == 0 for verdict in verdicts.tolist()] == fit
    back = torch.zeros_like(pieces)
    decode_pieces(RegionTable.upload([back], [0]), ids, rows, num_programs=3)
    assert torch.equal(back[torch.tensor(fit)], pieces[torch.tensor(fit)])
