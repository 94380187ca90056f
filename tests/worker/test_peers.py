"""What a rank sends to another engine of a step that rests on loads: nothing that may be wrong."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from kv_connector.config import Config
from kv_connector.peer.base import Connected, PeerPool
from kv_connector.peer.protocol.jobs import PeerJobs
from kv_connector.peer.wire.messages import Want
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport
from kv_connector.transfer import engine as engine_module
from kv_connector.types import Direction, PeerAction, PeerJob, StepPlan
from kv_connector.worker import WorkerHalf
from tests.engines import ManualLane
from tests.peer.peers import IDENTITY, Pool, info_of
from tests.worker.test_half import background, job

LAYERS = ("layers.0", "layers.1", "layers.2")
PIECE = 512
NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(2)]


class Producer:
    """A rank of three layers, each sent as soon as it is computed, and another engine that wants two blocks of it."""

    def __init__(self, num_tensors: int = 3) -> None:
        """Of fewer tensors than layers the first are of several layers each: those of different block groups."""
        self.jobs: PeerJobs | None = None
        net = LoopbackNet()
        info = replace(info_of(Pool()), identity=replace(IDENTITY, pieces=(PIECE,) * num_tensors))

        def open_peers(pool: PeerPool) -> PeerJobs:
            self.transport = LoopbackTransport(net, pool, replace(info, engine_id="producer", num_blocks=4))
            self.jobs = PeerJobs(self.transport, "producer", info.identity, 120.0, 60.0)
            return self.jobs

        self.worker = WorkerHalf(Config(host_memory="1MiB", layer_group_bytes=1), open_peers=open_peers)
        tensors = [torch.ones(4, 8, 16, dtype=torch.int32) for _ in range(num_tensors)]
        self.worker.register_kv_caches({name: tensors[i % num_tensors] for i, name in enumerate(LAYERS)}, 4)
        there = Pool().pool
        regions = tuple(replace(region, piece_bytes=PIECE) for region in there.regions[:num_tensors])
        pool = replace(there, regions=regions)
        self.consumer = LoopbackTransport(net, pool, info)
        link = self.consumer.connect("here", self.transport.port)
        assert any(isinstance(event, Connected) for event in self.consumer.poll(0.0))
        self.consumer.grant(link, 7, [0, 1])
        self.consumer.send(link, Want("t", "", 7, 0, 2, NAMES[-1], (0, 1)))

    def step(self, plan: StepPlan) -> list[int]:
        """The calls of a step; returns the bytes that had left in front of each layer's end."""
        sent = []
        self.worker.bind_connector_metadata(plan)
        self.worker.start_load_kv()
        for name in LAYERS:
            self.worker.wait_for_layer_load(name)
            sent.append(self.num_sent())
            self.worker.save_kv_layer(name)
        self.worker.wait_for_save()
        return sent

    def num_sent(self) -> int:
        """Bytes that have left, once all that may leave has."""
        assert self.jobs is not None
        for _ in range(5):
            self.jobs.turn(0.0)
        return self.transport.counters.sent_bytes


def send(job_id: int) -> PeerJob:
    return PeerJob(job_id, PeerAction.SEND, "t", 0, np.array([2, 3]), names=b"".join(NAMES))


def test_what_a_step_computes_leaves_with_it() -> None:
    producer = Producer()
    assert producer.step(StepPlan(1, peer=(send(1),))) == [0, 2 * PIECE, 2 * 2 * PIECE]
    assert producer.num_sent() == 2 * 3 * PIECE
    producer.worker.get_finished()
    assert producer.worker.build_connector_worker_meta().done == (1,)
    producer.worker.shutdown()


def test_what_layers_of_several_groups_lie_in_leaves_behind_the_last_of_them() -> None:
    """The third layer lies over the first: a block may be of either one's group."""
    producer = Producer(num_tensors=2)
    assert producer.step(StepPlan(1, peer=(send(1),))) == [0, 0, 0]
    assert producer.num_sent() == 2 * 2 * PIECE
    producer.worker.shutdown()


def test_of_each_part_of_a_prompt_no_layer_leaves_before_it_is_computed() -> None:
    """A prompt of two steps: that the first step has computed a layer says nothing of the second's blocks."""
    producer = Producer()
    first = PeerJob(1, PeerAction.SEND, "t", 0, np.array([2]), names=b"".join(NAMES))
    assert producer.step(StepPlan(1, peer=(first,))) == [0, PIECE, 2 * PIECE]
    before = producer.num_sent()
    assert before == 3 * PIECE
    producer.worker.get_finished()
    producer.worker.build_connector_worker_meta()
    second = PeerJob(2, PeerAction.SEND, "t", 1, np.array([3]))
    sent = producer.step(StepPlan(2, peer=(second,), reported_step=1))
    assert [num_bytes - before for num_bytes in sent] == [0, PIECE, 2 * PIECE]
    producer.worker.shutdown()


def test_a_prompt_that_is_withdrawn_and_offered_anew_in_one_step_is_offered() -> None:
    """A request that is preempted and admitted again between two steps: the plan has both."""
    producer = Producer()
    first = PeerJob(1, PeerAction.SEND, "t", 0, np.array([2]), names=b"".join(NAMES))
    producer.step(StepPlan(1, peer=(first,)))
    producer.step(StepPlan(2, peer=(send(2),), suspended=("t",), reported_step=1))
    producer.num_sent()
    producer.worker.get_finished()
    assert 2 not in producer.worker.build_connector_worker_meta().failed
    producer.worker.shutdown()


@pytest.mark.parametrize("is_planned_ahead", [False, True])
def test_no_layer_leaves_of_a_step_that_rests_on_a_load_that_failed(is_planned_ahead: bool) -> None:
    """In the step itself, or in the one in front of it, which the engine had not heard of."""
    producer = Producer()
    loads = (job(1, Direction.LOAD, 1, 10**6),)
    if is_planned_ahead:
        producer.step(StepPlan(1, loads))
        producer.worker.build_connector_worker_meta()
        producer.step(StepPlan(2, peer=(send(2),), reported_step=0))
    else:
        producer.step(StepPlan(1, loads, peer=(send(2),)))
    assert producer.num_sent() == 0
    producer.worker.get_finished()
    assert 2 in producer.worker.build_connector_worker_meta().failed
    producer.worker.shutdown()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_leaves_before_the_loads_have_ended_that_its_step_awaited(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waits for them on the device; whether their bytes have come is known later."""
    lanes = [ManualLane() for _ in range(2)]
    made = iter(lanes)
    monkeypatch.setattr(engine_module, "make_lane", lambda *_, **__: next(made))
    producer = Producer()
    producer.step(StepPlan(1, background_loads=(background(1, [1], [5]),), announced_loads=(1,)))
    producer.worker.get_finished()
    producer.step(StepPlan(2, peer=(send(2),), awaited_loads=(1,), reported_step=1))
    producer.worker.get_finished()
    assert producer.num_sent() == 0
    for event in lanes[0].marks:
        event.done, event.lost = True, fails
    producer.worker.get_finished()
    assert producer.num_sent() == (0 if fails else 2 * 3 * PIECE)
    producer.worker.get_finished()
    report = producer.worker.build_connector_worker_meta()
    assert (2 in report.done, 2 in report.failed) == (not fails, fails)
    producer.worker.shutdown()


def test_a_peer_thread_that_has_broken_is_in_the_next_report() -> None:
    """The scheduler half promises nothing of other engines from then on."""
    producer = Producer()
    producer.step(StepPlan(1))
    report = producer.worker.build_connector_worker_meta()
    assert report is not None and not report.peers_are_broken
    assert producer.jobs is not None
    producer.jobs.close()  # what the thread does at its end, however it comes to it
    producer.step(StepPlan(2))
    report = producer.worker.build_connector_worker_meta()
    assert report is not None and report.peers_are_broken
