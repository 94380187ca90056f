"""The worker half alone: registration, the step's calls, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_connector.build import build_worker
from kv_connector.config import Config
from kv_connector.errors import ConfigError, KVConnectorError, LayoutError, TransferError
from kv_connector.index import CacheIdentity
from kv_connector.testing.memory import MemoryStorage
from kv_connector.transfer import engine as engine_module
from kv_connector.transfer.costs.curves import BUILT_IN
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.host_share import HostShare
from kv_connector.transfer.paths import choice
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.types import CopyJob, Direction, StepPlan, StorageAction, StorageJob
from kv_connector.worker import WorkerHalf
from tests.engines import LateSubmitter, ManualLane, submit_all

NUM_BLOCKS = 4


def make_worker(device: torch.device, **settings: object) -> tuple[WorkerHalf, dict[str, torch.Tensor]]:
    caches = {f"layers.{i}": torch.full((NUM_BLOCKS, 8, 16), i + 1, dtype=torch.int32, device=device) for i in range(3)}
    worker = WorkerHalf(Config.from_mapping({"host_memory": "1MiB", "layer_group_bytes": 1, **settings}))
    worker.register_kv_caches(caches, NUM_BLOCKS)
    if worker._host is not None:
        worker._host.wait_ready()
    return worker, caches


def job(job_id: int, direction: Direction, device_id: int, host_id: int) -> CopyJob:
    return CopyJob(job_id, direction, np.array([device_id]), np.array([host_id]))


def step(worker: WorkerHalf, plan: StepPlan, full_graph: bool = False) -> None:
    """The calls of a step, in the order of an engine."""
    worker.handle_preemptions(plan)
    worker.bind_connector_metadata(plan)
    worker.start_load_kv(full_graph)
    for name in () if full_graph else ("layers.0", "layers.1", "layers.2", "not registered"):
        worker.wait_for_layer_load(name)
        worker.save_kv_layer(name)
    worker.wait_for_save()


def finish(worker: WorkerHalf) -> tuple[tuple[int, ...], tuple[int, ...], set[int]]:
    """(done, failed, invalid blocks) once the device has nothing left to do."""
    worker._completed += worker._transfer.drain()
    invalid = worker.get_block_ids_with_load_errors()
    report = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return report.done, tuple(sorted(report.failed)), invalid


@pytest.mark.parametrize("full_graph", [False, True])
def test_in_front_of_a_full_graph_the_whole_load_is_waited_for_though_all_layers_were_seen_to_wait(
    full_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines replay full graphs for some steps and not for others."""
    worker, _ = make_worker(torch.device("cpu"))
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5),)))
    step(worker, StepPlan(2, loads=(job(2, Direction.LOAD, 3, 5),)))
    finish(worker)
    waits: list[str] = []
    wait_all = worker._transfer.wait_all

    def noted() -> Any:
        waits.append("all")
        return wait_all()

    monkeypatch.setattr(worker._transfer, "wait_all", noted)
    worker.bind_connector_metadata(StepPlan(3, loads=(job(3, Direction.LOAD, 3, 5),)))
    worker.start_load_kv(full_graph)
    assert waits == (["all"] if full_graph else [])
    worker.wait_for_save()
    assert finish(worker) == ((3,), (), set())
    worker.shutdown()


@pytest.mark.parametrize(("computes", "milliseconds"), [(True, 28.0), (False, 0.0)])
@pytest.mark.parametrize(
    "calls",
    [
        ("start_load_kv", "forward", "wait_for_save", "get_finished"),
        ("forward", "start_load_kv", "wait_for_save", "get_finished"),  # vLLM 0.32, where nothing is loaded
        ("start_load_kv", "forward", "get_finished"),  # older ones, where tokens are drafted
        ("forward", "start_load_kv", "get_finished"),
    ],
)
def test_how_long_a_forward_pass_takes_the_thread_is_reported_wherever_it_is_among_the_calls(
    calls: tuple[str, ...], computes: bool, milliseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each step anew, and without what we take ourselves."""
    now = [10.0]
    worker = WorkerHalf(Config(host_memory="1MiB"), clock=lambda: now[0])
    worker.register_kv_caches({"layers.0": torch.zeros(NUM_BLOCKS, 8, 16)}, NUM_BLOCKS)

    def take_long(*_: object) -> None:
        now[0] += 1.0

    monkeypatch.setattr(worker._transfer, "submit_save", take_long)
    monkeypatch.setattr(worker._transfer, "submit_background_load", take_long)
    saves, background = (job(1, Direction.SAVE, 0, 5),), (job(2, Direction.LOAD, 1, 6),)
    worker.bind_connector_metadata(StepPlan(1, saves=saves, background_loads=background, computes=computes))
    for call in calls:
        now[0] += 0.001 if call != "forward" else 0.027
        if call != "forward":
            getattr(worker, call)()
    assert worker.build_connector_worker_meta().launch_milliseconds == pytest.approx(milliseconds)
    worker.wait_for_save()
    worker.clear_connector_metadata()
    worker.bind_connector_metadata(StepPlan(2))
    worker.start_load_kv()
    worker.wait_for_save()
    assert worker.build_connector_worker_meta().launch_milliseconds == 0.0
    worker.shutdown()


def test_a_step_that_was_never_launched_does_not_lengthen_the_next_one() -> None:
    """An engine may give one up in between."""
    now = [10.0]
    worker = WorkerHalf(Config(), clock=lambda: now[0])
    for number in (1, 2):
        worker.bind_connector_metadata(StepPlan(number, computes=number == 1))
        now[0] += 1.0
    assert worker.build_connector_worker_meta().launch_milliseconds == 0.0


def test_what_layers_wait_for_their_loads_does_not_count_as_launching_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    worker = WorkerHalf(Config(host_memory="1MiB"), clock=lambda: now[0])
    worker.register_kv_caches({"layers.0": torch.zeros(NUM_BLOCKS, 8, 16)}, NUM_BLOCKS)
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5),)))
    finish(worker)
    wait_layer = worker._transfer.wait_layer

    def wait_long(name: str) -> Any:
        now[0] += 1.0
        return wait_layer(name)

    monkeypatch.setattr(worker._transfer, "wait_layer", wait_long)
    worker.bind_connector_metadata(StepPlan(2, loads=(job(2, Direction.LOAD, 3, 5),), computes=True))
    worker.start_load_kv()
    for seconds in (0.020, 0.008):
        now[0] += seconds
        worker.wait_for_layer_load("layers.0")
    worker.wait_for_save()
    assert worker.build_connector_worker_meta().launch_milliseconds == pytest.approx(28.0)
    worker.shutdown()


@pytest.mark.parametrize("full_graph", [False, True])
def test_a_block_is_saved_and_loaded_elsewhere(device: torch.device, full_graph: bool) -> None:
    """With a full CUDA graph no hook runs: the whole load is waited for on the stream in front of the replay."""
    worker, caches = make_worker(device)
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5),)))
    assert finish(worker) == ((1,), (), set())
    for tensor in caches.values():
        tensor[3] = 0
    step(worker, StepPlan(2, loads=(job(2, Direction.LOAD, 3, 5),)), full_graph)
    read = [tensor[3].clone() for tensor in caches.values()]  # on the stream that waited
    assert finish(worker) == ((2,), (), set())
    assert [int(block.min()) for block in read] == [int(block.max()) for block in read] == [1, 2, 3]
    worker.shutdown()
    worker.shutdown()


@pytest.mark.parametrize("is_light", [False, True])
def test_of_a_light_step_the_whole_load_is_urgent(monkeypatch: pytest.MonkeyPatch, is_light: bool) -> None:
    """Of another one the first layer group alone is."""
    worker, _ = make_worker(torch.device("cpu"))
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5),)))
    finish(worker)
    (path,) = worker._transfer._queues[Direction.LOAD].paths
    copy_now, urgent = path.copy, []

    def watch(copy: BlockCopy) -> None:
        urgent.append(copy.urgent)
        copy_now(copy)

    monkeypatch.setattr(path, "copy", watch)
    step(worker, StepPlan(2, loads=(job(2, Direction.LOAD, 3, 5),), is_light=is_light))
    assert urgent == [True, is_light]
    assert finish(worker) == ((2,), (), set())
    worker.shutdown()


def busy(stream: Any = None) -> None:
    """Some 100 ms of work on a stream, the current one by default."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(150_000_000)


def background(job_id: int, device_ids: list[int], host_ids: list[int], num_guarded: int = 0) -> CopyJob:
    return CopyJob(job_id, Direction.LOAD, np.array(device_ids), np.array(host_ids), f"r{job_id}", num_guarded)


def test_an_announced_load_is_received_at_once_and_there_for_the_step_that_awaits_it(device: torch.device) -> None:
    worker, caches = make_worker(device)
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5),)))
    finish(worker)
    for tensor in caches.values():
        tensor[3] = 0
    if device.type == "cuda":
        busy(worker._transfer._queues[Direction.LOAD].lane.stream)
    loads = (background(2, [3], [5]), background(3, [2], [10**6]))
    step(worker, StepPlan(2, background_loads=loads, announced_loads=(2, 3)))
    assert worker.get_finished() == ({"r2", "r3"}, {"r3"}), "one failed on submission: there is nothing to announce"
    assert worker.get_finished() == (set(), set())
    report = worker.build_connector_worker_meta()
    assert report.failed == (3,)
    assert device.type == "cpu" or not report.done, "it is under way"
    worker.clear_connector_metadata()
    worker.bind_connector_metadata(StepPlan(3, awaited_loads=(2,)))  # engines call nothing else in front of it
    read = [tensor[3].clone() for tensor in caches.values()]  # on the stream that waited
    assert finish(worker)[0] == (() if report.done else (2,))
    assert worker.get_finished() == (set(), set()), "it was received before"
    assert [int(block.min()) for block in read] == [int(block.max()) for block in read] == [1, 2, 3]
    worker.shutdown()


def test_guarded_blocks_are_filled_behind_what_the_stream_holds_and_others_at_once(device: torch.device) -> None:
    worker, caches = make_worker(device)
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5), job(2, Direction.SAVE, 1, 6))))
    finish(worker)
    for tensor in caches.values():
        tensor[2:4] = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        busy()
    for tensor in caches.values():
        tensor[3] = 99  # a step under way writes to a block that the load is given
    step(worker, StepPlan(2, background_loads=(background(3, [2, 3], [5, 6], num_guarded=1),)))
    if device.type == "cuda":
        load_stream = worker._transfer._queues[Direction.LOAD].lane.stream
        submit_all(worker._transfer)
        assert not load_stream.query(), "it waits for the step"
        with torch.cuda.stream(torch.cuda.Stream()):
            while [int(tensor[2].max()) for tensor in caches.values()] != [1, 2, 3]:
                assert not torch.cuda.default_stream().query(), "the free block waited for the step too"
    assert finish(worker)[0] == (3,)
    expected = [int(tensor[1].max()) for tensor in caches.values()]
    assert [int(tensor[3].max()) for tensor in caches.values()] == expected
    assert [int(tensor[3].min()) for tensor in caches.values()] == [int(tensor[1].min()) for tensor in caches.values()]
    worker.shutdown()


def test_a_step_with_a_failed_load_saves_nothing(device: torch.device) -> None:
    """What the step computed may rest on bytes that never came."""
    worker, _ = make_worker(device)
    step(worker, StepPlan(1, (job(1, Direction.LOAD, 2, 10**6),), (job(2, Direction.SAVE, 0, 0),)))
    assert finish(worker) == ((), (1, 2), {2})
    step(worker, StepPlan(2, saves=(job(3, Direction.SAVE, 0, 0),), reported_step=0))
    assert finish(worker) == ((), (3,), set()), "planned before the engine knew of the failure"
    step(worker, StepPlan(3, saves=(job(4, Direction.SAVE, 0, 0),), reported_step=1))
    assert finish(worker) == ((4,), (), set())
    worker.shutdown()


def test_lost_blocks_are_reported_with_the_load_that_lost_them(device: torch.device) -> None:
    """The scheduler half forgets what else lies behind them, for which it looks while the load is open."""
    worker, _ = make_worker(device)
    step(worker, StepPlan(1, (job(1, Direction.LOAD, 2, 10**6),)))
    worker._completed += worker._transfer.drain()
    assert worker.get_block_ids_with_load_errors() == {2}
    report = worker.build_connector_worker_meta()
    assert (report.failed, report.lost_blocks) == ((1,), (2,))
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta().lost_blocks == ()
    worker.shutdown()


def test_a_save_is_submitted_once_however_often_it_is_waited_for(device: torch.device) -> None:
    """An engine may call it at the end of the model and at the end of the step."""
    worker, _ = make_worker(device)
    step(worker, StepPlan(1, saves=(job(1, Direction.SAVE, 0, 5),)))
    worker.wait_for_save()
    assert finish(worker) == ((1,), (), set())
    worker.shutdown()


def test_empty_steps_report_too(device: torch.device) -> None:
    worker, _ = make_worker(device)
    step(worker, StepPlan(7))
    report = worker.build_connector_worker_meta()
    assert (report.step, report.done, report.failed, report.num_host_blocks > 0) == (7, (), (), True)
    worker.shutdown()
    assert worker.build_connector_worker_meta().num_host_blocks == 0


def test_the_host_tier_can_be_off(device: torch.device) -> None:
    worker, _ = make_worker(device, host_memory=0)
    step(worker, StepPlan(1))
    assert worker.build_connector_worker_meta().num_host_blocks == 0
    worker.bind_connector_metadata(StepPlan(2, saves=(job(1, Direction.SAVE, 0, 0),)))
    with pytest.raises(KVConnectorError, match="host_memory is 0"):
        worker.wait_for_save()


def test_all_ranks_together_take_the_host_memory_of_the_engine() -> None:
    """Eight ranks pin what was asked for once, not eight times."""
    caches = {"layers.0": torch.zeros(NUM_BLOCKS, 1024, dtype=torch.int32)}
    taken = []
    for rank in range(8):
        worker = WorkerHalf(Config(host_memory="1MiB", pin_memory=False), rank, world_size=8)
        worker.register_kv_caches(caches, NUM_BLOCKS)
        report = worker.build_connector_worker_meta()
        taken.append(report.num_host_blocks * report.block_bytes)
        worker.shutdown()
    assert taken == [1 << 17] * 8


def test_what_cannot_work_is_refused_at_registration() -> None:
    with pytest.raises(ConfigError, match=r"host_memory=100 bytes for this rank is less than one block of 4096"):
        make_worker(torch.device("cpu"), host_memory=100)
    with pytest.raises(LayoutError):
        WorkerHalf(Config(host_memory="1MiB")).register_kv_caches({"layers.0": torch.zeros(3, 5)}, NUM_BLOCKS)


class LinkDown:
    """Copies like another path, but for loads from some call on."""

    def __init__(self, path: CopyPath, num_loads: int) -> None:
        self.path = path
        self.num_loads = num_loads

    def copy(self, copy: BlockCopy) -> None:
        self.num_loads -= copy.direction is Direction.LOAD
        if self.num_loads < 0:
            raise TransferError("the link is down")
        self.path.copy(copy)

    def close(self) -> None:
        self.path.close()


@pytest.fixture
def late_worker(monkeypatch: pytest.MonkeyPatch) -> WorkerHalf:
    """What can be submitted later is, and only the first layer of a load comes through."""
    monkeypatch.setattr(engine_module, "make_submitter", lambda *_: LateSubmitter())
    worker, _ = make_worker(torch.device("cpu"))
    for queue in worker._transfer._queues.values():
        queue.paths = (LinkDown(queue.paths[0], 1),)
    for name in ("layers.0", "layers.1", "layers.2"):
        worker.wait_for_layer_load(name)  # hooks that were seen are trusted
    return worker


@pytest.mark.parametrize("hooks", [["layers.0", "layers.1"], ["layers.0"], []])
def test_a_load_that_fails_late_is_a_load_that_failed(late_worker: WorkerHalf, hooks: list[str]) -> None:
    """Whichever call finds it out: the engine learns of it with this step, which saves nothing."""
    loads = job(1, Direction.LOAD, 1, 5), job(2, Direction.LOAD, 2, 6)
    late_worker.bind_connector_metadata(StepPlan(1, loads, (job(3, Direction.SAVE, 0, 0),)))
    late_worker.start_load_kv()
    assert not late_worker._is_distrusted
    for name in hooks:
        late_worker.wait_for_layer_load(name)
        late_worker.save_kv_layer(name)
    late_worker.wait_for_save()
    assert late_worker.get_block_ids_with_load_errors() == {1, 2}
    assert finish(late_worker) == ((), (1, 2, 3), set())


def test_blocks_of_an_awaited_load_that_failed_are_told_before_its_end_has_come(
    lanes: list[ManualLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request has been called received: with the next report the engine would use what this step computes."""
    monkeypatch.setattr(engine_module, "make_submitter", lambda *_: LateSubmitter())
    worker, _ = make_worker(torch.device("cpu"))
    queue = worker._transfer._queues[Direction.LOAD]
    queue.paths = (LinkDown(queue.paths[0], 0),)
    step(worker, StepPlan(1, background_loads=(background(1, [1], [5]),), announced_loads=(1,)))
    assert worker.get_finished() == ({"r1"}, set())
    step(worker, StepPlan(2, awaited_loads=(1,)))
    assert not any(event.query() for event in lanes[0].marks), "the device has not come so far"
    assert worker.get_block_ids_with_load_errors() == {1}
    for event in lanes[0].marks:
        event.done = True
    assert finish(worker) == ((), (1,), set())


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_load_is_reported_in_the_step_that_names_its_request(late_worker: WorkerHalf, is_announced: bool) -> None:
    """It ends between the engine's questions: once it is reported, another request of its id may be admitted, and
    nobody knows who has computed on its blocks."""
    late_worker._transfer._queues[Direction.LOAD].paths[0].num_loads = 0  # type: ignore[attr-defined]
    announced = (1,) if is_announced else ()
    step(late_worker, StepPlan(1, background_loads=(background(1, [1], [5]),), announced_loads=announced))
    assert late_worker.get_finished() == ({"r1"} if is_announced else set(), set())
    submit_all(late_worker._transfer)
    assert late_worker.get_block_ids_with_load_errors() == set()
    report = late_worker.build_connector_worker_meta()
    assert (report.failed, report.lost_blocks) == ((), ())
    step(late_worker, StepPlan(2, awaited_loads=announced))
    assert late_worker.get_finished() == (set() if is_announced else {"r1"}, set() if is_announced else {"r1"})
    assert late_worker.get_block_ids_with_load_errors() == ({1} if is_announced else set())
    report = late_worker.build_connector_worker_meta()
    assert (report.failed, report.lost_blocks) == ((1,), (1,) if is_announced else ())


def test_a_step_that_awaits_a_load_that_failed_saves_nothing(late_worker: WorkerHalf) -> None:
    late_worker._transfer._queues[Direction.LOAD].paths[0].num_loads = 0  # type: ignore[attr-defined]
    step(late_worker, StepPlan(1, background_loads=(background(1, [1], [5]),), announced_loads=(1,)))
    assert late_worker.get_finished() == ({"r1"}, set()), "it is queued, and known to nobody as failed"
    step(late_worker, StepPlan(2, saves=(job(2, Direction.SAVE, 0, 0),), awaited_loads=(1,)))
    assert late_worker.get_block_ids_with_load_errors() == {1}
    assert finish(late_worker) == ((), (1, 2), set())


def test_a_step_planned_before_an_announced_load_was_known_to_fail_saves_nothing(late_worker: WorkerHalf) -> None:
    """The load has failed and ended before the step that awaits it: no copy is waited for that would say so."""
    late_worker._transfer._queues[Direction.LOAD].paths[0].num_loads = 0  # type: ignore[attr-defined]
    step(late_worker, StepPlan(1, background_loads=(background(1, [1], [5]),), announced_loads=(1,)))
    assert late_worker.get_finished() == ({"r1"}, set())
    assert late_worker.build_connector_worker_meta().failed == ()
    submit_all(late_worker._transfer)
    step(late_worker, StepPlan(2))
    late_worker.get_finished()
    assert late_worker.build_connector_worker_meta().failed == (1,), "the engine hears of it with this report"
    step(late_worker, StepPlan(3, saves=(job(2, Direction.SAVE, 0, 0),), awaited_loads=(1,), reported_step=1))
    assert finish(late_worker)[:2] == ((), (2,))
    step(late_worker, StepPlan(4, saves=(job(3, Direction.SAVE, 0, 0),), reported_step=2))
    assert finish(late_worker)[:2] == ((3,), ())


def test_a_layer_that_was_never_seen_to_wait_is_waited_for_in_front_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hooks of a model may not run, as in layers that were compiled as one: then the whole load is waited for."""
    lanes = [ManualLane(), ManualLane()]
    made = iter(lanes)
    monkeypatch.setattr(engine_module, "make_lane", lambda *_, **__: next(made))
    worker, _ = make_worker(torch.device("cpu"))
    waited = []
    for number, hooked in ((1, ["layers.0"]), (2, ["layers.1", "layers.2"]), (3, [])):
        worker.bind_connector_metadata(StepPlan(number, (job(number, Direction.LOAD, 2, 5),)))
        worker.start_load_kv()
        assert worker._transfer._load is not None
        waited.append(worker._transfer._load.events[-1] in lanes[0].waited)
        for name in hooked:
            worker.wait_for_layer_load(name)
        worker.wait_for_save()
        finish(worker)
    assert waited == [True, True, False]
    worker.shutdown()


def test_what_memory_is_not_ready_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking goes on in the background: the scheduler half must not use what a copy could not reach yet."""
    worker, _ = make_worker(torch.device("cpu"))
    monkeypatch.setattr(HostPool, "num_ready_blocks", property(lambda pool: 3))
    assert worker.build_connector_worker_meta().num_host_blocks == 3
    worker.shutdown()


def test_what_a_rank_has_registered_is_told_with_what_decides_its_bytes() -> None:
    identity = CacheIdentity("org/model", "bfloat16", "NHD", 16, weights="commit abc")
    worker = build_worker(Config.from_mapping({"host_memory": "1MiB"}), 1, 2, identity, backend="FlashAttention")
    assert worker.describe() == "nothing registered"
    worker.register_kv_caches({"layers.0": torch.zeros((NUM_BLOCKS, 8, 16))}, NUM_BLOCKS)
    told = worker.describe()
    worker.shutdown()
    assert f"{NUM_BLOCKS} blocks on cpu" in told
    for part in ("model org/model", "weights commit abc", "rank 1 of 2", "backend FlashAttention"):
        assert part in told


def test_a_rank_that_shares_the_host_saves_its_share_and_loads_all(device: torch.device) -> None:
    """Two ranks that cache the same: what each reports makes up the job, and the bytes of a block count once."""
    file = os.memfd_create("shared", os.MFD_ALLOW_SEALING)
    ranks = []
    for index in range(2):
        share = HostShare(index, 2, os.dup(file))
        caches = {"layers.0": torch.arange(NUM_BLOCKS * 8, dtype=torch.int32, device=device).view(NUM_BLOCKS, 8)}
        config = Config.from_mapping({"host_memory": 8 * 4096})
        worker = WorkerHalf(config, index, 2, open_share=lambda share=share: share)
        worker.register_kv_caches(caches, NUM_BLOCKS)
        assert worker._host is not None
        worker._host.wait_ready()
        ranks.append((worker, caches["layers.0"]))
    os.close(file)
    both = CopyJob(1, Direction.SAVE, np.array([0, 1]), np.array([5, 4]))
    for worker, _ in ranks:
        step(worker, StepPlan(1, saves=(both, job(2, Direction.SAVE, 2, 7))), full_graph=True)
    for index, (worker, _) in enumerate(ranks):
        worker._completed += worker._transfer.drain()
        report = worker.build_connector_worker_meta()
        assert sorted(report.done) == [1, 2]
        assert (report.num_host_blocks, report.block_bytes, report.saved_bytes) == (8, 2048, (32, 64)[index])
    for worker, cache in ranks:
        expected = cache[:3].clone()
        cache.zero_()
        step(
            worker, StepPlan(2, loads=(CopyJob(3, Direction.LOAD, np.arange(3), np.array([5, 4, 7])),)), full_graph=True
        )
        assert finish(worker) == ((3,), (), set())
        assert torch.equal(cache[:3], expected)
        worker.shutdown()


def test_storage_is_opened_by_the_first_of_the_ranks_that_share_the_host(device: torch.device) -> None:
    """The others have nothing to read at their start, and report its jobs at once, also those that are called off."""
    file = os.memfd_create("shared", os.MFD_ALLOW_SEALING)
    opened, workers = [], []
    for index in range(2):
        share = HostShare(index, 2, os.dup(file))

        def open_storage(*about: object, index: int = index) -> MemoryStorage:
            opened.append((index, about[-1]))
            return MemoryStorage(4096, 1 << 20)

        config = Config.from_mapping({"host_memory": 8 * 4096})
        worker = WorkerHalf(config, index, 2, open_storage=open_storage, open_share=lambda share=share: share)
        worker.register_kv_caches(
            {"layers.0": torch.zeros(NUM_BLOCKS, 8, dtype=torch.int32, device=device)}, NUM_BLOCKS
        )
        workers.append(worker)
    os.close(file)
    assert opened == [(0, 2)], "for both"
    look_up = StorageJob(1, StorageAction.LOOK_UP, bytes(32), np.zeros(0, np.int64))
    step(workers[1], StepPlan(1, storage=(look_up,), cancelled_storage=(1,)), full_graph=True)
    report = workers[1].build_connector_worker_meta()
    assert (report.done, report.failed, report.found) == ((1,), (), ())
    assert report.group_blocks == 1, "the first rank says how many storage wants at a time"
    for worker in workers:
        worker.shutdown()


@pytest.mark.parametrize(("host_memory", "num_replicas"), [(0, 2), (1 << 20, 1)])
def test_nobody_is_asked_to_share_what_there_is_not(host_memory: int, num_replicas: int) -> None:
    """Ranks without host memory, and those that cache something of their own: others would wait for them."""

    def exchange(value: object) -> list[object]:
        raise AssertionError("nothing is shared")

    config = Config.from_mapping({"host_memory": host_memory})
    worker = build_worker(config, 0, 2, num_replicas=num_replicas, exchange=exchange)
    worker.register_kv_caches({"layers.0": torch.zeros(NUM_BLOCKS, 8, dtype=torch.int32)}, NUM_BLOCKS)
    worker.shutdown()


def test_pieces_are_packed_where_the_engine_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is built for a cache on a GPU."""
    wanted: list[bool] = []
    monkeypatch.setattr(choice, "AutoPath", lambda *given: wanted.append(given[-1]))
    on_a_gpu: Any = SimpleNamespace(name="", layout=SimpleNamespace(device=torch.device("cuda")))
    for given in ({}, {"packs_pieces": True}):
        worker = build_worker(Config(host_memory=1 << 20), **given)
        worker._make_path(on_a_gpu, None, Config(), BUILT_IN)  # type: ignore[arg-type]
    assert wanted == [False, True]


def test_ranks_that_cache_the_same_have_one_name_in_storage(tmp_path: Path) -> None:
    """Of four, the first two and the last two."""
    settings = {"host_memory": "1MiB", "storage": {"path": str(tmp_path), "capacity": "8MiB"}}
    names = []
    for rank in range(4):
        identity = CacheIdentity("model", "float32", "NHD", 16)
        worker = build_worker(Config.from_mapping(settings), rank, 4, identity, num_replicas=2)
        worker.register_kv_caches({"layers.0": torch.zeros(NUM_BLOCKS, 8, dtype=torch.int32)}, NUM_BLOCKS)
        worker.shutdown()
        names.append({path.name for path in (tmp_path / "identities").iterdir()})
    assert [len(seen) for seen in names] == [1, 1, 2, 2]
    with pytest.raises(KVConnectorError, match="num_replicas=3 cannot be: world_size=4"):
        build_worker(Config.from_mapping(settings), 0, 4, identity, num_replicas=3)


def test_a_port_behind_which_there_are_too_few_is_refused() -> None:
    settings = {"peer": {"role": "producer", "port": 65534, "secret": "known to a few engines"}}
    with pytest.raises(ConfigError, match="rank 2 would listen at port 65536, which is none; give at most 65533"):
        build_worker(Config.from_mapping(settings), 0, 3, CacheIdentity("model", "float32", "NHD", 16))
    build_worker(Config.from_mapping(settings), 1, 2, CacheIdentity("model", "float32", "NHD", 16))
