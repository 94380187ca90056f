"""Hashes that somebody gives and that are no prefix: those that events tell of, without what is in front of them.

What lay elsewhere in the tree than where requests look for it ended the engine when one of them met it: with a hint to
pin behind a hit, and with a fetch from storage. So hashes are taken that requests have shown, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest

from kv_connector.errors import KVConnectorError
from kv_connector.index import BlockGroup, group_key
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import BlockHash
from tests.scheduler.control.test_hints import Hinted, on_host, prompt, wait
from tests.scheduler.control.test_keeping import pinned
from tests.scheduler.storage.test_companion import PROMPT, arrive, compute, drain, report, step
from tests.scheduler.storage.test_companion import make_half as make_half_with_storage
from tests.scheduler.test_half import Asked, make_half, run, save
from tests.scheduler.test_half import report as report_saves

ASKED = Asked("r", prompt(1, 6))
FIRST, END = ASKED.block_hashes[:3], ASKED.block_hashes[3:5]
NO_PREFIX = [
    END,
    END[::-1],
    [END[0], END[0]],
    [FIRST[0], END[0]],
    [FIRST[0], FIRST[1], FIRST[1]],
    [*ASKED.block_hashes, BlockHash(bytes(32))],
    [group_key(FIRST[0], 1)],
]
REFUSED = "not known as those of a prompt's blocks from its first one on"


@pytest.mark.parametrize("hashes", NO_PREFIX)
@pytest.mark.parametrize("groups", [(BlockGroup(),), (BlockGroup(), BlockGroup(window_blocks=2))])
def test_what_no_request_has_shown_as_a_prefix_is_refused_and_nothing_is_changed(
    hashes: Sequence[BlockHash], groups: Sequence[BlockGroup]
) -> None:
    half, _, _ = make_half_with_storage(groups=groups)
    for _ in range(2):  # before it was asked for, and behind that
        num_known = len(half.tree)
        with pytest.raises(KVConnectorError, match=REFUSED):
            half.pin_prefix(hashes)
        with pytest.raises(KVConnectorError, match=REFUSED):
            half.warm(hashes)
        assert half.pinned_prefixes() == [] and pinned(half) == 0 and len(half.tree) == num_known
        assert not half.has_pending_push_work()
        _life(half, ASKED)
        report(half, step(half))
    half.pin_prefix(ASKED.block_hashes[:4])
    assert pinned(half) == 4 * len(groups)
    half.check()


def test_what_is_known_is_taken_and_what_was_forgotten_is_not() -> None:
    half, _ = make_half()
    save(half, ASKED)
    half.pin_prefix(FIRST)
    half.unpin_prefix(FIRST)
    half.tree.max_remembered = 0
    half.reset_cache()
    save(half, Asked("other", prompt(2, 10)))
    with pytest.raises(KVConnectorError, match=REFUSED):
        half.pin_prefix(FIRST)
    half.pin_prefix(FIRST, are_given=False)
    half.pin_prefix(FIRST)
    half.unpin_prefix(FIRST)
    half.unpin_prefix(FIRST)
    assert pinned(half) == 0
    half.check()


def test_a_hint_to_pin_behind_a_hit_meets_nothing_that_an_operator_gave_by_mistake() -> None:
    half, _ = make_half(num_host_blocks=40)
    save(half, Asked("first", prompt(1, 3)))
    _give(half, END)
    save(half, ASKED)
    longer = Hinted("longer", [*ASKED.tokens, 9, 9, 9, 9], cache={"pin": True, "ttl_s": 1000})
    assert half.get_num_new_matched_tokens(longer, 0) == (24, False)
    half.update_state_after_alloc(longer, [list(range(20, 28))], 0, 24)
    report_saves(half, run(half, longer))
    half.request_finished(longer)
    assert on_host(half, longer) == pinned(half) == 7
    wait(half, 1001.0)
    assert pinned(half) == 0
    half.check()


def test_a_fetch_meets_nothing_that_an_operator_gave_by_mistake() -> None:
    half, _, _ = make_half_with_storage()
    asked = Asked("r", PROMPT)
    compute(half, Asked("first", PROMPT[:13]))
    drain(half)
    look_up = arrive(half, asked)
    _give(half, asked.block_hashes[3:5])
    for _ in range(2):  # what storage has of it is looked up and fetched
        report(half, step(half), found=2)
    report(half, [look_up], found=7)
    report(half, step(half))
    assert on_host(half, asked) == 10
    half.check()


def _give(half: SchedulerHalf, hashes: Sequence[BlockHash]) -> None:
    """Somebody tries both."""
    with suppress(KVConnectorError):
        half.pin_prefix(hashes)
    with suppress(KVConnectorError):
        half.warm(hashes)


def _life(half: SchedulerHalf, request: Asked) -> None:
    half.get_num_new_matched_tokens(request, 0)
    tables = [list(range(10 * group, 10 * group + 6)) for group in range(len(half._grouped.groups))]
    half.update_state_after_alloc(request, tables, 0, 0)
    report_saves(half, run(half, request))
    half.request_finished(request)
