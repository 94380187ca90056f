"""Requests whose input streams in: they keep their blocks between their turns, and others find what is saved of them.

What is right is what an ordinary request with all of a session's text is answered, with a salt that nothing is cached
under.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from vllm.v1.request import RequestStatus

from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    VllmEngine,
    prompts,
    running,
    schedule_ahead,
    transfer_config,
    vllm_version,
)
from integration.tests.vllm_sessions import Drafter, Session, step, step_until_turns
from kv_connector.engines.vllm.sessions import Sessions

pytestmark = pytest.mark.skipif(vllm_version() < "0.32", reason="older versions keep another part of a turn")

WRITE_THROUGH = transfer_config({"write_policy": "write_through"})
DRAFTS = {
    "method": "custom_class",
    "model": "integration.tests.vllm_sessions.Drafter",
    "num_speculative_tokens": 3,
}


def computed(engine: VllmEngine, text: list[int], num_tokens: int) -> list[int]:
    """What follows a text of which nothing is cached."""
    return engine.generate([text], num_tokens, cache_salt=f"{uuid4()}")[0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("model", ["dense", "windows"])
def test_turns_are_right_and_what_is_saved_of_them_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, ahead: bool
) -> None:
    """Sessions side by side that lose their blocks in the middle of a turn; some turns end where a block does."""
    if ahead:
        schedule_ahead(monkeypatch)
    lengths, answers = (40, 55, 65, 1), (9, 1, 24, 8)
    asked: list[tuple[list[int], list[int]]] = []
    with running(folder, model, num_blocks=100, kv_transfer_config=WRITE_THROUGH) as engine:
        sessions = [Session(engine, f"session-{i}") for i in range(4)]
        for turn, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
            texts = []
            for session, chunk in zip(sessions, prompts(4, length, seed=turn), strict=True):
                texts.append((session.tokens[:-1] if turn else []) + chunk)
                session.send(chunk, answer)
            if answer == 24:
                for _ in range(9):
                    step(engine, sessions)
                assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            step_until_turns(engine, sessions, turn + 1)
            asked += zip(texts, [session.turns[-1] for session in sessions], strict=True)
        num_reloaded = engine.stats()["loaded_blocks"]
        whole = [session.tokens for session in sessions]
        for session in sessions:
            session.end()
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        found = engine.alone(whole)
        num_found = engine.stats()["host_hit_tokens"]
        assert found == [computed(engine, text, 8) for text in whole]
        assert [said for _, said in asked] == [computed(engine, text, len(said)) for text, said in asked]
        engine.check_all_free()
    assert num_reloaded >= 4 * 3
    assert num_found >= 4 * 5 * BLOCK_SIZE


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("length", [1, 40, None])
def test_a_turn_that_ends_within_accepted_drafts_spoils_nothing(
    folder: Path, is_queued: bool, length: int | None
) -> None:
    """vLLM alone has wrong tokens in its cache then, and ends where no more input comes than it had drafted. Without
    `length` that is just what comes."""
    first = prompts(1, 70)[0]
    options = {"kv_transfer_config": WRITE_THROUGH, "speculative_config": DRAFTS}
    with running(folder, num_blocks=60, async_scheduling=False, **options) as engine:
        answer = computed(engine, first, 8)
        second = prompts(1, length, seed=1)[0] if length else answer[2:4]
        Drafter.texts = [first + answer]
        session = Session(engine, "session")
        session.send(first, 2)
        if is_queued:
            session.send(second, 40)
        step_until_turns(engine, [session], 1)
        if not is_queued:
            session.send(second, 40)
        step_until_turns(engine, [session], 2)
        text = first + answer[:2] + second
        whole = session.tokens
        session.end()
        engine.drain()
        assert session.turns[0] == answer[:2]
        assert whole[: len(text)] == text
        assert computed(engine, text, 40) == session.turns[1]
        assert engine.llm.reset_prefix_cache()
        assert engine.alone([whole]) == [computed(engine, whole, 8)]
        assert engine.stats()["host_hit_tokens"] >= len(whole) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        engine.check_all_free()


class Turn(SimpleNamespace):
    """A session as `Sessions` sees it, of which 10 tokens are known when its step is planned."""

    def __init__(self) -> None:
        super().__init__(resumable=True, num_tokens=10, num_computed_tokens=9, all_token_ids=list(range(10)))
        self.status = RequestStatus.RUNNING

    def step(self, sessions: Sessions, drafts: list[int], *sampled: int, ends: bool = False) -> None:
        """A step with these drafts, after which these tokens are the session's."""
        output = SimpleNamespace(
            num_scheduled_tokens={"a": 1 + len(drafts)}, scheduled_spec_decode_tokens={"a": drafts} if drafts else {}
        )
        sessions.planned(output, {"a": self})  # type: ignore[arg-type]
        self.num_computed_tokens += 1 + len(drafts)
        self.all_token_ids += sampled
        self.num_tokens += len(sampled)
        if ends:
            self.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        sessions.taken_in()


@pytest.mark.parametrize(("drafts", "right"), [([20, 21, 22], 12), ([20, 99, 22], 11), ([-1, -1, -1], 13)])
def test_rows_of_drafts_that_are_not_the_sessions_tokens_are_taken_back(drafts: list[int], right: int) -> None:
    """Those of asynchronous scheduling, -1, are counted right by vLLM."""
    turn, sessions = Turn(), Sessions()
    turn.step(sessions, drafts, 20, 21, ends=True)
    assert turn.num_computed_tokens == right


def test_drafts_of_an_earlier_step_or_of_an_ended_session_are_forgotten() -> None:
    turn, sessions = Turn(), Sessions()
    turn.step(sessions, [98, 99], 20)
    turn.num_computed_tokens = 10  # vLLM takes rejected drafts back
    turn.step(sessions, [], 21, ends=True)
    assert turn.num_computed_tokens == 11
    turn = Turn()
    turn.step(sessions, [98, 99], 20)
    sessions.forget("a")
    turn.status = RequestStatus.FINISHED_ABORTED
    sessions.taken_in()
    assert turn.num_computed_tokens == 12
