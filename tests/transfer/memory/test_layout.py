"""Regions are found from real strides: any geometry is saved and restored exactly, every byte of a block once."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.errors import LayoutError
from kv_connector.transfer.memory.host_form import BLOCK_ALIGN, raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import FIRST_GROUP_BYTES, CacheLayout, layer_groups
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.torch import TorchPath
from kv_connector.types import Direction

POISON = 0x5A


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@st.composite
def cache_tensors(draw: st.DrawFn, num_blocks: int) -> tuple[torch.Tensor, int]:
    """A tensor of any dtype, order and padding, in memory of poison, and which of its dimensions counts blocks."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    block_dim = draw(st.integers(0, len(sizes)))
    sizes.insert(block_dim, num_blocks * draw(st.sampled_from([1, 1, 2, 3])))
    order = draw(st.permutations(range(len(sizes))))
    strides = [0] * len(sizes)
    stride = 1
    for dim in order:
        stride += draw(st.sampled_from([0, 0, 0, 1, 3]))
        strides[dim] = stride
        stride *= sizes[dim]
    start = draw(st.integers(0, 3))
    last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    memory = torch.full(((start + last + 1 + 2) * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype)
    tensor = torch.as_strided(memory, sizes, strides, start)
    bits = torch.arange(prod(sizes) * dtype.itemsize, dtype=torch.int64).mul(37).add(11).to(torch.uint8)
    tensor.copy_(bits.view(dtype).view(sizes))
    return tensor, block_dim


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def block_addresses(tensor: torch.Tensor, block_dim: int, num_blocks: int, block: int) -> set[int]:
    """Address of every byte of one block, element by element."""
    ratio = tensor.shape[block_dim] // num_blocks
    part = tensor.narrow(block_dim, block * ratio, ratio)
    elements = np.zeros(tuple(part.shape), dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        shape = [1] * part.ndim
        shape[dim] = size
        elements = elements + (np.arange(size) * stride).reshape(shape)
    starts = part.data_ptr() + elements.ravel() * part.itemsize
    return {int(start) + byte for start in starts for byte in range(part.itemsize)}


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_geometry_round_trips_and_every_byte_is_covered_once(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 5))
    drawn = data.draw(st.lists(cache_tensors(num_blocks), min_size=1, max_size=3))
    tensors = {f"layer.{i}": tensor for i, (tensor, _) in enumerate(drawn)}
    dims = {f"layer.{i}": dim for i, (_, dim) in enumerate(drawn)}
    layout = CacheLayout.from_tensors(tensors, num_blocks, dims)
    form = raw_form(layout)

    assert form.block_bytes % BLOCK_ALIGN == 0
    assert form.moved_bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) // num_blocks
    for name, tensor in tensors.items():
        for block in range(num_blocks):
            covered = [
                region.data_ptr + block * region.block_stride + byte
                for region in layout.regions
                if region.layer == name
                for byte in range(region.piece_bytes)
            ]
            assert len(covered) == len(set(covered))
            assert set(covered) == block_addresses(tensor, dims[name], num_blocks, block)

    before = {name: memory_of(tensor).clone() for name, tensor in tensors.items()}
    host = HostPool(num_blocks, form.block_bytes)
    path = TorchPath(form, host)
    everything = range(len(layout.regions))
    there = np.arange(num_blocks, dtype=np.int64)
    path.copy(BlockCopy(Direction.SAVE, everything, there, there[::-1].copy()))
    for tensor in tensors.values():
        tensor.view(tensor.dtype).copy_(torch.zeros_like(tensor))
    path.copy(BlockCopy(Direction.LOAD, everything, there, there[::-1].copy()))
    for name, tensor in tensors.items():
        assert torch.equal(memory_of(tensor), before[name])


@settings(deadline=None, max_examples=100)
@given(
    pieces=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    num_blocks=st.integers(1, 50),
    target=st.integers(1, 20_000),
    least=st.integers(0, 1000),
    more=st.integers(0, 1000),
)
def test_layer_groups_cut_between_layers_in_order(
    pieces: list[int], num_blocks: int, target: int, least: int, more: int
) -> None:
    tensors = {f"{i}": [torch.zeros(7, size), torch.zeros(7, 3, 2)[:, :, :1]] for i, size in enumerate(pieces)}
    layout = CacheLayout.from_tensors(tensors, 7, {f"{i}": 0 for i in range(len(pieces))})
    sizes = [region.piece_bytes for region in layout.regions]
    groups = layer_groups(layout.layer_stops, sizes, num_blocks, target, least, least + more)
    assert [region for group in groups for region in group] == list(range(len(layout.regions)))
    # Every group holds twice the one before it, so that the first is early and later ones come in longer rows.
    least_row, least_bytes = 0, min(FIRST_GROUP_BYTES, target)
    for i, group in enumerate(groups):
        row = sum(layout.regions[region].piece_bytes for region in group)
        last_layer = layout.regions[group.stop - 1].layer
        if i + 1 < len(groups):
            assert num_blocks * row >= least_bytes and row >= least_row
            assert layout.regions[group.stop].layer != last_layer
        rest = sum(layout.regions[region].piece_bytes for region in group if layout.regions[region].layer != last_layer)
        assert rest == 0 or num_blocks * rest < least_bytes or rest < least_row
        least_row = max(least, min(2 * row, least + more))
        least_bytes = min(2 * num_blocks * row, target)
    for name in layout.layer_names:
        assert layout.regions[layout.last_region(name)].layer == name


B, N, H, D = 11, 16, 2, 8


def regions_of(tensor: torch.Tensor, num_blocks: int = B) -> list[tuple[int, int]]:
    layout = CacheLayout.from_tensors({"layer": tensor}, num_blocks)
    return [(region.data_ptr - tensor.data_ptr(), region.piece_bytes) for region in layout.regions]


def test_block_outermost_is_one_piece() -> None:
    assert regions_of(torch.zeros(B, N, H, D)) == [(0, N * H * D * 4)]
    assert regions_of(torch.zeros(B, H, N, D).transpose(1, 2)) == [(0, N * H * D * 4)]


def test_keys_and_values_apart_are_two_pieces() -> None:
    half = N * H * D * 2
    assert regions_of(torch.zeros(2, B, N, H, D, dtype=torch.bfloat16)) == [(0, half), (B * half, half)]


def test_heads_outside_of_blocks_are_a_piece_each() -> None:
    piece = N * D
    tensor = torch.zeros(H, B, N, D, dtype=torch.uint8).permute(1, 0, 2, 3)
    assert regions_of(tensor) == [(head * B * piece, piece) for head in range(H)]


def test_kernel_blocks_are_regrouped() -> None:
    assert regions_of(torch.zeros(B * 4, N, H, D, dtype=torch.uint8)) == [(0, 4 * N * H * D)]
    apart = torch.zeros(2, B * 2, N, D, dtype=torch.uint8)
    assert regions_of(apart) == [(0, 2 * N * D), (B * 2 * N * D, 2 * N * D)]


def test_padding_behind_a_block_is_not_copied() -> None:
    tensor = torch.zeros(B, 100, dtype=torch.uint8)[:, :70]
    layout = CacheLayout.from_tensors({"layer": tensor}, B)
    assert [(region.piece_bytes, region.block_stride) for region in layout.regions] == [(70, 100)]


def test_layers_interleaved_in_one_storage() -> None:
    whole = torch.zeros(B, 3, N, D, dtype=torch.uint8)
    layout = CacheLayout.from_tensors({f"{i}": whole[:, i] for i in range(3)}, B)
    assert [region.data_ptr - whole.data_ptr() for region in layout.regions] == [0, N * D, 2 * N * D]
    assert {region.block_stride for region in layout.regions} == {3 * N * D}


def test_a_shared_tensor_is_copied_once_and_both_names_wait_for_it() -> None:
    first, second = torch.zeros(B, N), torch.zeros(B, N)
    layout = CacheLayout.from_tensors({"0": first, "1": second, "2": first, "3": [first, second]}, B)
    assert [region.layer for region in layout.regions] == ["0", "1"]
    assert layout.layer_names == ("0", "1", "2", "3")
    assert [layout.last_region(name) for name in ("0", "1", "2", "3", "other")] == [0, 1, 0, 1, -1]


PAGE = 512


def hybrid(num_layers: int, states: dict[str, tuple[int, int]], kernel_blocks: int = 1) -> dict[str, torch.Tensor]:
    """Cache tensors as vLLM has them for a model with recurrent states: one allocation in pages of `PAGE` bytes, B for
    each slot. Attention fills the pages of its slots, in kernel blocks; `states` are slot and bytes of the others."""
    memory = torch.arange(num_layers * B * PAGE, dtype=torch.int64).mul(37).to(torch.uint8).view(torch.int8)
    pages = memory.view(num_layers, B, PAGE)
    caches = {f"{i}.attn": pages[i].view(torch.bfloat16).view(B * kernel_blocks, 2, -1, D) for i in range(num_layers)}
    return caches | {
        name: pages[slot].as_strided((B, 1, 1, size), (PAGE, size, size, 1)) for name, (slot, size) in states.items()
    }


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_layers_that_overlay_each_other_are_one_region(kernel_blocks: int) -> None:
    """A block belongs to one group at a time, and its bytes are those of all: attention's, states', padding between."""
    caches = hybrid(3, {"3.state": (0, 400), "4.state": (2, 400), "5.state": (0, 130)}, kernel_blocks)
    layout = CacheLayout.from_tensors(caches, B, dict.fromkeys(caches, 0))
    assert [(region.layer, region.piece_bytes, region.block_stride) for region in layout.regions] == [
        ("0.attn", PAGE, PAGE),
        ("1.attn", PAGE, PAGE),
        ("2.attn", PAGE, PAGE),
    ]
    assert [layout.last_region(name) for name in caches] == [0, 1, 2, 0, 2, 0]
    assert [region.data_ptr - caches["0.attn"].data_ptr() for region in layout.regions] == [0, B * PAGE, 2 * B * PAGE]
    backwards = dict(reversed(caches.items()))
    layout = CacheLayout.from_tensors(backwards, B, dict.fromkeys(caches, 0))
    assert [region.layer for region in layout.regions] == ["5.state", "4.state", "1.attn"]
    assert [region.piece_bytes for region in layout.regions] == [PAGE] * 3


def test_overlays_that_reach_over_each_other_are_one_region_from_the_first_byte_to_the_last() -> None:
    """Keys and values apart in a block, and a state from the middle of the one to the middle of the other."""
    whole = torch.zeros(B, PAGE, dtype=torch.uint8)
    apart = whole.view(B, 2, PAGE // 2).transpose(0, 1)[:, :, :200]
    caches = {"a": apart, "b": whole[:, 100:300], "c": whole[:, 500:]}
    layout = CacheLayout.from_tensors(caches, B, {"a": 1, "b": 0, "c": 0})
    found = [(region.layer, region.data_ptr - whole.data_ptr(), region.piece_bytes) for region in layout.regions]
    assert found == [("a", 0, 456), ("c", 500, 12)]
    assert [layout.last_region(name) for name in caches] == [0, 0, 1]
    assert "200 at 100" in layout.arrangement, "where a state lies decides what its bytes mean"


@settings(deadline=None, max_examples=100)
@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=8),
    slots=st.integers(1, 3),
    data=st.data(),
)
def test_of_any_overlays_every_byte_is_copied_once(
    spans: list[tuple[int, int]], slots: int, data: st.DataObject
) -> None:
    num_blocks, page = 4, 60
    memory = torch.zeros(slots, num_blocks, page, dtype=torch.uint8)
    where = [data.draw(st.integers(0, slots - 1)) for _ in spans]
    views = {
        f"{i}": memory[slot][:, start : start + size]
        for i, (slot, (start, size)) in enumerate(zip(where, spans, strict=True))
    }
    layout = CacheLayout.from_tensors(views, num_blocks, dict.fromkeys(views, 0))
    for block in range(num_blocks):
        expected = set().union(*(block_addresses(view, 0, num_blocks, block) for view in views.values()))
        starts = [region.data_ptr + block * region.block_stride for region in layout.regions]
        covered = [
            start + byte
            for start, region in zip(starts, layout.regions, strict=True)
            for byte in range(region.piece_bytes)
        ]
        assert len(covered) == len(set(covered))
        assert set(covered) == expected
    for name, view in views.items():
        region = layout.regions[layout.last_region(name)]
        assert region.data_ptr <= view.data_ptr() < region.data_ptr + region.piece_bytes


def test_views_that_share_bytes_of_other_blocks_are_refused() -> None:
    memory = torch.zeros(1000, dtype=torch.uint8)
    shifted = {"a": memory.as_strided((B, 12), (20, 1)), "b": memory.as_strided((B, 12), (20, 1), 11)}
    with pytest.raises(LayoutError, match=r"'a'.*23 bytes, 20 from block to block"):
        CacheLayout.from_tensors(shifted, B)
    one_behind = {"a": memory.as_strided((B, 12), (20, 1)), "b": memory.as_strided((B, 12), (20, 1), 20)}
    with pytest.raises(LayoutError, match="share bytes"):
        CacheLayout.from_tensors(one_behind, B)
    strides = torch.zeros(1000, dtype=torch.uint8)
    apart = {"a": strides.as_strided((B, 4), (20, 1)), "b": strides.as_strided((B, 4), (24, 1), 4)}
    with pytest.raises(LayoutError, match="share bytes"):
        CacheLayout.from_tensors(apart, B)


def test_expanded_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match="share bytes"):
        CacheLayout.from_tensors({"a": torch.zeros(B, 1).expand(B, 4)}, B)


def test_an_ambiguous_shape_names_itself_and_the_way_out() -> None:
    tensor = torch.zeros(4, 4, 3)
    with pytest.raises(LayoutError, match=r"\(4, 4, 3\).*block_dims=\{'a'"):
        CacheLayout.from_tensors({"a": tensor}, 4)
    assert CacheLayout.from_tensors({"a": tensor}, 4, {"a": 0}).regions[0].piece_bytes == 48
    assert [region.piece_bytes for region in CacheLayout.from_tensors({"a": tensor}, 4, {"a": -2}).regions] == [12] * 4
    # Kernel blocks outside of as many heads as there are blocks: one reading would be silently wrong.
    with pytest.raises(LayoutError, match="cannot tell"):
        CacheLayout.from_tensors({"a": torch.zeros(8, 4, 3)}, 4)
    # A token or head count inside a block that happens to be a multiple is none.
    assert len(CacheLayout.from_tensors({"a": torch.zeros(4, 16, 8)}, 4).regions) == 1


@pytest.mark.parametrize(
    ("caches", "num_blocks", "dims", "text"),
    [
        ({"a": torch.zeros(5, 3)}, 4, None, r"no dimension fits.*block_dims"),
        ({"a": torch.zeros(5, 3)}, 4, {"a": 0}, "not a multiple"),
        ({"a": torch.zeros(5, 3)}, 5, {"a": 7}, "dimension 7"),
        ({"a": torch.zeros(5, 3)}, 0, None, "num_blocks=0"),
        ({}, 5, None, "no cache tensor"),
        ({"a": torch.zeros(5, 3), "b": []}, 5, None, r"\['b'\]"),
        ({"a": torch.zeros(5, 3), "b": torch.zeros(5, 3, device="meta")}, 5, None, "one rank"),
    ],
)
def test_what_cannot_be_a_layout_is_refused(caches: dict, num_blocks: int, dims: dict | None, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        CacheLayout.from_tensors(caches, num_blocks, dims)


def test_regions_keep_the_memory_alive() -> None:
    tensor = torch.arange(B * 8, dtype=torch.uint8).view(B, 8)
    layout = CacheLayout.from_tensors({"a": tensor}, B)
    expected = tensor.clone()
    del tensor
    assert torch.equal(layout.regions[0].view, expected)


@pytest.mark.gpu
def test_regions_of_device_tensors() -> None:
    tensor = torch.arange(2 * B * 8, dtype=torch.int32, device="cuda").view(2, B, 8)
    layout = CacheLayout.from_tensors({"a": tensor}, B)
    assert layout.device == tensor.device
    for region, half in zip(layout.regions, tensor, strict=True):
        assert torch.equal(region.view, half.view(torch.uint8))


def arrangement(*tensors: torch.Tensor, num_blocks: int = B) -> str:
    return CacheLayout.from_tensors({f"layer {i}": t for i, t in enumerate(tensors)}, num_blocks).arrangement


def test_the_arrangement_tells_what_the_bytes_are_where_regions_do_not() -> None:
    """Heads in front of tokens, or behind: the same regions, and other bytes in every one of them."""
    nhd, hnd = torch.zeros(B, N, H, D), torch.zeros(B, H, N, D).transpose(1, 2)
    assert regions_of(nhd) == regions_of(hnd)
    kinds = {
        arrangement(nhd),
        arrangement(hnd),
        arrangement(nhd.to(torch.int32)),
        arrangement(torch.zeros(B, N, 2 * H, D // 2)),
        arrangement(torch.zeros(2, B, N, H, D // 2)),
        arrangement(nhd, nhd.clone()),
        arrangement(nhd, hnd.clone()),
    }
    assert len(kinds) == 7


def test_the_arrangement_is_of_a_block_and_not_of_the_memory_around_it() -> None:
    """Engines with more blocks, or that keep the layers of a block side by side, have the same bytes in a block."""
    layers = [torch.zeros(B, N, H, D) for _ in range(3)]
    assert arrangement(*layers) == f"3 x float32[1:{N} 2:{H} 3:{D}] in {N * H * D * 4}"
    assert arrangement(*(torch.zeros(2 * B, N, H, D) for _ in range(3)), num_blocks=2 * B) == arrangement(*layers)
    assert arrangement(*torch.zeros(B, 3, N, H, D).unbind(1)) == arrangement(*layers)
    apart = [torch.zeros(2, count, N, H, D) for count in (B, 3 * B)]
    assert arrangement(apart[0]) == arrangement(apart[1], num_blocks=3 * B)
    one_head = torch.zeros(B, N, 1, D), torch.zeros(B, 1, N, D).transpose(1, 2)
    assert arrangement(one_head[0]) == arrangement(one_head[1]), "there is one order of one head"
