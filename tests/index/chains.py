"""Short names for prefixes, and prefixes put on a tier."""

from __future__ import annotations

from kv_connector.index import BlockState, CacheTier, Event
from kv_connector.types import BlockHash, Tier

START = {Tier.DEVICE: Event.COMPUTE, Tier.HOST: Event.SWAP_OUT}


def path(*names: int) -> list[BlockHash]:
    """Hashes of a chain: block names 1, 2, 3 become the prefixes (1), (1, 2), (1, 2, 3)."""
    return [BlockHash(bytes(names[: end + 1])) for end in range(len(names))]


def store(tier: CacheTier, hashes: list[BlockHash], now: float = 0.0) -> list[int]:
    """Make the whole path resident on the tier, where it is not yet, unreferenced; returns its nodes."""
    tree = tier.tree
    missing = sum((node := tree.get(h)) is None or tier.node_state(node) is BlockState.ABSENT for h in hashes)
    tree.touch(tree.match(hashes), now)
    ids = tier.allocate(missing)
    assert ids is not None, "no room"
    nodes = tree.insert_path(hashes, now)
    tree.touch(nodes, now)
    tier.attach(ids, [node for node in nodes if tier.node_state(node) is BlockState.ABSENT], START[tier.tier])
    tier.fill(ids)
    tier.release(ids)
    return nodes


def resident(tier: CacheTier, hashes: list[BlockHash]) -> int:
    return tier.resident_prefix(tier.tree.match(hashes))
