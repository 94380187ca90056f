"""Hashes that an operator gives and that are no prefix: those that events tell of, without what is in front of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_connector.errors import KVConnectorError
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import BlockHash
from tests.scheduler.control.test_hints import Hinted, on_host, prompt, wait
from tests.scheduler.control.test_keeping import Remembered, pinned
from tests.scheduler.storage.test_companion import PROMPT, fetch, report, step
from tests.scheduler.storage.test_companion import make_half as make_half_with_storage
from tests.scheduler.test_half import Asked, make_half, save

ASKED = Asked("r", prompt(1, 6))
END = ASKED.block_hashes[3:5]


@pytest.mark.parametrize("groups", [(BlockGroup(),), (BlockGroup(), BlockGroup(window_blocks=2))])
def test_who_pins_the_end_of_a_prompt_that_nobody_has_asked_for_yet_stops_no_engine(
    groups: Sequence[BlockGroup],
) -> None:
    half, _ = make_half(num_host_blocks=40, groups=groups)
    half.pin_prefix(END, ttl_s=50)
    num_pinned = pinned(half)
    asked = Hinted("r", prompt(1, 6), cache={"pin": True, "ttl_s": 1000})
    _life(half, asked)
    half.check()
    assert on_host(half, asked) == 6, "what requests show counts"
    wait(half, 100.0)
    assert pinned(half) == 6 * len(groups), "the operator's are over"
    wait(half, 1000.0)
    assert pinned(half) == 0 < num_pinned
    half.check()


@pytest.mark.parametrize("hashes", [END, END[::-1], [END[0], END[0]], [ASKED.block_hashes[0], END[0]]])
def test_what_is_surely_no_prefix_is_refused_and_nothing_is_changed(hashes: Sequence[BlockHash]) -> None:
    half, _ = make_half()
    save(half, ASKED)
    with pytest.raises(KVConnectorError, match="give those of all blocks from the first one on, in order"):
        half.pin_prefix(hashes)
    assert half.pinned_prefixes() == [] and pinned(half) == 0
    save(half, ASKED)
    half.check()


def test_an_engine_starts_with_a_pin_of_the_last_start_that_was_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    half, _ = make_half()
    half.pin_prefix(ASKED.block_hashes)
    (kept,) = half.pinned_prefixes()
    half, _ = make_half()
    half.keep_pins(Remembered([kept, kept._replace(block_hashes=tuple(END))]))
    assert [pin.block_hashes for pin in half.pinned_prefixes()] == [kept.block_hashes]
    assert "a pin of the last start does not come back: these 2 hashes are no prefix" in caplog.text


def test_what_is_warmed_takes_no_block_from_where_requests_have_shown_it() -> None:
    half, _, _ = make_half_with_storage()
    asked = Asked("r", PROMPT)
    assert half.warm(asked.block_hashes[3:5])
    (look_up,) = step(half)
    (job,) = fetch(half, asked)
    report(half, [job])
    nodes = half.tree.match(asked.block_hashes)
    report(half, [look_up], found=2)
    assert step(half) == () and half.tree.match(asked.block_hashes) == nodes
    half.check()


def test_what_was_warmed_by_mistake_stops_no_engine() -> None:
    half, _, _ = make_half_with_storage()
    asked = Asked("r", PROMPT)
    assert half.warm(asked.block_hashes[3:5])
    report(half, step(half), found=2)
    (wrong,) = step(half)
    (job,) = fetch(half, asked)
    report(half, [wrong, job])
    assert on_host(half, asked) == 10
    half.check()


def test_a_mistake_that_is_pinned_twice_is_undone_twice() -> None:
    half, _ = make_half()
    half.pin_prefix(END)
    save(half, ASKED)
    half.tree.max_remembered = 0
    half.reset_cache()
    save(half, Asked("other", prompt(2, 10)))  # what requests have shown is forgotten
    half.pin_prefix(END)
    half.unpin_prefix(END)
    half.unpin_prefix(END)
    assert pinned(half) == 0
    half.check()


def _life(half: SchedulerHalf, request: Asked) -> None:
    from tests.scheduler.test_half import report as report_saves
    from tests.scheduler.test_half import run

    half.get_num_new_matched_tokens(request, 0)
    tables = [list(range(10 * group, 10 * group + 6)) for group in range(len(half._grouped.groups))]
    half.update_state_after_alloc(request, tables, 0, 0)
    report_saves(half, run(half, request))
    half.request_finished(request)
