"""Writes into another pool that is mapped here: by runs or by the kernel, the same bytes at the same places."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.errors import TransferError
from kv_connector.transfer.cuda.copier import driver_copier
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths import peer_writes as remote
from kv_connector.transfer.paths.peer_writes import RemoteWriters
from tests.copies import copy_now
from tests.engines import ManualLane

PIECES = (64, 24, 64, 40)


def pool(
    num_blocks: int, paddings: tuple[int, ...], side_by_side: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    """Regions of a pool, apart with `paddings` behind each piece, or all pieces of a block in a row."""
    if side_by_side:
        memory = torch.randint(0, 256, (num_blocks, sum(PIECES)), dtype=torch.uint8).to(device)
        ends = np.cumsum(PIECES)
        return {str(i): memory[:, end - size : end] for i, (end, size) in enumerate(zip(ends, PIECES, strict=True))}
    return {
        str(i): torch.randint(0, 256, (num_blocks, size + padding), dtype=torch.uint8).to(device)[:, :size]
        for i, (size, padding) in enumerate(zip(PIECES, paddings, strict=True))
    }


def layout_of(tensors: dict[str, torch.Tensor], num_blocks: int) -> CacheLayout:
    return CacheLayout.from_tensors(tensors, num_blocks, dict.fromkeys(tensors, 0))


paddings = st.tuples(*[st.sampled_from([0, 0, 8, 3])] * len(PIECES))


class WatchedLane(ManualLane):
    """Takes events back as soon as their waits are enqueued, as a lane does."""

    def recycle(self, events: list[Any]) -> None:
        """See above."""


def writers_of(tensors: dict[str, torch.Tensor], copier: Any = copy_now) -> RemoteWriters:
    return RemoteWriters(layout_of(tensors, 9), WatchedLane(), copier)


def places_of(layout: CacheLayout) -> tuple[Any, Any]:
    """Where its pieces lie, as another engine is told."""
    bases = np.array([region.data_ptr for region in layout.regions], dtype=np.int64)
    return bases, np.array([region.block_stride for region in layout.regions], dtype=np.int64)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ManualLane]:
    """The lanes that writers make for themselves."""
    lanes: list[ManualLane] = []

    def make(*_: object, **__: object) -> ManualLane:
        lanes.append(WatchedLane())
        return lanes[-1]

    monkeypatch.setattr(remote, "make_lane", make)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return lanes


def test_links_that_come_and_go_share_streams_and_ids(made: list[ManualLane]) -> None:
    own, other = pool(9, (0,) * 4, False, torch.device("cpu")), pool(9, (0,) * 4, False, torch.device("cpu"))
    writers = writers_of(own)
    num_lanes, places = len(made), places_of(layout_of(other, 9))
    links = [writers.writer(*places) for _ in range(40)]
    for link in links:
        link.write(np.array([1, 2]), np.array([3, 4]), range(4))
    assert len(made) == num_lanes == remote.DMA_STREAMS - 1


def test_what_was_enqueued_of_a_write_that_fails_is_waited_for(
    made: list[ManualLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LEAST_DMA_BYTES", 0)
    monkeypatch.setattr(remote, "_PART_RUNS", 1)
    own, other = pool(9, (8,) * 4, False, torch.device("cpu")), pool(9, (8,) * 4, False, torch.device("cpu"))
    calls = []

    def fail_third(*call: Any) -> None:
        calls.append(call)
        if len(calls) == 3:
            raise TransferError("no luck")

    writers = writers_of(own, fail_third)
    with pytest.raises(TransferError):
        writers.writer(*places_of(layout_of(other, 9))).write(np.array([1, 3]), np.array([3, 5]), range(4))
    behind = [event for lane in made for event, stream in lane.waits if stream is writers.lane.stream]
    assert [event.lane for event in behind] == made, "what comes behind the write comes behind each of its streams"


@pytest.mark.parametrize("least_bytes", [0, 1 << 30])
def test_nothing_is_written_once_it_may_not_be(
    made: list[ManualLane], monkeypatch: pytest.MonkeyPatch, least_bytes: int
) -> None:
    """By copy engines or the kernel: it is asked when all that goes in front of the first copy is done."""
    monkeypatch.setattr(remote, "LEAST_DMA_BYTES", least_bytes)
    own, other = pool(9, (8,) * 4, False, torch.device("cpu")), pool(9, (8,) * 4, False, torch.device("cpu"))
    before = [tensor.clone() for tensor in other.values()]
    writer = writers_of(own).writer(*places_of(layout_of(other, 9)))
    assert not writer.write(np.array([1, 3]), np.array([3, 5]), range(4), lambda: False)
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(other.values(), before, strict=True))
    assert writer.write(np.array([1, 3]), np.array([3, 5]), range(4), lambda: True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    own_paddings=paddings,
    other_paddings=paddings,
    in_rows=st.tuples(st.booleans(), st.booleans()),
    sources=st.permutations(range(9)),
    targets=st.permutations(range(7)),
    count=st.integers(1, 7),
    sort=st.booleans(),
    first=st.integers(0, 3),
    stop=st.integers(1, 4),
    by_kernel=st.booleans(),
)
def test_named_blocks_and_regions_arrive_and_nothing_else_changes(
    device: torch.device,
    own_paddings: tuple[int, ...],
    other_paddings: tuple[int, ...],
    in_rows: tuple[bool, bool],
    sources: list[int],
    targets: list[int],
    count: int,
    sort: bool,
    first: int,
    stop: int,
    by_kernel: bool,
) -> None:
    regions = range(min(first, stop - 1), stop)
    own, other = pool(9, own_paddings, in_rows[0], device), pool(7, other_paddings, in_rows[1], device)
    here, there = layout_of(own, 9), layout_of(other, 7)
    source_ids, target_ids = np.array(sources[:count]), np.array(targets[:count])
    if sort:
        source_ids, target_ids = np.sort(source_ids), np.sort(target_ids)
    expected = [tensor.clone() for tensor in other.values()]
    for region in regions:
        expected[region][target_ids] = own[str(region)][source_ids]
    bases = np.array([region.data_ptr for region in there.regions], dtype=np.int64)
    strides = np.array([region.block_stride for region in there.regions], dtype=np.int64)
    lane = make_lane(device, Priority.PEER, timing=False)
    copier = copy_now if device.type == "cpu" else driver_copier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "LEAST_DMA_BYTES", 1 << 20 if by_kernel else 0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        RemoteWriters(here, lane, copier).writer(bases, strides).write(source_ids, target_ids, regions)
    if lane.stream is not None:
        lane.stream.synchronize()
    for tensor, wanted in zip(other.values(), expected, strict=True):
        assert torch.equal(tensor, wanted)
