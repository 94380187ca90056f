"""What the ranks say of themselves, taken together."""

from __future__ import annotations

import pytest

from kv_connector.index import LEAST_REMEMBERED, CacheTier, PrefixTree
from kv_connector.scheduler.ranks import RankStates
from kv_connector.types import BlockHash, StepReport, Tier


@pytest.mark.parametrize(
    ("num_host_blocks", "num_remembered"), [(5, LEAST_REMEMBERED), (LEAST_REMEMBERED + 7, 2 * LEAST_REMEMBERED + 14)]
)
def test_twice_as_many_blocks_are_remembered_as_the_host_has(num_host_blocks: int, num_remembered: int) -> None:
    """A chat that comes back after prompts that fill the host twice is known as one that was there before."""
    tree = PrefixTree()
    ranks = RankStates(1, CacheTier(tree, Tier.HOST, 0))
    ranks.take_in(StepReport(1, 0, num_host_blocks=num_host_blocks))
    ranks.fit_host()
    others = [BlockHash(number.to_bytes(32)) for number in range(num_remembered)]
    chat, others = others[:3], others[3:]
    tree.settle(tree.insert_path(chat, 1.0))
    tree.settle(tree.insert_path(others, 2.0))
    assert len(tree.match(chat)) == 3


def test_the_largest_group_of_any_rank_is_that_of_all() -> None:
    ranks = RankStates(2, CacheTier(PrefixTree(), Tier.HOST, 0))
    assert ranks.group_blocks == 1
    for rank, group_blocks in ((0, 2), (1, 8), (0, 2)):
        ranks.take_in(StepReport(1, rank, group_blocks=group_blocks))
    assert ranks.group_blocks == 8
