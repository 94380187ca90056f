"""What a consumer takes for the end of a KV transfer: only what fills its own blocks, from whom it asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_connector.peer.base import Arrived
from kv_connector.peer.protocol.receives import Receives
from kv_connector.peer.wire.messages import Refused, Stopped
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport
from kv_connector.types import PeerAction, PeerJob
from tests.peer.peers import IDENTITY, Pool, info_of, linked

JOB = 3
DEADLINE = 10.0
STOP_SECONDS = 1.0
FENCE_SECONDS = 7.0


class Consumer:
    """A rank with one region, whose peers' copies write into its pool themselves, and that has asked for two blocks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fences: dict[int, float] = {}  # by link: until when something may be written over it
        net, pool = LoopbackNet(), Pool()
        producer = LoopbackTransport(net, pool.pool, replace(info_of(pool), engine_id="producer"))
        self.transport = LoopbackTransport(net, pool.pool, info_of(pool))
        self.transport.is_one_sided = True
        self.transport.quiet_in = lambda link: max(0.0, self.fences.get(link, 0.0) - self.now)
        self.receives = Receives(
            self.transport, replace(IDENTITY, pieces=(512,)), DEADLINE, STOP_SECONDS, lambda: self.now
        )
        ports = (producer.port,)
        self.receives.receive(
            PeerJob(JOB, PeerAction.RECEIVE, "t", 0, np.array([0, 1]), names=bytes(32), host="here", ports=ports)
        )
        (self.link,) = self.transport.ends
        self.receives.connected(linked(self.link))
        self.fences[self.link] = FENCE_SECONDS

    def arrived(self, count: int = 2, link: int | None = None) -> None:
        """So many blocks of the grant are said to be there."""
        self.receives.arrived(Arrived(self.link if link is None else link, JOB, 0, count, range(1)))

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.receives.give_up_overdue()


def test_a_transfer_ends_with_its_last_block() -> None:
    consumer = Consumer()
    consumer.arrived(1)
    assert consumer.receives.ended == []
    consumer.arrived(2)
    assert consumer.receives.ended == [(JOB, True)]


def test_what_comes_over_another_link_does_not_count() -> None:
    """Else any peer that guesses a number completes a transfer whose blocks hold whatever was there before."""
    consumer = Consumer()
    consumer.receives.connected(linked(consumer.link + 100))
    consumer.arrived(link=consumer.link + 100)
    assert consumer.receives.ended == []


def test_another_peer_cannot_say_that_the_producer_has_stopped() -> None:
    """The producer's copies still write: given back on a stranger's word, the blocks would be spoilt for who has them
    next."""
    consumer = Consumer()
    consumer.receives.connected(linked(consumer.link + 100))
    consumer.receives.cancel(JOB)
    consumer.receives.hear(consumer.link + 100, Stopped(JOB))
    assert consumer.receives.ended == []
    consumer.receives.hear(consumer.link, Stopped(JOB))
    assert consumer.receives.ended == [(JOB, False)]


def test_another_peer_cannot_refuse_what_the_producer_sends() -> None:
    """Else any peer that guesses a number has prompts computed again."""
    consumer = Consumer()
    consumer.receives.connected(linked(consumer.link + 100))
    consumer.receives.hear(consumer.link + 100, Refused(JOB, "no"))
    consumer.arrived()
    assert consumer.receives.ended == [(JOB, True)]


def test_a_transfer_that_goes_on_is_not_given_up_however_long_it_takes() -> None:
    """What counts is the time without anything arriving."""
    consumer = Consumer()
    consumer.tick(DEADLINE - 0.1)
    consumer.arrived(1)
    consumer.tick(DEADLINE - 0.1)
    consumer.arrived(2)
    assert consumer.receives.ended == [(JOB, True)]


def test_a_transfer_of_which_nothing_comes_any_more_is_given_up() -> None:
    consumer = Consumer()
    consumer.tick(DEADLINE - 0.1)
    consumer.arrived(1)
    consumer.tick(DEADLINE)
    consumer.receives.hear(consumer.link, Stopped(JOB))
    assert consumer.receives.ended == [(JOB, False)]


@pytest.mark.parametrize("count", [3, 5])
def test_who_claims_more_blocks_than_were_granted_is_dropped(count: int) -> None:
    consumer = Consumer()
    consumer.arrived(count)
    assert consumer.receives.ended == []
    assert consumer.link not in consumer.transport.ends


def test_who_claims_more_of_each_block_than_there_is_is_dropped() -> None:
    consumer = Consumer()
    consumer.receives.arrived(Arrived(consumer.link, JOB, 0, 2, range(2)))
    assert consumer.receives.ended == []
    assert consumer.link not in consumer.transport.ends


def test_what_was_told_to_stop_has_not_ended_though_all_of_it_came() -> None:
    """The producer's copies may write for as long as it has not said that it stopped: the blocks stay held."""
    consumer = Consumer()
    consumer.receives.cancel(JOB)
    consumer.arrived()
    assert consumer.receives.ended == []
    consumer.receives.hear(consumer.link, Stopped(JOB))
    assert consumer.receives.ended == [(JOB, False)]


def test_who_does_not_stop_loses_its_link_before_the_blocks_are_given_back() -> None:
    """A producer that says nothing may still write: its link goes first, and then the fence passes."""
    consumer = Consumer()
    consumer.receives.cancel(JOB)
    consumer.tick(STOP_SECONDS)
    assert consumer.receives.ended == []
    assert consumer.link not in consumer.transport.ends
    consumer.receives.lost(consumer.link)
    consumer.tick(FENCE_SECONDS - STOP_SECONDS - 0.1)
    assert consumer.receives.ended == []
    consumer.tick(0.1)
    assert consumer.receives.ended == [(JOB, False)]


def test_a_producer_that_never_had_a_lease_is_not_waited_for() -> None:
    consumer = Consumer()
    consumer.fences.clear()
    consumer.receives.lost(consumer.link)
    assert consumer.receives.ended == [(JOB, False)]


def test_a_producer_that_is_found_to_be_gone_is_waited_for_no_longer() -> None:
    consumer = Consumer()
    consumer.receives.lost(consumer.link)
    consumer.tick(0.1)
    assert consumer.receives.ended == []
    consumer.fences[consumer.link] = 0.2
    consumer.tick(0.1)
    assert consumer.receives.ended == [(JOB, False)]
