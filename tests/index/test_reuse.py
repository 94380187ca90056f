"""What is learned from the blocks that are asked for again, and what goes first because of it."""

import random

import numpy as np
import pytest

from kv_connector.index import BlockPool, CacheTier, Event, PrefixTree, Recency, ReuseModel
from kv_connector.index.eviction import EvictionQueue
from kv_connector.index.reuse import _BUCKETS, _bucket, _cells
from kv_connector.types import BlockHash, Tier


class Host:
    """A host tier whose order is learned; every block of a request is saved that is worth it."""

    def __init__(self, capacity: int, declines: bool = False, remembered: int = 10_000) -> None:
        self.tree = PrefixTree(remembered)
        self.reuse = ReuseModel(self.tree)
        self.tier = CacheTier(self.tree, Tier.HOST, capacity, order=self.reuse)
        self.now = 0.0
        self._declines = declines

    def ask(self, *path: str, on_device: int = 0) -> int:
        """How many blocks behind those on the device the host has."""
        self.now += 1.0
        hashes = hashed(path)
        known = self.tree.match(hashes)
        self.reuse.visited(np.array(known, np.intc), np.arange(len(known)) >= on_device)
        self.reuse.asked(len(hashes))
        self.reuse.learn()
        self.tree.touch(known, self.now)
        found = self.tier.resident_prefix(known[on_device:])
        wanted = [*self.tier.absent(known), *range(len(known), len(hashes))]
        worth = self.reuse.worth_of(hashes, wanted[0]) if wanted and self._declines else float("inf")
        block_ids = self.tier.allocate_behind(len(wanted), (hashes,), self.now, worth)
        nodes = self.tree.insert_path(hashes, self.now)
        self.tier.attach(block_ids, [nodes[index] for index in wanted[: len(block_ids)]], Event.SWAP_OUT)
        self.tier.fill(block_ids)
        self.tier.release(block_ids)
        self.tree.settle(nodes)
        return found

    def holds(self, *path: str) -> bool:
        known = self.tree.match(hashed(path))
        return len(known) == len(path) and self.tier.resident_prefix(known) == len(path)

    def check(self) -> None:
        self.tree.check()
        self.tier.check()


def hashed(path: tuple[str, ...]) -> list[BlockHash]:
    return [BlockHash("/".join(path[: i + 1]).encode().rjust(32, b".")) for i in range(len(path))]


def teach(host: Host, rounds: int = 40) -> int:
    """Chats come back after a while, and one-off prompts of four blocks never do; hits of the last round."""
    num_hits = 0
    for number in range(rounds):
        num_hits = 0
        for chat in range(4):
            num_hits += host.ask(f"chat {chat}", "a", "b")
            host.ask(f"one-off {number} {chat}", "a", "b", "c")
    return num_hits


def test_chats_that_come_back_outlive_prompts_that_never_do() -> None:
    """The host holds less than what comes between two turns of a chat, so that the least recently used is always
    what is needed next."""
    learned, host_of_old = Host(24), Host(24)
    host_of_old.tier = CacheTier(host_of_old.tree, Tier.HOST, 24, order=Recency(host_of_old.tree))
    assert (teach(learned), teach(host_of_old)) == (12, 0)
    learned.check()


def test_what_many_ask_for_outlives_the_prompt_that_went_on_behind_it() -> None:
    """Room for a few blocks is made out of that prompt and of one-offs, though they were asked for later."""
    host = Host(8)
    for number in range(200):
        host.ask("system")
        for other in range(12):
            host.ask(f"one-off {number} {other}")
    host.ask("system", "branch")
    host.tier.discard(host.tier.blocks_of(host.tree.match(hashed(("system", "branch")))[1:]))
    host.ask("system", "other branch")
    for number in range(6):
        host.ask(f"later {number}")
    assert host.tier.pool.num_free == 0
    host.ask("last", "a", "b")
    assert host.holds("system")
    assert not host.holds("system", "other branch")
    host.check()


def test_until_something_is_learned_the_least_recently_used_goes() -> None:
    host = Host(3)
    for name in "abcad":
        host.ask(name)
    assert [host.holds(name) for name in "abcd"] == [True, False, True, True]


@pytest.mark.parametrize("on_device", [0, 1])
def test_what_is_asked_for_while_the_device_has_it_makes_no_use_of_the_host(on_device: int) -> None:
    host = Host(8)
    for _ in range(300):
        host.ask("system", on_device=on_device)
    (node,) = host.tree.match(hashed(("system",)))
    assert (host.reuse.worth(node) > 0) == (on_device == 0)


def test_what_is_worth_less_than_all_that_is_there_is_declined() -> None:
    host, saves_all = Host(12, declines=True), Host(12)
    for one in (host, saves_all):
        teach(one)
        for chat in range(4):
            one.ask(f"chat {chat}", "a", "b")
        one.ask("never seen", "a", "b")
    assert not host.holds("never seen")
    assert all(host.holds(f"chat {chat}", "a", "b") for chat in range(4))
    assert saves_all.holds("never seen", "a", "b")
    host.check()


LASTING = 150


def day(host: Host, rng: random.Random, number: int) -> None:
    """New prompts, each asked for four times, soon and not at once, and between them those of every day."""
    names = [f"day {number} {index // 4}" for index in range(800)]
    for index in range(len(names)):
        other = min(len(names) - 1, index + rng.randrange(40))
        names[index], names[other] = names[other], names[index]
    for name in names:
        host.ask(name, "a", "b", "c")
        host.ask(f"lasting {rng.randrange(LASTING)}", "a", "b", "c")


def test_a_batch_at_night_drives_out_little_and_by_day_new_prompts_are_let_in_again() -> None:
    """What is new by day comes back, so that what is new at night is taken for such until it is seen not to."""
    rng, host = random.Random(1), Host(800, declines=True)
    for number in range(6):
        day(host, rng, number)
    new = hashed(("never seen",))
    by_day = host.reuse.worth_of(new, 0)
    for number in range(300):
        host.ask(f"night {number}", "a", "b", "c")
    assert host.reuse.worth_of(new, 0) < by_day / 10
    assert sum(host.holds(f"lasting {number}", "a", "b", "c") for number in range(LASTING)) > LASTING / 2
    day(host, rng, 6)
    assert host.reuse.worth_of(new, 0) > by_day / 2
    host.check()


def test_how_often_a_block_was_asked_for_is_told_apart_by_half_octaves() -> None:
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    (node,) = tree.insert_path(hashed(("one",)), 0.0)
    classes = []
    for visits in range(40):
        tree.visits[node] = visits + 0.9
        classes.append(reuse.class_of(node))
    begins = [visits for visits in range(40) if not visits or classes[visits] != classes[visits - 1]]
    assert begins == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert classes == sorted(classes) and classes[-1] == 10


def test_what_was_declined_is_known_and_saved_when_its_kind_turns_out_to_come_back() -> None:
    host = Host(12, declines=True)
    teach(host)
    assert not host.holds("never seen")
    for _ in range(40):
        for name in ("one", "two", "three"):
            host.ask(name, "a", "b", "c")
    assert [host.ask(name, "a", "b", "c") for name in ("one", "two", "three")] == [4, 4, 4]


def test_the_newest_blocks_of_a_chat_are_of_its_visits_and_those_of_a_branch_are_new() -> None:
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    reuse.resized(1 << 60)  # nothing fades
    first = tree.insert_path(hashed(("system", "hello")), 0.0)
    for _ in range(3):
        reuse.visited(np.array(first, np.intc), np.ones(2, bool))
        reuse.asked(2)
    longer = tree.insert_path(hashed(("system", "hello", "there", "you")), 1.0)
    assert [tree.visits[node] for node in longer] == [3, 3, 3, 3]
    other = tree.insert_path(hashed(("system", "goodbye")), 2.0)
    assert tree.visits[other[-1]] == 0, "another chat begins behind the same system prompt"
    assert [tree.visits[node] for node in tree.insert_path(hashed(("alone",)), 3.0)] == [0]


def test_the_newest_blocks_of_a_chat_that_is_pinned_are_of_its_visits() -> None:
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    first = tree.insert_path(hashed(("hello",)), 0.0)
    tree.pin(first)
    reuse.visited(np.array(first, np.intc), np.ones(1, bool))
    reuse.asked(1)
    assert [tree.visits[node] for node in tree.insert_path(hashed(("hello", "there")), 1.0)] == [1, 1]


def test_what_is_asked_for_now_and_then_never_counts_as_much_as_what_is_asked_for_all_the_time() -> None:
    """However long an engine runs: else all that ever comes back would be alike one day."""
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    reuse.resized(8)
    (often,), (rarely,) = tree.insert_path(hashed(("often",)), 0.0), tree.insert_path(hashed(("rarely",)), 0.0)
    for number in range(20_000):
        reuse.visited(np.array([often if number % 100 else rarely], np.intc), np.ones(1, bool))
        reuse.asked(8)
    assert reuse.class_of(rarely) < reuse.class_of(often)


def test_prompts_that_come_once_make_nothing_less_popular() -> None:
    """A night of them is over, and the chat of the day before is still the one that comes back."""
    host = Host(24, declines=True)
    for number in range(60):
        host.ask("popular", on_device=number % 2)
    (node,) = host.tree.match(hashed(("popular",)))
    before = host.tree.visits[node]
    for number in range(300):
        host.ask(f"one-off {number}", "a", "b", "c")
    host.ask("popular")
    assert host.tree.visits[node] == pytest.approx(before + 1, rel=0.05)


def test_what_goes_on_where_nobody_did_is_as_popular_as_the_chat_it_belongs_to() -> None:
    """The newest blocks of a chat were visited when they came: what was visited before does not fade them."""
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    reuse.resized(1)
    (other,), (first,) = tree.insert_path(hashed(("other",)), 0.0), tree.insert_path(hashed(("hello",)), 0.0)
    for _ in range(100):
        reuse.visited(np.array([other], np.intc), np.ones(1, bool))
        reuse.asked(1)
    for _ in range(3):
        reuse.visited(np.array([first], np.intc), np.ones(1, bool))
        reuse.asked(1)
    longer = tree.insert_path(hashed(("hello", "there")), 1.0)
    at_first = tree.visits[longer[-1]]
    reuse.visited(np.array(longer[1:], np.intc), np.ones(1, bool))
    reuse.asked(1)
    assert tree.visits[longer[-1]] == at_first + 1 > 3


class Classes(Recency):
    """Of nodes by hand, the higher ones worth more."""

    def __init__(self, class_of: dict[int, int]) -> None:
        self.classes = class_of

    def class_of(self, node: int) -> int:
        return self.classes[node]

    def worth(self, node: int) -> float:
        return float(self.classes[node])


@pytest.mark.parametrize("then", [0, 1, 2])
def test_a_block_of_another_class_is_found_there(then: int) -> None:
    tree = PrefixTree()
    nodes = [tree.insert_path(hashed((name,)), 0.0)[0] for name in ("changed", "other", "third")]
    order = Classes(dict(zip(nodes, (1, 1, 2), strict=True)))
    queue = EvictionQueue(tree, Tier.HOST, [], order, lambda node: True)
    for node in nodes:
        queue.push(node)
    tree.touch(nodes[:1], 1.0)
    order.classes[nodes[0]] = then
    popped = [first[2] for _ in nodes if (first := queue.pop()) is not None]
    assert popped == sorted(nodes, key=lambda node: (order.classes[node], tree.used[node], node))
    queue.check(BlockPool(len(nodes)))


def test_what_comes_back_at_the_same_age_each_time_is_kept() -> None:
    """Also where it never is of that age when the ages of all blocks are looked at."""
    host = Host(512)
    hot = ["hot", *map(str, range(63))]
    found = []
    for number in range(1500):
        if number % 10 == 0:
            found.append(host.ask(*hot))
        else:
            host.ask(f"one-off {number}", *map(str, range(39)))
    assert found[-100:] == [64] * 100


def test_what_is_forgotten_is_exposed_to_nothing() -> None:
    host = Host(4, remembered=10)
    for number in range(300):
        host.ask(f"one-off {number}", "a", "b")
    host.tier.reset()
    host.tree.max_remembered = 0
    host.tree.settle(())
    assert host.reuse._open().sum() == len(host.tree) < 10
    host.check()


def test_an_idle_night_ages_nothing() -> None:
    host = Host(24)
    teach(host)
    host.now += 1e6
    host.ask("good morning")
    assert [host.ask(f"chat {chat}", "a", "b") for chat in range(4)] == [3, 3, 3, 3]


def test_equal_histories_learn_the_same() -> None:
    def outcome() -> list[int]:
        rng, host = random.Random(3), Host(40)
        return [host.ask(f"{rng.randrange(30)}", "a", f"{rng.randrange(3)}") for _ in range(600)]

    assert outcome() == outcome()


@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_lost_or_given_twice_whatever_is_asked_for(seed: int) -> None:
    """A node that waits to be evicted and loses its last child is not taken twice."""
    rng, host = random.Random(seed), Host(rng_capacity := 5 + seed, declines=seed % 2 == 0, remembered=30)
    for step in range(1500):
        depth = rng.randint(1, 6)
        path = [f"{rng.randrange(3)}"] + [f"{rng.randrange(2)}" for _ in range(depth - 1)]
        host.ask(*path, on_device=rng.randint(0, 2))
        if step % 50 == 0:
            host.tier.resize(rng.choice([rng_capacity, rng_capacity // 2, rng_capacity + 3]))
            host.check()
    host.check()


def test_ages_are_put_into_the_same_buckets_one_by_one_and_at_once() -> None:
    ages = [0, *(1 << power for power in range(46)), *(3 << power for power in range(44)), 5, 6, 7, 1000, 12_345_678]
    cells = _cells(np.zeros(len(ages), np.uintc), np.array(ages, np.int64))
    assert cells.tolist() == [_bucket(age) for age in ages]
    assert max(cells) < _BUCKETS
    assert sorted(cells.tolist()) == [_bucket(age) for age in sorted(ages)], "older is not in a younger bucket"
