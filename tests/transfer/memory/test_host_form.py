"""Where the pieces of a block lie on the host."""

from __future__ import annotations

import torch

from kv_connector.transfer.memory.host_form import BLOCK_ALIGN, PIECE_ALIGN, raw_form
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
