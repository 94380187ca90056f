"""What looks at the index's columns lets go of them at once: they grow, whoever keeps the frames that looked."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

import kv_connector.index
from kv_connector.index import CacheTier, Event, PrefixTree, ReuseModel, Terms
from kv_connector.types import BlockHash, Tier

_INDEX = str(Path(kv_connector.index.__file__).parent)
_CHAT = 40  # blocks


@contextmanager
def keeping_frames() -> Iterator[list[FrameType]]:
    """As a profiler in the process does, or a traceback: every frame of the index lives on, with its variables."""
    kept: list[FrameType] = []

    def keep(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_filename.startswith(_INDEX):
            kept.append(frame)

    before = sys.getprofile()
    sys.setprofile(keep)
    try:
        yield kept
    finally:
        sys.setprofile(before)


def hashes_of(chat: int) -> list[BlockHash]:
    return [BlockHash(b"%32d" % (1000 * chat + block)) for block in range(_CHAT)]


def serve(tree: PrefixTree, tier: CacheTier, reuse: ReuseModel, chat: int) -> None:
    """A chat asks twice, and what is new of it is saved."""
    for _ in range(2):
        hashes, now = hashes_of(chat), float(chat)
        known = tree.match(hashes)
        reuse.visited(np.array(known, np.intc), np.ones(len(known), np.bool_))
        reuse.used(np.array(known[:1], np.intc))
        reuse.asked(len(hashes))
        reuse.learn()
        nodes = tree.insert_path(hashes, now, terms=Terms(tenant=0, priority=1, is_transient=chat % 2 == 0))
        tree.terms.use(nodes, Terms(tenant=0, priority=chat % 2, is_transient=False))
        absent = tier.absent(nodes)
        block_ids = tier.allocate_behind(len(absent), (hashes,), now, float("inf"))
        tier.attach(block_ids, [nodes[index] for index in absent[: len(block_ids)]], Event.SWAP_OUT)
        tier.fill(block_ids)
        tier.release(block_ids)
        tree.settle(nodes)


def test_columns_grow_whoever_keeps_the_frames_that_looked_at_them() -> None:
    tree = PrefixTree()
    reuse = ReuseModel(tree)
    tier = CacheTier(tree, Tier.HOST, 8 * _CHAT, log_removed=True, order=reuse)
    with keeping_frames() as kept:
        for number in range(60):
            serve(tree, tier, reuse, number)
            if number % 20 == 10:
                tier.reset()
                tier.resize(8 * _CHAT + _CHAT * number)
                tree.terms.bar_tenant(0)
    looked = {"visited", "used", "_look", "_open", "use", "reset", "remove_all_copies", "free_idle", "bar_tenant"}
    assert looked <= {frame.f_code.co_name for frame in kept}
    assert len(tree.asked) > 60 * _CHAT, "the tree has grown"
    tree.check()
    tier.check()
