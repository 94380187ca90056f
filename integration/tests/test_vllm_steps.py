"""vLLM's words in ours: block tables, and which block holds which recurrent state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kv_connector.base import StateBlock
from kv_connector.engines.vllm.blocks import PoolBlocks
from kv_connector.engines.vllm.scheduler import SchedulerRole
from kv_connector.engines.vllm.steps import to_step, to_tables, told_ends, told_states
from kv_connector.index import BlockGroup
from kv_connector.types import NO_BLOCK, BlockHash

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


def shape_of(block_size: int, *groups: BlockGroup) -> Any:
    sizes = tuple(block_size * group.hashes_per_block for group in groups)
    ids = tuple(range(len(groups)))
    has_states = any(group.states_are_told for group in groups)
    return SimpleNamespace(
        block_size=block_size, groups=groups, group_ids=ids, block_sizes=sizes, has_states=has_states
    )


@pytest.fixture
def is_told() -> Any:
    """Whether an offered state is kept, for each of those that are ours: block 7 has the state behind 128 tokens of
    request a, in group 1, whose blocks have two hashes of 32 tokens."""
    hashes = [BlockHash(bytes([i]) * 32) for i in range(6)]
    blocks = [SimpleNamespace(block_hash=None) for _ in range(10)]
    blocks[7].block_hash = make_block_hash_with_group_id(hashes[3], 1)
    blocks[8].block_hash = make_block_hash_with_group_id(hashes[4], 1)
    groups = (BlockGroup(None, 2), BlockGroup(1, 2, states_are_told=True))
    role: Any = SchedulerRole.__new__(SchedulerRole)
    role.shape = shape_of(32, *groups)
    role._blocks = PoolBlocks(SimpleNamespace(blocks=blocks, reset_prefix_cache=None), {0: 0, 1: 1}, lambda: False)
    role._live = {"a": SimpleNamespace(block_hashes=hashes)}

    def tell(request_id: str = "a", group_id: int = 1, block_id: int = 7, num_tokens: int = 128, **step: Any) -> Any:
        offers = SimpleNamespace(boundary_state_offloads={request_id: [(group_id, block_id, num_tokens)]})
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        output: Any = SimpleNamespace(
            kv_connector_block_state=offers,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            preempted_req_ids=step.get("preempted"),
            num_scheduled_tokens={},
        )
        role._ends_within = step.get("ends_within", False)
        return [role._is_kept(state, output) for state in told_states(output, role.shape)]

    return tell


def test_a_state_inside_of_a_block_is_kept_where_hits_may_end_there(is_told: Any) -> None:
    assert is_told(block_id=8, num_tokens=160) == [False]
    assert is_told(block_id=8, num_tokens=160, ends_within=True) == [True]
    assert is_told(block_id=8, num_tokens=161, ends_within=True) == [False]


@pytest.mark.parametrize("wrong", ["another block", "another length", "another group", "no request", "preempted"])
def test_what_is_not_the_state_that_it_is_told_to_be_is_not_kept(is_told: Any, wrong: str) -> None:
    """What the engine tells is looked at against what it has cached under that name, and who asked for it."""
    assert is_told() == [True]
    changed = {
        "another block": is_told(block_id=8),
        "another length": [kept for more in (-64, -1, 1, 64, 640) for kept in is_told(num_tokens=128 + more)],
        "another group": is_told(group_id=0),
        "no request": is_told(request_id="b"),
        "preempted": is_told(preempted={"a"}),
    }
    assert not any(changed[wrong])


def test_a_state_that_a_request_begins_with_is_told_of() -> None:
    """Of new requests and of those that come back, where a block of the group ends there; the block behind it is that
    which the request goes on with. What goes on has told of its states."""
    shape = shape_of(32, BlockGroup(None, 2), BlockGroup(1, 2, states_are_told=True))
    shape.group_ids = 1, 0
    tables = {"whole": ([0, 7, 8], [3, 4, 5]), "none": ([9], [6]), "within": ([0, 7, 8], [3, 4, 5])}
    counts = {"whole": 128, "none": 0, "within": 96}
    new = [SimpleNamespace(req_id=i, block_ids=ids, num_computed_tokens=counts[i]) for i, ids in tables.items()]
    cached = SimpleNamespace(
        req_ids=["back", "goes on", "waits"],
        new_block_ids=[([17, 18], [13, 14]), ([27], [23]), None],
        num_computed_tokens=[64, 64, 64],
        resumed_req_ids={"back"},
    )
    output: Any = SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={"goes on": [(0, 26, 64), (1, 22, 64)]}),
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
    )
    told = [
        StateBlock("goes on", 1, 26, 64),
        StateBlock("goes on", 0, 22, 64),
        StateBlock("whole", 1, 7, 128),
        StateBlock("back", 1, 17, 64),
    ]
    assert list(told_states(output, shape)) == told
    # Inside of a block the state is gone on with in place: what was hit there is what vLLM has copied.
    output.kv_cache_block_copies = [SimpleNamespace(src_block_id=40, dst_block_id=7)]
    assert list(told_states(output, shape)) == [*told[:3], StateBlock("within", 1, 40, 96), told[3]]


def test_where_a_prompt_ends_inside_of_blocks_attention_is_told_of() -> None:
    """Once for all states there, and where a hit has been copied the copy, which the step appends to."""
    states = BlockGroup(1, 1, states_are_told=True)
    shape = shape_of(32, BlockGroup(None, 2), states, states, BlockGroup(None, 3))
    tables = {"ends": ([3, 4, 5], [], [], [6, 7]), "begins": ([13, 14], [], [], [16, 17])}
    output: Any = SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        kv_cache_block_copies=[SimpleNamespace(src_block_id=39, dst_block_id=13)],
    )
    told = [StateBlock("ends", 1, 9, 160), StateBlock("ends", 2, 8, 160)]
    told += [StateBlock("begins", 1, 40, 32), StateBlock("begins", 1, 19, 96)]
    gone = [StateBlock("gone", 1, 29, 96)]
    assert list(told_ends(output, shape, told + gone)) == [
        StateBlock("ends", 0, 5, 160),
        StateBlock("ends", 3, 7, 160),
        StateBlock("begins", 0, 13, 32),
        StateBlock("begins", 3, 16, 32),
        StateBlock("begins", 0, 14, 96),
    ]
