"""Which requests are traced, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from kv_connector.config import Config
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler import traces as traces_module
from kv_connector.scheduler.traces import Attributes, RequestTraces
from kv_connector.types import CopyJob, Direction, StepReport, StorageAction, StorageJob
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, report, run


@dataclass
class Noted:
    """A span that keeps what it is told."""

    name: str
    headers: Mapping[str, str] = field(default_factory=dict)
    children: list[Noted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ok: bool | None = None

    def child(self, name: str, attributes: Attributes) -> Noted:
        self.children.append(Noted(name))
        return self.children[-1]

    def note(self, name: str, attributes: Attributes) -> None:
        self.notes.append(name)

    def end(self, attributes: Attributes, ok: bool = True) -> None:
        assert self.ok is None, "once"
        self.ok = ok


class Notes:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Noted] = []

    def begin(self, name: str, trace_headers: Mapping[str, str], attributes: Attributes) -> Noted:
        self.spans.append(Noted(name, trace_headers))
        return self.spans[-1]


class WithTrace(Asked):
    """A request whose client has sent a trace context."""

    def __init__(self, request_id: str, tokens: list[int], traceparent: str) -> None:
        super().__init__(request_id, tokens)
        self.trace_headers = {"traceparent": traceparent}


def make_traced(share: float) -> tuple[SchedulerHalf, Notes, RequestTraces]:
    notes = Notes()
    traces = RequestTraces(notes, share)
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through"})
    half = SchedulerHalf(config, 4, observers=(traces,))
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=100)])
    return half, notes, traces


def test_a_share_of_the_requests_is_traced_and_each_once() -> None:
    half, notes, _ = make_traced(0.1)
    asked = [Asked(f"request {number}", [number] * 9) for number in range(2000)]
    for request in asked:
        half.on_new_request(request)
        half.on_new_request(request)
    assert 150 < len(notes.spans) < 250
    for request in asked:
        half.request_finished(request)
    assert {span.ok for span in notes.spans} == {True}


def test_of_too_many_saves_the_oldest_is_forgotten_and_one_saved_anew_is_not_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Storage writes them later: a span under that of the save."""
    monkeypatch.setattr(traces_module, "_MOST_BLOCKS", 2)
    traces = RequestTraces(Notes(), 1.0)
    assert traces.arrived(Asked("a", [1] * 9))
    blocks = [np.array([host_id]) for host_id in range(3)]
    for job_id, host_id in enumerate((0, 1, 0, 2)):
        assert traces.opened(CopyJob(job_id, Direction.SAVE, blocks[host_id], blocks[host_id]), {"a"})
    written = [StorageJob(10 + host_id, StorageAction.BACK_UP, b"", blocks[host_id]) for host_id in range(3)]
    assert [traces.opened(job, ()) for job in written] == [True, False, True]


def test_engines_agree_on_a_trace_and_nonsense_is_no_trace() -> None:
    half, notes, traces = make_traced(0.5)
    low, high = "00-" + "a" * 24 + "00000001-" + "b" * 16 + "-01", "00-" + "a" * 24 + "ffffffff-" + "b" * 16 + "-01"
    for number in range(20):
        half.on_new_request(WithTrace(f"low {number}", [1] * 9, low))
        half.on_new_request(WithTrace(f"high {number}", [1] * 9, high))
    assert [span.headers["traceparent"] for span in notes.spans] == [low] * 20
    for nonsense in ("", "-", "00-xyz-1-1", "00-" + "z" * 32 + "-" + "b" * 16 + "-01"):
        half.on_new_request(WithTrace("nonsense", [1] * 9, nonsense))
    assert "nonsense" in traces._requests or len(notes.spans) == 20


def test_a_job_that_fails_is_an_error_and_one_may_outlive_its_request() -> None:
    half, notes, traces = make_traced(1.0)
    first, second = Asked("first", [1] * 9), Asked("second", [1] * 9)
    admit(half, first)
    saves = run(half, first)
    half.request_finished(first)
    (request,) = notes.spans
    (save,) = request.children
    assert (request.ok, save.name, save.ok) == (True, "kv_connector.save", None)
    report(half, saves)
    assert save.ok
    assert admit(half, second, 10) == 8
    report(half, run(half, second, computed=8), ok=False)
    half.request_finished(second)
    assert next((span.name, span.ok) for span in notes.spans[1].children) == ("kv_connector.load", False)
    assert notes.spans[1].notes == ["admitted"]
    assert not traces._requests and not traces._jobs
