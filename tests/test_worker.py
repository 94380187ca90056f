"""The worker half alone: registration, the step's calls, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_connector.config import Config
from kv_connector.errors import ConfigError, KVConnectorError, LayoutError
from kv_connector.types import CopyJob, Direction, StepPlan
from kv_connector.worker import WorkerHalf

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


def test_a_step_with_a_failed_load_saves_nothing(device: torch.device) -> None:
    """What the step computed may rest on bytes that never came."""
    worker, _ = make_worker(device)
    step(worker, StepPlan(1, (job(1, Direction.LOAD, 2, 10**6),), (job(2, Direction.SAVE, 0, 0),)))
    assert finish(worker) == ((), (1, 2), {2})
    step(worker, StepPlan(2, saves=(job(3, Direction.SAVE, 0, 0),)))
    assert finish(worker) == ((3,), (), set())
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


def test_what_cannot_work_is_refused_at_registration() -> None:
    with pytest.raises(ConfigError, match=r"host_memory=100 bytes for this rank is less than one block of 4096"):
        make_worker(torch.device("cpu"), host_memory=100)
    with pytest.raises(LayoutError):
        WorkerHalf(Config(host_memory="1MiB")).register_kv_caches({"layers.0": torch.zeros(3, 5)}, NUM_BLOCKS)
