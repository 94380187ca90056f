"""The tree of an engine that shows parts of prefixes: what follows what is learned as they overlap."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.index import ROOT, BlockState, CacheTier, Event, FragmentTree
from kv_connector.types import BlockHash, Tier


def chain(length: int, name: str = "chat") -> list[BlockHash]:
    """Hashes of a prefix."""
    return [BlockHash(f"{name} {i}".encode().ljust(32)) for i in range(length)]


def save(host: CacheTier, hashes: list[BlockHash], now: float) -> list[int]:
    """Give copies to as many of these blocks as there is room for; the nodes of all."""
    blocks = host.allocate_up_to(len(hashes))  # first: what is evicted for it may be forgotten
    nodes = host.tree.insert_path(hashes, now)
    missing = [nodes[i] for i in host.absent(nodes)][: len(blocks)]
    host.attach(blocks[: len(missing)], missing, Event.SWAP_OUT)
    host.fill(blocks[: len(missing)])
    host.release(blocks)
    host.tree.settle(nodes)
    return nodes


def test_a_tail_finds_its_head() -> None:
    """Shown apart, both begin where nothing is known; shown together, one follows the other."""
    tree, hashes = FragmentTree(), chain(6)
    tail = tree.insert_path(hashes[3:], now=1.0)
    head = tree.insert_path(hashes[:3], now=2.0)
    assert tree.parent[tail[0]] == tree.parent[head[0]] == ROOT
    assert tree.insert_path(hashes, now=3.0) == head + tail
    assert tree.parent[tail[0]] == head[-1]
    assert tree.insert_path(hashes[3:], now=4.0) == tail, "a tail alone says nothing of what is in front of it"
    assert tree.parent[tail[0]] == head[-1]
    tree.settle(head + tail)
    tree.check()


def test_the_tail_goes_first_once_its_head_is_known() -> None:
    """The tail was used before its head, and yet it goes first: without the head nobody reaches it."""
    tree, hashes = FragmentTree(), chain(4)
    host = CacheTier(tree, Tier.HOST, 4)
    save(host, hashes[:2], now=1.0)
    save(host, hashes[2:], now=2.0)
    nodes = tree.insert_path(hashes, now=3.0)
    host.release(host.allocate(1) or [])
    assert [host.node_state(node) for node in nodes] == [BlockState.RESIDENT] * 3 + [BlockState.ABSENT]
    tree.check()
    host.check()


def test_what_lies_between_is_filled_in() -> None:
    """A fragment with blocks that nobody has shown, in front of others that somebody has."""
    tree, hashes = FragmentTree(), chain(8)
    ends = tree.insert_path(hashes[:2], now=1.0), tree.insert_path(hashes[6:], now=1.0)
    nodes = tree.insert_path(hashes, now=2.0)
    assert nodes[:2] == ends[0] and nodes[6:] == ends[1]
    assert [tree.parent[node] for node in nodes] == [ROOT, *nodes[:-1]]
    assert tree.match(hashes) == nodes
    tree.settle(nodes)
    tree.check()


@settings(deadline=None)  # of a busy machine
@given(seed=st.integers(0, 2**32 - 1))
def test_any_fragments_in_any_order(seed: int) -> None:
    """Whatever is shown, saved and evicted: counts hold, and no block follows a wrong one."""
    chance = random.Random(seed)
    tree = FragmentTree(max_remembered=chance.choice([0, 8, 1000]))
    host = CacheTier(tree, Tier.HOST, chance.randrange(1, 20))
    common = chain(8, "common")
    chats = [common[: chance.randrange(9)] + chain(8, f"chat {i}") for i in range(3)]
    for now in range(30):
        hashes = chance.choice(chats)
        first = chance.randrange(len(hashes))
        part = hashes[first : chance.randrange(first, len(hashes)) + 1]
        if chance.random() < 0.7:
            save(host, part, float(now))
        else:
            nodes = tree.insert_path(part, float(now))
            assert tree.hashes_of(nodes) == part
            tree.settle(nodes)
        for chat in chats:
            for node, before in zip(tree.match(chat)[1:], tree.match(chat), strict=False):
                assert tree.parent[node] in (ROOT, before)
        tree.check()
        host.check()


def test_room_for_a_fragment_is_not_made_out_of_it() -> None:
    """Its blocks are counted from where others began to show them."""
    tree, hashes = FragmentTree(), chain(6)
    host = CacheTier(tree, Tier.HOST, 4)
    save(host, hashes[:4], now=1.0)
    assert not host.has_room_behind([hashes[3:]], now=2.0)
    assert host.allocate_behind(2, [hashes[3:]], now=2.0) == []
    assert host.has_room_behind([hashes[4:]], now=3.0)
    assert len(host.allocate_behind(2, [chain(2, "others")], now=3.0)) == 2
