"""Names of blocks for storage and peers: equal for the same weights and adapter, and for no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kv_connector.base import Request
from kv_connector.config import Config
from kv_connector.index import BlockGroup, GroupedTree, PrefixTree, group_key
from kv_connector.scheduler import SchedulerHalf, names
from kv_connector.scheduler.names import BlockNames, Roots
from kv_connector.types import BlockHash, StepReport, StorageAction
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, run

PROMPT = list(range(41))  # ten blocks, and a token to compute
ROOT = BlockHash(b"r" * 32)


@dataclass
class Adapted(Asked):
    """A request of an adapter. The engine's hashes do not tell which: all are of one name."""

    adapter: str = ""


def adapter_of(request: Request) -> str:
    return getattr(request, "adapter", "")


def keys(adapter: str, policy: str) -> tuple[bytes, bytes]:
    """Under which names an engine asks storage for a prompt's blocks, and under which it stores them, whenever."""
    storage = {"path": "unused", "capacity": 8 << 20, "prefetch": "wait_complete"}
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": policy, "storage": storage})
    half = SchedulerHalf(config, 4, adapter_of=adapter_of)
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=100)])
    request = Adapted("a", PROMPT, adapter=adapter)
    half.on_new_request(request)
    (look_up,) = run(half).storage
    half.update_connector_output(
        [StepReport(half._step, 0, (look_up.job_id,), num_host_blocks=100, found=((look_up.job_id, 0),))]
    )
    admit(half, request)
    plan = run(half, request)
    half.request_finished(request)
    if policy == "write_back":
        blocks.order = [(index, block_hash) for index, block_hash in enumerate(request.block_hashes)]
        plan = run(half)
    done = tuple(job.job_id for job in plan.saves)
    half.update_connector_output([StepReport(half._step, 0, done, num_host_blocks=100)])
    (stored,) = [job for job in run(half).storage if job.action is StorageAction.BACK_UP]
    assert stored.num_blocks == 10
    return look_up.keys, stored.keys


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_an_adapter_has_stored_is_found_by_the_same_alone(policy: str) -> None:
    """Also where blocks are saved long after the request has ended, and nothing but their hashes is known."""
    found = {adapter: keys(adapter, policy) for adapter in ("", "trained", "retrained")}
    for asked, stored in found.values():
        assert asked == stored
    assert len({asked[:32] for asked, _ in found.values()}) == 3
    assert keys("trained", policy) == found["trained"], "the next start gives the same names"


def names_of(tree: PrefixTree | None = None, groups: Sequence[BlockGroup] = (BlockGroup(),)) -> BlockNames:
    return BlockNames(Roots(ROOT, adapter_of), GroupedTree(tree if tree is not None else PrefixTree(), groups))


def test_a_hash_that_two_adapters_share_has_no_name_that_others_know() -> None:
    """An adapter that was replaced under a live engine: which of them has computed the copy is not known."""
    old, new = (Adapted(adapter, PROMPT[:8], adapter=adapter) for adapter in ("old", "new"))
    mixed = names_of()
    mixed.admitted(old)
    as_old = mixed.of(old.block_hashes)
    mixed.admitted(new)
    mixed.finished(new)
    unsure = mixed.of(old.block_hashes)
    alone = names_of()
    alone.admitted(new)
    assert len({as_old, unsure, alone.of(new.block_hashes)}) == 3


def test_a_request_is_known_by_itself_and_not_by_its_id() -> None:
    """Ids come again, and with another adapter."""
    first, second = (Adapted("same", PROMPT[:8], adapter=adapter) for adapter in ("", "trained"))
    named = names_of()
    plain = named.of(first.block_hashes)
    named.admitted(first)
    named.admitted(second)
    assert named.of(second.block_hashes) != plain
    named.finished(second)
    assert named.of(second.block_hashes) != plain, "its blocks may be stored yet"


def test_names_of_before_a_reset_are_none_of_after() -> None:
    request = Adapted("a", PROMPT[:8], adapter="trained")
    named = names_of()
    named.admitted(request)
    before = named.of(request.block_hashes)
    named.reset()
    assert not {before[:32], before[32:]} & {(after := named.of(request.block_hashes))[:32], after[32:]}


def test_what_the_tree_forgets_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory does not grow, and what may be asked for is still known."""
    monkeypatch.setattr(names, "_LEAST", 4)
    tree = PrefixTree()
    named = names_of(tree)
    named._most = 4
    live = Adapted("live", [900 + i for i in range(8)], adapter="trained")
    named.admitted(live)
    expected = named.of(live.block_hashes)
    kept = Adapted("kept", PROMPT[:8], adapter="trained")
    tree.insert_path(kept.block_hashes, 0.0)
    named.admitted(kept)
    expected_kept = named.of(kept.block_hashes)
    named.finished(kept)
    for number in range(100):
        request = Adapted(f"r{number}", [1000 * number + i for i in range(8)], adapter="trained")
        named.admitted(request)
        named.finished(request)
        assert len(named._root_of) < 16
    assert named.of(live.block_hashes) == expected
    assert named.of(kept.block_hashes) == expected_kept


@pytest.mark.parametrize("adapter", ["", "trained"])
def test_blocks_of_several_groups_have_names_of_their_own_and_the_first_keeps_its_names(adapter: str) -> None:
    groups = (BlockGroup(), BlockGroup(window_blocks=1), BlockGroup(hashes_per_block=2))
    request = Adapted("a", PROMPT[:16], adapter=adapter)
    named, alone = names_of(groups=groups), names_of()
    for each in (named, alone):
        each.admitted(request)
    hashes = request.block_hashes
    text = named.of([group_key(block_hash, group) for group in range(3) for block_hash in hashes])
    found = [text[i : i + 32] for i in range(0, len(text), 32)]
    assert len(set(found)) == 12
    assert b"".join(found[:4]) == alone.of(hashes)
    others = names_of(groups=groups)
    others.admitted(other := Adapted("a", PROMPT[:16], adapter="another"))
    assert not set(found) & {others.of([group_key(h, group)]) for group in range(3) for h in other.block_hashes}


def test_a_hash_that_only_one_group_has_a_block_of_is_remembered_as_its_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first group's blocks have two hashes each: it has none that ends in the first hash."""
    monkeypatch.setattr(names, "_LEAST", 1)
    tree, request = PrefixTree(), Adapted("a", PROMPT[:8], adapter="trained")
    named = names_of(tree, (BlockGroup(hashes_per_block=2), BlockGroup(window_blocks=1)))
    named._most = 1
    key = group_key(request.block_hashes[0], 1)
    tree.insert_path([key], 0.0)
    named.admitted(request)
    expected = named.of([key])
    named.finished(request)
    assert named.of([key]) == expected
