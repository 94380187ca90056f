"""Copy paths: each moves exactly the bytes that indexing would, and says what it cannot serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.config import Config, PathName
from kv_connector.errors import ConfigError, TransferError
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.paths import staged as staging
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.choice import make_path
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
    filled,
    fp8_with_scales,
    ids,
    layers_inside_blocks,
    make_named_path,
    make_pool,
    odd_bytes,
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
    path = make_named_path("staged", layout, pool, min_staging_memory(layout) + extra)
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
        path = RunsPath(layout, pool, copy_now) if kind == "runs" else TorchPath(layout, pool)
        check_copy(path, layout, pool, direction, regions, pairs)


def count_segments(make: Any, pairs: list[tuple[int, int]], blocks_per_piece: int = 1000) -> int:
    layout = filled(make, torch.device("cpu"))
    pool = make_pool(layout)
    pool.blocks_per_piece = blocks_per_piece
    device_ids, host_ids = (ids(*column) for column in zip(*pairs, strict=True))
    copy = BlockCopy(SAVE, range(len(layout.regions)), device_ids, host_ids)
    return len(RunsPath(layout, pool, copy_now).plan(copy))


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


def test_paths_that_cannot_serve_say_what_to_change() -> None:
    layout = filled(bf16_apart, torch.device("cpu"))
    with pytest.raises(ConfigError, match="pin_memory"):
        DirectPath(layout, HostPool(2, layout.block_bytes))
    with pytest.raises(ConfigError, match=rf"staging_memory=100 .* give at least {min_staging_memory(layout)} bytes"):
        StagedPath(layout, HostPool(2, layout.block_bytes), 100, copy_now)
    assert isinstance(make_path(layout, HostPool(2, layout.block_bytes), Config(copy_path=PathName.STAGED)), TorchPath)


def test_staged_joins_its_stream_also_where_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = filled(bf16_apart, torch.device("cpu"))
    pool = make_pool(layout)
    joined = []
    monkeypatch.setattr(staging._Ring, "join", lambda ring, stream: joined.append(ring))

    def fail(*_: object) -> None:
        raise TransferError("no luck")

    path = StagedPath(layout, pool, min_staging_memory(layout), fail)
    for direction in Direction:
        with pytest.raises(TransferError):
            path.copy(BlockCopy(direction, range(2), ids(1), ids(2)))
    assert len(joined) == 2
