"""vLLM's words in ours: block tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from kv_connector.engines.vllm.steps import to_step, to_tables
from kv_connector.types import NO_BLOCK

NO_NEW = {"scheduled_new_reqs": [], "preempted_req_ids": None}


def step_of(
    request_id: str, new_blocks: tuple[list[int], ...] | None, told: dict[str, Any], resumed: bool = False
) -> list[list[int]]:
    """The blocks that a step of one known request tells of."""
    cached = SimpleNamespace(
        req_ids=[request_id],
        new_block_ids=[new_blocks],
        num_computed_tokens=[96],
        resumed_req_ids={request_id} if resumed else set(),
    )
    output: Any = SimpleNamespace(**NO_NEW, scheduled_cached_reqs=cached, num_scheduled_tokens={request_id: 1})
    (item,) = to_step(output, (1, 0), told).scheduled
    assert (item.request_id, item.num_computed_tokens, item.num_scheduled_tokens) == (request_id, 96, 1)
    return [list(ids) for ids in item.new_block_ids]


def test_the_null_block_is_no_block_of_ours() -> None:
    """In front of a window vLLM's tables have block 0: a copy must neither read nor write it."""
    assert to_tables([[0, 0, 5], [7]]) == [[NO_BLOCK, NO_BLOCK, 5], [7]]
    assert step_of("a", ([3], [0]), {}) == [[NO_BLOCK], [3]]
    assert step_of("a", ([3, 4], [0, 6]), {}, resumed=True) == [[NO_BLOCK, 6], [3, 4]]


def test_a_step_tells_of_blocks_once() -> None:
    """What the admission has told already is left out, and what it could not tell is there."""
    assert step_of("a", ([3, 4], [5, 6]), {"a": [[5], [3]]}, resumed=True) == [[6], [4]]
    assert step_of("a", ([3, 4], [5, 6]), {"a": [[], []]}, resumed=True) == [[5, 6], [3, 4]]
    assert step_of("a", None, {}) == []
