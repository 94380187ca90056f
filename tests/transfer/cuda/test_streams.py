"""Streams of the driver's, as long as somebody holds them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kv_connector.transfer.cuda.streams import Priority, make_lane, make_stream


def test_the_cpu_has_no_streams() -> None:
    assert make_stream(torch.device("cpu"), Priority.LOAD) is None


@pytest.mark.gpu
def test_a_stream_goes_with_the_last_who_holds_it() -> None:
    """Behind a kernel that still runs on it, too."""
    lane = make_lane(torch.device("cuda:0"), Priority.SAVE, timing=False)
    stream = lane.stream
    owner = weakref.ref(stream.owner)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
    del lane
    gc.collect()
    assert owner() is not None
    del stream
    gc.collect()
    assert owner() is None
    torch.cuda.synchronize()
