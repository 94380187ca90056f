"""What a search says is brought to the host, and the look-up of requests is asked: it finds the longest hit that the
host and storage have together, whatever each of them has of which groups."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.index import BlockGroup, CacheTier, Event, GroupedTree, Lookup, PrefixTree, Recency
from kv_connector.scheduler.storage import search as module
from kv_connector.scheduler.storage.grouping import Grouping
from kv_connector.scheduler.storage.search import Search
from kv_connector.types import BlockHash, Tier

NUM_WORLDS = 800


@dataclass
class World:
    """A prefix of a model: of each group the blocks that the host has, and those that storage has."""

    grouped: GroupedTree
    host: CacheTier
    hashes: list[BlockHash]
    group_blocks: int
    held: list[set[int]] = field(default_factory=list)
    stored: list[set[int]] = field(default_factory=list)

    def put(self, group: int, blocks: list[int], now: float) -> None:
        """These blocks are on the host: of full attention they are behind those that are."""
        grouped, host = self.grouped, self.host
        named = range(blocks[-1] + 1) if group in grouped.full else blocks
        nodes = grouped.insert(self.hashes, group, now, named)[-len(blocks) :]
        ids = host.allocate(len(nodes))
        host.attach(ids, nodes, Event.FETCH)
        host.fill(ids)
        host.release(ids)

    def search(self) -> Search:
        """All questions are answered."""
        grouping = Grouping(self.grouped, self.host, SimpleNamespace(group_blocks=self.group_blocks))  # type: ignore[arg-type]
        search = Search(self.grouped, self.host, grouping, self.hashes)
        while search.questions:
            for asked in search.take():
                if asked.group not in self.grouped.full:
                    least = self.grouped.needed(0, search.host_end)[asked.group]
                    assert asked.blocks.start >= least.start, "the host has a hit that ends there"
                bits = sum(1 << i for i, block in enumerate(asked.blocks) if block in self.stored[asked.group])
                search.answer(asked, bits)
        return search

    def fetch(self, search: Search, end: int) -> int:
        """Bring what storage is to bring for this end; returns how many blocks that was."""
        count = 0
        for group, blocks in enumerate(search.needed(end)):
            stop = search.stop_of(group, end)
            wanted = [block for block in blocks if block < stop and block not in self.held[group]]
            assert self.stored[group].issuperset(wanted)
            count += len(wanted)
            if wanted:
                self.put(group, wanted, 2.0)
        return count

    def longest(self) -> int:
        """A hit if all of storage were on the host, but for full attention in objects that begin behind all of it."""
        grouped, end = self.grouped, len(self.hashes)
        for group in grouped.full:
            num_held = len(self.held[group])
            begun = num_held - num_held % self.group_blocks
            num_stored = len(self.stored[group])
            num_there = max(num_held, num_stored) if num_stored > begun else num_held
            end = min(end, num_there * grouped.groups[group].hashes_per_block)
        return grouped.hit_end(0, end, lambda g, block: block in self.held[g] or block in self.stored[g])


def draw(rng: random.Random, drop_last_block: bool) -> World:
    groups = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        size = rng.choice([1, 1, 2, 3])
        window, chunk = BlockGroup(rng.choice([1, 2, 3, 5]), size), BlockGroup(None, size, False, rng.choice([1, 2, 4]))
        groups.append(
            rng.choices((BlockGroup(None, size), window, chunk, BlockGroup(1, size, True)), (40, 20, 20, 20))[0]
        )
    groups.sort(key=lambda group: not group.is_full)
    tree = PrefixTree()
    hashes = [BlockHash(bytes((i,)) * 32) for i in range(rng.randrange(1, 50))]
    host = CacheTier(tree, Tier.HOST, 4000, order=Recency(tree))
    world = World(GroupedTree(tree, groups, drop_last_block), host, hashes, rng.choice([1, 1, 2, 4]))
    for g, group in enumerate(groups):
        count = len(hashes) // group.hashes_per_block
        if group.is_full:
            world.held.append(set(range(rng.choice([0, rng.randrange(count + 1)]))))
            world.stored.append(set(range(rng.choice([0, count, rng.randrange(count + 1)]))))
        else:
            shares = rng.choice([0, 0.1, 0.5]), rng.choice([0.05, 0.3, 0.8, 1.0])
            held, stored = ({block for block in range(count) if rng.random() < share} for share in shares)
            world.held.append(held)
            world.stored.append(stored)
        if world.held[g]:
            world.put(g, sorted(world.held[g]), 1.0)
    return world


@pytest.fixture(params=[False, True])
def drops_last_block(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_the_longest_hit_of_host_and_storage_is_found(drops_last_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(NUM_WORLDS):
        rng = random.Random(seed)
        world = draw(rng, drops_last_block)
        monkeypatch.setattr(module, "_ENDS", rng.choice([1, 2, 4, 64]))
        search, longest = world.search(), world.longest()
        end = search.fit()
        assert end == max(longest, search.host_end), seed
        if end > search.host_end:
            num_lacking = search.num_lacking(end)
            assert world.fetch(search, end) == num_lacking, seed
        assert Lookup(world.grouped, world.host).find(world.hashes, 0, len(world.hashes)) == longest, seed


def test_what_there_is_no_room_for_is_not_fetched(drops_last_block: bool) -> None:
    """A hit that is shorter is, where one is longer than what the host has."""
    for seed in range(NUM_WORLDS):
        rng = random.Random(seed)
        world = draw(rng, drops_last_block)
        search = world.search()
        most = rng.randrange(1, 20)
        end = search.fit(most)
        if end > search.host_end:
            assert world.fetch(search, end) <= most, seed
            assert Lookup(world.grouped, world.host).find(world.hashes, 0, len(world.hashes)) == end, seed
