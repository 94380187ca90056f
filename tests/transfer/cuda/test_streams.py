"""Streams of the driver's, as long as somebody holds them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from kv_connector.transfer.cuda import streams
from kv_connector.transfer.cuda.streams import CudaLane, Priority, make_lane, make_stream


def test_the_cpu_has_no_streams() -> None:
    assert make_stream(torch.device("cpu"), Priority.LOAD) is None


class RecordedEvent:
    """Of torch's, as far as a lane uses them."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing, self.blocking = enable_timing, blocking
        self.streams: list[object] = []

    def record(self, stream: object) -> None:
        self.streams.append(stream)


def test_what_threads_wait_for_on_the_host_is_recorded_once_and_waited_for_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, model = SimpleNamespace(cuda_stream=7), object()
    monkeypatch.setattr(streams, "make_stream", lambda *_: own)
    monkeypatch.setattr(torch.cuda, "Event", RecordedEvent)
    lane = CudaLane(torch.device("cuda", 0), Priority.SAVE, timing=True)
    monkeypatch.setattr(lane, "current", lambda: model)
    first = lane.mark(own)
    lane.recycle([first])
    events = [lane.position(), lane.end()]
    assert [event.streams for event in events] == [[model], [own]]  # type: ignore[attr-defined]
    assert all(event.timing for event in events), "ends are those of completions"  # type: ignore[attr-defined]
    assert all(event.blocking for event in events)  # type: ignore[attr-defined]
    assert lane.mark(own) is first, "those of marks go around"
    assert not first.blocking  # type: ignore[attr-defined]


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
