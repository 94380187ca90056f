"""Victims up a prefix: the blocks of neighbouring rows are compared at once, which decides nothing else."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kv_connector.index import CacheTier, Event, PrefixTree, Recency, ReuseModel, eviction
from kv_connector.types import BlockHash, Tier


def evicted(seed: int) -> list[list[BlockHash]]:
    """What goes in each step in which chats with long prompts come, branch, come back, are used, pinned and lost."""
    rng, now = random.Random(seed), 0.0
    tree = PrefixTree(rng.choice([0, 50, 1000]))
    reuse = ReuseModel(tree)
    reuse.least_part = 64
    host = CacheTier(tree, Tier.HOST, 160, log_removed=True, order=rng.choice([reuse, Recency(tree)]))
    chats: list[list[BlockHash]] = [[] for _ in range(6)]
    pinned: list[list[int]] = []
    in_use: list[list[int]] = []
    steps = []
    for _ in range(300):
        now += rng.choice([0.0, 1.0])
        number = rng.randrange(len(chats))
        stem = rng.choice(chats)
        if rng.random() < 0.3:
            chats[number] = stem[: rng.randint(0, len(stem))]
        chats[number] = chats[number] + [BlockHash(rng.randbytes(32)) for _ in range(rng.randint(0, 40))]
        path = chats[number] = chats[number][:100]
        known = tree.match(path)
        if rng.random() < 0.7:  # else storage brings it
            reuse.visited(np.array(known, np.intc), np.ones(len(known), bool))
            reuse.asked(len(path))
            reuse.learn()
        tree.touch(known[rng.choice([0, len(known) // 2, len(known)]) :], now)
        absent = [*host.absent(known), *range(len(known), len(path))][: rng.choice([5, 100])]
        block_ids = host.allocate_behind(len(absent), (path,), now, rng.choice([float("inf"), 0.01]))
        nodes = tree.insert_path(path, now)
        host.attach(block_ids, [nodes[index] for index in absent[: len(block_ids)]], Event.SWAP_OUT)
        host.fill(block_ids)
        host.release(block_ids)
        what = rng.random()
        if what < 0.1:
            pinned.append(nodes[: rng.randint(0, len(nodes))])
            tree.pin(pinned[-1])
        resident = [block_id for block_id in host.blocks_of(nodes) if block_id >= 0]
        tree.settle(nodes)
        if 0.1 < what < 0.25:
            in_use.append(resident[: rng.randint(0, len(resident))])
            host.acquire(in_use[-1])
        elif what < 0.4 and in_use:
            host.release(in_use.pop(0))
        elif 0.4 < what < 0.6 and pinned:
            host.unpin(pinned.pop(0))
        elif 0.6 < what < 0.65 and resident:
            host.discard([rng.choice(resident)])
        elif 0.7 < what < 0.8:
            host.next_reused(rng.randint(1, 200))
        elif what > 0.9:
            host.release(host.allocate_up_to(rng.randint(1, 60), now))
        host.check()
        tree.check()
        steps.append(list(host.removed))
        host.removed.clear()
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_what_is_compared_at_once_goes_as_what_is_looked_at_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_LEAST_RUN", 1)
    at_once = evicted(seed)
    monkeypatch.setattr(eviction, "_LEAST_RUN", 1 << 30)
    assert sum(map(len, at_once)) > 1000
    assert at_once == evicted(seed)


class Chats:
    """A host with room for all that comes; blocks of one chat at a time."""

    def __init__(self, order: Recency | None = None) -> None:
        self.tree = PrefixTree()
        self.host = CacheTier(self.tree, Tier.HOST, 64, log_removed=True, order=order)

    def save(self, name: str, now: float, *, behind: Sequence[BlockHash] = (), count: int = 1) -> list[BlockHash]:
        path = [*behind, *(BlockHash(f"{name} {number}".encode()) for number in range(count))]
        nodes = self.tree.insert_path(path, now)[len(behind) :]
        block_ids = self.host.allocate(count)
        assert block_ids is not None
        self.host.attach(block_ids, nodes, Event.SWAP_OUT)
        self.host.fill(block_ids)
        self.host.release(block_ids)
        return path

    def evicted(self, count: int) -> list[BlockHash]:
        self.host.release(self.host.allocate_up_to(self.host.pool.num_free + count))
        self.host.check()
        return self.host.removed


def test_what_another_chat_goes_on_from_outlives_that_chat() -> None:
    chats = Chats()
    first = chats.save("first", 0.0, count=40)
    second = chats.save("second", 1.0, behind=first[:10])
    assert chats.evicted(35) == [*first[:9:-1], second[10], *first[9:5:-1]]


def test_a_block_that_was_used_since_outlives_what_is_older() -> None:
    chats = Chats()
    first = chats.save("first", 0.0, count=40)
    second = chats.save("second", 5.0)
    chats.tree.touch(chats.tree.match(first)[5:6], 9.0)
    assert chats.evicted(38) == [*first[:5:-1], second[0], *first[5:2:-1]]


class Favourites(Recency):
    """Nodes of the second class are worth more."""

    def __init__(self) -> None:
        self.nodes: set[int] = set()

    def class_of(self, node: int) -> int:
        return int(node in self.nodes)

    def worth(self, node: int) -> float:
        return float(node in self.nodes)


def test_a_block_that_waits_in_another_class_is_evicted_once() -> None:
    order = Favourites()
    chats = Chats(order)
    order.nodes |= {20, 41, 42}  # rows as they come
    old = chats.tree.match(chats.save("first", 0.0, count=20))
    first = chats.save("longer", 0.0, behind=chats.tree.hashes_of(old), count=20)
    second, third = chats.save("second", -1.0), chats.save("third", 7.0)
    assert [*old[-1:], *chats.tree.match(second), *chats.tree.match(third)] == [20, 41, 42]
    order.nodes.remove(20)
    assert chats.evicted(42) == [*first[:19:-1], *second, *first[19::-1], *third]


@pytest.mark.parametrize("column", ["visits", "asked"])
def test_the_head_of_a_prefix_that_is_worth_more_than_its_tail_does_not_go_with_it(column: str) -> None:
    """It was asked for more often, or at another time, and used when all of it was."""
    order = Favourites()
    chats = Chats(order)
    first, second = chats.save("first", 0.0, count=40), chats.save("second", 5.0)
    heads = chats.tree.match(first)[:10]
    order.nodes |= set(heads)
    for node in heads:
        getattr(chats.tree, column)[node] = 7
    assert chats.evicted(31) == [*first[:9:-1], second[0]]


def test_what_is_pinned_stays_when_all_behind_it_goes() -> None:
    chats = Chats()
    path = chats.save("pinned", 0.0, count=8)
    chats.tree.pin(chats.tree.match(path)[:4])
    assert chats.evicted(8) == path[:3:-1]


def test_a_head_waits_for_a_leaf_that_is_older_though_one_in_front_of_that_was_used_since() -> None:
    chats = Chats()
    path = chats.save("path", 0.0, count=2)
    used, old = chats.save("used", 1.0), chats.save("old", 2.0)
    chats.tree.touch(chats.tree.match(path)[:1], 5.0)
    chats.tree.touch(chats.tree.match(used), 9.0)
    assert chats.evicted(3) == [path[1], old[0], path[0]]
