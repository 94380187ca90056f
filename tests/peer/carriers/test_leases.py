"""The fence of one-sided writes: a lease is over one lease behind its answer, however late that is read."""

from __future__ import annotations

import math

import pytest

from kv_connector.peer.carriers.leases import GONE_SECONDS, LEASE_SECONDS, STILL_SECONDS, WriteLeases
from kv_connector.peer.wire.messages import AskLease, Lease, Stop, WireMessage

LINK = 3
LONGEST_SECONDS = 5.0
IDLE_SECONDS = 0.25


class Pair:
    """A writer and the owner of the memory, whose clocks show different times and whose messages wait to be read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.to_owner: list[WireMessage] = []
        self.to_writer: list[WireMessage] = []
        self.writer = WriteLeases(self._say(self.to_owner), LONGEST_SECONDS, lambda: 1000.0 + self.seconds)
        self.owner = WriteLeases(self._say(self.to_writer), LONGEST_SECONDS, lambda: self.seconds)
        self.has_ended = False  # the writer's process
        for leases in (self.writer, self.owner):
            leases.met(LINK, self)

    def pass_time(self, seconds: float) -> None:
        """The owner takes its turns."""
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds = min(end, self.seconds + IDLE_SECONDS)
            self.owner.turn()

    def _say(self, inbox: list[WireMessage]):  # type: ignore[no-untyped-def]
        return lambda link, message: inbox.append(message)

    def read(self) -> None:
        """Both read what was said to them."""
        for leases, inbox in ((self.owner, self.to_owner), (self.writer, self.to_writer)):
            while inbox:
                assert leases.hear(LINK, inbox.pop(0))


def that_has_lost_its_link() -> Pair:
    """With a lease on it."""
    pair = Pair()
    pair.writer.may_write(LINK)
    pair.read()
    pair.owner.lost(LINK)
    return pair


def test_a_writer_without_a_lease_asks_once_and_writes_when_it_has_one() -> None:
    pair = Pair()
    assert not pair.writer.may_write(LINK)
    assert not pair.writer.may_write(LINK)
    assert pair.to_owner == [AskLease(1)]
    pair.read()
    assert pair.writer.may_write(LINK)


def test_a_lease_is_counted_from_when_it_was_asked_for() -> None:
    """Its answer lay in a socket's buffer while the writer stood still."""
    pair = Pair()
    pair.writer.may_write(LINK)
    pair.owner.hear(LINK, pair.to_owner.pop())
    pair.seconds += LEASE_SECONDS
    pair.read()
    assert not pair.writer.may_write(LINK)


@pytest.mark.parametrize("on_the_way", [0.0, 0.3, 1.9])
@pytest.mark.parametrize("unread", [0.0, 0.05])
def test_nothing_that_was_posted_lands_behind_the_fence(on_the_way: float, unread: float) -> None:
    pair = Pair()
    pair.writer.may_write(LINK)
    pair.seconds += on_the_way
    pair.owner.hear(LINK, pair.to_owner.pop())
    pair.seconds += unread
    pair.read()
    last_landing = -math.inf
    for _ in range(400):
        if pair.writer.may_write(LINK):
            last_landing = pair.seconds + LONGEST_SECONDS
        pair.pass_time(0.01)
    assert on_the_way + unread < LEASE_SECONDS
    assert -math.inf < last_landing <= pair.seconds + pair.owner.quiet_in(LINK)


def test_who_goes_on_writing_is_given_the_next_lease_before_the_last_is_over() -> None:
    pair = Pair()
    pair.writer.may_write(LINK)
    for _ in range(100):
        pair.read()
        assert pair.writer.may_write(LINK)
        pair.seconds += LEASE_SECONDS / 10
    assert pair.owner.quiet_in(LINK) > LONGEST_SECONDS


def test_an_answer_that_never_came_is_asked_for_again() -> None:
    pair = Pair()
    pair.writer.may_write(LINK)
    lost = pair.to_owner.pop()
    pair.seconds += LEASE_SECONDS
    pair.writer.may_write(LINK)
    assert pair.to_owner == [AskLease(2)]
    pair.writer.hear(LINK, Lease(lost.number, 2000))  # type: ignore[attr-defined]
    assert not pair.writer.may_write(LINK), "the answer to another question"


def test_who_never_had_a_lease_has_written_nothing() -> None:
    assert Pair().owner.quiet_in(LINK) == 0.0


def test_a_process_that_has_ended_is_waited_for_no_longer_than_what_is_on_its_way() -> None:
    pair = that_has_lost_its_link()
    pair.has_ended = True
    pair.seconds += 0.5
    assert pair.owner.quiet_in(LINK) == GONE_SECONDS
    pair.seconds += 0.5
    assert pair.owner.quiet_in(LINK) == GONE_SECONDS - 0.5, "from when it was found"


def test_a_lost_link_is_remembered_for_as_long_as_something_can_land() -> None:
    pair = that_has_lost_its_link()
    pair.owner.met(LINK + 1, pair)
    assert pair.owner.quiet_in(LINK) == LEASE_SECONDS + LONGEST_SECONDS
    pair.pass_time(LEASE_SECONDS + LONGEST_SECONDS)
    pair.owner.met(LINK + 2, pair)
    assert pair.owner.quiet_in(LINK) == 0.0


@pytest.mark.parametrize("is_seen_first_by", ["a turn", "a look", "another link"])
@pytest.mark.parametrize("after", [0.5, LEASE_SECONDS + LONGEST_SECONDS - 0.1])
def test_the_fence_counts_only_time_in_which_its_owner_runs(after: float, is_seen_first_by: str) -> None:
    """An owner that was paused for an hour: what was posted to it has waited, and lands once it goes on."""
    pair = that_has_lost_its_link()
    pair.pass_time(after)
    pair.seconds += 3600.0
    if is_seen_first_by == "a turn":
        pair.owner.turn()
    elif is_seen_first_by == "another link":
        pair.owner.met(LINK + 1, pair)
    left = pair.owner.quiet_in(LINK)
    assert LONGEST_SECONDS <= left <= LEASE_SECONDS + LONGEST_SECONDS
    pair.pass_time(left)
    assert pair.owner.quiet_in(LINK) == 0.0


@pytest.mark.parametrize("stall", [STILL_SECONDS + 0.1, 3600.0])
@pytest.mark.parametrize("between", [0.0, LONGEST_SECONDS - 1.0])
def test_the_fence_ends_whatever_stalls_its_owner_has(between: float, stall: float) -> None:
    """A thread that waits for Python's lock or for a core, at every turn or once in every transfer; a shutdown waits
    for the fence."""
    pair = that_has_lost_its_link()
    counted = 0.0
    while pair.owner.quiet_in(LINK):
        pair.seconds += stall
        pair.owner.turn()
        pair.pass_time(between)
        counted += STILL_SECONDS + between
        assert counted < LEASE_SECONDS + 2 * LONGEST_SECONDS + 2 * STILL_SECONDS + between
    assert counted >= LEASE_SECONDS + LONGEST_SECONDS


@pytest.mark.parametrize("stall", [STILL_SECONDS + 0.1, 3600.0])
def test_the_fence_of_a_process_that_has_ended_ends_whatever_stalls_its_owner_has(stall: float) -> None:
    pair = that_has_lost_its_link()
    pair.has_ended = True
    counted = 0.0
    while pair.owner.quiet_in(LINK):
        pair.seconds += stall
        counted += STILL_SECONDS
        assert counted <= 2 * GONE_SECONDS + STILL_SECONDS
    assert counted >= GONE_SECONDS


def test_an_owner_that_was_paused_again_does_not_count_its_pauses() -> None:
    """Behind the last time that its stalls put the fence off."""
    pair = that_has_lost_its_link()
    pair.pass_time(LEASE_SECONDS + LONGEST_SECONDS - 1.0)
    pair.seconds += 3600.0
    pair.pass_time(LONGEST_SECONDS - 1.0)
    pair.seconds += 3600.0
    left = pair.owner.quiet_in(LINK)
    assert left > STILL_SECONDS
    pair.seconds += 3600.0
    assert pair.owner.quiet_in(LINK) >= left - STILL_SECONDS


def test_what_is_on_its_way_from_a_process_that_has_ended_waits_for_an_owner_that_stands_still() -> None:
    """Bytes of a writer that was killed meanwhile are in the owner's own buffers, which it reads when it goes on."""
    pair = that_has_lost_its_link()
    pair.has_ended = True
    assert pair.owner.quiet_in(LINK) == GONE_SECONDS
    pair.seconds += 2 * GONE_SECONDS
    assert pair.owner.quiet_in(LINK) == GONE_SECONDS
    pair.pass_time(GONE_SECONDS)
    assert pair.owner.quiet_in(LINK) == 0.0


def test_a_fence_that_was_over_before_its_owner_stood_still_is_over() -> None:
    pair = that_has_lost_its_link()
    pair.pass_time(LEASE_SECONDS + LONGEST_SECONDS)
    pair.seconds += 3600.0
    assert pair.owner.quiet_in(LINK) == 0.0


def test_what_is_not_about_leases_is_for_others() -> None:
    assert not Pair().owner.hear(LINK, Stop(1))


def test_links_that_were_lost_are_kept_until_nothing_of_them_can_land() -> None:
    """And no longer: peers come and go for as long as an engine lives."""
    pair = that_has_lost_its_link()
    pair.owner.met(LINK + 1, pair)
    assert pair.owner.quiet_in(LINK) == LEASE_SECONDS + LONGEST_SECONDS
    for number in range(2, 10):
        pair.owner.lost(LINK + number - 1)
        pair.pass_time(LEASE_SECONDS + LONGEST_SECONDS)
        pair.owner.met(LINK + number, pair)
        assert list(pair.owner._links) == [LINK + number]
