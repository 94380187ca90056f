"""Engines of two TP sizes: each rank gets the KV heads that it holds, from whoever holds them, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kv_connector.peer.identity import PeerIdentity
from kv_connector.peer.shards import MOST_PARTNERS
from kv_connector.testing.loopback import LoopbackNet
from tests.peer.tp_engines import Engines, Layer, Rank, Reached, apart, heads_outside, hnd, mla, nhd
from tests.waiting import until

MODELS = {
    "NHD": [nhd(), nhd()],
    "HND": [hnd(), hnd()],
    "K and V apart": [apart(), apart()],
    "more ranks than heads": [nhd(2), hnd(2)],
    "one head": [nhd(1)],
    "MLA": [mla(), mla()],
    "MLA beside heads": [mla(), hnd(8), nhd(2)],
}
SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2)]
SOURCES, TARGETS = [3, 9, 4, 17, 8], [20, 2, 3, 11, 5]

Open = Callable[..., Engines]


@pytest.fixture(params=["loopback", "shared_memory"])
def make(request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Engines] = []

    def make(layers: list[Layer], producer: int, consumer: int, num_stages: int = 1) -> Engines:
        net = LoopbackNet() if request.param == "loopback" else None
        opened.append(Engines(layers, producer, consumer, net, num_stages))
        return opened[-1]

    yield make
    for engines in opened:
        engines.close()


@pytest.mark.parametrize(("producer", "consumer"), SIZES)
@pytest.mark.parametrize("model", list(MODELS))
def test_each_rank_gets_its_heads(make: Open, model: str, producer: int, consumer: int) -> None:
    engines = make(MODELS[model], producer, consumer)
    engines.compute(SOURCES)
    sent, received = engines.offer(SOURCES), engines.ask(TARGETS, len(SOURCES))
    engines.ready(sent)
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer)), "the producer holds blocks that nobody waits for"
    engines.check(TARGETS)


@pytest.mark.parametrize(("producer", "consumer"), SIZES)
def test_blocks_are_asked_for_before_and_while_layers_are_computed(make: Open, producer: int, consumer: int) -> None:
    engines = make(MODELS["MLA beside heads"], producer, consumer)
    received = engines.ask(TARGETS[2:], len(SOURCES))
    for _ in range(10):
        engines.turn()
    engines.compute(SOURCES)
    sent = engines.offer(SOURCES)
    for regions in (1, 2, 3):
        engines.ready(sent, regions)
        engines.turn()
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer))


@pytest.mark.parametrize(("producer", "consumer"), SIZES)
def test_a_window_comes_beside_full_attention(make: Open, producer: int, consumer: int) -> None:
    """Each block group has jobs of its own; they end each by itself, on every rank."""
    engines = make(MODELS["NHD"], producer, consumer)
    engines.compute(SOURCES)
    sent = engines.offer(SOURCES), engines.offer(SOURCES[-2:], group=1)
    received = engines.ask(TARGETS, 5), engines.ask([], 2, group=1)
    for job_id in sent:
        engines.ready(job_id)
    for job_id in received:
        assert all(engines.until_ended(job_id, engines.consumer))
    for job_id in sent:
        assert all(engines.until_ended(job_id, engines.producer))
    engines.check(TARGETS)


@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (4, 1), (4, 2)])
def test_of_ranks_that_hold_the_same_one_is_asked(make: Open, producer: int, consumer: int) -> None:
    engines = make(MODELS["MLA"], producer, consumer)
    engines.compute(SOURCES)
    sent, received = engines.offer(SOURCES), engines.ask(TARGETS, len(SOURCES))
    engines.ready(sent)
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer)), "the others hold blocks that nobody will ask for"
    engines.check(TARGETS)
    num_bytes = [rank.transport.counters.sent_bytes for rank in engines.producer]
    assert [count > 0 for count in num_bytes] == [rank % (producer // consumer) == 0 for rank in range(producer)]


@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (4, 1), (2, 4)])
def test_where_one_producer_is_gone_the_blocks_are_computed(make: Open, producer: int, consumer: int) -> None:
    """A part of a block is none."""
    engines = make(MODELS["HND"], producer, consumer)
    engines.compute(SOURCES)
    sent, received = engines.offer(SOURCES), engines.ask(TARGETS, len(SOURCES))
    for rank in engines.producer[:-1]:
        rank.jobs.ready([sent], len(rank.identity.pieces), Reached())
    for _ in range(30):
        engines.turn()
    gone = engines.producer.pop()
    gone.jobs.close()
    failed = [not ok for ok in engines.until_ended(received, engines.consumer)]
    assert failed == [gone.rank in rank.identity.shard.partners(producer) for rank in engines.consumer]


@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (1, 2), (4, 2)])
def test_what_is_called_off_is_let_go_of_everywhere(make: Open, producer: int, consumer: int) -> None:
    engines = make(MODELS["NHD"], producer, consumer)
    sent, received = engines.offer(SOURCES), engines.ask(TARGETS, len(SOURCES))
    for _ in range(30):
        engines.turn()
    for rank in engines.consumer:
        rank.jobs.cancel([received])
    assert not any(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer))


@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (1, 2), (4, 2)])
def test_a_prompt_of_which_nothing_is_wanted_is_let_go(make: Open, producer: int, consumer: int) -> None:
    engines = make(MODELS["NHD"], producer, consumer)
    sent, received = engines.offer(SOURCES), engines.ask([], len(SOURCES))
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer))


def test_blocks_are_held_until_every_rank_has_its_heads(make: Open) -> None:
    engines = make(MODELS["NHD"], 1, 2)
    engines.compute(SOURCES)
    sent = engines.offer(SOURCES)
    engines.ready(sent)
    late = engines.consumer.pop()
    received = engines.ask(TARGETS, len(SOURCES))
    assert all(engines.until_ended(received, engines.consumer))
    for _ in range(30):
        engines.turn()
    assert sent not in engines.producer[0].ended, "a rank that has not asked yet finds nothing"
    engines.consumer = [late]
    received = engines.ask(TARGETS, len(SOURCES))
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer))
    engines.check(TARGETS)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1), (0, 1, 2), (0, 1, 2, 3, 0, 1, 2, 3)])
def test_ranks_that_are_told_in_another_order_or_number_give_nothing(make: Open, order: tuple[int, ...]) -> None:
    """A proxy says which port is which rank's. Ranks know better, and a wrong one is a miss."""
    engines = make(MODELS["more ranks than heads"], 4, 1)
    engines.compute(SOURCES)
    ports = tuple(engines.ports[rank] for rank in order)
    engines.ready(engines.offer(SOURCES))
    received = engines.ask(TARGETS, len(SOURCES), ports)
    assert engines.until_ended(received, engines.consumer) == [False]


@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (2, 2)])
def test_each_stage_of_a_pipeline_has_ranks_of_its_own(make: Open, producer: int, consumer: int) -> None:
    engines = make(MODELS["NHD"], producer, consumer, num_stages=2)
    engines.compute(SOURCES)
    sent, received = engines.offer(SOURCES), engines.ask(TARGETS, len(SOURCES))
    engines.ready(sent)
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer))
    engines.check(TARGETS)


@pytest.mark.parametrize(("producer", "consumer"), [(1, 1), (4, 1), (4, 2), (1, 4)])
@pytest.mark.parametrize("is_early", [False, True])
def test_who_wants_less_than_is_offered_holds_nothing_else(
    make: Open, is_early: bool, producer: int, consumer: int
) -> None:
    """Nor on the ranks that hold the same and are not asked."""
    engines = make(MODELS["MLA"], producer, consumer)
    engines.compute(SOURCES)
    sent = 0 if is_early else engines.offer(SOURCES)
    received = engines.ask(TARGETS[:-1], len(SOURCES) - 1)
    for _ in range(10):
        engines.turn()
    sent = sent or engines.offer(SOURCES)
    engines.ready(sent)
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer)), "some hold blocks that nobody will ask for"
    engines.check(TARGETS[:-1])


@pytest.mark.parametrize(("producer", "consumer"), [(1, 1), (1, 2), (1, 8), (8, 1)])
def test_as_many_kv_transfers_may_be_unwanted_before_they_begin_whatever_the_sizes(
    make: Open, producer: int, consumer: int
) -> None:
    engines = make([nhd(8)], producer, consumer)
    engines.ask([], len(SOURCES))
    last = 0
    for number in range(200):
        last = engines.ask([], len(SOURCES), transfer_id=f"never begun {number}")
    engines.until_ended(last, engines.consumer)
    for _ in range(10):
        engines.turn()
    sent = engines.offer(SOURCES)
    assert all(engines.until_ended(sent, engines.producer)), "it is held, though nobody wants it"


@pytest.mark.parametrize(("producer", "consumer"), [(1, 1), (1, 8)])
def test_as_many_kv_transfers_may_be_wanted_before_they_begin_whatever_the_sizes(
    make: Open, producer: int, consumer: int
) -> None:
    engines = make([nhd(8)], producer, consumer)
    asked = [engines.ask([1], 1, transfer_id=f"transfer {number}") for number in range(200)]
    for _ in range(20):
        engines.turn()
    for number in (0, 199):
        engines.ready(engines.offer([1], transfer_id=f"transfer {number}"))
        assert all(engines.until_ended(asked[number], engines.consumer))


def turn_until_ended(first: Engines, second: Engines, job_id: int) -> None:
    """Both engines, until the consumer of the second knows what has become of the job."""

    def turn() -> None:
        first.turn()
        second.turn()

    consumer = second.consumer
    until(lambda: all(job_id in rank.ended for rank in consumer), turn, lambda: [rank.ended for rank in consumer])


def test_heads_that_an_engine_of_another_size_has_asked_for_are_refused_to_the_next() -> None:
    """It is told at once, and computes; else one waits for what the other keeps from it."""
    net = LoopbackNet()
    first, second = Engines(MODELS["NHD"], 1, 1, net), Engines(MODELS["NHD"], 1, 2, net)
    first.compute(SOURCES)
    sent = first.offer(SOURCES)
    received = first.ask(TARGETS, len(SOURCES))
    for _ in range(10):
        first.turn()
    refused = second.ask(TARGETS, len(SOURCES), first.ports)
    turn_until_ended(first, second, refused)
    first.ready(sent)
    assert first.until_ended(received, first.consumer) == [True]
    assert [rank.ended[refused] for rank in second.consumer] == [False, False]
    assert first.until_ended(sent, first.producer) == [True]
    first.check(TARGETS)
    for engines in (first, second):
        engines.close()


def test_of_engines_of_two_sizes_that_ask_early_the_first_is_served() -> None:
    """All of its ranks, though another has asked in between."""
    net = LoopbackNet()
    first, second = Engines(MODELS["NHD"], 1, 2, net), Engines(MODELS["NHD"], 1, 1, net)
    later, *first.consumer = first.consumer
    received = first.ask(TARGETS, len(SOURCES))
    for _ in range(10):
        first.turn()
    refused = second.ask(TARGETS, len(SOURCES), first.ports)
    turn_until_ended(first, second, refused)
    first.compute(SOURCES)
    sent = first.offer(SOURCES)
    first.ready(sent)
    assert first.until_ended(received, first.consumer) == [True]
    first.consumer = [later]
    assert first.until_ended(first.ask(TARGETS, len(SOURCES)), first.consumer) == [True]
    assert first.until_ended(sent, first.producer) == [True]
    assert second.consumer[0].ended[refused] is False
    first.check(TARGETS)
    for engines in (first, second):
        engines.close()


def test_where_one_rank_is_a_wrong_one_no_other_is_asked(make: Open) -> None:
    """Links are open, so that each rank is known at once: what has failed may be given to another request."""
    engines = make(MODELS["HND"], 4, 1)
    for rank in engines.producer:
        rank.turn()
    assert engines.until_ended(engines.ask([], 1, transfer_id="another"), engines.consumer) == [True]
    engines.compute(SOURCES)
    engines.ready(engines.offer(SOURCES))
    ports = engines.ports
    received = engines.ask(TARGETS, len(SOURCES), (ports[1], *ports[1:]))
    assert engines.until_ended(received, engines.consumer) == [False]
    for _ in range(30):
        engines.turn()
    engines.check([])


@pytest.mark.parametrize("count", [33, 64, 100, 256, 1024])
def test_a_request_that_names_many_ranks_costs_a_computation(make: Open, count: int) -> None:
    """No link to any of them, and nothing of what comes behind it."""
    engines = make(MODELS["MLA"], 1, 1)
    engines.compute(SOURCES)
    refused = engines.ask(TARGETS, len(SOURCES), tuple(range(20001, 20001 + count)))
    assert engines.until_ended(refused, engines.consumer) == [False]
    engines.ready(engines.offer(SOURCES))
    received = engines.ask(TARGETS, len(SOURCES))
    assert engines.until_ended(received, engines.consumer) == [True]
    counters = engines.consumer[0].transport.counters
    assert counters.lost_links == counters.refused_links == 0


def test_of_as_many_ranks_as_there_may_be_nobody_listens() -> None:
    """Each link of them is lost, one behind the other."""
    engines = Engines(MODELS["MLA"], 1, 1, LoopbackNet())
    received = engines.ask(TARGETS, len(SOURCES), tuple(range(20001, 20001 + MOST_PARTNERS)))
    assert engines.until_ended(received, engines.consumer) == [False]
    engines.close()


def identity(layers: list[Layer], rank: int, tp_size: int, **named: Any) -> PeerIdentity:
    return Rank(LoopbackNet(), layers, rank, tp_size, **named).identity


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        (identity([nhd(6)], 0, 2), identity([nhd(6)], 0, 3), "one must be a multiple of the other"),
        (identity([nhd()], 0, 1), identity([hnd()], 0, 2), "arrangement|not divided alike"),
        (identity([nhd()], 0, 1), identity([nhd(8)], 0, 2), "not divided alike"),
        (identity([nhd()], 0, 1), identity([nhd(), nhd()], 0, 2), "is not known"),
        (identity([nhd()], 0, 2), identity([nhd()], 2, 4), "holds no heads of rank"),
        (identity([nhd(6)], 0, 1), identity([nhd(6)], 0, 4), "not divided alike"),
        (identity([nhd()], 0, 1), identity([nhd()], 0, 2, pieces=(512,)), "not divided alike"),
        (identity([mla()], 0, 1), identity([mla()], 0, 64), "32 times at most"),
        (identity([nhd()], 0, 1), identity([nhd()], 0, 2, weights="others"), "weights is"),
        (identity([mla()], 0, 1), identity([nhd(1)], 0, 2), "arrangement|not divided alike"),
        (identity([heads_outside()], 0, 1), identity([heads_outside()], 0, 2), "is not known"),
        (
            identity([Layer(nhd().make, "unknown")], 0, 1),
            identity([Layer(nhd().make, "unknown")], 0, 2),
            "is not known: give both engines the same TP size",
        ),
    ],
)
def test_who_cannot_be_served_is_told_why(here: PeerIdentity, there: PeerIdentity, reason: str) -> None:
    for one, other in ((here, there), (there, here)):
        text = "; ".join(one.differences(other))
        assert any(part in text for part in reason.split("|")), text


def test_what_an_engine_does_not_say_is_not_exchanged(make: Open) -> None:
    """Recurrent states are of several kinds, which ranks do not divide like heads."""
    engines = make([nhd(), Layer(nhd().make, "unknown")], 1, 2)
    engines.ready(engines.offer(SOURCES))
    received = engines.ask(TARGETS, len(SOURCES))
    assert engines.until_ended(received, engines.consumer) == [False, False]
