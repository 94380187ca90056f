"""The transfer engine: order, readiness, failures, and the end of every job."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kv_connector.config import Config, PathName
from kv_connector.errors import ConfigError, InvalidBlockError
from kv_connector.transfer import engine as engine_module
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout, layer_groups
from kv_connector.transfer.paths.choice import make_path
from kv_connector.transfer.submission.checks import merged_ids
from kv_connector.types import CopyJob, Direction
from tests.copies import (
    LOAD,
    NUM_DEVICE,
    NUM_HOST,
    PAIRS,
    POISON,
    SAVE,
    bf16_apart,
    check_copy,
    filled,
    ids,
    job,
    make_pool,
)
from tests.engines import ManualLane, ends, make_engine, never_submits, submit_all


def test_loads_of_about_one_length_are_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting takes longer than looking it up, and the model waits for the first group."""
    engine, _, _ = make_engine()
    cut = engine_module.layer_groups
    asked: list[int] = []

    def watched(stops: Any, pieces: Any, num_blocks: int, *sizes: int) -> tuple[range, ...]:
        asked.append(num_blocks)
        return cut(stops, pieces, num_blocks, *sizes)

    monkeypatch.setattr(engine_module, "layer_groups", watched)
    for number, count in enumerate((5, 8, 7, 6, 9, 1, 1)):
        blocks = list(range(count))
        assert engine.submit_load([job(number, LOAD, blocks, blocks)]) == frozenset()
        assert ends(engine.drain()) == [(number, True)]
    assert asked == [8, 16, 1]


@pytest.mark.parametrize("name", list(PathName))
def test_saved_blocks_load_back_into_other_blocks(name: PathName, device: torch.device) -> None:
    engine, layout, pool = make_engine(device, copy_path=name)
    before = [region.view.cpu().clone() for region in layout.regions]
    assert engine.submit_save([job(1, SAVE, [3, 4, 9], [2, 7, 0]), job(2, SAVE, [1], [16])]) == frozenset()
    assert ends(engine.drain()) == [(1, True), (2, True)]
    for region in layout.regions:
        region.view[:] = POISON
    assert engine.submit_load([job(3, LOAD, [0, 12], [7, 2]), job(4, LOAD, [5], [16])]) == frozenset()
    for layer in layout.layer_names:
        engine.wait_layer(layer)
    seen = [region.view.clone() for region in layout.regions]  # on the current stream, which waited
    done = engine.drain()
    assert ends(done) == [(3, True), (4, True)]
    assert sum(completion.bytes for completion in done) == 3 * raw_form(layout).moved_bytes
    for view, old in zip(seen, before, strict=True):
        expected = torch.full_like(old, POISON)
        expected[ids(0, 12, 5)] = old[ids(4, 3, 1)]
        assert torch.equal(view.cpu(), expected)
    engine.close()
    pool.close()


def test_a_save_reads_what_the_current_stream_wrote_before_it(device: torch.device) -> None:
    engine, layout, pool = make_engine(device)
    for value in range(1, 20):
        for region in layout.regions:
            region.view.fill_(value)
        engine.submit_save([job(value, SAVE, list(range(NUM_DEVICE)), list(range(NUM_DEVICE)))])
        engine.drain()
        for column in raw_form(layout).columns(pool.tensor):
            assert bool((column[:NUM_DEVICE] == value).all())
    engine.close()
    pool.close()


def test_each_layer_waits_for_its_group_and_only_that(lanes: list[ManualLane]) -> None:
    engine, layout, _ = make_engine()
    load = lanes[0]
    engine.wait_layer("0")
    engine.wait_all()
    assert load.waited == []
    blocks = list(range(8))  # two regions of 128 bytes a layer: 2048 bytes for 8 blocks, so two layers a group
    engine.submit_load([job(1, LOAD, blocks, blocks)])
    assert len(load.marks) - 1 == len(layer_groups(layout.layer_stops, raw_form(layout).stored_bytes, 8, 4096)) == 2
    waited = []
    for layer in ("0", "1", "1", "2", "0", "unknown"):
        engine.wait_layer(layer)
        waited.append(len(load.waited))
    assert load.waited == [load.marks[1], load.marks[2]], "the stream waits once, and for what is in front as well"
    assert waited == [1, 1, 1, 2, 2, 2]
    engine.wait_all()
    engine.submit_load([job(2, LOAD, blocks, blocks)])
    engine.wait_layer("0")
    assert load.waited[2:] == [load.marks[4]], "another load is waited for anew"
    engine.wait_all()
    assert load.waited[3:] == [load.marks[5]]
    engine.wait_layer("2")
    assert len(load.waited) == 4


def test_a_layer_of_one_region_waits_for_its_own_group(lanes: list[ManualLane]) -> None:
    """As in latent attention: the region behind the group that is waited for is the next layer's."""
    tensors = {str(layer): torch.zeros(8, 1024, dtype=torch.uint8) for layer in range(3)}
    layout = CacheLayout.from_tensors(tensors, 8, dict.fromkeys(tensors, 0))
    assert len(layout.regions) == 3
    engine = TransferEngine(raw_form(layout), make_pool(layout), Config(layer_group_bytes=8 * 1024))
    blocks = list(range(8))
    engine.submit_load([job(1, LOAD, blocks, blocks)])
    engine.wait_layer("0")
    engine.wait_layer("1")
    assert lanes[0].waited == lanes[0].marks[1:3]


def test_each_stream_waits_for_a_layer(lanes: list[ManualLane], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = make_engine()
    load = lanes[0]
    engine.submit_load([job(1, LOAD, [0], [0])])
    for stream in ("one", "other", "other"):
        monkeypatch.setattr(load, "current", lambda stream=stream: stream)
        engine.wait_layer("0")
    assert load.waits == [(load.marks[1], "one"), (load.marks[1], "other")]


def test_a_load_that_fails_behind_a_wait_is_told_to_whoever_asks_next(lanes: list[ManualLane]) -> None:
    """For the same group, too."""
    engine, _, _ = make_engine(fail_on=1)
    never_submits(engine)
    blocks = list(range(8))
    assert engine.submit_load([job(1, LOAD, blocks, blocks)]) == frozenset()
    assert engine.wait_layer("0") == frozenset()
    submit_all(engine)  # as the thread does meanwhile
    assert engine.wait_layer("0") == {1}
    assert engine.wait_layer("0") == engine.wait_all() == frozenset(), "told once"
    assert lanes[0].waited == [lanes[0].marks[1], lanes[0].marks[-1]]


def test_jobs_end_once_their_event_has_completed(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    load, save = lanes
    engine.submit_load([job(1, LOAD, [0], [0]), job(2, LOAD, [1], [1])])
    engine.submit_save([job(3, SAVE, [2], [2])])
    engine.submit_save([job(4, SAVE, [3], [3])])
    assert engine.poll() == []
    save.marks[1].done = True
    assert ends(engine.poll()) == [(3, True)]
    load.marks[-1].done = True
    assert ends(engine.poll()) == [(1, True), (2, True)]
    assert engine.poll() == []
    waited = list(load.waits)
    engine.wait_all()
    assert load.waits == waited  # everything has arrived
    assert ends(engine.drain()) == [(4, True)]


def test_a_failed_job_ends_only_after_what_was_enqueued_for_it(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine(fail_on=1)
    load = lanes[0]
    blocks = list(range(8))
    assert engine.submit_load([job(1, LOAD, blocks, blocks)]) == {1}
    assert engine.poll() == []
    assert load.waited == [load.marks[-1]]  # nothing that recomputes those blocks may run before it
    engine.wait_layer("2")
    assert len(load.waited) == 1
    for event in load.marks:
        event.done = True
    assert ends(engine.poll()) == [(1, False)]
    assert engine.poll() == []


def test_a_lost_device_fails_jobs_and_raises_nothing(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    engine.submit_save([job(1, SAVE, [0], [0])])
    lanes[1].marks[1].lost = True
    assert ends(engine.poll()) == [(1, False)]


@pytest.mark.parametrize("fail_on", [0, 1])
def test_an_error_fails_every_job_of_the_submission_once(
    fail_on: int, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _, pool = make_engine(device, fail_on=fail_on)
    blocks = list(range(8))
    failed = engine.submit_load([job(1, LOAD, blocks, blocks), job(2, LOAD, [9], [9])])
    for layer in "012":
        failed |= engine.wait_layer(layer)
    assert failed == {1, 2}
    done = engine.drain()
    assert ends(done) == [(1, False), (2, False)]
    assert [completion.bytes for completion in done] == [0, 0]
    assert [record.name for record in caplog.records] == ["kv_connector.transfer"]
    assert "fault injected" in caplog.text
    assert engine.submit_load([job(3, LOAD, blocks, blocks)]) == frozenset()
    assert ends(engine.drain()) == [(3, True)]
    engine.close()
    pool.close()


WRONG = [
    (job(1, LOAD, [13], [0]), "device_ids names block 13, outside of the 13"),
    (job(1, LOAD, [-1], [0]), "device_ids names block -1"),
    (job(1, LOAD, [0], [17]), "host_ids names block 17, outside of the 17"),
    (job(1, LOAD, [4, 5, 4], [0, 1, 2]), "names destination block 4 twice"),
    (job(1, LOAD, [2, 6], [0, 1]), "names block 6, which an earlier job writes"),
    (job(1, LOAD, [0, 1], [0]), "2 device_ids do not pair with 1 host_ids"),
    (job(1, SAVE, [0], [0]), "it is a save, submitted as a load"),
    (CopyJob(1, LOAD, np.array([0], dtype=np.int32), ids(0)), "int32 of shape"),
    (CopyJob(1, LOAD, ids(0).reshape(1, 1), ids(0)), r"shape (1, 1)"),
    (CopyJob(1, LOAD, [0], ids(0)), "is list"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_a_job_with_wrong_ids_fails_alone(wrong: CopyJob, text: str, caplog: pytest.LogCaptureFixture) -> None:
    engine, layout, pool = make_engine()
    pool.tensor.fill_(1)
    before = [region.view.clone() for region in layout.regions]
    good = [job(0, LOAD, [6], [3]), job(2, LOAD, [7], [3])]
    assert engine.submit_load([good[0], wrong, good[1]]) == {1}
    assert ends(engine.poll()) == [(0, True), (1, False), (2, True)]
    assert len(caplog.records) == 1
    assert text in caplog.text
    for region, old in zip(layout.regions, before, strict=True):
        old[ids(6, 7)] = 1
        assert torch.equal(region.view, old)


def test_a_save_checks_its_host_side_against_what_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, pool = make_engine()
    pool._num_ready_blocks = 5
    assert engine.submit_save([job(1, SAVE, [0], [5]), job(2, SAVE, [0, 0], [3, 4]), job(3, SAVE, [1], [4])]) == {1, 3}
    assert "outside of the 5 blocks" in caplog.text
    assert ends(engine.poll()) == [(1, False), (2, True), (3, False)]


def test_checking_ids_costs_nothing_in_proportion_to_the_pools() -> None:
    """A table of pools of this size would not fit into any memory."""
    jobs = [job(1, SAVE, [5, 7], [1 << 50, 3]), job(2, SAVE, [6], [1 << 51])]
    device_ids, host_ids = merged_ids(jobs, SAVE, 1 << 60, 1 << 60) or pytest.fail("they are right")
    assert (device_ids.tolist(), host_ids.tolist()) == ([5, 7, 6], [1 << 50, 3, 1 << 51])
    assert merged_ids([*jobs, job(3, SAVE, [9], [3])], SAVE, 1 << 60, 1 << 60) is None


def test_jobs_without_blocks_are_done(device: torch.device) -> None:
    engine, _, pool = make_engine(device)
    assert engine.submit_load([]) == frozenset()
    assert engine.submit_load([job(1, LOAD, [], [])]) == frozenset()
    assert engine.submit_save([job(2, SAVE, [], [])]) == frozenset()
    assert [(c.job_id, c.ok, c.bytes) for c in engine.poll()] == [(1, True, 0), (2, True, 0)]
    engine.close()
    pool.close()


def test_a_job_id_names_one_job_until_it_is_reported(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    engine.submit_save([job(1, SAVE, [0], [0])])
    with pytest.raises(InvalidBlockError, match="job id 1 is in flight"):
        engine.submit_load([job(2, LOAD, [1], [1]), job(1, LOAD, [0], [0])])
    with pytest.raises(InvalidBlockError, match="job id 3"):
        engine.submit_save([job(3, SAVE, [0], [1]), job(3, SAVE, [0], [2])])
    assert ends(engine.drain()) == [(1, True)]
    engine.submit_save([job(1, SAVE, [0], [0])])
    assert ends(engine.drain()) == [(1, True)]


def test_close_ends_what_runs_and_fails_what_comes_later(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    engine.submit_save([job(1, SAVE, [0], [0])])
    engine.close()
    engine.close()
    assert lanes[1].marks[1].done
    assert engine.submit_load([job(2, LOAD, [0], [0])]) == {2}
    engine.wait_layer("0")
    assert ends(engine.poll()) == [(1, True), (2, False)]
    assert engine.drain() == []


def test_pool_and_layout_must_agree_on_the_size_of_a_block() -> None:
    layout = filled(bf16_apart, torch.device("cpu"))
    with pytest.raises(ConfigError, match="8192"):
        TransferEngine(raw_form(layout), HostPool(2, 8192), Config())


def test_timings_of_loads_are_taken_once(device: torch.device) -> None:
    engine, layout, pool = make_engine(device, trace_loads=True)
    blocks = list(range(8))
    assert engine.take_load_timings() == ()
    for step in range(2):
        engine.submit_load([job(step, LOAD, blocks, blocks)])
        for layer in layout.layer_names:
            engine.wait_layer(layer)
        engine.drain()
    if device.type == "cuda":
        torch.cuda.synchronize()
    timings = engine.take_load_timings()
    assert [len(timing.load_stall_ms) for timing in timings] == [2, 2]
    assert all(timing.load_ms > 0 and min(timing.load_stall_ms) >= 0 for timing in timings)
    assert engine.take_load_timings() == ()
    engine.close()
    pool.close()


def test_a_timing_counts_the_first_wait_of_each_group(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine(trace_loads=True)
    load = lanes[0]
    blocks = list(range(8))
    engine.submit_load([job(1, LOAD, blocks, blocks)])
    for layer in ("0", "1"):
        engine.wait_layer(layer)
    assert len(load.marks) == 3 + 2
    assert load.waited == [load.marks[1]] * 2
    load.marks[2].done = True
    engine.poll()
    assert engine.take_load_timings() == ()  # the compute stream has not passed its wait yet
    for event in load.marks:
        event.done = True
    (timing,) = engine.take_load_timings()
    assert timing.load_ms == 2.0
    assert timing.load_stall_ms == (1.0, 0.0)


def test_a_timing_is_of_the_stream_that_waits_and_no_other_devices(lanes: list[ManualLane]) -> None:
    engine, layout, _ = make_engine(trace_loads=True)
    load, model = lanes[0], object()
    load.current = lambda: model  # type: ignore[assignment,method-assign,return-value]
    engine.submit_load([job(1, LOAD, [0, 1], [0, 1])])
    for layer in (*layout.layer_names, layout.layer_names[0]):
        engine.wait_layer(layer)
    assert len(load.waits) == len(layout.layer_names) + 1
    assert all(stream is model for _, stream in load.waits)
    assert {id(stream) for stream in load.marked} == {id(load.stream), id(model)}


def test_an_engine_that_is_dropped_ends_its_copies_before_their_memory_goes(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    engine.submit_save([job(1, SAVE, [0, 1], [0, 1])])
    path = weakref.ref(engine._queues[SAVE].paths[0])
    seen = []
    for lane in lanes:
        lane.wait_idle = lambda lane=lane: seen.append((lane, path() is not None))  # type: ignore[method-assign]
    del engine
    gc.collect()
    assert seen == [(lane, True) for lane in lanes]
    assert path() is None


def test_without_tracing_there_are_no_timings() -> None:
    engine, _, _ = make_engine()
    engine.submit_load([job(1, LOAD, [0], [0])])
    engine.poll()
    assert engine.take_load_timings() == ()


def test_failures_are_logged_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, _ = make_engine(fail_on=0)
    engine.submit_save([job(1, SAVE, [0], [0])])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.gpu
def test_nothing_on_the_forward_path_waits_for_the_device() -> None:
    engine, layout, pool = make_engine(torch.device("cuda", 0))
    engine.submit_save([job(0, SAVE, [0, 1, 2], [0, 1, 2])])  # compiles the kernels
    engine.submit_load([job(1, LOAD, [3], [0])])
    engine.drain()
    gate = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    gate.record()
    engine.submit_load([job(2, LOAD, [3, 4, 5], [0, 1, 2])])
    for layer in layout.layer_names:
        engine.wait_layer(layer)
    engine.submit_save([job(3, SAVE, [3, 4, 5], [4, 5, 6])])
    assert engine.poll() == []
    assert not gate.query()
    assert ends(engine.drain()) == [(2, True), (3, True)]
    torch.cuda.synchronize()
    for column in raw_form(layout).columns(pool.tensor):
        assert torch.equal(column[4:7], column[0:3])
    engine.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("direction", list(Direction))
def test_an_unpinned_pool_is_copied_too(direction: Direction) -> None:
    layout = filled(bf16_apart, torch.device("cuda", 0))
    pool = HostPool(NUM_HOST, raw_form(layout).block_bytes, device=layout.device, pin_memory=False)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    path = make_path(raw_form(layout), pool, Config())
    check_copy(path, layout, pool, direction, range(len(layout.regions)), PAIRS[3])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("path", [PathName.RUNS, PathName.STAGED, PathName.DIRECT])
def test_a_cache_lies_on_a_device_that_is_not_current(path: PathName) -> None:
    device = torch.device("cuda", 1)
    engine, layout, pool = make_engine(device, copy_path=path)
    before = [region.view.cpu().clone() for region in layout.regions]
    assert torch.cuda.current_device() == 0
    engine.submit_save([job(1, Direction.SAVE, [3, 5], [1, 0])])
    assert ends(engine.drain()) == [(1, True)]
    for region in layout.regions:
        region.view.zero_()
    with torch.cuda.device(device):  # as an engine's steps run: its current stream is on the cache's device
        engine.submit_load([job(2, Direction.LOAD, [3, 5], [1, 0])])
        engine.wait_all()
    assert ends(engine.drain()) == [(2, True)]
    for region, old in zip(layout.regions, before, strict=True):
        assert torch.equal(region.view[[3, 5]].cpu(), old[[3, 5]])
    engine.close()
    pool.close()
