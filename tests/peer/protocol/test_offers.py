"""Who is served of what a producer offers: the first that asks, and nobody that is gone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kv_connector.peer.base import Connected, Lost, Message, Pushed
from kv_connector.peer.protocol.early import MOST_EARLY_BLOCKS, MOST_WITHDRAWN
from kv_connector.peer.protocol.offers import Offers
from kv_connector.peer.wire.messages import Nothing, Refused, Stop, Stopped, Want
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport
from kv_connector.types import PeerAction, PeerJob
from tests.peer.peers import IDENTITY, Pool, info_of, linked

NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(2)]


class Producer:
    """A rank with one region and a prompt of two blocks, and two other engines."""

    def __init__(self) -> None:
        net, pool = LoopbackNet(), Pool()
        self.transport = LoopbackTransport(net, pool.pool, replace(info_of(pool), engine_id="producer"))
        self.consumers = [
            LoopbackTransport(net, Pool().pool, replace(info_of(pool), engine_id=f"consumer {number}"))
            for number in range(2)
        ]
        self.now = 0.0
        self.offers = Offers(self.transport, "producer", replace(IDENTITY, pieces=(512,)), 60.0, lambda: self.now)
        self.links = []
        for consumer in self.consumers:
            consumer.grant(consumer.connect("here", self.transport.port), 7, [0, 1])
        for event in self.transport.poll(0.0):
            assert isinstance(event, Connected)
            self.offers.connected(event)
            self.links.append(event.link)

    def hear_want(self, number: int, engine_id: str) -> None:
        """A consumer asks for the prompt, at this start of the engine or whichever it is."""
        self.offers.hear(self.links[number], Want("t", engine_id, 7, 0, 2, NAMES[-1], (0, 1)))

    def hear_nothing(self, number: int, engine_id: str, name: bytes = NAMES[-1]) -> None:
        """A consumer wants nothing of a prompt whose last block has this name."""
        self.offers.hear(self.links[number], Nothing("t", engine_id, name))

    def compute(self, job_id: int = 1) -> None:
        """The prompt is offered, and computed."""
        self.offers.offer(PeerJob(job_id, PeerAction.SEND, "t", 0, np.array([2, 3]), names=b"".join(NAMES)))
        self.offers.ready(job_id, 1)

    def said_to(self, number: int) -> list[Any]:
        """What a consumer has been told."""
        return [event.message for event in self.consumers[number].poll(0.0) if isinstance(event, Message)]


def test_a_prompt_that_was_asked_for_twice_goes_to_the_first() -> None:
    """The second is told at once, and computes; else the first waits for blocks that go elsewhere."""
    producer = Producer()
    producer.offers.offer(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2, 3]), names=b"".join(NAMES)))
    for number in range(2):
        producer.hear_want(number, "producer")
    assert producer.said_to(0) == []
    assert producer.said_to(1) == [Refused(7, "the blocks were asked for before")]
    producer.offers.ready(1, 1)
    producer.transport.poll(0.0)
    received = [consumer.counters.received_bytes for consumer in producer.consumers]
    assert received[0] > 0 and received[1] == 0


def test_a_prompt_that_is_asked_for_before_it_is_offered_is_sent_when_it_is_computed() -> None:
    producer = Producer()
    producer.hear_want(0, "")
    producer.compute()
    producer.transport.poll(0.0)
    assert producer.consumers[0].counters.received_bytes > 0


def test_who_is_gone_before_anything_is_offered_is_forgotten() -> None:
    """Its wish would keep whoever asks next from being served, until the deadline."""
    producer = Producer()
    producer.hear_want(0, "")
    producer.offers.lost(producer.links[0])
    producer.compute()
    producer.hear_want(1, "producer")
    producer.transport.poll(0.0)
    assert producer.said_to(1) == []
    assert [consumer.counters.received_bytes > 0 for consumer in producer.consumers] == [False, True]


def test_what_who_is_gone_did_not_want_is_offered_to_others() -> None:
    producer = Producer()
    producer.hear_nothing(0, "")
    producer.offers.lost(producer.links[0])
    producer.compute()
    assert producer.offers.ended == []
    producer.hear_want(1, "producer")
    producer.transport.poll(0.0)
    assert producer.consumers[1].counters.received_bytes > 0


def test_what_is_on_its_way_to_who_gives_up_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a producer writes on into blocks that the consumer waits to have back."""
    producer = Producer()
    cancelled: list[int] = []
    monkeypatch.setattr(producer.transport, "cancel", cancelled.append)
    producer.hear_want(0, "")
    producer.compute()
    producer.offers.hear(producer.links[0], Stop(7))
    assert len(cancelled) == 1


def test_what_was_promised_to_who_is_gone_is_let_go() -> None:
    """A consumer asks and dies while the prompt is computed: its blocks, and those of later parts, are held for
    nobody."""
    producer = Producer()
    producer.offers.offer(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2]), names=b"".join(NAMES)))
    producer.hear_want(0, "producer")
    producer.consumers[0].close()
    for event in producer.transport.poll(0.0):
        assert isinstance(event, Lost)
        producer.offers.lost(event.link)
    producer.offers.ready(1, 1)
    for event in producer.transport.poll(0.0):
        assert isinstance(event, Pushed)
        producer.offers.pushed(event)
    producer.offers.offer(PeerJob(2, PeerAction.SEND, "t", 1, np.array([3])))
    assert producer.offers.ended == [(1, True), (2, True)]


def test_what_ends_of_an_earlier_offer_leaves_the_next_one_of_its_name() -> None:
    """A consumer gives up while the blocks are on their way, and so does the producer's request; it comes once more,
    for another consumer, before the first push has ended."""
    producer = Producer()
    producer.hear_want(0, "")
    producer.compute()
    producer.offers.hear(producer.links[0], Stop(7))
    producer.offers.withdraw("t")
    assert producer.offers.ended == [], "a push is under way"
    producer.compute(job_id=2)
    for event in producer.transport.poll(0.0):
        if isinstance(event, Pushed):
            producer.offers.pushed(event)
    assert producer.offers.ended == [(1, True)]
    assert producer.said_to(0) == [Stopped(7)]
    producer.hear_want(1, "producer")
    producer.transport.poll(0.0)
    assert producer.said_to(1) == []
    assert [consumer.counters.received_bytes > 0 for consumer in producer.consumers] == [False, True]


@pytest.mark.parametrize("first", ["want", "none"])
def test_who_asks_early_is_answered_whoever_else_wants_nothing(first: str) -> None:
    """A proxy that tries again names the same KV transfer; an asker that nobody answers waits until its deadline."""
    producer = Producer()
    for said in (first, "none" if first == "want" else "want"):
        if said == "want":
            producer.hear_want(1, "")
        else:
            producer.hear_nothing(0, "")
    producer.compute()
    producer.transport.poll(0.0)
    refused = [type(message) for message in producer.said_to(1)]
    assert (producer.consumers[1].counters.received_bytes > 0, refused) in ((True, []), (False, [Refused]))
    assert (first == "want") == (not refused), "who comes first has its way"


@pytest.mark.parametrize("offered", [True, False])
def test_who_does_not_know_a_prompt_cannot_say_that_nobody_wants_it(offered: bool) -> None:
    """A third engine guesses the id of a KV transfer, before or after the prompt is offered."""
    producer = Producer()
    if offered:
        producer.compute()
    producer.hear_nothing(0, "", name=hashlib.sha256(b"another prompt").digest())
    if not offered:
        producer.compute()
    assert producer.offers.ended == []
    producer.hear_want(1, "producer")
    producer.transport.poll(0.0)
    assert producer.consumers[1].counters.received_bytes > 0


@pytest.mark.parametrize("offered", [True, False])
def test_a_prompt_that_its_consumer_does_not_want_is_let_go(offered: bool) -> None:
    producer = Producer()
    if not offered:
        producer.hear_nothing(0, "")
        producer.hear_nothing(1, "", name=bytes(32))  # of no effect on what the first has said
    producer.compute()
    if offered:
        producer.hear_nothing(0, "producer")
    assert producer.offers.ended == [(1, True)]


def test_who_asks_for_what_another_did_not_want_is_told_at_once() -> None:
    """The first half of the prompt is let go already; else the asker waits until its deadline for nothing."""
    producer = Producer()
    producer.offers.offer(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2]), names=b"".join(NAMES)))
    producer.hear_nothing(0, "producer")
    producer.hear_want(1, "producer")
    assert [type(message) for message in producer.said_to(1)] == [Refused]
    producer.offers.offer(PeerJob(2, PeerAction.SEND, "t", 1, np.array([3])))
    assert producer.offers.ended == [(1, True), (2, True)]


@pytest.mark.parametrize("asked", ["before", "behind"])
@pytest.mark.parametrize("offered", [True, False])
def test_what_will_not_be_offered_is_refused_whenever_it_is_asked_for(asked: str, offered: bool) -> None:
    """A proxy asks both engines at once, and the producer finds that it cannot serve: else the consumer waits until its
    deadline."""
    producer = Producer()
    if asked == "before":
        producer.hear_want(0, "")
    if offered:
        producer.offers.offer(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2]), names=b"".join(NAMES)))
    producer.offers.withdraw("t")
    if asked == "behind":
        producer.hear_want(0, "")
    assert producer.said_to(0) == [Refused(7, "the blocks are not held any more")]


def test_whoever_asks_while_the_request_is_preempted_waits_for_the_next_offer() -> None:
    producer = Producer()
    producer.compute()
    producer.offers.suspend("t")
    producer.hear_want(0, "")
    producer.compute(job_id=2)
    producer.transport.poll(0.0)
    assert producer.said_to(0) == []
    assert producer.consumers[0].counters.received_bytes > 0


@pytest.mark.parametrize("is_offered", [True, False])
def test_the_id_of_what_was_withdrawn_may_come_again(is_offered: bool) -> None:
    """With an offer, or after a while."""
    producer = Producer()
    producer.offers.withdraw("t")
    if is_offered:
        producer.compute()
    else:
        producer.now = 60.0
        producer.offers.forget_overdue()
    producer.hear_want(0, "")
    assert producer.said_to(0) == []


def test_what_is_withdrawn_once_more_is_remembered_from_then_on() -> None:
    producer = Producer()
    for seconds, transfer_id in ((0.0, "again"), (10.0, "once"), (50.0, "again")):
        producer.now = seconds
        producer.offers.withdraw(transfer_id)
    producer.now = 75.0
    producer.offers.forget_overdue()
    for grant, transfer_id in enumerate(("once", "again")):
        producer.offers.hear(producer.links[0], Want(transfer_id, "", grant, 0, 2, NAMES[-1], (0, 1)))
    assert producer.said_to(0) == [Refused(1, "the blocks are not held any more")]


def test_what_was_withdrawn_takes_a_bounded_memory() -> None:
    producer = Producer()
    for number in range(MOST_WITHDRAWN + 5):
        producer.offers.withdraw(f"t{number}")
    producer.offers.hear(producer.links[0], Want("t4", "", 7, 0, 2, NAMES[-1], (0, 1)))
    producer.offers.hear(producer.links[0], Want("t5", "", 8, 0, 2, NAMES[-1], (0, 1)))
    assert producer.said_to(0) == [Refused(8, "the blocks are not held any more")], "only the oldest went"


def test_what_is_wanted_early_takes_a_bounded_memory() -> None:
    """Whoever asks for more is told at once, and computes."""
    producer = Producer()
    link, count = producer.links[0], 1 << 16
    producer.offers.connected(linked(link, 1 << 20))
    for number in range(MOST_EARLY_BLOCKS // count + 5):
        want = Want(f"never begun {number}", "", number, 0, count, bytes(32), tuple(range(count)))
        producer.offers.hear(link, want)
    assert [type(message) for message in producer.said_to(0)] == [Refused] * 5
    assert sum(want.block_ids.nbytes for want in producer.offers._early._wants[0].values()) == 8 * MOST_EARLY_BLOCKS


class TwoGroups(Producer):
    """A prompt of two block groups: two blocks of full attention, and the last one of a window."""

    WINDOW = hashlib.sha256(b"window").digest()

    def begin(self) -> None:
        """The first block is computed."""
        self.offers.offer(PeerJob(1, PeerAction.SEND, "t", 0, np.array([2]), names=b"".join(NAMES)))
        self.offers.offer(PeerJob(2, PeerAction.SEND, "t", 1, np.array([], np.int64), names=self.WINDOW, group=1))

    def want_window(self, first: int = 1, name: bytes = WINDOW) -> None:
        """A consumer asks for the window's blocks from here on."""
        blocks = tuple(range(3, 5 - first))
        self.offers.hear(self.links[0], Want("t", "producer", 8, first, 2, name, blocks, group=1))

    def finish(self) -> None:
        """All is computed."""
        self.offers.offer(PeerJob(3, PeerAction.SEND, "t", 1, np.array([3])))
        self.offers.offer(PeerJob(4, PeerAction.SEND, "t", 1, np.array([4]), group=1))
        for job_id in (1, 3, 4):
            self.offers.ready(job_id, 1)
        for event in self.transport.poll(0.0):
            if isinstance(event, Pushed):
                self.offers.pushed(event)


def test_each_group_of_a_prompt_is_asked_for_by_itself() -> None:
    """What will come of it is known from the beginning, so who asks before it is computed waits for it."""
    producer = TwoGroups()
    producer.consumers[0].grant(1, 8, [3])
    producer.begin()
    producer.hear_want(0, "producer")
    producer.want_window()
    producer.finish()
    assert producer.said_to(0) == []
    assert producer.offers.ended == [(2, True), (1, True), (3, True), (4, True)]
    assert producer.offers._offers == {}


@pytest.mark.parametrize(("first", "name"), [(0, TwoGroups.WINDOW), (1, NAMES[-1])])
def test_of_a_window_only_what_is_offered_can_be_had(first: int, name: bytes) -> None:
    """Not what lies in front of it, and not by the name of another group's block."""
    producer = TwoGroups()
    producer.begin()
    producer.want_window(first, name)
    assert [type(message) for message in producer.said_to(0)] == [Refused]


def test_a_prompt_is_withdrawn_with_all_of_its_groups() -> None:
    """The first ones would be waited for in vain without the last."""
    producer = TwoGroups()
    producer.begin()
    producer.hear_want(0, "producer")
    producer.want_window()
    producer.offers.withdraw("t")
    assert [message.grant for message in producer.said_to(0)] == [7, 8]
    assert producer.offers._offers == {}
