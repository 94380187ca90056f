"""Block ids on their way to the device: the right ones, and none written over while a kernel may still read it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.transfer.cuda import uploads as uploads_module
from kv_connector.transfer.cuda.uploads import IdUploads
from tests.engines import ManualEvent, ManualLane


class LaneWithStreams(ManualLane):
    """Marks any stream, as an upload's own lane does."""

    def recycle(self, events: list[Any]) -> None:
        assert all(event.done for event in events), "a buffer was taken before its kernels had ended"


def make_uploads(sides: int, in_order: bool, **sizes: int) -> tuple[IdUploads, LaneWithStreams]:
    lane = LaneWithStreams()
    with patch.object(uploads_module, "make_events", lambda *_: lane):
        return IdUploads(torch.device("cpu"), sides, in_order, **sizes), lane


def frozen(values: list[int]) -> Any:
    array = np.array(values, dtype=np.int64)
    array.setflags(write=False)
    return array


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 100, 4096, 4097, 9000]), min_size=1, max_size=14),
    ends=st.lists(st.integers(0, 20), max_size=14),
    sides=st.integers(1, 2),
    in_order=st.booleans(),
    num_ids=st.sampled_from([200, 9000, 40_000]),
)
def test_what_kernels_may_still_read_stays_as_it_was(
    sizes: list[int], ends: list[int], sides: int, in_order: bool, num_ids: int
) -> None:
    uploads, lane = make_uploads(sides, in_order, num_ids=num_ids)
    rng = np.random.default_rng(len(sizes))
    reading: list[tuple[torch.Tensor, torch.Tensor, ManualEvent]] = []  # where, what, until
    for number, size in enumerate(sizes):
        device_ids, host_ids = (frozen(rng.permutation(size + 5)[:size].tolist()) for _ in range(2))
        uploaded = uploads.get(device_ids, host_ids, None)
        order = np.argsort(host_ids) if in_order else np.arange(size)
        expected = torch.from_numpy(np.concatenate([device_ids[order], host_ids[order]][:sides]))
        assert torch.equal(uploaded.there[: sides * size], expected)
        assert uploaded.host_ids.tolist() == host_ids[order].tolist()
        assert uploads.get(device_ids, host_ids, None) is uploaded, "sent once for all groups of a load"
        uploads.used(None)
        reading.append((uploaded.there, expected, lane.marks[-1]))
        for event in lane.marks[: ends[number] if number < len(ends) else 0]:
            event.done = True
        for there, what, until in reading:
            assert until.done or torch.equal(there[: len(what)], what)


def test_no_memory_is_made_for_copies_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, lane = make_uploads(2, in_order=False)
    monkeypatch.setattr(uploads_module, "_Slab", lambda *_: pytest.fail("ids are in service's way"))
    for number in range(200):
        uploads.get(frozen(list(range(5000))), frozen(list(range(5000))), None)
        uploads.used(None)
        if number >= 9:  # ten copies are under way
            lane.marks[number - 9].done = True


def test_a_copy_that_failed_before_its_kernels_holds_nothing_for_ever() -> None:
    uploads, lane = make_uploads(2, in_order=False, num_ids=100)
    for _ in range(50):
        uploads.get(frozen(list(range(10))), frozen(list(range(10))), None)
        for event in lane.marks:
            event.done = True
    assert uploads._slab.num_ids == 100


def test_arrays_that_somebody_can_change_are_sent_again() -> None:
    uploads, _ = make_uploads(2, in_order=False)
    device_ids, host_ids = np.array([4, 2]), np.array([7, 1])
    assert uploads.get(device_ids, host_ids, None).there[:4].tolist() == [4, 2, 7, 1]
    uploads.used(None)
    device_ids[0] = 3
    assert uploads.get(device_ids, host_ids, None).there[:4].tolist() == [3, 2, 7, 1]


@pytest.mark.gpu
def test_many_ids_arrive_on_the_gpu() -> None:
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    uploads = IdUploads(device, 2, in_order=True)
    host_ids, device_ids = (frozen(np.random.default_rng(seed).permutation(10_000).tolist()) for seed in (1, 2))
    there = uploads.get(device_ids, host_ids, stream).there
    uploads.used(stream)
    stream.synchronize()
    order = np.argsort(host_ids)
    assert there[:20_000].tolist() == [*device_ids[order].tolist(), *host_ids[order].tolist()]
    uploads.close()
