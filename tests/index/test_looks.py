"""What a part is learned from, which is looked at several times, and what is expected between two looks."""

from __future__ import annotations

import numpy as np
import pytest

from kv_connector.index import PrefixTree, ReuseModel
from kv_connector.index.frailty import LOOKS
from kv_connector.index.rates import Rates, Table
from kv_connector.index.reuse import _SHAPE, _bucket
from kv_connector.index.terms import PRIORITY_STEP
from kv_connector.types import BlockHash

PART = 1000
CAPACITY = 4 * PART
KNOWN = 100
ASKED = 50


class Kept(Rates):
    """Keeps what it is told of each part, and believes what the test says."""

    def __init__(self) -> None:
        super().__init__(_SHAPE[0], np.full(_SHAPE[1], 0.5))
        self.parts: list[tuple[float, float, int]] = []

    def add(self, events: Table, exposure: Table, passed: int) -> None:
        self.parts.append((events.sum(), exposure.sum(), passed))


class Model:
    """So many blocks are known, and every request is for one of the first, in turn; for the others none is."""

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.reuse, self.kept = ReuseModel(self.tree), Kept()
        self.reuse._rates = self.kept
        self.reuse.resized(CAPACITY)
        hashes = [BlockHash(b"%032d" % number) for number in range(KNOWN)]
        self.nodes = self.tree.insert_apart(hashes, 0.0)
        self.seen: list[tuple[float, float]] = []
        """What came back of what was asked for lately and what should have, look by look; the other of older blocks."""
        self.seen_before: list[tuple[float, float]] = []
        self.reuse._lately.add = lambda *seen: self.seen.append(seen)  # type: ignore[method-assign]
        self.reuse._before.add = lambda *seen: self.seen_before.append(seen)  # type: ignore[method-assign]

    def ask(self, num_requests: int, is_of_use: bool = True) -> None:
        for number in range(num_requests):
            node = self.nodes[number % ASKED]
            self.reuse.visited(np.array([node], np.intc), np.array([is_of_use]))
            self.reuse.asked(1)
            self.reuse.learn()


def test_a_part_is_learned_once_from_all_that_was_seen_at_its_looks() -> None:
    model = Model()
    model.ask(5 * PART)
    assert model.kept.parts == [(PART, KNOWN * PART, PART)] * 5
    assert len(model.seen) == 5 * LOOKS


def test_what_is_on_the_device_is_exposed_and_comes_back_to_no_use() -> None:
    model = Model()
    model.ask(PART, is_of_use=False)
    assert model.kept.parts == [(0, KNOWN * PART, PART)]


@pytest.mark.parametrize("is_lately", [True, False])
def test_between_two_looks_what_is_known_is_expected_to_come_back_as_often_as_its_kind(is_lately: bool) -> None:
    """Of what was asked for lately, and apart from that of what is older."""
    model = Model()
    model.tree.time += PART
    model.ask(ASKED)
    model.seen.clear()
    model.seen_before.clear()
    begin = _bucket(PART)
    model.kept.mean[:, slice(begin) if is_lately else slice(begin, None)] = 0.01
    model.ask(PART)
    num_lately, num_before = (ASKED, 0) if is_lately else (0, KNOWN - ASKED)
    for seen, number in ((model.seen, num_lately), (model.seen_before, num_before)):
        assert [expected for _, expected in seen] == [pytest.approx(0.01 * number * PART / LOOKS)] * LOOKS


@pytest.mark.parametrize(("age", "events"), [(PART // 2, 1.0), (PART, 0.0)])
def test_only_what_comes_back_within_a_part_is_of_what_came_lately(age: int, events: float) -> None:
    model = Model()
    model.tree.time += age
    model.ask(1)
    assert [came for came, _ in model.seen] == [events]
    assert [came for came, _ in model.seen_before] == [1.0 - events]


def test_a_priority_adds_what_it_does_however_little_comes_back() -> None:
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    for _ in range(10 * LOOKS):
        reuse._lately.add(0.0, 1000.0)
    new = [BlockHash(b"new".rjust(32))]
    assert reuse._lately.factor(1.0) < 0.01
    assert [reuse.worth_of(new, 0, priority) for priority in (-2, 0, 1)] == [-2 * PRIORITY_STEP, 0.0, PRIORITY_STEP]


NEW = [BlockHash(b"new".rjust(32))]
WORTH = 0.1


class Shift:
    """A new block's class is worth so much, and a part of blocks should come back at each look, of both times."""

    def __init__(self) -> None:
        self.reuse = ReuseModel(PrefixTree())
        self.reuse.resized(CAPACITY)
        self.reuse._worth[0][0] = WORTH

    def worth(self, lately: float, before: float) -> float:
        """Of a new block, when these shares of it come back from now on."""
        for _ in range(10 * LOOKS):
            self.reuse._lately.add(lately * PART, PART)
            self.reuse._before.add(before * PART, PART)
        return self.reuse.worth_of(NEW, 0)


def test_where_only_what_is_new_comes_back_more_of_it_is_let_in() -> None:
    """Chats have left and others have come: those that left are worth less than rates of a long time say."""
    shift = Shift()
    assert shift.worth(lately=1.0, before=1.0) == pytest.approx(WORTH)
    assert shift.worth(lately=1.0, before=0.0) > 2 * WORTH
    assert shift.worth(lately=1.0, before=1.0) == pytest.approx(WORTH, rel=0.01), "they are back"


@pytest.mark.parametrize("lately", [0.0, 0.5, 0.9])
def test_where_neither_comes_back_what_is_new_is_worth_no_more_for_that(lately: float) -> None:
    """At night the prompts of the day stay away, and will come back; what is asked for then will not."""
    assert Shift().worth(lately, before=0.0) == pytest.approx(lately * WORTH, abs=0.02 * WORTH)


def test_few_prompts_that_stay_away_do_not_tell_that_all_have_left() -> None:
    shift = Shift()
    shift.reuse._before.add(0.0, PART / 50)
    assert shift.reuse.worth_of(NEW, 0) == pytest.approx(WORTH, rel=0.05)


def test_however_many_stay_away_what_is_new_is_worth_less_than_a_higher_priority() -> None:
    """The least that a block of that priority can be worth is one step of it."""
    shift = Shift()
    for _ in range(10 * LOOKS):
        shift.reuse._before.add(0.0, 1000.0 * PART)
    new, next_priority = (shift.reuse.worth_of(NEW, 0, priority) for priority in (0, 1))
    assert 1.0 < new < PRIORITY_STEP < next_priority < 2 * PRIORITY_STEP
