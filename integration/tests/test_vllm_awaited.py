"""Loads in the background that a step waits for, as they are announced before they have ended: random requests in one
live engine, of which many are aborted, and resets, while loads are late."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    VllmEngine,
    running,
    schedule_ahead,
    transfer_config,
)

NUM_STEPS = 350
MOST_AT_ONCE = 8
LENGTHS = (1, 2, 5, 12, 33)


class Crowd:
    """Requests for prefixes of a few documents, a random end behind each."""

    def __init__(self, engine: VllmEngine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.documents = [self._tokens(9 * BLOCK_SIZE) for _ in range(5)]
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.is_late = False

    def turn(self) -> None:
        """What happens in front of a step, and the step."""
        if self._happens(0.25) and len(self._live) < MOST_AT_ONCE:
            self._ask()
        if self._happens(0.03) and self._live:
            self.aborted.add(name := self.random.choice(self._live))
            self.engine.llm.llm_engine.abort_request([name])
        if self._happens(0.02):
            self.engine.llm.reset_prefix_cache()
        if self._happens(0.03 if self.is_late else 0.15):
            self.delay(not self.is_late)
        self.step()

    def step(self) -> None:
        """One step of the engine."""
        for output in self.engine.llm.llm_engine.step():
            if output.finished and output.request_id not in self.aborted:
                self.answers[output.request_id] = list(output.outputs[0].token_ids)

    def delay(self, delayed: bool) -> None:
        """Loads from now on begin when a step waits for them, or at once."""
        if delayed != self.is_late:
            self.is_late = delayed
            self.engine.delay_loads(delayed)

    @property
    def _live(self) -> list[str]:
        return [name for name in self.asked if name not in self.answers and name not in self.aborted]

    def _ask(self) -> None:
        from vllm import SamplingParams

        document = self.random.choice(self.documents)
        prefix = document[: self.random.randrange(BLOCK_SIZE, len(document))]
        prompt = prefix + self._tokens(self.random.randrange(1, 40))
        name, length = f"{len(self.asked)}", self.random.choice(LENGTHS)
        self.asked[name] = prompt, length
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        self.engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _happens(self, share: float) -> bool:
        return self.random.random() < share

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2, 500) for _ in range(count)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_waits_for_announced_loads_reads_what_they_bring(
    models: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    if ahead:
        schedule_ahead(monkeypatch)
    # Once it is known how long loads take, each is announced in the step that begins it.
    settings = {"load_choice": "async", "max_load_stall_ms": 10_000}
    config = transfer_config(settings | {"write_policy": "write_through", "host_memory": "8MiB"})
    options: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 256, "kv_transfer_config": config}
    with running(models, num_blocks=33, **options) as engine:
        assert (engine.core.batch_queue_size == 2) == ahead
        crowd = Crowd(engine, 1 + ahead)
        for _ in range(NUM_STEPS):
            crowd.turn()
        crowd.delay(False)
        while engine.llm.llm_engine.has_unfinished_requests():
            crowd.step()
        stats = engine.stats()
        assert stats["async_loads"] > stats["awaited_async_loads"] > 0
        engine.check_all_free()
        for name, answer in crowd.answers.items():
            prompt, length = crowd.asked[name]
            assert engine.generate([prompt], length, cache_salt=f"nothing is cached under {name}") == [answer]
