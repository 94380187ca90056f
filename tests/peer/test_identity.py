"""Two engines exchange blocks only where all that decides their bytes is equal, and a refusal names what is not."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kv_connector.build import _peer_identity
from kv_connector.index import BlockGroup, CacheIdentity, RankIdentity, describe_groups
from kv_connector.peer.base import PeerError, PoolRegion
from kv_connector.peer.identity import PeerIdentity

CACHE = CacheIdentity("m@", "auto/bfloat16", "", 16, weights="commit a")
REGIONS = (PoolRegion(0, 256, 256), PoolRegion(0, 256, 256))
HERE = _peer_identity(RankIdentity(CACHE, 0, 1, "FlashAttention", "2 x bfloat16[1:16 2:8] in 256"), REGIONS)


def test_an_identity_of_a_rank_is_told_as_a_whole() -> None:
    """No field is left out on the way from the engine to the other one."""
    assert PeerIdentity.decode(HERE.encode()) == HERE
    left_out = {"cache", "world_size", "pool"}  # the last is of engines that store pools apart, and have no peers here
    named = {part.name for part in (*fields(CacheIdentity), *fields(RankIdentity))} - left_out
    assert {part.name for part in fields(PeerIdentity)} == named | {"pieces", "heads", "head_bytes"}
    assert (HERE.weights, HERE.backend, HERE.arrangement[:3]) == ("commit a", "FlashAttention", "2 x")


@pytest.mark.parametrize(
    "name", ["engine", "config", "settings", "weights", "draft_weights", "backend", "arrangement", "groups"]
)
def test_each_difference_is_named_with_both_values(name: str) -> None:
    there = replace(HERE, **{name: "other"})
    assert HERE.differences(there) == [f"{name} is {getattr(HERE, name)!r} here and 'other' there"]


@pytest.mark.parametrize(
    "change", [{"weights": 1}, {"rank": "0"}, {"rank": True}, {"pieces": "256"}, {"pieces": ["a"]}]
)
def test_what_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(PeerError, match="identity's"):
        PeerIdentity.decode(HERE.encode() | change)


def test_block_groups_are_told() -> None:
    """And those of full attention alone are what they were before there were others."""
    groups = describe_groups((BlockGroup(), BlockGroup(window_blocks=3)))
    there = _peer_identity(RankIdentity(CACHE, 0, 1, HERE.backend, HERE.arrangement, groups), REGIONS)
    assert HERE.differences(there) == ["groups is '' here and 'full of 1, window 3 of 1' there"]
