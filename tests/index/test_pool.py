"""The pool of block ids: no id is lost, given out twice or freed twice, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_connector.errors import InvalidBlockError
from kv_connector.index import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a plain dictionary of reference counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.refs: dict[int, int] = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        ids = self.pool.allocate(count)
        if count > free:
            assert ids is None
            assert self.pool.num_free == free
            return
        assert ids is not None
        assert len(set(ids)) == count
        assert not set(ids) & set(self.refs)
        assert all(block_id < self.pool.capacity for block_id in ids)
        self.refs |= dict.fromkeys(ids, 1)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.refs)), max_size=3))
        self.pool.acquire(ids)
        for block_id in ids:
            self.refs[block_id] += 1

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(b for b, count in self.refs.items() if count)))
        self.refs[block_id] -= 1
        assert self.pool.release([block_id]) == ([block_id] if self.refs[block_id] == 0 else [])

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.refs)))
        if self.refs[block_id]:
            with pytest.raises(InvalidBlockError, match=f"block {block_id} is freed while"):
                self.pool.free([block_id])
        else:
            self.pool.free([block_id])
            del self.refs[block_id]
            with pytest.raises(InvalidBlockError, match=f"block {block_id} is not live"):
                self.pool.free([block_id])

    @rule(capacity=st.integers(0, 12))
    def resize(self, capacity: int) -> None:
        self.pool.resize(capacity)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.live_ids() == sorted(self.refs)
        assert all(self.pool.refs(block_id) == count for block_id, count in self.refs.items())
        within = sum(block_id < self.pool.capacity for block_id in self.refs)
        assert self.pool.num_free == self.pool.capacity - within


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase


def test_allocating_nothing_gives_nothing() -> None:
    """FastDeploy's `allocate(0)` handed out every block."""
    pool = BlockPool(4)
    assert pool.allocate(0) == []
    assert pool.num_free == 4
    assert BlockPool(0).allocate(0) == []


def test_a_failing_call_changes_nothing() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2) or []
    for call in (pool.acquire, pool.release):
        with pytest.raises(InvalidBlockError, match="block 9 "):
            call([first, second, 9])
        assert pool.refs(first) == pool.refs(second) == 1
    with pytest.raises(InvalidBlockError, match="more often"):
        pool.release([first, first])
    assert pool.refs(first) == 1


@pytest.mark.parametrize("call", [BlockPool, BlockPool(3).allocate, BlockPool(3).resize])
def test_negative_counts_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidBlockError, match="-1 blocks"):
        call(-1)


def test_a_double_free_in_a_batch_frees_none() -> None:
    pool = BlockPool(4)
    ids = pool.release(pool.allocate(2) or [])
    for wrong in ([ids[0], ids[0]], [ids[0], 3]):
        with pytest.raises(InvalidBlockError, match="is not live"):
            pool.free(wrong)
        assert pool.num_free == 2
        pool.check()
    pool.free(ids)
    assert pool.num_free == 4
