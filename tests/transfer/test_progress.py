"""An operator sees how many bytes are still to come, while long copies are under way."""

from __future__ import annotations

import pytest
import torch

from kv_connector.config import Config, PathName
from kv_connector.scheduler import SchedulerHalf
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.layout import layer_groups
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.types import CopyJob, StepPlan
from kv_connector.worker import WorkerHalf
from tests.copies import LOAD, POISON, SAVE, ids, job
from tests.engines import ManualEvent, ManualLane, cut, ends, make_engine


def test_a_load_is_pending_by_layer_groups_until_they_have_arrived(lanes: list[ManualLane]) -> None:
    engine, layout, _ = make_engine()
    load, save = lanes
    blocks = list(range(8))
    engine.submit_load([job(1, LOAD, blocks, blocks)])
    engine.submit_save([job(2, SAVE, [9, 10], [9, 10])])
    form = raw_form(layout)
    groups = layer_groups(layout.layer_stops, form.stored_bytes, 8, 4096)
    first, second = (8 * form.bytes_of(group) for group in groups)
    assert first + second == 8 * raw_form(layout).moved_bytes
    assert engine.pending_bytes(LOAD) == first + second
    assert engine.pending_bytes(SAVE) == 2 * raw_form(layout).moved_bytes
    load.marks[1].done = True
    assert [engine.pending_bytes(LOAD), engine.pending_bytes(LOAD)] == [second, second]
    load.marks[2].done = save.marks[1].done = True
    assert engine.pending_bytes(LOAD) == engine.pending_bytes(SAVE) == 0
    assert ends(engine.poll()) == [(1, True), (2, True)]


def test_jobs_that_are_copied_together_take_the_time_of_one_copy(
    lanes: list[ManualLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_milliseconds` is time on the link, whatever number of requests shared it."""
    engine, _, _ = make_engine()
    engine.submit_load([job(1, LOAD, [0], [0]), job(2, LOAD, [1], [1]), job(3, LOAD, [2], [2])])
    monkeypatch.setattr(ManualEvent, "elapsed_time", lambda start, end: 8.0)
    for mark in lanes[0].marks:
        mark.done = True
    completions = engine.poll()
    assert sorted(completion.job_id for completion in completions) == [1, 2, 3]
    assert sum(completion.milliseconds for completion in completions) == 8.0


def test_what_has_failed_is_not_pending(lanes: list[ManualLane]) -> None:
    engine, layout, _ = make_engine(fail_on=0)
    engine.submit_save([job(1, SAVE, [0], [0])])
    assert engine.pending_bytes(SAVE) == 0
    engine.submit_save([job(2, SAVE, [0], [1])])
    assert engine.pending_bytes(SAVE) == raw_form(layout).moved_bytes
    lanes[1].marks[-1].lost = True
    assert engine.pending_bytes(SAVE) == 0, "the device is lost"
    lanes[1].marks[1].done = True
    assert ends(engine.poll()) == [(1, False), (2, False)]


class SeenPath:
    """Copies like another path and remembers the ids."""

    def __init__(self, path: CopyPath) -> None:
        self.path = path
        self.host_ids: list[list[int]] = []

    def copy(self, copy: BlockCopy) -> None:
        assert not copy.urgent and not copy.device_ids.flags.writeable and not copy.host_ids.flags.writeable
        self.host_ids.append(copy.host_ids.tolist())
        self.path.copy(copy)

    def close(self) -> None:
        self.path.close()


def test_long_copies_of_whole_blocks_tell_how_far_they_are(lanes: list[ManualLane]) -> None:
    engine, layout, _ = make_engine()
    seen = SeenPath(engine._queues[SAVE].paths[0])
    for queue in engine._queues.values():
        queue.paths = (seen,)
    cut(engine, 3)
    load, save = lanes
    before = [region.view.clone() for region in layout.regions]
    engine.submit_save([job(1, SAVE, [0, 1, 2, 3], [7, 1, 0, 5]), job(2, SAVE, [4, 5, 6], [6, 2, 4])])
    assert seen.host_ids == [[0, 1, 2], [4, 5, 6], [7]], "neighbours on the host stay together"
    pending = []
    for event in save.marks[1:]:
        assert engine.poll() == []
        pending.append(engine.pending_bytes(SAVE) // raw_form(layout).moved_bytes)
        event.done = True
    assert pending == [7, 4, 1]
    assert ends(engine.poll()) == [(1, True), (2, True)]

    for region in layout.regions:
        region.view[:] = POISON
    after = engine.mark()
    load.marks[-1].done = True
    guarded = CopyJob(3, LOAD, ids(0, 1, 2, 3, 4, 5, 6), ids(7, 1, 0, 5, 6, 2, 4), "r", num_guarded=2)
    engine.submit_background_load([guarded], after)
    assert seen.host_ids[3:] == [[0, 1, 5], [6, 7], [2, 4]], "the guarded last, and only they behind the mark"
    assert [event for event, _ in load.waits] == [after]
    assert engine.pending_bytes(LOAD) == 7 * raw_form(layout).moved_bytes
    assert ends(engine.drain()) == [(3, True)]
    for region, old in zip(layout.regions, before, strict=True):
        assert torch.equal(region.view[:7], old[:7])


def test_an_operator_sees_what_is_still_to_come_on_all_ranks(lanes: list[ManualLane]) -> None:
    half = SchedulerHalf(Config(host_memory=1 << 20), 4, world_size=2)
    worker = WorkerHalf(Config(host_memory=1 << 20, layer_group_bytes=1))
    worker.register_kv_caches({f"layers.{i}": torch.zeros(4, 2048, dtype=torch.int8) for i in range(2)}, 4)
    assert worker._host is not None
    worker._host.wait_ready()

    def seen() -> tuple[float, float]:
        report = worker.build_connector_worker_meta()
        assert report.block_bytes == 4096
        own = report._replace(done=(), failed=())  # the half has planned no such jobs
        half.update_connector_output([own, own._replace(rank=1)])
        stats = half.get_kv_connector_stats()
        return stats["loading_bytes"], stats["saving_bytes"]

    load, save = lanes
    worker.bind_connector_metadata(StepPlan(1, loads=(job(1, LOAD, [0], [0]),), saves=(job(2, SAVE, [1, 2], [1, 2]),)))
    worker.start_load_kv()
    worker.wait_for_save()
    assert seen() == (2 * 4096, 4 * 4096)
    load.marks[1].done = True
    assert seen() == (2 * 2048, 4 * 4096), "the first layer is there"
    load.marks[2].done = save.marks[1].done = True
    assert seen() == (0, 0)
    worker.shutdown()


@pytest.mark.parametrize("name", list(PathName))
def test_slices_are_copied_like_the_whole(name: PathName, device: torch.device) -> None:
    engine, layout, pool = make_engine(device, copy_path=name)
    cut(engine, 2)
    before = [region.view.cpu().clone() for region in layout.regions]
    engine.submit_save([job(1, SAVE, list(range(13)), list(range(12, -1, -1)))])
    engine.drain()
    for region in layout.regions:
        region.view[:] = POISON
    blocks = CopyJob(2, LOAD, ids(*range(13)), ids(*range(12, -1, -1)), "r", num_guarded=3)
    engine.submit_background_load([blocks], engine.mark())
    assert ends(engine.drain()) == [(2, True)]
    for region, old in zip(layout.regions, before, strict=True):
        assert torch.equal(region.view.cpu(), old)
    engine.close()
    pool.close()
