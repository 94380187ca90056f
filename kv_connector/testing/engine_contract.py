"""What the adapter of every engine promises, as checks that its suite runs against the real engine:

    @pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check, engine, expected):
        check(engine, expected)

The checks share one engine, which is slow to start: each takes prompts of its own (`prompts`), finds the engine idle
and leaves it so. `expected` says what an engine without the connector answers. Those of `RESTARTS` start engines
themselves, with storage in a folder. A check raises AssertionError where a promise is broken.

The engine saves all that it computes (`write_through`), loads every hit, has room for `ROOM_BLOCKS` host blocks or
more, and its device for some thousand tokens, in blocks of which the longest prompt has seven or more.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

ROOM_BLOCKS = 512
_LENGTH = 240  # tokens of a prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. token_ids: what was generated; None if the request was aborted, or failed with an
    `error`. num_loaded: tokens of its prompt that the connector loaded; num_hit: those, and device hits. num_preempted:
    how often it was preempted."""

    token_ids: Sequence[int] | None
    num_loaded: int = 0
    num_hit: int = 0
    num_preempted: int = 0
    error: str = ""


class ContractEngine(Protocol):
    """An engine with the connector, as the checks drive it. Greedy sampling, and no end but the number of tokens."""

    block_tokens: int
    """Tokens of a block."""
    device_tokens: int
    """That the device has blocks for."""
    num_token_ids: int
    """Prompts are made of token ids from 2 on, below this."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[Answer]:
        """All are asked at once; their answers, in order. Requests with different salts share nothing."""

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[str]:
        """As `generate`, without waiting; returns the requests' ids."""

    def finish(self, request_ids: Sequence[str]) -> list[Answer]:
        """Wait for these; each is named once."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these, in whatever phase they are; `finish` is called for them nevertheless."""

    def reset(self) -> None:
        """Reset the cache, on the device and behind it; called while nothing runs."""

    def break_loads(self, broken: bool) -> None:
        """From now on all loads fail, retries too; or, with False, none does."""

    def limit_host(self, num_blocks: int | None) -> None:
        """Use no more host blocks than these; None uses all."""

    def stats(self) -> Mapping[str, float]:
        """The connector's counters and gauges."""

    def check_idle(self) -> None:
        """Wait until nothing is in flight, and assert that nothing is held for a request and all invariants hold."""


Expected = Callable[[Sequence[Sequence[int]], int], list[Sequence[int]]]
"""What an engine without the connector generates for each of these prompts, so many tokens."""
Check = Callable[[ContractEngine, Expected], None]
Open = Callable[[Mapping[str, Any]], AbstractContextManager[ContractEngine]]
"""Starts an engine with these settings beside its usual ones, and stops it."""
RestartCheck = Callable[[Open, Expected, str], None]
"""The text is a folder that does not exist yet."""


def answered_once(answer: Callable[[Sequence[int], int], Sequence[int]]) -> Expected:
    """What `answer` says to each prompt, of which it is to continue so many tokens; a prompt is asked once."""
    known: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}

    def answers(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Sequence[int]]:
        keys = [(tuple(prompt), num_tokens) for prompt in prompts]
        for key in keys:
            if key not in known:
                known[key] = answer(*key)
        return [known[key] for key in keys]

    return answers


def prompts(engine: ContractEngine, count: int, length: int = _LENGTH, seed: object = 0) -> list[list[int]]:
    """Random prompts that share nothing, with each other and with those of other seeds."""
    chance = random.Random(f"{seed} {length}")
    return [[chance.randrange(2, engine.num_token_ids) for _ in range(length)] for _ in range(count)]


def loadable(engine: ContractEngine, prompt: Sequence[int]) -> int:
    """Of a prompt all whole blocks, but that at least one token is left to compute."""
    return (len(prompt) - 1) // engine.block_tokens * engine.block_tokens


def evict(engine: ContractEngine, seed: object) -> None:
    """Ask for so much else that the device holds nothing of before."""
    engine.generate(prompts(engine, 2 * engine.device_tokens // _LENGTH, seed=f"others {seed}"), num_tokens=1)


def what_the_device_has_lost_is_loaded(engine: ContractEngine, expected: Expected) -> None:
    """The plain case, one after the other and all at once."""
    asked = prompts(engine, 4, seed="lost")
    answers = expected(asked, 8)
    assert _tokens([engine.generate([prompt])[0] for prompt in asked]) == answers
    for _ in range(2):
        engine.check_idle()  # what is held for a save would be the last that leaves the device
        evict(engine, "lost")
        again = engine.generate(asked)
        assert _tokens(again) == answers
        assert [a.num_loaded for a in again] == [loadable(engine, prompt) for prompt in asked]
    engine.check_idle()


def a_block_that_is_not_full_is_computed(engine: ContractEngine, expected: Expected) -> None:
    """Prompts that end one token in front of a block's end, there, and one behind it, and one of less than a block."""
    size = engine.block_tokens
    lengths = [6 * size - 1, 6 * size, 6 * size + 1, size + 1, max(2, size - 1)]
    for length in lengths:
        (prompt,) = prompts(engine, 1, length, seed="partial")
        (answer,) = expected([prompt], 8)
        assert _tokens(engine.generate([prompt])) == [answer]
        evict(engine, f"partial {length}")
        (again,) = engine.generate([prompt])
        assert again.token_ids == answer
        assert again.num_loaded == loadable(engine, prompt), f"a prompt of {length} tokens"
    engine.check_idle()


def a_chat_goes_on_behind_what_was_generated(engine: ContractEngine, expected: Expected) -> None:
    """Each turn has the ones before it as its prefix, with the answers."""
    history, num_known = prompts(engine, 1, 100, seed="chat")[0], 0
    for turn in range(4):
        (answer,) = expected([history], 24)
        (said,) = engine.generate([history], num_tokens=24)
        assert said.token_ids == answer
        assert said.num_loaded == num_known // engine.block_tokens * engine.block_tokens
        num_known = len(history) + len(answer) - 1  # the last token is computed with the next turn
        history = [*history, *answer, *prompts(engine, 1, 17, seed=f"turn {turn}")[0]]
        evict(engine, f"chat {turn}")
    engine.check_idle()


def chats_that_share_a_beginning_are_told_apart(engine: ContractEngine, expected: Expected) -> None:
    """A common beginning is loaded for all of them, and what follows is each one's own."""
    common = prompts(engine, 1, 5 * engine.block_tokens + 3, seed="common")[0]
    asked = [[*common, *tail] for tail in prompts(engine, 4, 90, seed="tails")]
    answers = expected(asked, 8)
    assert _tokens(engine.generate(asked)) == answers
    evict(engine, "tails")
    again = engine.generate(asked)
    assert _tokens(again) == answers
    assert all(answer.num_loaded > 0 for answer in again[:1])
    evict(engine, "tails again")
    other = [*common, *prompts(engine, 1, 90, seed="another tail")[0]]
    (answer,) = engine.generate([other])
    assert answer.token_ids == expected([other], 8)[0]
    assert answer.num_loaded == 5 * engine.block_tokens
    engine.check_idle()


def nothing_is_found_after_a_reset(engine: ContractEngine, expected: Expected) -> None:
    """The weights may be others by then."""
    asked = prompts(engine, 2, seed="reset")
    answers = expected(asked, 8)
    assert _tokens(engine.generate(asked)) == answers
    engine.reset()
    again = engine.generate(asked)
    assert _tokens(again) == answers
    assert [answer.num_loaded for answer in again] == [0, 0]
    evict(engine, "reset")
    assert [a.num_loaded for a in engine.generate(asked)] == [loadable(engine, prompt) for prompt in asked]
    engine.check_idle()


def another_salt_finds_nothing(engine: ContractEngine, expected: Expected) -> None:
    """One tenant's cache is nobody else's, and does not tell what others have asked."""
    (prompt,) = prompts(engine, 1, seed="salt")
    answers = expected([prompt], 8)
    assert _tokens(engine.generate([prompt], salt="mine")) == answers
    for salt, num_loaded in (("yours", 0), ("", 0), ("mine", loadable(engine, prompt))):
        evict(engine, f"salt {salt}")
        (again,) = engine.generate([prompt], salt=salt)
        assert _tokens([again]) == answers
        assert again.num_loaded == num_loaded, f"with the salt {salt!r}"
    engine.check_idle()


def requests_are_given_up_at_any_moment(engine: ContractEngine, expected: Expected) -> None:
    """While they wait, while they load, and while they run; whoever stays is answered as ever."""
    asked = prompts(engine, 12, seed="abort")
    answers = expected(asked, 8)
    assert _tokens(engine.generate(asked)) == answers
    for turn in range(6):
        evict(engine, f"abort {turn}")
        request_ids = engine.start(asked)
        given_up = {request_id for i, request_id in enumerate(request_ids) if (i + turn) % 3 == 0}
        if turn % 2:
            engine.finish(staying := request_ids[1:2])
            request_ids = [request_id for request_id in request_ids if request_id not in staying]
        engine.abort([request_id for request_id in request_ids if request_id in given_up])
        wanted = dict(zip(request_ids, engine.finish(request_ids), strict=True))
        known = dict(zip(request_ids, [a for i, a in enumerate(answers) if not turn % 2 or i != 1], strict=True))
        assert all(wanted[i].token_ids == known[i] for i in request_ids if i not in given_up)
    engine.check_idle()
    evict(engine, "abort")
    assert _tokens(engine.generate(asked)) == answers
    engine.check_idle()


def requests_that_lose_their_blocks_go_on(engine: ContractEngine, expected: Expected) -> None:
    """More is generated than the device has room for: some are preempted, and come again. A few end soon, so that
    others are let in beside those that grow."""
    size = engine.block_tokens
    asked = prompts(engine, engine.device_tokens // (6 * size), 4 * size, seed="preempted")
    num_tokens = [(2 if i % 4 == 0 else 10) * size for i in range(len(asked))]
    answers = [expected([prompt], count)[0] for prompt, count in zip(asked, num_tokens, strict=True)]
    for _ in range(2):
        started = [engine.start([prompt], count) for prompt, count in zip(asked, num_tokens, strict=True)]
        said = engine.finish([request_id for request_ids in started for request_id in request_ids])
        assert _tokens(said) == answers
        assert any(answer.num_preempted for answer in said), "the device had room for all of them"
        engine.check_idle()
        evict(engine, "preempted")


def a_load_that_fails_gives_no_wrong_token(engine: ContractEngine, expected: Expected) -> None:
    """Its requests are computed, or given up where the engine knows no better; what comes later is right."""
    asked = prompts(engine, 3, seed="failing")
    answers = expected(asked, 8)
    assert _tokens(engine.generate(asked)) == answers
    evict(engine, "failing")
    engine.break_loads(True)
    for prompt, answer in zip(asked, answers, strict=True):
        (said,) = engine.generate([prompt])
        assert said.token_ids in (None, answer)
    engine.break_loads(False)
    engine.check_idle()  # until ranks have told of the last one
    assert engine.stats()["failed_load_jobs"] > 0, "no load has failed"
    assert _tokens(engine.generate(asked)) == answers
    evict(engine, "failed")
    again = engine.generate(asked)
    assert _tokens(again) == answers
    assert all(answer.num_loaded for answer in again), "what was computed anew is kept anew"
    engine.check_idle()


def a_host_that_is_full_lets_the_oldest_go(engine: ContractEngine, expected: Expected) -> None:
    """Or keeps nothing at all."""
    asked = prompts(engine, 6, seed="full")
    answers = expected(asked, 8)
    for num_blocks in (3 * _LENGTH // engine.block_tokens, 5, 0):
        engine.limit_host(num_blocks)
        for _ in range(2):
            for prompt, answer in zip(asked, answers, strict=True):
                assert engine.generate([prompt])[0].token_ids == answer
            assert _tokens(engine.generate(asked)) == answers
        assert engine.stats()["host_cached_blocks"] <= num_blocks
    engine.limit_host(None)
    assert _tokens(engine.generate(asked)) == answers
    evict(engine, "full")
    assert [a.num_loaded for a in engine.generate(asked)] == [loadable(engine, prompt) for prompt in asked]
    engine.check_idle()


def many_requests_over_few_blocks(engine: ContractEngine, expected: Expected) -> None:
    """Chats that come and go, more of them at once than the device has room for."""
    chance = random.Random(0)
    beginnings = prompts(engine, 3, 6 * engine.block_tokens, seed="many")
    asked = [
        [*chance.choice(beginnings)[: chance.randrange(20, 6 * engine.block_tokens)], *tail]
        for tail in prompts(engine, 48, 60, seed="many tails")
    ]
    asked += chance.sample(asked, 16)
    answers = expected(asked, 8)
    assert _tokens(engine.generate(asked)) == answers
    assert _tokens(engine.generate(asked)) == answers
    engine.check_idle()


def chats_hit_what_an_endless_cache_would_have(engine: ContractEngine, expected: Expected) -> None:
    """200 requests, 16 at a time: the host has room for all of their blocks, and the device for a quarter of them."""
    num_chats, num_turns, at_once, length = 40, 5, 16, 8
    beginning = 4 * engine.device_tokens // num_chats - (2 * num_turns - 1) * length
    histories = prompts(engine, num_chats, beginning, seed="endless")
    asked = [(turn, chat) for turn in range(num_turns) for chat in range(num_chats)]
    started: deque[str] = deque()
    num_hit = num_could = 0
    for i in range(len(asked) + at_once):
        if i >= at_once:
            turn, chat = asked[i - at_once]
            (answer,) = engine.finish([started.popleft()])
            assert _tokens([answer]) == expected([histories[chat]], length)
            num_known = len(histories[chat]) - length - 1 if turn else 0  # the last answer's end is computed
            num_could += num_known // engine.block_tokens * engine.block_tokens
            num_hit += answer.num_hit
            tail = prompts(engine, 1, length, seed=f"endless {turn} {chat}")[0]
            histories[chat] = [*histories[chat], *(answer.token_ids or ()), *tail]
        if i < len(asked):
            started += engine.start([histories[asked[i][1]]], length)
    assert num_hit >= 0.9 * num_could > 0, f"{num_hit} of {num_could} tokens"
    engine.check_idle()


def a_new_start_finds_what_storage_has(open_engine: Open, expected: Expected, folder: str) -> None:
    """An engine is stopped while it computes and copies, and the next one goes on where its storage is; what is
    forgotten then is found no more."""
    storage = {"storage": {"path": folder, "capacity": "256MiB"}}
    with open_engine(storage) as engine:
        asked = prompts(engine, 3, seed="stored")
        answers = expected(asked, 8)
        assert _tokens(engine.generate(asked)) == answers
        engine.check_idle()
        engine.start(prompts(engine, 3, seed="stopped"), num_tokens=64)
    with open_engine({"storage": storage["storage"] | {"prefetch": "timeout", "timeout_ms": 10000}}) as engine:
        again = engine.generate(asked)
        assert _tokens(again) == answers
        assert [answer.num_loaded for answer in again] == [loadable(engine, prompt) for prompt in asked]
        engine.reset()
        anew = engine.generate(asked)
        assert _tokens(anew) == answers
        assert [answer.num_loaded for answer in anew] == [0] * len(asked)
        engine.check_idle()


def _tokens(answers: Sequence[Answer]) -> list[Sequence[int] | None]:
    errors = [answer.error for answer in answers if answer.token_ids is None]
    assert not errors, f"requests were given up: {errors}"
    return [answer.token_ids for answer in answers]


CHECKS: tuple[Check, ...] = (
    what_the_device_has_lost_is_loaded,
    a_block_that_is_not_full_is_computed,
    a_chat_goes_on_behind_what_was_generated,
    chats_that_share_a_beginning_are_told_apart,
    nothing_is_found_after_a_reset,
    another_salt_finds_nothing,
    requests_are_given_up_at_any_moment,
    a_load_that_fails_gives_no_wrong_token,
    a_host_that_is_full_lets_the_oldest_go,
    many_requests_over_few_blocks,
    chats_hit_what_an_endless_cache_would_have,
)
PREEMPTIONS: tuple[Check, ...] = (requests_that_lose_their_blocks_go_on, many_requests_over_few_blocks)
"""For an engine that takes requests their blocks now and then, whatever it has to be told for that."""
RESTARTS: tuple[RestartCheck, ...] = (a_new_start_finds_what_storage_has,)
