"""SGLang's own sessions beside ordinary requests that share prefixes with them: every answer is the one that an engine
without us gives to the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.tests.sglang_engines import SglangEngine, running
from kv_connector.testing.engine_contract import Answer, Expected, evict

LONGEST = 200
"""Of texts that go on. The sessions that keep theirs on the device leave room for another request."""


@dataclass
class Session:
    """Whole texts by request id, each with the length of what was asked. A streaming one goes on behind its last."""

    name: str
    streams: bool = False
    said: dict[str, tuple[list[int], int]] = field(default_factory=dict)

    def asked(self, chance: random.Random, text: list[int]) -> tuple[dict[str, Any], list[int], list[int]]:
        """What SGLang is told of the next turn, what it is given, and the text that it makes of both."""
        params: dict[str, Any] = {"id": self.name}
        known = [rid for rid, (said, _) in self.said.items() if self.streams or len(said) < LONGEST]
        if not known:
            return params, text, text
        chunk, last = text[-9:], known[-1]
        if self.streams:
            return params, chunk, self.said[last][0] + chunk
        rid = chance.choice(known)
        said, num_asked = self.said[rid]
        cut = chance.randrange(1, len(said))
        return chance.choice(
            [
                (params | {"rid": rid}, chunk, said + chunk),
                (params | {"rid": rid, "drop_previous_output": True}, chunk, said[:num_asked] + chunk),
                (params | {"rid": rid, "offset": cut}, chunk, said[:cut] + chunk),
                (params | {"rid": last, "replace": True}, chunk, self.said[last][0] + chunk),
            ]
        )


@dataclass
class Turn:
    """A request under way; of no session where it is an ordinary one."""

    request_id: str
    text: list[int]
    num_tokens: int
    session: Session | None


class Users:
    """Who asks an engine, at random from a seed. Texts begin like those that were said."""

    def __init__(self, engine: SglangEngine, expected: Expected, texts: list[list[int]], seed: int) -> None:
        self.engine, self.expected, self.texts = engine, expected, texts
        self.chance = random.Random(seed)
        self.num_opened = 0
        self.answers: list[Answer] = []
        self.sessions = [self.open(Session(name)) for name in ("one", "two")]
        self.sessions += [self.open(Session("", streams=True)) for _ in range(2)]

    def open(self, session: Session) -> Session:
        """SGLang still has to end a streaming one whose turn runs: the next one has another name."""
        self.num_opened += 1
        name = f"stream {self.num_opened}" if session.streams else session.name
        assert self.engine.engine.open_session(100_000, session_id=name, streaming=session.streams) == name
        return Session(name, session.streams)

    def end(self, which: int) -> None:
        """Of which a turn may run; another one begins."""
        self.engine.engine.close_session(self.sessions[which].name)
        self.sessions[which] = self.open(self.sessions[which])

    def ask(self, session: Session | None) -> Turn:
        begin = self.chance.choice(self.texts)[: self.chance.randrange(LONGEST)] if self.texts else []
        end = [self.chance.randrange(2, self.engine.num_token_ids) for _ in range(self.chance.choice([1, 9, 50]))]
        params, given, text = None, begin + end, begin + end
        if session is not None:
            params, given, text = session.asked(self.chance, text)
        return self.start(given, text, session, params)

    def start(self, given: list[int], text: list[int], session: Session | None, params: dict[str, Any] | None) -> Turn:
        num_tokens = self.chance.choice([4, 12])
        (rid,) = self.engine.start([given], num_tokens, session=params)
        return Turn(rid, text, num_tokens, session)

    def round(self, aborts_streams: bool = True) -> None:
        """All ask at once. A turn is aborted, one is replaced while it runs, and a session ends under its own."""
        chance = self.chance
        turns = [self.ask(session) for session in (*self.sessions, None, None)]
        if chance.random() < 0.4:
            self.engine.abort([chance.choice(turns if aborts_streams else [*turns[:2], *turns[4:]]).request_id])
        if chance.random() < 0.3:
            params = {"id": turns[0].session.name, "rid": turns[0].request_id} if turns[0].session else {}
            params |= {"replace": True, "drop_previous_output": True}
            turns.append(self.start([7], [*turns[0].text, 7], turns[0].session, params))
        if chance.random() < 0.3:
            self.end(chance.randrange(len(self.sessions)))
        self.check(turns)
        for which, session in enumerate(self.sessions):
            if session.streams and any(len(text) > LONGEST for text, _ in session.said.values()):
                self.end(which)

    def check(self, turns: Sequence[Turn]) -> None:
        for turn, answer in zip(turns, self.engine.finish([turn.request_id for turn in turns]), strict=True):
            self.answers.append(answer)
            if answer.token_ids is None:
                continue
            assert [answer.token_ids] == self.expected([turn.text], turn.num_tokens), turn
            whole = [*turn.text, *answer.token_ids]
            self.texts.append(whole)
            if turn.session is not None:
                turn.session.said[turn.request_id] = whole, len(turn.text)

    def leave(self) -> None:
        """All sessions end, and nothing is held for any."""
        for session in self.sessions:
            self.engine.engine.close_session(session.name)
        self.engine.check_idle()


@pytest.mark.parametrize(
    ("options", "retracts"),
    [
        ({"page_size": 1, "chunked_prefill_size": 32}, True),
        ({"page_size": 32, "disable_overlap_schedule": True}, False),
    ],
    ids=["pages of 1, chunks, retraction", "pages of 32, no overlap"],
)
def test_every_turn_is_right(
    models: Path, expected: Expected, tmp_path: Path, options: dict[str, Any], retracts: bool
) -> None:
    """Over evictions on both tiers, resets with sessions open, and a restart behind which all that was said comes back
    from storage. SGLang has what a retracted turn of a streaming session said in the session although it is aborted
    then, so none is."""
    storage = {"path": str(tmp_path / "kv"), "capacity": "1GiB", "prefetch": "timeout", "timeout_ms": 5000}
    texts: list[list[int]] = []
    answers: list[Answer] = []
    for seed in range(2):
        with running(models, {"storage": storage}, enable_streaming_session=True, **options) as engine:
            users = Users(engine, expected, texts, seed)
            if retracts:
                engine.retract_every(10)
            for number in range(8):
                users.round(aborts_streams=not retracts)
                if number % 3 == 1:
                    evict(engine, number)
                if number == 2 and not seed:
                    engine.reset()
                engine.limit_host(40 if number in (4, 5) else None)
            users.leave()
            answers += users.answers
            assert not seed or engine.stats()["storage_read_blocks"] > 0
    right = [answer for answer in answers if answer.token_ids is not None]
    assert len(right) > 0.6 * len(answers)
    assert sum(answer.num_loaded for answer in right) > 0
    assert not retracts or sum(answer.num_preempted for answer in right) > 0
