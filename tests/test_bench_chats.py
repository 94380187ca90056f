"""What a window of chats keeps of an engine: no first token is left out, and nothing void looks measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from integration.bench.chats import ChatResult, ChatShape, Window, chat_row, histories, percentile

SHAPE = ChatShape(users=12, at_once=6, document=8000, question=160, max_length=12288)
WINDOW = Window(number=1, answer=8, rate=None, lead=2.0, seconds=30.0)


def row(name: str, external_tokens: float, **result: Any) -> dict[str, Any]:
    phases = {"external_tokens": external_tokens}
    return chat_row(name, WINDOW, ChatResult(turns=300, prompt_tokens=3000, phases=phases, **result))


def test_chats_begin_as_large_as_they_are_on_average() -> None:
    begun = histories(SHAPE)
    assert begun == histories(SHAPE), "the same for every engine"
    others = histories(replace(SHAPE, users=6))
    assert not {tuple(history[:100]) for history in begun} & {tuple(history[:100]) for history in others}
    assert sum(map(len, begun)) == pytest.approx(SHAPE.mean_tokens, rel=0.01)
    assert all(SHAPE.document <= len(history) <= SHAPE.max_length - SHAPE.question for history in begun)
    assert SHAPE.mean_tokens * 131072 == pytest.approx(14.86 * 2**30, rel=0.001)


def test_turns_that_wait_are_in_every_percentile() -> None:
    kept = row("ours", 1000, ttft_ms=[10.0] * 60, waits_ms=[5000.0] * 40)
    assert (kept["arrived"], kept["waiting"]) == (100, 40)
    assert (kept["ttft_p50_ms"], kept["ttft_p90_ms"]) == (10.0, 5000.0)
    assert kept["lower_bounds"] == ["ttft_p90_ms", "ttft_p99_ms"], "they have waited longer than the median of all"


def test_a_wait_that_has_only_begun_makes_the_median_a_lower_bound() -> None:
    assert percentile([10.0, 20.0, 30.0], [], 50) == (20.0, False)
    assert percentile([10.0, 20.0, 30.0], [1.0], 50) == (15.0, True)
    assert percentile([], [], 50) == (0.0, True)


def test_a_peer_whose_memory_gave_nothing_is_void() -> None:
    assert "host memory" in row("lmcache", 0)["void"]
    assert "void" not in row("lmcache", 256)
    assert "void" not in row("none", 0), "it has none"
    assert "void" not in row("ours", 0), "that is a result of ours, and a bad one"


def test_a_peer_that_answered_nothing_is_no_comparison() -> None:
    assert chat_row("offloading", WINDOW, ChatResult(phases={"external_tokens": 0.0}))["void"] == "no turn was answered"
    answered = ChatResult(turns=1, prompt_tokens=100, phases={"external_tokens": 96.0})
    assert "void" not in chat_row("offloading", WINDOW, answered)


def test_a_figure_between_a_first_token_and_a_wait_is_a_lower_bound() -> None:
    assert percentile([100.0] * 59, [5000.0], 99)[1]
    assert percentile([100.0] * 59, [5000.0], 50) == (100.0, False)
