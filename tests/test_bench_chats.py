"""What a window of chats keeps of an engine: no first token is left out, and nothing void looks measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from integration.bench import chats
from integration.bench.chats import ChatResult, Chats, ChatShape, Window, chat_row, histories, percentile
from integration.bench.engines import Output

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


class Clock:
    """Seconds that pass as the engine steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class OneByOne:
    """An engine that answers one request after the other: a second to the first token, and one to the last."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self._waiting: deque[tuple[str, int, int]] = deque()
        self._parts: Iterator[Output] = iter(())

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, name: str, history: Sequence[int], answer: int) -> None:
        self.prompts.append(list(history))
        self._waiting.append((name, len(history), answer))

    def step(self) -> list[Output]:
        self.clock.now += 1.0
        output = next(self._parts, None)
        if output is None:
            name, length, answer = self._waiting[0]
            parts = [Output(name, count == answer, [7] * count, length, length // 2) for count in (1, answer)]
            self._parts = iter(parts)
            output = next(self._parts)
        if output.is_finished:
            self._waiting.popleft()
        return [output]

    def abort(self, names: list[str]) -> None:
        self.aborted += names
        self._waiting.clear()

    def settle(self) -> None:
        """Nothing is under way."""

    def stats(self) -> dict[str, float]:
        return {"requests": float(len(self.prompts))}

    def follow(self) -> Any:
        return SimpleNamespace(arrived=lambda name: None, answered=lambda output: None, stop=dict)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chats, "time", clock)
    return clock


SMALL = ChatShape(users=5, at_once=2, document=100, question=10, max_length=200)


def test_what_ends_in_the_lead_or_behind_the_window_is_not_counted(clock: Clock) -> None:
    """A turn ends every two seconds, and asks when the one before the last has ended."""
    engine = OneByOne(clock)
    result = Chats(engine, SMALL).run(Window(1, answer=4, rate=None, lead=6.0, seconds=20.0))  # type: ignore[arg-type]
    assert result.turns == 10, "those of 6, 8, ... 24"
    # Turns that arrived at 6, 8, ... 24: a wait of two seconds, and one to the first token.
    assert result.ttft_ms == [3000.0] * 10 and result.waits_ms == []
    assert result.cached_tokens == pytest.approx(result.prompt_tokens / 2, rel=0.01)
    row = chat_row("none", Window(1, answer=4, rate=None, lead=6.0, seconds=20.0), result)
    assert row["turns_per_second"] == 0.5, "of the seconds that count"
    assert row["tokens_per_second"] == (result.prompt_tokens + 40) / 20.0


def test_every_engine_is_asked_the_same_in_the_same_order_and_chats_go_on_behind_their_answers(clock: Clock) -> None:
    asked = []
    for _ in range(2):
        clock.now, engine = 0.0, OneByOne(clock)
        Chats(engine, SMALL).run(Window(1, answer=4, rate=None, lead=0.0, seconds=40.0))  # type: ignore[arg-type]
        asked.append(engine.prompts)
    assert asked[0] == asked[1]
    begun = {tuple(history[:100]): history for history in histories(SMALL)}
    again = 0
    for prompt in asked[0]:
        history = begun[tuple(prompt[:100])]
        assert len(prompt) + 4 <= SMALL.max_length
        assert prompt[:-10] == history or prompt[:-10] == history[:100], "what was said so far, or the document"
        again += prompt[-14:-10] == [7] * 4
        history[:] = [*prompt, 7, 7, 7, 7]
    assert again >= 10, "an answer is a part of the next prompt"


class Hangs(OneByOne):
    """An engine that answers nothing."""

    def step(self) -> list[Output]:
        self.clock.now += 1.0
        return []


@pytest.mark.parametrize(("lead", "waits"), [(0.0, [15_000.0] * 2), (6.0, [])])
def test_who_arrived_in_the_lead_and_waits_is_no_turn_of_the_window(
    clock: Clock, lead: float, waits: list[float]
) -> None:
    engine = Hangs(clock)
    result = Chats(engine, SMALL).run(Window(1, answer=4, rate=None, lead=lead, seconds=10.0 - lead))  # type: ignore[arg-type]
    assert result.waits_ms == waits, "five seconds behind the window are waited for first tokens"
    assert (result.turns, result.ttft_ms) == (0, [])
    assert len(engine.aborted) == 2
