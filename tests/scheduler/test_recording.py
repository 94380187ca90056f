"""What the scheduler half tells of requests, for a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kv_connector.base import SchedulerOutput
from kv_connector.build import build_scheduler
from kv_connector.config import Config
from kv_connector.replay import read_trace
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.recording import RequestRecorder
from kv_connector.types import BlockHash, StepReport
from tests.scheduler.test_half import Asked, Clock, ForeignBlocks, admit, run, save

Told = tuple[int, int, int]


def make_recorded() -> tuple[SchedulerHalf, list[Told]]:
    told: list[Told] = []

    def record(seconds: float, input_tokens: int, output_tokens: int, hashes: Sequence[BlockHash]) -> None:
        told.append((input_tokens, output_tokens, len(hashes)))

    clock = Clock()
    half = SchedulerHalf(Config(host_memory=1 << 20), 4, clock=clock, observers=[RequestRecorder(record, clock)])
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10)])
    return half, told


def test_a_request_is_told_of_once_when_it_ends() -> None:
    """Prompt and answer apart, also where it lost its blocks in the middle of the answer and began again."""
    half, told = make_recorded()
    request = Asked("chat", list(range(10)))
    admit(half, request)
    run(half, request)
    request.tokens += [7, 7, 7]
    half.build_connector_meta(SchedulerOutput((), {"chat"}))
    admit(half, request, first_block=20)
    run(half, request)
    request.tokens += [8]
    assert not told
    half.request_finished(request)
    assert told == [(10, 4, 2)]
    half.request_finished(request)
    half.request_finished(Asked("left before it was admitted", [1, 2, 3]))
    assert told == [(10, 4, 2)]


def test_a_reset_and_an_id_that_comes_again_change_nothing() -> None:
    half, told = make_recorded()
    request = Asked("chat", list(range(8)))
    admit(half, request)
    assert half.reset_cache()
    half.request_finished(request)
    save(half, Asked("chat", list(range(20))))
    assert told == [(8, 0, 2), (20, 0, 5)]


def test_what_an_engine_served_is_replayed(tmp_path: Path) -> None:
    """The setting alone: chats whose second turn has all of the first one's blocks."""
    file = tmp_path / "trace.jsonl"
    half = build_scheduler(Config(host_memory=1 << 20, record_trace=str(file)), 4)
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10)])
    for number, length in enumerate((9, 13)):
        save(half, Asked(str(number), list(range(length))), first_block=10 * number)
    del half  # closes the file
    trace = read_trace(file)
    assert (list(trace.input_tokens), list(trace.device_hits), trace.block_tokens) == ([9, 13], [0, 2], 4)


@pytest.mark.parametrize("fault", ["arrived", "admitted", "preempted", "finished", "opened", "ended"])
def test_an_observer_that_raises_breaks_no_engine(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """It calls others' code: exporters of traces. All goes on, no block stays leased, and the log has one line."""
    heard: list[str] = []

    class Broken:
        def __getattr__(self, name: str) -> Callable[..., bool]:
            heard.append(name)
            if name == fault:
                raise RuntimeError("an exporter is broken")
            return lambda *told: True

    pool = ForeignBlocks()
    half = build_scheduler(Config(host_memory=1 << 20), 4, observers=[Broken()])
    half.bind_block_pool(pool)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10)])
    request = Asked("chat", list(range(9)))
    half.on_new_request(request)
    admit(half, request)
    half.build_connector_meta(SchedulerOutput((), {"chat"}))
    admit(half, request, first_block=20)
    save(half, request, first_block=40)
    stats = half.get_kv_connector_stats()
    assert (stats["jobs_in_flight"], stats["host_leased_blocks"], stats["host_cached_blocks"]) == (0, 0, 2)
    half.check()
    assert heard[-1] == fault and heard.count(fault) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Broken raised and is not called any more, the engine continues"
    ]
