"""Real vLLM engines as the contract of adapters drives them, and what vLLM answers without us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.models import tiny_configs
from integration.tests.forks import vllm_context
from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, running, transfer_config
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Answer, ContractEngine, Expected
from tests.waiting import ANSWER_SECONDS, until

NUM_BLOCKS = 33  # one of them is vLLM's own


class ContractVllm:
    """An engine of this process; see `ContractEngine`."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.block_tokens = BLOCK_SIZE
        self.device_tokens = (NUM_BLOCKS - 1) * BLOCK_SIZE
        self.num_token_ids = tiny_configs.VOCABULARY
        self._requests: dict[str, Any] = {}  # vLLM's, by the ids that it gave them
        self._outputs: dict[str, Any] = {}
        self._hits: dict[str, tuple[int, int]] = {}  # tokens that the device had, and that were loaded
        self._num_started = 0
        self._watch_hits()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[Answer]:
        """Greedy continuations; all prompts are asked at once."""
        return self.finish(self.start(prompts, num_tokens, salt))

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[str]:
        """Ask, and run the first two steps."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        salted = {"cache_salt": salt} if salt else {}
        known = set(self._engine.scheduler.requests)
        names = [f"request {self._num_started + i}" for i in range(len(prompts))]
        self._num_started += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            asked: Any = {"prompt_token_ids": list(prompt)} | salted
            self._engine.llm.llm_engine.add_request(name, asked, params)
            (request_id,) = set(self._engine.scheduler.requests) - known
            known.add(request_id)
            self._requests[name] = self._engine.scheduler.requests[request_id]
        for _ in range(2):
            self._step()
        return names

    def finish(self, request_ids: Sequence[str]) -> list[Answer]:
        """Step until these are over."""
        until(lambda: all(name in self._outputs for name in request_ids), self._step, self.stats, ANSWER_SECONDS)
        return [self._answer(name) for name in request_ids]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Their clients go away."""
        left = [name for name in request_ids if name not in self._outputs]
        self._engine.abort([self._requests[name].request_id for name in left])
        self._outputs |= dict.fromkeys(left)

    def reset(self) -> None:
        """As weights that change have it."""
        self._engine.drain()
        assert self._engine.llm.reset_prefix_cache(reset_connector=True)

    def break_loads(self, broken: bool) -> None:
        """Loads fail from now on, or do so no more."""
        self._engine.break_loads(broken)

    def limit_host(self, num_blocks: int | None) -> None:
        """Give us so many host blocks only."""
        self._engine.half.resize_host(num_blocks)

    def stats(self) -> Mapping[str, float]:
        """Our counters."""
        return self._engine.stats()

    def check_idle(self) -> None:
        """Nothing is held, and every invariant of the index holds."""
        self._engine.check_all_free()

    def _step(self) -> None:
        if not self._engine.llm.llm_engine.has_unfinished_requests():
            self._engine.drain()
            return
        for output in self._engine.llm.llm_engine.step():
            if output.finished:
                self._outputs[output.request_id] = output.outputs[0]

    def _answer(self, name: str) -> Answer:
        output, request = self._outputs.pop(name), self._requests.pop(name)
        num_on_device, num_loaded = self._hits.pop(request.request_id, (0, 0))
        is_answered = output is not None and output.finish_reason == "length"
        return Answer(
            list(output.token_ids) if is_answered else None,
            num_loaded,
            num_on_device + num_loaded,
            request.num_preemptions,
            "" if output is None or is_answered else str(output.finish_reason),
        )

    def _watch_hits(self) -> None:
        """What vLLM asks of the connector when it admits a request for the first time."""
        connector = self._engine.scheduler.connector
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        on_device: dict[str, int] = {}

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            on_device[request.request_id] = num_computed_tokens
            return match(request, num_computed_tokens)

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            self._hits.setdefault(request.request_id, (on_device[request.request_id], num_external_tokens))
            allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc


@contextmanager
def opened(folder: Path, settings: Mapping[str, Any] | None = None, **options: Any) -> Iterator[ContractEngine]:
    """An engine with our connector and these settings."""
    config = transfer_config({"write_policy": "write_through"} | dict(settings or {}))
    with running(folder, num_blocks=NUM_BLOCKS, kv_transfer_config=config, **options) as engine:
        yield ContractVllm(engine)


@contextmanager
def answers_alone(folder: Path, **options: Any) -> Iterator[Expected]:
    """What vLLM answers without us to each prompt alone, in a process of its own."""
    arguments = folder, options
    with ProcessPoolExecutor(1, vllm_context(), initializer=_start_alone, initargs=arguments) as process:
        yield engine_contract.answered_once(lambda prompt, num: process.submit(_answer_alone, prompt, num).result())


_alone: list[Any] = []  # in a process of its own: the engine, until that ends


def _start_alone(folder: Path, options: dict[str, Any]) -> None:
    context = running(folder, num_blocks=200, kv_transfer_config=None, enable_prefix_caching=False, **options)
    _alone.extend((context.__enter__(), context))


def _answer_alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    answers: list[list[int]] = _alone[0].generate([prompt], num_tokens)
    return answers[0]
