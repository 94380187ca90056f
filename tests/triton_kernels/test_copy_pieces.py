"""The copy kernel against torch, byte for byte: interpreted where there is no GPU, compiled where there is one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_connector.triton_kernels import copy_pieces, launch
from kv_connector.triton_kernels.copy_pieces import (
    CHUNK_BYTES,
    RegionTable,
    copy_pieces_reference,
    gather_pieces,
    scatter_pieces,
)

POISON = 0xA5
NUM_BLOCKS = 6
NUM_ROWS = 7


def strided_views(sizes: list[int], padding: int, device: torch.device) -> list[torch.Tensor]:
    """Views of (NUM_BLOCKS, size) with `padding` poisoned bytes behind each row."""
    views = []
    for seed, size in enumerate(sizes):
        memory = torch.full((NUM_BLOCKS, size + padding), POISON, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        memory[:, :size] = torch.randint(0, 256, (NUM_BLOCKS, size), dtype=torch.uint8, generator=generator)
        views.append(memory.to(device)[:, :size])
    return views


def whole(view: torch.Tensor) -> torch.Tensor:
    """All of the view's memory, padding included."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def offsets_of(sizes: list[int], align: int) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = -(-(end + size) // align) * align
    return offsets, end


def check(
    views: list[torch.Tensor], offsets: list[int], row_bytes: int, device: torch.device, regions: slice | None = None
) -> None:
    """Both directions of scattered blocks; every byte of both sides is compared, untouched ones too."""
    regions = regions or slice(0, len(views))
    block_ids = torch.tensor([5, 0, 3, 4], device=device)
    flat_ids = torch.tensor([1, 6, 2, 0], device=device)
    first = regions.start
    table = RegionTable.upload(views, offsets).narrow(first, regions.stop - first)
    for to_flat in (True, False):
        flat = torch.randint(
            0, 256, (NUM_ROWS, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(99)
        ).to(device)
        expected_flat = flat.clone()
        expected_memory = [whole(view).clone() for view in views]
        expected_views = [
            torch.as_strided(memory, view.shape, view.stride())
            for memory, view in zip(expected_memory, views, strict=True)
        ]
        part = expected_views[regions], offsets[regions]
        copy_pieces_reference(*part, block_ids, expected_flat, flat_ids, to_flat)
        move = gather_pieces if to_flat else scatter_pieces
        move(table, block_ids, flat, flat_ids, num_programs=3)
        assert torch.equal(flat, expected_flat)
        for view, memory in zip(views, expected_memory, strict=True):
            assert torch.equal(whole(view), memory)


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 33, 64, 4095, 4096, 16391])
@pytest.mark.parametrize("padding", [0, 5, 24])
def test_odd_sizes_and_strides(size: int, padding: int, device: torch.device) -> None:
    sizes = [size, size]
    offsets, row_bytes = offsets_of(sizes, 16)
    check(strided_views(sizes, padding, device), offsets, row_bytes, device)


@pytest.mark.parametrize("size", [1, 13, 40, 4095])
def test_words_with_a_tail(size: int, device: torch.device) -> None:
    padding = -size % 8 + 8
    offsets, row_bytes = offsets_of([size, 8, size], 16)
    views = strided_views([size], padding, device) + strided_views([8, size + 8 - size % 8], 0, device)
    assert RegionTable.upload(views, offsets).align >= 8
    check(views, offsets, row_bytes + 16, device)


def test_regions_of_different_sizes_and_many_chunks(device: torch.device) -> None:
    sizes = [CHUNK_BYTES * 2 + 24, 16, 3, CHUNK_BYTES]
    offsets, row_bytes = offsets_of(sizes, 16)
    check(strided_views(sizes, 0, device), offsets, row_bytes, device)


@pytest.mark.parametrize("row_padding", [0, 1])
@pytest.mark.parametrize("regions", [slice(0, 1), slice(1, 2), slice(1, 4), slice(0, 5)])
def test_one_layer_and_groups(regions: slice, row_padding: int, device: torch.device) -> None:
    sizes = [64, 24, 128, 8, 32]
    offsets, row_bytes = offsets_of(sizes, 16)
    check(strided_views(sizes, 8, device), offsets, row_bytes + row_padding, device, regions)


def test_a_shift_moves_a_group_to_the_start_of_a_row(device: torch.device) -> None:
    views = strided_views([64, 32, 16], 0, device)
    table = RegionTable.upload(views, [0, 64, 96]).narrow(1, 2)
    ids = torch.tensor([4, 2], device=device)
    flat = torch.full((2, 48), POISON, dtype=torch.uint8, device=device)
    gather_pieces(table, ids, flat, flat_shift=-64)
    assert torch.equal(flat, torch.cat([views[1][ids], views[2][ids]], dim=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float32])
def test_any_dtype_is_bytes(dtype: torch.dtype, device: torch.device) -> None:
    cache = torch.randint(0, 256, (NUM_BLOCKS, 16, 3 * dtype.itemsize), dtype=torch.uint8).to(device).view(dtype)
    view = cache.view(torch.uint8).view(NUM_BLOCKS, -1)
    check([view], [0], view.shape[1], device)


def test_no_blocks_is_no_launch(device: torch.device) -> None:
    flat = torch.full((2, 64), POISON, dtype=torch.uint8, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    gather_pieces(RegionTable.upload(strided_views([64], 0, device), [0]), empty, flat, empty)
    assert torch.equal(flat, torch.full_like(flat, POISON))


def test_misuse_is_refused(device: torch.device) -> None:
    table = RegionTable.upload(strided_views([64], 0, device), [0])
    flat = torch.zeros((2, 64), dtype=torch.uint8, device=device)
    ids = torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match="rows of uint8"):
        gather_pieces(table, ids, flat.view(torch.int64), ids)
    with pytest.raises(ValueError, match="int32"):
        gather_pieces(table, ids.int(), flat, ids)
    with pytest.raises(ValueError, match="there are"):
        scatter_pieces(table, ids[:1], flat, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [7, 4096, 65536])
def test_page_locked_host_memory_both_ways(size: int) -> None:
    device = torch.device("cuda")
    views = strided_views([size, size], 0, device)
    offsets, row_bytes = offsets_of([size, size], 16)
    table = RegionTable.upload(views, offsets)
    host = torch.full((NUM_ROWS, row_bytes), POISON, dtype=torch.uint8, pin_memory=True)
    block_ids, rows = torch.tensor([5, 0, 3], device=device), torch.tensor([2, 6, 0], device=device)
    expected = host.clone()
    copy_pieces_reference(views, offsets, block_ids.cpu(), expected, rows.cpu(), to_flat=True)
    gather_pieces(table, block_ids, host, rows)
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    before = [view.clone() for view in views]
    for view in views:
        view.zero_()
    scatter_pieces(table, block_ids, host, rows)
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view[block_ids], old[block_ids])
        assert view.sum() == view[block_ids].sum()


@pytest.mark.gpu
def test_launches_go_through_the_driver_and_a_profiler_hears_of_them() -> None:
    device = torch.device("cuda")
    views = strided_views([96, 96], 0, device)
    offsets, row_bytes = offsets_of([96, 96], 16)
    table = RegionTable.upload(views, offsets)
    ids, flat = torch.tensor([4, 1], device=device), torch.zeros((2, row_bytes), dtype=torch.uint8, device=device)
    gather_pieces(table, ids, flat)
    assert {launch.__name__ for launch in copy_pieces._launches.values()} == {"by_driver"}
    heard: list[dict[str, Any]] = []
    hook = launch.knobs.runtime.launch_enter_hook
    hear = lambda metadata: heard.append(metadata.get())  # noqa: E731 - what is added is removed
    hook.add(hear)
    try:
        gather_pieces(table, ids, flat)
        scatter_pieces(table, ids, flat)
    finally:
        hook.remove(hear)
    gather_pieces(table, ids, flat)
    assert [entry["name"].rsplit("_", 1)[-1] for entry in heard] == ["gather", "scatter"]
    assert [entry["bytes"] for entry in heard] == [2 * 2 * 192] * 2


@pytest.mark.gpu
def test_threads_that_launch_at_once_do_not_mix_their_arguments() -> None:
    device = torch.device("cuda")
    offsets, row_bytes = offsets_of([4096], 16)
    parts = []
    for _ in range(4):
        views = strided_views([4096], 0, device)
        flat = torch.zeros((NUM_BLOCKS, row_bytes), dtype=torch.uint8, device=device)
        parts.append((views, RegionTable.upload(views, offsets), flat, torch.cuda.Stream()))
    ids = torch.randperm(NUM_BLOCKS).to(device)
    torch.cuda.synchronize()

    def gather(number: int) -> None:
        _, table, flat, stream = parts[number]
        torch.cuda.set_device(0)
        for _ in range(200):
            gather_pieces(table, ids, flat, stream=stream)

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(gather, range(len(parts))))
    torch.cuda.synchronize()
    for views, _, flat, _ in parts:
        assert torch.equal(flat[:, :4096], views[0][ids])


@pytest.mark.parametrize(
    ("bits", "scratch", "known"),
    [
        ((64, 32, 64), {}, True),
        ((64, 32, 64, 64, 64), {"global_scratch_size": 0}, True),
        ((64, 64, 32), {}, False),
        ((64, 32), {}, False),
        ((64, 32, 64, 32), {}, False),
        ((64, 32, 64, 64, 64, 64), {}, False),
        ((64, 32, 64, 64, 64), {"global_scratch_size": 128}, False),
        ((64, 32, 64), {"num_ctas": 2}, False),
    ],
)
def test_a_kernel_is_launched_by_triton_unless_its_parameters_are_known(
    bits: tuple[int, ...], scratch: dict[str, int], known: bool
) -> None:
    params = ",\n".join(f"\t.param .u{width} .ptr .global .align 1 k_param_{i}" for i, width in enumerate(bits))
    kernel = SimpleNamespace(
        metadata=SimpleNamespace(**scratch),
        src=SimpleNamespace(signature={"ids": "*i64", "count": "i32", "base": "i64", "WORDS": "constexpr"}),
        asm={"ptx": f".visible .entry k(\n{params}\n)\n.reqntid 256\n{{\n.param .b32 other;\n}}"},
    )
    assert launch._has_known_parameters(kernel) is known


def test_one_compiled_kernel_serves_every_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Triton compiles anew where an argument outgrows 32 bits: only addresses may."""
    launched: list[tuple[Any, ...]] = []
    views = strided_views([64], 0, device)
    table = RegionTable.upload(views, [0])

    def remember(programs: int, stream: int, arguments: list[int]) -> None:
        launched.append(tuple(arguments))

    monkeypatch.setattr(
        copy_pieces,
        "_launches",
        dict.fromkeys([(device.index if device.index is not None else -1, True, True, True, table.width)], remember),
    )
    monkeypatch.setattr(copy_pieces, "is_observed", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    flat = torch.empty((1, 64), dtype=torch.uint8, device=device).expand(1 << 26, 64)
    ids = torch.zeros(1, dtype=torch.int64, device=device).expand(1 << 26)
    gather_pieces(table, ids, flat)
    (arguments,) = launched
    assert all(abs(value) < 1 << 31 for value in arguments[-5:]), "counts and lengths: 4 GiB are copied"
