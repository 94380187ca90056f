"""Chats with one engine: users talk about a document each, and go on where they were from window to window.

A window has a lead that is not counted and a time that is. Turns arrive at random at a rate, whether or not the engine
keeps up, or as soon as one user is answered another one asks, at random of those that are reading: then `at_once` turns
wait or run at any time, and the engine is saturated, however fast it is. When a window closes nothing more is
submitted, and turns under way may still have their first token, within a limit. A turn that arrived and has none then
is in every percentile with what it has waited; where such a wait lies at or below a percentile, that figure is a lower
bound and says so. Histories begin at lengths spread from the document to the greatest, so that all the chats' bytes do
not change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from integration.bench.engines import EngineServer, Output, Phases
from integration.bench.peers import is_peer, no_hits

_LAST_SECONDS = 5.0
"""Behind a window, for the first tokens of turns under way."""


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Lengths in tokens. A chat whose next turn would be longer than `max_length` begins anew at its document.

    `at_once`: of `users`, who ask at the same time where the engine is saturated. The fewer they are, the less do chats
    come back in the order in which they went: in a fixed order a cache a little too small keeps what is needed last.
    """

    users: int
    at_once: int
    document: int
    question: int
    max_length: int

    @property
    def mean_tokens(self) -> float:
        """Of all chats together."""
        return self.users * (self.document + self.max_length) / 2


@dataclass(frozen=True, slots=True)
class Window:
    """Turns with answers of `answer` tokens, `rate` a second or, without one, as soon as one is answered."""

    number: int
    answer: int
    rate: float | None
    lead: float
    seconds: float


@dataclass(slots=True)
class ChatResult:
    """Of the counted time: turns that ended and their tokens, and ms to the first token of those that arrived in it.

    `waits_ms`: of turns that arrived in it and had no first token in the end, what they had waited.
    """

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)  # of the lead, too; see `Phases.stop`
    counted: dict[str, float] = field(default_factory=dict)  # by our connector, of the lead, too


class Chats:
    """All users of one engine; lives in its process."""

    def __init__(self, server: EngineServer, shape: ChatShape) -> None:
        self._server, self._shape = server, shape
        self._random = np.random.default_rng(1)
        self._histories = histories(shape)
        self._idle = list(range(shape.users))
        self._running: dict[str, tuple[int, float]] = {}  # user, arrival
        self._started: set[str] = set()  # have their first token

    def read(self) -> None:
        """Every history once, so that all are in the caches that hold them."""
        for history in self._histories:
            self._server.generate(history)
        self._server.settle()

    def run(self, window: Window) -> ChatResult:
        """Serve until the window closes; what is unfinished then is aborted."""
        result, end = ChatResult(), window.lead + window.seconds
        arrivals = self._arrivals(window, end)
        before, phases = self._server.stats(), self._server.follow()
        begin, num_submitted = time.perf_counter(), 0
        while (now := time.perf_counter() - begin) < end + _LAST_SECONDS:
            while now < end and self._idle and self._is_next(window, arrivals, num_submitted, now):
                arrival = now if window.rate is None else arrivals[num_submitted]
                self._submit(f"{window.number}-{num_submitted}", arrival, window.answer, phases)
                num_submitted += 1
            if now >= end and self._running.keys() <= self._started:
                break
            if not self._server.busy:
                time.sleep(0.0005)
                continue
            for output in self._server.step():
                self._take(output, time.perf_counter() - begin, window, result, phases)
        result.phases = phases.stop()
        result.counted = {name: value - before[name] for name, value in self._server.stats().items()}
        late = [arrival for name, (_, arrival) in self._running.items() if name not in self._started]
        late += [] if window.rate is None else [t for t in arrivals[num_submitted:] if t < end]
        result.waits_ms = [1e3 * (now - arrival) for arrival in late if arrival >= window.lead]
        self._abort()
        return result

    def _is_next(self, window: Window, arrivals: Sequence[float], num_submitted: int, now: float) -> bool:
        """Whether somebody asks now."""
        if window.rate is None:
            return len(self._running) < self._shape.at_once
        return arrivals[num_submitted] <= now

    def _arrivals(self, window: Window, end: float) -> list[float]:
        """When turns arrive, in seconds of the window; the last ones long after its end."""
        if window.rate is None:
            return []
        random = np.random.default_rng((window.number, 7))  # the same for every engine
        gaps = random.exponential(1 / window.rate, int(2 * window.rate * end) + 20)
        arrivals: list[float] = np.cumsum(gaps).tolist()
        return arrivals

    def _submit(self, name: str, arrival: float, answer: int, phases: Phases) -> None:
        user = self._idle.pop(int(self._random.integers(len(self._idle))))
        shape, history = self._shape, self._histories[user]
        if len(history) + shape.question + answer > shape.max_length:
            del history[shape.document :]
        history += self._random.integers(3, 500, shape.question).tolist()
        self._running[name] = (user, arrival)
        phases.arrived(name)
        self._server.submit(name, history, answer)

    def _take(self, output: Output, now: float, window: Window, result: ChatResult, phases: Phases) -> None:
        name = output.name
        if name not in self._running:
            return  # it was aborted
        user, arrival = self._running[name]
        phases.answered(output)
        if name not in self._started:
            self._started.add(name)
            if arrival >= window.lead:
                result.ttft_ms.append(1e3 * (now - arrival))
        if output.is_finished:
            del self._running[name]
            self._started.discard(name)
            self._histories[user] += output.token_ids
            self._idle.append(user)
            if window.lead <= now < window.lead + window.seconds:
                result.turns += 1
                result.prompt_tokens += output.prompt_tokens
                result.cached_tokens += output.cached_tokens

    def _abort(self) -> None:
        self._server.abort(list(self._running))
        self._idle += [user for user, _ in self._running.values()]
        self._running.clear()
        self._started.clear()
        self._server.settle()


def histories(shape: ChatShape) -> list[list[int]]:
    """The same for every engine, and others for other numbers of users: of each user the document and what was said
    about it so far."""
    random = np.random.default_rng((10**6, shape.users))
    room = shape.max_length - shape.document - shape.question
    lengths = shape.document + room * (np.arange(shape.users) + 0.5) / shape.users
    return [random.integers(3, 500, int(length)).tolist() for length in lengths]


def begin_chats(server: EngineServer, shape: ChatShape) -> None:
    """Runs in the engine's process: new chats, each read once."""
    server.kept = Chats(server, shape)
    server.kept.read()


def run_window(server: EngineServer, window: Window) -> ChatResult:
    """Runs in the engine's process, after `begin_chats`."""
    result: ChatResult = server.kept.run(window)
    return result


def percentile(times: Iterable[float], waits: Sequence[float], share: float) -> tuple[float, bool]:
    """Of both together, and whether it is only a lower bound, because one of the waits lies at or below it."""
    every = [*times, *waits]
    if not every:
        return 0.0, True
    reached = float(np.percentile(every, share, method="higher"))  # of the two that the figure lies between
    return float(np.percentile(every, share)), any(wait <= reached for wait in waits)


def chat_row(name: str, window: Window, result: ChatResult) -> dict[str, Any]:
    """What the JSON file keeps of one engine in one window; `void` where it is no comparison."""
    row: dict[str, Any] = {"part": "chats", "connector": name, **asdict(window)}
    row["turns_per_second"] = result.turns / window.seconds
    row["tokens_per_second"] = (result.prompt_tokens + result.turns * window.answer) / window.seconds
    for share in (10, 50, 90, 99):
        row[f"ttft_p{share}_ms"], is_bound = percentile(result.ttft_ms, result.waits_ms, share)
        if is_bound:
            row.setdefault("lower_bounds", []).append(f"ttft_p{share}_ms")
    row["cached_share"] = result.cached_tokens / max(1, result.prompt_tokens)
    row["arrived"] = len(result.ttft_ms) + len(result.waits_ms)
    row["waiting"] = len(result.waits_ms)
    if is_peer(name) and (reason := no_hits(result.prompt_tokens, int(result.phases["external_tokens"]))):
        row["void"] = reason
    return row | {"phases": result.phases, "counted": result.counted}
