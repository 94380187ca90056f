"""Where the pieces of a block lie on the host."""

from __future__ import annotations

import pytest
import torch
from kv_connector.triton_kernels.coded_rows import coded_bytes

from kv_connector.config import HostFormName
from kv_connector.errors import ConfigError
from kv_connector.transfer.memory.host_form import BLOCK_ALIGN, PIECE_ALIGN, make_form, raw_form
from kv_connector.transfer.memory.layout import CacheLayout

B, N, H, D = 11, 16, 2, 8


def test_mixed_layers_lie_in_layer_order_and_aligned() -> None:
    caches = {
        "dense": torch.zeros(2, B, N, H, D, dtype=torch.bfloat16),
        "mla": torch.zeros(B, N, 37, dtype=torch.uint8),
        "fp8": [torch.zeros(B, N, D, dtype=torch.float8_e4m3fn), torch.zeros(B, N, dtype=torch.float32)],
        "draft": torch.zeros(B, N, H, D, dtype=torch.float16),
    }
    layout = CacheLayout.from_tensors(caches, B)
    assert [region.layer for region in layout.regions] == ["dense", "dense", "mla", "fp8", "fp8", "draft"]
    form, ends = raw_form(layout), [0]
    for region, offset in zip(layout.regions, form.offsets, strict=True):
        assert offset % PIECE_ALIGN == 0
        assert ends[-1] <= offset < ends[-1] + PIECE_ALIGN
        ends.append(offset + region.piece_bytes)
    assert form.host_slice(range(6)) == (0, ends[-1])
    assert form.host_slice(range(2, 3)) == (form.offsets[2], N * 37)
    assert form.block_bytes == -(-ends[-1] // BLOCK_ALIGN) * BLOCK_ALIGN


def test_of_mixed_layers_those_of_bf16_are_coded_and_the_others_lie_as_they_are() -> None:
    caches = {
        "dense": torch.zeros(2, B, N, H, D, dtype=torch.bfloat16),
        "fp8": [torch.zeros(B, N, D, dtype=torch.float8_e4m3fn), torch.zeros(B, N, dtype=torch.float32)],
        "half": torch.zeros(B, N, H, D, dtype=torch.float16),
        "short": torch.zeros(B, 3, D, dtype=torch.bfloat16),
        "draft": torch.zeros(B, 4 * N, H, D, dtype=torch.bfloat16),
    }
    layout = CacheLayout.from_tensors(caches, B)
    form, raw = make_form(layout, HostFormName.LOSSLESS), raw_form(layout)
    assert form.is_coded == (True, True, False, False, False, False, True)
    for region, coded, stored in zip(layout.regions, form.is_coded, form.stored_bytes, strict=True):
        assert stored == (coded_bytes(region.piece_bytes) if coded else region.piece_bytes)
    ends = [0, *(at + size for at, size in zip(form.offsets, form.stored_bytes, strict=True))]
    assert all(0 <= at - end < PIECE_ALIGN for at, end in zip(form.offsets, ends, strict=False))
    assert form.block_bytes == -(-ends[-1] // BLOCK_ALIGN) * BLOCK_ALIGN
    assert form.arrangement != raw.arrangement == layout.arrangement, "what is stored of one is not found by the other"
    assert make_form(layout, HostFormName.RAW).arrangement == raw.arrangement


def test_bytes_that_are_of_bf16_and_of_something_else_are_not_coded() -> None:
    """A block belongs to one group at a time, and its numbers are those of either."""
    memory = torch.zeros(B * 4096, dtype=torch.uint8)
    attention = memory.view(torch.bfloat16).view(B, 2048)
    state = memory.view(torch.float32).view(B, 1024)
    alone = torch.zeros(B, 2048, dtype=torch.bfloat16)
    layout = CacheLayout.from_tensors({"a": attention, "s": state, "b": alone}, B)
    assert make_form(layout, HostFormName.LOSSLESS).is_coded == (False, True)
    same = {"a": attention, "s": memory.view(torch.float16).view(B, 2048), "b": alone}
    assert make_form(CacheLayout.from_tensors(same, B), HostFormName.LOSSLESS).is_coded == (False, True)


def test_pieces_that_wide_loads_cannot_reach_are_not_coded() -> None:
    """They begin, or follow each other, at no multiple of 16 bytes."""
    memory = torch.zeros(B * 4096 + 8, dtype=torch.bfloat16)
    caches = {
        "good": torch.zeros(B, 2048, dtype=torch.bfloat16),
        "begins apart": memory[4 : 4 + B * 2048].view(B, 2048),
        "follows apart": torch.zeros(B, 2052, dtype=torch.bfloat16)[:, :2048],
    }
    layout = CacheLayout.from_tensors(caches, B)
    assert make_form(layout, HostFormName.LOSSLESS).is_coded == (True, False, False)


def test_a_form_that_codes_nothing_is_refused() -> None:
    layout = CacheLayout.from_tensors({"a": torch.zeros(B, 64, dtype=torch.float16)}, B)
    with pytest.raises(ConfigError, match=r"host_form='lossless' gains nothing here: .*; give 'raw'"):
        make_form(layout, HostFormName.LOSSLESS)
