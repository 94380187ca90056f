"""Sessions whose input streams in, turn by turn, in engines of `vllm_engines`; and drafts that are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from integration.tests.vllm_engines import VllmEngine
from tests.waiting import ANSWER_SECONDS, until


class Drafter:
    """A proposer of vLLM's method `custom_class`, which knows how texts go on."""

    texts: ClassVar[list[list[int]]] = []

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *args: Any) -> None:
        """There is none."""

    def propose(self, sampled: Sequence[Sequence[int]], counts: Any, tokens: Any, **options: Any) -> list[list[int]]:
        """By row of the batch; nothing of a row that has sampled nothing."""
        return [self._after(tokens[row, : counts[row]].tolist()) if ids else [] for row, ids in enumerate(sampled)]

    def _after(self, known: list[int]) -> list[int]:
        count = len(known)
        found = [text[count:] for text in self.texts if text[:count] == known and len(text) > count]
        return found[0][: self._most] if found else []


class Session:
    """As `AsyncLLM.generate` asks the engine's core where its prompt is a generator."""

    def __init__(self, engine: VllmEngine, name: str) -> None:
        self.name = name
        self.turns: list[list[int]] = []  # what was said in each that has ended
        self._engine, self._said = engine, list[int]()
        self._client = engine.llm.llm_engine.engine_core

    @property
    def tokens(self) -> list[int]:
        """All that the engine goes on with."""
        return list(self._engine.scheduler.requests[self.name].all_token_ids)

    def send(self, chunk: Sequence[int], num_tokens: int = 1, is_last: bool = False) -> None:
        """Another turn; `is_last` says that there is no more, and its chunk is not looked at."""
        from vllm import SamplingParams

        llm = self._engine.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        prompt, tasks = {"prompt_token_ids": list(chunk)}, llm.get_supported_tasks()
        process = llm.input_processor.process_inputs
        self._client.add_request(process(self.name, prompt, params, supported_tasks=tasks, resumable=not is_last))

    def end(self) -> None:
        self.send([0], is_last=True)

    def take(self, outputs: Sequence[Any]) -> None:
        """What a step has brought."""
        for output in outputs:
            if output.request_id == self.name:
                self._said += output.new_token_ids
                if output.finish_reason is not None:
                    self.turns.append(self._said)
                    self._said = []


def step(engine: VllmEngine, sessions: Sequence[Session]) -> None:
    """One step of the engine, for all of its sessions."""
    outputs = engine.llm.llm_engine.engine_core.get_output().outputs
    for session in sessions:
        session.take(outputs)


def step_until_turns(engine: VllmEngine, sessions: Sequence[Session], count: int) -> None:
    """Until each of these has ended so many turns."""
    until(
        lambda: all(len(session.turns) >= count for session in sessions),
        lambda: step(engine, sessions),
        engine.stats,
        ANSWER_SECONDS,
    )
