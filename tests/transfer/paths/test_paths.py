"""Copy paths: each moves exactly the bytes that indexing would, and says what it cannot serve."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.config import Config, PathName
from kv_connector.errors import ConfigError, TransferError
from kv_connector.transfer.costs.curves import BUILT_IN, LEAST_PITCHED_BYTES, Curve
from kv_connector.transfer.cuda import driver, turns
from kv_connector.transfer.cuda import pitched as pitched_module
from kv_connector.transfer.cuda.pitched import COPY, MOST_PITCH, ON_DEVICE, ON_HOST, copy_pitched
from kv_connector.transfer.cuda.turns import TURN_BYTES, NoTurns, TurnTaking
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths import runs as runs_module
from kv_connector.transfer.paths import staged as staging
from kv_connector.transfer.paths.base import LONG_SLICE_BYTES, SLICE_BYTES, BlockCopy
from kv_connector.transfer.paths.choice import AutoPath, make_path
from kv_connector.transfer.paths.direct import DirectPath
from kv_connector.transfer.paths.runs import RunsPath, merge_runs
from kv_connector.transfer.paths.staged import StagedPath, min_staging_memory
from kv_connector.transfer.paths.torch import TorchPath
from kv_connector.types import Direction
from tests.copies import (
    CACHES,
    LOAD,
    NUM_DEVICE,
    NUM_HOST,
    PAIRS,
    PATHS,
    SAVE,
    bf16_apart,
    check_copy,
    copy_now,
    expected_after,
    filled,
    fp8_with_scales,
    ids,
    layers_inside_blocks,
    make_named_path,
    make_pool,
    odd_bytes,
    side_stream,
)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("make", CACHES)
def test_paths_copy_exactly_what_indexing_would(name: str, make: Any, device: torch.device) -> None:
    layout = filled(make, device)
    pool = make_pool(layout)
    path = make_named_path(name, layout, pool)
    count = len(layout.regions)
    for pairs in PAIRS:
        check_copy(path, layout, pool, SAVE, range(count), pairs)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    for pairs in PAIRS:
        check_copy(path, layout, pool, LOAD, range(count), pairs)
    for regions in (range(1), range(1, count), range(count - 1, count)):
        check_copy(path, layout, pool, LOAD, regions, PAIRS[3])
        check_copy(path, layout, pool, SAVE, regions, PAIRS[3])
    path.close()
    path.close()
    pool.close()


@pytest.mark.parametrize("extra", [0, 4096])
def test_a_small_ring_goes_round_and_long_rows_are_cut(extra: int, device: torch.device) -> None:
    layout = filled(fp8_with_scales, device)
    pool = make_pool(layout)
    path = make_named_path("staged", layout, pool, min_staging_memory(raw_form(layout)) + extra)
    everything = range(len(layout.regions))
    pairs = [(block, (block * 5 + 2) % NUM_HOST) for block in range(NUM_DEVICE)]
    for _ in range(2):
        check_copy(path, layout, pool, SAVE, everything, pairs)
        pool.tensor.add_(1)
        check_copy(path, layout, pool, LOAD, everything, pairs)
    path.close()
    pool.close()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), which=st.sampled_from(range(len(CACHES))), direction=st.sampled_from(Direction))
def test_runs_and_torch_agree_on_any_ids(data: st.DataObject, which: int, direction: Direction) -> None:
    layout = filled(CACHES[which], torch.device("cpu"))
    count = data.draw(st.integers(1, NUM_DEVICE))
    device_ids = data.draw(st.permutations(range(NUM_DEVICE)))[:count]
    host_ids = data.draw(st.permutations(range(NUM_HOST)))[:count]
    first = data.draw(st.integers(0, len(layout.regions) - 1))
    regions = range(first, data.draw(st.integers(first + 1, len(layout.regions))))
    pairs = list(zip(device_ids, host_ids, strict=True))
    for kind in ("runs", "torch"):
        pool = make_pool(layout)
        path = RunsPath(raw_form(layout), pool, copy_now) if kind == "runs" else TorchPath(raw_form(layout), pool)
        check_copy(path, layout, pool, direction, regions, pairs)


def count_segments(make: Any, pairs: list[tuple[int, int]], blocks_per_piece: int = 1000) -> int:
    layout = filled(make, torch.device("cpu"))
    pool = make_pool(layout)
    pool.blocks_per_piece = blocks_per_piece
    device_ids, host_ids = (ids(*column) for column in zip(*pairs, strict=True))
    copy = BlockCopy(SAVE, range(len(layout.regions)), device_ids, host_ids)
    return len(RunsPath(raw_form(layout), pool, copy_now).plan(copy))


def test_runs_merge_across_layers_and_blocks_in_either_order() -> None:
    ascending = [(2, 5), (3, 6), (4, 7), (9, 1)]
    assert count_segments(layers_inside_blocks, ascending) == 2
    assert count_segments(layers_inside_blocks, ascending[::-1]) == 2
    assert count_segments(layers_inside_blocks, [(2, 7), (3, 6), (4, 5)]) == 3
    assert count_segments(layers_inside_blocks, ascending, blocks_per_piece=6) == 3
    assert count_segments(bf16_apart, ascending) == 6 * 4
    assert count_segments(odd_bytes, ascending) == 4 * 4


def test_merged_segments_hold_the_same_bytes() -> None:
    segments = merge_runs(ids(100, 108, 200, 216), ids(0, 8, 16, 32), ids(8, 8, 16, 8), ids(0, 0, 0, 0))
    assert segments.device.tolist() == [100, 200]
    assert segments.host.tolist() == [0, 16]
    assert segments.sizes.tolist() == [16, 24]


def evenly_apart(device: torch.device, gap: int = 0, piece: int = 48) -> CacheLayout:
    """Layers that lie as far apart as each other, but for the last, which is `gap` bytes further."""
    layer_bytes = NUM_DEVICE * piece
    memory = torch.randint(0, 256, (4 * layer_bytes + gap,), dtype=torch.uint8).to(device)
    starts = [layer * layer_bytes + gap * (layer == 3) for layer in range(4)]
    return CacheLayout.from_tensors(
        {f"{start}": memory[start : start + layer_bytes].view(NUM_DEVICE, piece) for start in starts},
        NUM_DEVICE,
        dict.fromkeys(map(str, starts), 0),
    )


class PitchedNow:
    """`PitchedCopier` for memory of the CPU; counts the copies."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, copies: np.ndarray, stream: int | None) -> None:
        kinds = {ON_HOST: "host", ON_DEVICE: "device"}
        for copy in copies:
            sides = copy["target"], copy["source"]
            assert {int(side["type"]) for side in sides} == {ON_HOST, ON_DEVICE}
            assert all(side["pitch"] >= copy["width"] for side in sides)
            for piece in range(int(copy["height"])):
                target, source = (int(side[kinds[int(side["type"])]]) + piece * int(side["pitch"]) for side in sides)
                ctypes.memmove(target, source, int(copy["width"]))
        self.count += len(copies)


@pytest.mark.parametrize("direction", Direction)
def test_pieces_that_lie_evenly_apart_are_one_copy_a_block(direction: Direction, device: torch.device) -> None:
    layout = evenly_apart(device)
    pool = make_pool(layout)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    on_cpu = device.type == "cpu"
    pitched = PitchedNow()
    form = raw_form(layout)
    path = RunsPath(form, pool, copy_now, pitched, 48) if on_cpu else RunsPath(form, pool, least_pitched=48)
    for pairs in PAIRS:
        for regions in (range(4), range(1, 3)):
            before = pitched.count
            assert path.is_pitched(regions)
            check_copy(path, layout, pool, direction, regions, pairs)
            assert pitched.count - before == (len(pairs) if on_cpu else 0)
        check_copy(path, layout, pool, direction, range(2, 3), pairs)
    pool.close()


def test_long_pieces_that_lie_evenly_apart_need_no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    pitched = PitchedNow()
    monkeypatch.setattr(turns, "driver_copier", lambda: copy_now)
    layout = evenly_apart(torch.device("cpu"), piece=LEAST_PITCHED_BYTES)
    pool = make_pool(layout)
    slow_pieces = Curve((LEAST_PITCHED_BYTES, 4 * LEAST_PITCHED_BYTES), (1.0, 50.0), 0.0)
    fast_packing = Curve((LEAST_PITCHED_BYTES,), (1e5,), 0.0)
    costs = replace(BUILT_IN, save=replace(BUILT_IN.save, dma=slow_pieces, packing=fast_packing))
    path = AutoPath(raw_form(layout), pool, min_staging_memory(raw_form(layout)), costs)
    monkeypatch.setattr(path._runs, "_pitched", pitched)
    check_copy(path, layout, pool, SAVE, range(4), PAIRS[3])
    assert pitched.count == len(PAIRS[3])


def test_copies_that_are_packed_are_cut_into_longer_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them the ring runs empty. Directions differ, and memory that is pageable is never packed."""
    monkeypatch.setattr(turns, "driver_copier", lambda: copy_now)
    layout = filled(bf16_apart, torch.device("cpu"))
    pool = make_pool(layout)
    slow_pieces = replace(BUILT_IN.save, dma=Curve((1 << 7, 1 << 9), (1.0, 50.0), 0.0))
    costs = replace(BUILT_IN, load=replace(BUILT_IN.load, dma=Curve((1 << 7,), (50.0,), 0.0)), save=slow_pieces)
    path = AutoPath(raw_form(layout), pool, min_staging_memory(raw_form(layout)), costs)
    assert (path.slice_bytes(LOAD), path.slice_bytes(SAVE)) == (SLICE_BYTES, LONG_SLICE_BYTES)
    monkeypatch.setattr(type(pool), "is_pinned", False)
    assert path.slice_bytes(SAVE) == SLICE_BYTES


def test_pieces_are_packed_for_an_engine_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast DMA is; not what DMA takes in one copy, and what the model waits for goes by its costs."""
    monkeypatch.setattr(turns, "driver_copier", lambda: copy_now)
    fast, slow = Curve((1 << 7,), (1e5,), 0.0), Curve((1 << 7,), (1e-3,), 0.0)
    load, save = (replace(BUILT_IN.of(direction), dma=fast, direct=slow) for direction in (LOAD, SAVE))
    costs = replace(BUILT_IN, load=load, save=save)

    def choices(layout: CacheLayout, packs_pieces: bool, num_regions: int | None = None) -> list[PathName]:
        form, pool = raw_form(layout), make_pool(layout)
        path = AutoPath(form, pool, min_staging_memory(form), costs, packs_pieces)
        regions = range(num_regions or len(layout.regions))
        return [path._choose(*copy) for copy in ((SAVE, regions, 4), (LOAD, regions, 4), (LOAD, regions, 4, True))]

    runs, staged = PathName.RUNS, PathName.STAGED
    apart, evenly = (
        filled(bf16_apart, torch.device("cpu")),
        evenly_apart(torch.device("cpu"), piece=LEAST_PITCHED_BYTES),
    )
    assert choices(apart, False) == choices(evenly, False) == [runs] * 3
    assert (choices(apart, True), choices(evenly, True)) == ([staged, staged, runs], [runs] * 3)
    assert choices(apart, True, num_regions=1) == [runs] * 3, "a block is one piece"


def test_what_a_copy_engine_cannot_take_in_one_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pieces, one piece, a gap between two, allocations of their own, a distance that the driver refuses, and
    memory that is pageable."""
    cpu = torch.device("cpu")
    layout = evenly_apart(cpu)
    pool, pageable = make_pool(layout), HostPool(2, raw_form(layout).block_bytes, pin_memory=False)

    def is_pitched(layout: CacheLayout, pool: HostPool, num_regions: int, least: int = 48) -> bool:
        return RunsPath(raw_form(layout), pool, copy_now, least_pitched=least).is_pitched(range(num_regions))

    assert is_pitched(layout, pool, 4)
    assert not is_pitched(layout, pool, 4, least=49)
    assert not is_pitched(layout, pool, 1)
    assert not is_pitched(layout, pageable, 4)
    uneven = evenly_apart(cpu, gap=16)
    assert is_pitched(uneven, make_pool(uneven), 3) and not is_pitched(uneven, make_pool(uneven), 4)
    memory = torch.zeros(3, NUM_DEVICE, 48, dtype=torch.uint8)
    for other in (memory[1, :, :40], memory[1, :4].view(4, 48), memory[1].view(-1)[: 12 * 48].view(-1, 2, 48)[:, 0]):
        caches = {"0": memory[0, :4], "1": other[:4], "2": memory[2, :4]}
        unequal = CacheLayout.from_tensors(caches, 4, dict.fromkeys(caches, 0))
        is_equal = unequal.regions[1].piece_bytes == unequal.regions[1].block_stride == 48
        assert is_pitched(unequal, make_pool(unequal), 3) is is_equal
    own = {str(layer): torch.from_numpy(array) for layer, array in enumerate(memory.numpy())}
    allocations = CacheLayout.from_tensors(own, NUM_DEVICE, dict.fromkeys(own, 0))
    assert not is_pitched(allocations, make_pool(allocations), 3), "from one allocation into the next"
    monkeypatch.setattr(runs_module, "MOST_PITCH", NUM_DEVICE * 48 - 1)
    assert not is_pitched(layout, pool, 4)


@pytest.mark.parametrize("direction", Direction)
def test_a_driver_that_refuses_a_pitched_copy_is_asked_for_no_other(
    direction: Direction, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first block of several: these are copied all the same, and those of every later copy, in either
    direction."""
    layout = evenly_apart(torch.device("cpu"))
    pool = make_pool(layout)
    asked = []

    def take_one(address: int, stream: int) -> int:
        asked.append(address)
        memory = (ctypes.c_char * COPY.itemsize).from_address(address)
        PitchedNow()(np.frombuffer(memory, dtype=COPY), stream)
        return 0 if len(asked) == 1 else 1

    def say(code: Any, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0

    monkeypatch.setattr(pitched_module, "_driver_call", lambda: take_one)
    monkeypatch.setattr(driver, "libcuda", lambda: SimpleNamespace(cuGetErrorString=say))
    path = RunsPath(raw_form(layout), pool, copy_now, lambda copies, _: copy_pitched(copies, 7), least_pitched=48)
    assert path.is_pitched(range(4))
    for way in (direction, *Direction):
        pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
        check_copy(path, layout, pool, way, range(4), PAIRS[3])
        check_copy(path, layout, pool, way, range(1, 3), PAIRS[2])
    assert len(asked) == 2 and not path.is_pitched(range(4))
    assert [record.getMessage() for record in caplog.records] == [
        "no pitched copies from now on, pieces are copied one by one: "
        "cuMemcpy2DAsync failed with CUDA error 1: invalid argument"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("direction", Direction)
def test_what_the_driver_refuses_is_copied_all_the_same(direction: Direction) -> None:
    """A width above the pitch, which it does refuse, from the second block on."""
    layout = evenly_apart(torch.device("cuda", torch.cuda.current_device()))
    pool = make_pool(layout)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    asked = []

    def ask_for_too_much(copies: np.ndarray, stream: int | None) -> None:
        asked.append(len(copies))
        copies["width"][1:] = MOST_PITCH + 1
        copy_pitched(copies, stream)

    path = RunsPath(raw_form(layout), pool, pitched=ask_for_too_much, least_pitched=48)
    for _ in range(2):
        check_copy(path, layout, pool, direction, range(4), PAIRS[3])
    assert asked == [len(PAIRS[3])]
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("direction", Direction)
def test_layers_that_lie_gigabytes_apart_are_pitched_copies(direction: Direction) -> None:
    """As in a cache that takes most of a GPU: all layers are further apart than 32 bits count."""
    apart, piece, num_layers = (3 << 29) + (1 << 20), 128 << 10, 6
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.mem_get_info(device)[0] < num_layers * apart:
        pytest.skip("the GPU has no room for it")
    memory = torch.empty(num_layers * apart, dtype=torch.uint8, device=device)
    caches = {f"{i}": memory[i * apart :][: NUM_DEVICE * piece].view(NUM_DEVICE, piece) for i in range(num_layers)}
    for cache in caches.values():
        cache.random_(0, 256)
    layout = CacheLayout.from_tensors(caches, NUM_DEVICE, dict.fromkeys(caches, 0))
    pool = make_pool(layout)
    path = RunsPath(raw_form(layout), pool)
    assert path.is_pitched(range(num_layers))
    device_ids, host_ids = (ids(*column) for column in zip(*PAIRS[3], strict=True))
    views, host = expected_after(layout, pool, direction, range(num_layers), device_ids, host_ids)
    with side_stream(device) as stream:
        path.copy(BlockCopy(direction, range(num_layers), device_ids, host_ids, stream))
    assert torch.equal(pool.tensor, host)
    assert all(torch.equal(region.view.cpu(), view) for region, view in zip(layout.regions, views, strict=True))
    pool.close()


def test_a_long_plan_is_handed_over_in_calls_of_some_size(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = filled(layers_inside_blocks, torch.device("cpu"))
    pool = make_pool(layout)
    call_bytes = 2 * raw_form(layout).block_bytes
    made = {pace: TurnTaking(NoTurns(), call_bytes) for pace in TURN_BYTES}
    monkeypatch.setattr(runs_module, "make_turn_taking", lambda _: made)
    counts = []

    def counting(targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
        counts.append(count)
        copy_now(targets, sources, sizes, count, pinned, stream)

    pairs = [(2 * block, 3 * block) for block in range(5)]
    check_copy(RunsPath(raw_form(layout), pool, counting), layout, pool, SAVE, range(4), pairs)
    assert counts == [2, 2, 1]


def test_paths_that_cannot_serve_say_what_to_change() -> None:
    form = raw_form(filled(bf16_apart, torch.device("cpu")))
    pool = HostPool(2, form.block_bytes)
    with pytest.raises(ConfigError, match="pin_memory"):
        DirectPath(form, pool)
    with pytest.raises(ConfigError, match=rf"staging_memory=100 .* give at least {min_staging_memory(form)} bytes"):
        StagedPath(form, pool, 100, copy_now)
    assert isinstance(make_path(form, pool, Config(copy_path=PathName.STAGED)), TorchPath)


def test_staged_joins_its_stream_also_where_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = filled(bf16_apart, torch.device("cpu"))
    pool = make_pool(layout)
    joined = []
    monkeypatch.setattr(staging._Ring, "join", lambda ring, stream: joined.append(ring))

    def fail(*_: object) -> None:
        raise TransferError("no luck")

    path = StagedPath(raw_form(layout), pool, min_staging_memory(raw_form(layout)), fail)
    for direction in Direction:
        with pytest.raises(TransferError):
            path.copy(BlockCopy(direction, range(2), ids(1), ids(2)))
    assert len(joined) == 2
