"""The protocol between a producer and a consumer under random offers, wants, faults and losses. Derandomised.

Every job ends exactly once, and a receive that is done holds exactly what was offered under its name.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kv_connector.peer.base import Arrived, Connected, Lost, Message, PeerTransport, Pushed
from kv_connector.peer.protocol.early import MOST_EARLY_NONES
from kv_connector.peer.protocol.jobs import PeerJobs
from kv_connector.peer.protocol.offers import Offers
from kv_connector.peer.protocol.receives import Receives
from kv_connector.peer.wire.messages import Hello, Stop, Want
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport
from kv_connector.types import PeerAction, PeerJob
from tests.peer.peers import IDENTITY, PIECES, Pool, info_of

SEEN: Counter[str] = Counter()
ENGINE = "producer"
DEADLINE = 10.0


class Transfer:
    """A prompt of some blocks on the producer, offered chunk by chunk."""

    def __init__(self, name: str, blocks: list[int]) -> None:
        self.name = name
        self.blocks = blocks
        self.names = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(len(blocks))]
        self.num_offered = 0
        self.jobs: dict[int, int] = {}  # job: regions that are ready


class TransferMachine(RuleBasedStateMachine):
    """An engine on either side, a network and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LoopbackNet()
        self.now = 0.0
        self.source, self.target = Pool(400, seed=1), Pool(4000, seed=2)
        self.a: PeerTransport = LoopbackTransport(self.net, self.source.pool, info_of(self.source, ENGINE))
        self.b: PeerTransport = LoopbackTransport(self.net, self.target.pool, info_of(self.target, "consumer"))
        self.offers = Offers(self.a, ENGINE, IDENTITY, DEADLINE, lambda: self.now)
        self.receives = Receives(self.b, IDENTITY, DEADLINE, 1.0, lambda: self.now)
        self.transfers: list[Transfer] = []
        self.asked: dict[int, tuple[Transfer, int, list[int]]] = {}  # receive: what, from where, into which blocks
        self.open: set[int] = set()
        self.ended: dict[int, bool] = {}
        self.next_job = self.next_source = self.next_target = 0

    @rule(num_blocks=st.integers(1, 6), chunk=st.integers(1, 6))
    def begin(self, num_blocks: int, chunk: int) -> None:
        if self.next_source + num_blocks <= 400:
            blocks = list(range(self.next_source, self.next_source + num_blocks))
            self.next_source += num_blocks
            self.transfers.append(Transfer(f"transfer {len(self.transfers)}", blocks[::-1]))
            self.offer(len(self.transfers) - 1, chunk)

    @rule(which=st.integers(0, 50), chunk=st.integers(1, 6))
    def offer(self, which: int, chunk: int) -> None:
        transfer = self.pick(which)
        if transfer is None or transfer.num_offered == len(transfer.blocks):
            return
        first, stop = transfer.num_offered, min(len(transfer.blocks), transfer.num_offered + chunk)
        transfer.num_offered = stop
        names = b"" if first else b"".join(transfer.names)
        job = self.job(PeerAction.SEND, transfer.name, first, transfer.blocks[first:stop], names=names)
        transfer.jobs[job.job_id] = 0
        self.offers.offer(job)

    @rule(which=st.integers(0, 50), regions=st.integers(1, 3))
    def compute(self, which: int, regions: int) -> None:
        transfer = self.pick(which)
        for job_id in transfer.jobs if transfer is not None else ():
            self.offers.ready(job_id, regions)

    @rule(which=st.integers(0, 50))
    def compute_all(self, which: int) -> None:
        self.offer(which, 6)
        self.compute(which, 3)
        self.pump()

    @rule(num_blocks=st.integers(2, 6), first=st.integers(0, 1), early=st.booleans(), parts=st.integers(1, 3))
    def hand_over(self, num_blocks: int, first: int, early: bool, parts: int) -> None:
        """As it mostly goes; asked for before the blocks are computed or after."""
        self.begin(num_blocks, num_blocks // parts)
        for _ in range(2):
            if early:
                self.ask(0, first, knows_engine=False, mixes_up=1)
            self.pump()
            self.compute(0, parts)
            self.compute_all(0)
            if not early:
                self.ask(0, first, knows_engine=True, mixes_up=1)
            early = not early
        self.compute_all(0)
        self.pump()

    @rule(num_blocks=st.integers(2, 6), ready=st.integers(0, 3))
    def give_up_in_the_middle(self, num_blocks: int, ready: int) -> None:
        self.begin(num_blocks, 1)
        self.ask(0, 0, knows_engine=True, mixes_up=1)
        self.compute(0, ready)
        self.pump()
        self.give_up(-1)
        self.pump()

    @rule(which=st.integers(0, 50), first=st.integers(0, 4), knows_engine=st.booleans(), mixes_up=st.integers(0, 9))
    def ask(self, which: int, first: int, knows_engine: bool, mixes_up: int) -> None:
        transfer = self.pick(which)
        if transfer is None:
            return
        count = max(0, len(transfer.blocks) - first)
        if not count:
            SEEN["nothing wanted"] += 1
        blocks = list(range(self.next_target, self.next_target + count))
        self.next_target += count
        name = transfer.names[-1] if mixes_up else hashlib.sha256(b"another prompt").digest()
        engine_id = ENGINE if knows_engine else ""
        job = self.job(PeerAction.RECEIVE, transfer.name, first, blocks, names=name, engine_id=engine_id)
        if mixes_up:
            self.asked[job.job_id] = transfer, first, blocks
        self.receives.receive(job)

    def want_nothing(self, transfer: str, num_blocks: int = 2) -> None:
        name = hashlib.sha256(f"{transfer} {num_blocks - 1}".encode()).digest()
        self.receives.receive(self.job(PeerAction.RECEIVE, transfer, 0, [], names=name))

    @rule(which=st.integers(0, 50))
    def compute_wrongly(self, which: int) -> None:
        transfer = self.pick(which)
        for job_id in list(transfer.jobs) if transfer is not None else ():
            if job_id in self.open:
                self.offers.fail(job_id)
                SEEN["failed"] += 1

    @rule(which=st.integers(0, 50))
    def withdraw(self, which: int) -> None:
        transfer = self.pick(which)
        if transfer is not None:
            self.offers.withdraw(transfer.name)
            SEEN["withdrawn"] += 1

    @rule(which=st.integers(0, 50))
    def give_up(self, which: int) -> None:
        waiting = [job_id for job_id in self.asked if job_id in self.receives]
        if waiting:
            self.receives.cancel(waiting[which % len(waiting)])
            SEEN["given up"] += 1

    @rule(hold=st.booleans())
    def delay(self, hold: bool) -> None:
        self.net.hold = hold

    @rule(chance=st.integers(0, 4))
    def cut(self, chance: int) -> None:
        if not chance:
            self.net.cut(self.a.port)
            SEEN["cut"] += 1

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    @rule()
    def pump(self) -> None:
        for _ in range(20):
            for transport, is_producer in ((self.a, True), (self.b, False)):
                for event in transport.poll(0.0):
                    self.take(event, is_producer)
            self.receives.give_up_overdue()
            self.offers.forget_overdue()

    @invariant()
    def every_job_ends_once(self) -> None:
        for part in (self.offers, self.receives):
            ended, part.ended = part.ended, []
            for job_id, ok in ended:
                assert job_id in self.open, f"job {job_id} ends twice"
                self.open.discard(job_id)
                self.ended[job_id] = ok
                if ok and job_id in self.asked:
                    self.check(job_id)

    def check(self, job_id: int) -> None:
        transfer, first, blocks = self.asked[job_id]
        SEEN["received"] += 1
        for target, source in zip(blocks, transfer.blocks[first:], strict=True):
            assert self.target.block(target) == self.source.block(source), "other bytes"

    def take(self, event: Any, is_producer: bool) -> None:
        transport = self.a if is_producer else self.b
        part: Any = self.offers if is_producer else self.receives
        if isinstance(event, Connected):
            part.connected(event)
        elif isinstance(event, Lost):
            part.lost(event.link)
        elif isinstance(event, Message):
            assert part.hear(event.link, event.message), f"{event.message} is for nobody"
        elif isinstance(event, Pushed):
            self.offers.pushed(event)
        elif isinstance(event, Arrived):
            self.receives.arrived(event)
        assert transport is not None

    def pick(self, which: int) -> Transfer | None:
        return self.transfers[-1 - which % min(3, len(self.transfers))] if self.transfers else None

    def job(self, action: PeerAction, transfer: str, first: int, blocks: list[int], **fields: Any) -> PeerJob:
        job = PeerJob(
            self.next_job,
            action,
            transfer,
            first,
            np.array(blocks, dtype=np.int64),
            host="here",
            ports=(self.a.port,),
            request_id="request",
            **fields,
        )
        self.next_job += 1
        self.open.add(job.job_id)
        return job

    def teardown(self) -> None:
        """Everything comes to an end: what was not asked for is withdrawn, and what never comes is given up."""
        self.net.hold = False
        self.pump()
        for transfer in self.transfers:
            self.offers.withdraw(transfer.name)
        self.now += 2 * DEADLINE
        self.pump()
        self.every_job_ends_once()
        assert not self.open, f"jobs {self.open} never end"
        assert self.offers.num_open == self.receives.num_open == 0
        assert not any(self.offers._early._nones.values())
        SEEN["jobs"] += len(self.ended)


def test_every_job_ends_once_and_what_arrives_is_what_was_offered() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        TransferMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A run that met none of these would prove nothing.
    least = {"jobs": 1000, "received": 100, "failed": 30, "withdrawn": 100, "given up": 50, "cut": 50}
    assert {name: SEEN[name] for name, count in least.items() if SEEN[name] < count} == {}


def test_a_prompt_that_nobody_wants_is_let_go_however_many_others_were_not_wanted() -> None:
    machine = TransferMachine()
    for number in range(MOST_EARLY_NONES + 10):
        machine.want_nothing(f"never offered {number}")
    machine.want_nothing("transfer 0")
    machine.pump()
    machine.begin(num_blocks=2, chunk=2)
    machine.every_job_ends_once()
    assert machine.open == set()
    assert len(machine.offers._early._nones[0]) < MOST_EARLY_NONES


def test_an_id_that_comes_again_after_the_deadline_is_served() -> None:
    """Nothing was wanted under it before, and nothing was offered."""
    machine = TransferMachine()
    machine.want_nothing("transfer 0")
    machine.pump()
    machine.now += DEADLINE
    machine.begin(num_blocks=2, chunk=2)
    machine.compute_all(0)
    machine.ask(0, 0, knows_engine=False, mixes_up=1)
    machine.pump()
    SEEN.clear()
    machine.every_job_ends_once()
    assert (machine.open, SEEN["received"]) == (set(), 1)


def test_the_thread_opts_out_of_captures_before_it_calls_anything() -> None:
    """An engine may capture a CUDA graph from the moment it has one: see `PeerPool.prepare_thread`."""
    pool, called = Pool(4), []

    class Watched(LoopbackTransport):
        def poll(self, timeout: float) -> Any:
            called.append(("poll", threading.current_thread().name))
            return super().poll(timeout)

    transport = Watched(LoopbackNet(), pool.pool, info_of(pool))
    prepare = lambda: called.append(("prepare", threading.current_thread().name))  # noqa: E731 - a word to the thread
    jobs = PeerJobs(transport, ENGINE, IDENTITY, 120.0, 60.0, prepare_thread=prepare)
    jobs.start()
    jobs.close()
    assert called[0] == ("prepare", "kv-peer")
    assert called.count(called[0]) == 1


class Here:
    """A marker that is reached."""

    def query(self) -> bool:
        return True


class Served:
    """A producer with a prompt of two blocks that is not computed yet, and a consumer that has asked for it."""

    def __init__(self) -> None:
        net = LoopbackNet()
        self.transport = LoopbackTransport(net, Pool(seed=1).pool, info_of(Pool(), ENGINE))
        self.consumer = LoopbackTransport(net, Pool(seed=2).pool, info_of(Pool(), "consumer"))
        self.jobs = PeerJobs(self.transport, ENGINE, IDENTITY, 120.0, 60.0)
        self.link = self.consumer.connect("here", self.transport.port)
        self.consumer.grant(self.link, 7, [0, 1])
        self.jobs.begin(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2, 3]), names=bytes(64)), Here())
        self.jobs.turn(0.0)
        self.consumer.send(self.link, Want("t", "", 7, 0, 2, bytes(32), (0, 1)))
        self.jobs.turn(0.0)


def test_what_peers_have_said_is_heard_before_anything_is_pushed() -> None:
    """The blocks are ready when the consumer's word to stop has come and nobody has read it yet."""
    served = Served()
    served.consumer.send(served.link, Stop(7))
    served.jobs.ready([1], len(PIECES), Here())
    for _ in range(3):
        served.jobs.turn(0.0)
    assert served.transport.counters.sent_bytes == 0
    assert [(job.job_id, job.ok) for job in served.jobs.poll()] == [(1, True)]


def test_what_the_engine_offers_is_known_when_it_is_asked_for() -> None:
    """The peer thread was busy: the offer waits to be taken in, and so does the want of who was told of it."""
    served = Served()
    served.jobs.begin(PeerJob(2, PeerAction.SEND, "u", 0, np.array([4, 5]), names=bytes(64)), Here())
    served.consumer.grant(served.link, 8, [2, 3])
    served.consumer.send(served.link, Want("u", ENGINE, 8, 0, 2, bytes(32), (2, 3)))
    served.jobs.ready([2], len(PIECES), Here())
    for _ in range(3):
        served.jobs.turn(0.0)
    assert served.transport.counters.sent_bytes == 2 * sum(PIECES)
    assert not [event for event in served.consumer.poll(0.0) if isinstance(event, Message)], "refused"


def test_a_peer_that_says_what_nobody_expects_loses_its_link_and_what_it_said_behind_that() -> None:
    served = Served()
    served.consumer.send(served.link, Hello(1, bytes(32)))
    served.consumer.send(served.link, Stop(7))
    served.jobs.turn(0.0)
    said = [event.message for event in served.consumer.poll(0.0) if isinstance(event, Message)]
    assert said == [] and not served.consumer.ends
    served.jobs.turn(0.0)
    assert not served.jobs.is_broken


def test_what_is_said_over_a_link_that_was_not_met_is_nobodys() -> None:
    """A transport that refuses a peer may have heard more of it by then."""
    served = Served()
    with served.transport._net.changed:
        for message in (Want("t", "", 8, 0, 2, bytes(32), (0, 1)), Stop(8)):
            served.transport._tell(Message(99, message))
    served.jobs.turn(0.0)
    assert served.consumer.ends, "the good one is served on"


def test_an_error_of_ours_costs_the_link_that_met_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()

    def break_down(link: int, message: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(served.jobs._offers, "hear", break_down)
    served.consumer.send(served.link, Stop(7))
    served.jobs.turn(0.0)
    assert not served.consumer.ends
    assert served.transport.counters.link_faults == 1


def test_a_thread_that_breaks_fails_its_jobs_once_and_says_so() -> None:
    class Breaking(LoopbackTransport):
        def poll(self, timeout: float) -> Any:
            if self.is_to_break.is_set():
                raise ZeroDivisionError
            return super().poll(timeout)

        is_to_break = threading.Event()

    transport = Breaking(LoopbackNet(), Pool().pool, info_of(Pool(), ENGINE))
    jobs = PeerJobs(transport, ENGINE, IDENTITY, 120.0, 60.0)
    jobs.start()
    jobs.begin(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2, 3]), names=bytes(64)), Here())
    assert not jobs.is_broken
    transport.is_to_break.set()
    transport.wake()
    assert jobs._thread is not None
    jobs._thread.join()
    assert jobs.is_broken
    assert [(job.job_id, job.ok) for job in jobs.poll()] == [(1, False)]
    jobs.begin(PeerJob(2, PeerAction.SEND, "u", 0, np.array([2, 3]), names=bytes(64)), Here())
    assert [(job.job_id, job.ok) for job in jobs.poll()] == [(2, False)]
    jobs.close()
