"""Saves of which some blocks do not fit into the form of a host block."""

from __future__ import annotations

import pytest
import torch

from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.types import StepPlan
from tests.copies import LOAD, SAVE, job
from tests.engines import ManualLane, cut, make_engine
from tests.worker.test_half import make_worker, step


class ChoosyPath:
    """Copies like another path and refuses some host blocks, as the device finds out at the end of a copy: until then
    nobody may ask."""

    def __init__(self, path: CopyPath, *refused: int) -> None:
        self.path = path
        self.refused = refused
        self.may_ask = True

    def copy(self, copy: BlockCopy) -> None:
        if copy.direction is SAVE:
            own = [block for block in copy.host_ids.tolist() if block in self.refused]
            copy.refusals.append(lambda: self._answer(own))
        self.path.copy(copy)

    def _answer(self, own: list[int]) -> list[int]:
        assert self.may_ask, "the device is not there yet"
        return own

    def close(self) -> None:
        self.path.close()


def choose(engine: TransferEngine, *refused: int) -> ChoosyPath:
    """The engine's path refuses these host blocks from now on."""
    path = ChoosyPath(engine._queues[SAVE].paths[0], *refused)
    for queue in engine._queues.values():
        queue.paths = (path,)
    return path


def told(engine: TransferEngine) -> dict[int, tuple[bool, tuple[int, ...]]]:
    """By job whether it is done, and what is missing of it."""
    return {completion.job_id: (completion.ok, completion.missing) for completion in engine.poll()}


@pytest.mark.parametrize("most", [1, 2, 100])
def test_each_of_the_jobs_that_were_merged_hears_of_its_own_blocks_from_all_parts(most: int) -> None:
    engine, _, _ = make_engine()
    choose(engine, 9, 3, 5)
    cut(engine, most)
    jobs = [job(1, SAVE, [0, 1, 2], [3, 4, 5]), job(2, SAVE, [3, 4], [6, 7]), job(3, SAVE, [5, 6], [8, 9])]
    assert engine.submit_save(jobs) == frozenset()
    assert told(engine) == {1: (True, (3, 5)), 2: (True, ()), 3: (True, (9,))}
    engine.submit_load([job(4, LOAD, [7, 8], [4, 6])])
    assert told(engine) == {4: (True, ())}


def test_what_did_not_fit_is_asked_when_the_copy_has_completed(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    path = choose(engine, 5)
    path.may_ask = False
    engine.submit_save([job(1, SAVE, [0, 1], [4, 5])])
    assert told(engine) == {}
    path.may_ask = True
    lanes[1].marks[-1].done = True
    assert told(engine) == {1: (True, (5,))}


def test_nobody_asks_a_copy_that_has_failed(lanes: list[ManualLane]) -> None:
    """On a lost device nothing has been found out."""
    engine, _, _ = make_engine()
    choose(engine, 5).may_ask = False
    engine.submit_save([job(1, SAVE, [0, 1], [4, 5])])
    lanes[1].marks[-1].lost = True
    assert told(engine) == {1: (False, ())}


def test_a_rank_reports_what_did_not_fit() -> None:
    worker, _ = make_worker(torch.device("cpu"))
    choose(worker._transfer, 6)
    step(worker, StepPlan(1, saves=(job(1, SAVE, [0, 1], [5, 6]),)))
    worker._completed += worker._transfer.drain()
    report = worker.build_connector_worker_meta()
    assert (report.done, report.failed, report.missing) == ((1,), (), ((1, (6,)),))
    worker.shutdown()
