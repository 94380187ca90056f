"""Engines of the model of TensorRT-LLM's executor, with the connector."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from integration import faults
from integration.tensorrt_llm.collectives import stand_in
from integration.tensorrt_llm.engine import LLM, Connector
from integration.tensorrt_llm.executor import Executor, Options, Response
from kv_connector.engines.tensorrt_llm import TieredKVScheduler, TieredKVWorker
from kv_connector.engines.tensorrt_llm.launch import VARIABLE
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Answer, Expected
from kv_connector.types import CopyJob

SETTINGS = {"host_memory": "64MiB", "write_policy": "write_through", "pin_memory": False, "calibration": "off"}
OURS = Connector(TieredKVScheduler, TieredKVWorker)


class ModelledEngine:
    """See `engine_contract.ContractEngine`."""

    num_token_ids = 512

    def __init__(self, options: Options, tp_size: int, saves_late: int = 0, **variants: Any) -> None:
        self.block_tokens = options.tokens_per_block
        self.device_tokens = options.tokens_per_block * options.num_blocks
        self._kind = options, OURS, tp_size
        self._variants = variants
        self._before: Counter[str] = Counter()  # statistics of engines that have ended
        self._saves_late = saves_late
        self._given_up: set[int] = set()  # or answered with an error
        self._open()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[Answer]:
        return self.finish(self.start(prompts, num_tokens, salt))

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[str]:
        return [str(i) for i in self.llm.start(prompts, num_tokens, salt or None)]

    def finish(self, request_ids: Sequence[str]) -> list[Answer]:
        responses = self.llm.finish([int(i) for i in request_ids])
        self._given_up |= {response.request.request_id for response in responses if response.token_ids is None}
        return [_answer(response) for response in responses]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.llm.cancel(int(request_id))

    def reset(self) -> None:
        def forget(executor: Executor) -> None:
            executor.kv.reset()
            assert executor.rank or scheduler_of(executor).reset_cache()

        self.llm.call(forget)

    def break_loads(self, broken: bool) -> None:
        if broken:
            self.llm.call(lambda executor: faults.break_loads(worker_of(executor)._half, broken))
            return
        self._before.update({"failed_load_jobs": int(self.stats()["failed_load_jobs"])})
        self.shutdown()
        self._open()

    def limit_host(self, num_blocks: int | None) -> None:
        self.llm.call(lambda executor: executor.rank or scheduler_of(executor)._half.resize_host(num_blocks))

    def stats(self) -> Mapping[str, float]:
        stats: dict[str, float] = scheduler_of(self.llm.ranks[0]).stats()
        return stats | {name: stats[name] + count for name, count in self._before.items()}

    def check_idle(self) -> None:
        """An idle engine's ranks tell each other nothing: it is woken up until nothing is under way."""
        for _ in range(1000):
            if not scheduler_of(self.llm.ranks[0]).is_busy:
                break
            self.llm.turn()
        self.llm.turn()
        self.llm.call(lambda executor: executor.kv.check_idle())
        scheduler = scheduler_of(self.llm.ranks[0])
        scheduler._half.check()
        assert scheduler.stats()["host_leased_blocks"] == 0
        assert scheduler._live.keys() <= self._given_up, "of these TensorRT-LLM says nothing"
        assert not scheduler._held

    def _open(self) -> None:
        self.llm = LLM(*self._kind, **self._variants)
        if self._saves_late:
            self.llm.call(lambda executor: delay_saves(executor, self._saves_late))

    def shutdown(self) -> None:
        """As the process would end."""
        self.llm.shutdown()
        for executor in self.llm.ranks:
            worker_of(executor).shutdown()


class LateSaves:
    """A transfer engine whose saves read their blocks some steps later: whoever reuses these too early is found out."""

    def __init__(self, engine: Any, seed: int, most: int) -> None:
        self._engine = engine
        self._most = most
        self._chance = random.Random(seed)
        self._late: list[tuple[int, Sequence[CopyJob]]] = []  # and how often it is polled before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit_save(self, jobs: Sequence[CopyJob]) -> frozenset[int]:
        self._late.append((self._chance.randint(0, self._most), jobs))
        return frozenset()

    def poll(self) -> Any:
        self._late = [(left - 1, jobs) for left, jobs in self._late]
        self._submit(lambda left: left < 0)
        return self._engine.poll()

    def fence(self) -> None:
        self._submit(lambda left: True)
        self._engine.fence()

    def _submit(self, is_due: Callable[[int], bool]) -> None:
        for _, jobs in [late for late in self._late if is_due(late[0])]:
            self._engine.submit_save(jobs)
        self._late = [late for late in self._late if not is_due(late[0])]


def delay_saves(executor: Executor, most: int) -> None:
    """Of this rank, from now on, until it has been polled so often at most."""
    half = worker_of(executor)._half
    half._engine = LateSaves(half._engine, executor.rank, most)


def _answer(response: Response) -> Answer:
    request = response.request
    num_hit = request.num_matched + request.num_reused
    return Answer(response.token_ids, request.num_matched, num_hit, request.num_reset, response.error)


def worker_of(executor: Executor) -> Any:
    """Of this rank."""
    assert executor.manager is not None
    return executor.manager.worker


def scheduler_of(executor: Executor) -> Any:
    """Of rank 0; None on others."""
    assert executor.manager is not None
    return executor.manager.scheduler


@contextmanager
def running(
    options: Options,
    tp_size: int = 1,
    settings: Mapping[str, Any] | None = None,
    saves_late: int = 0,
    **variants: Any,
) -> Iterator[ModelledEngine]:
    """An engine with these settings beside the usual ones. `variants`: of its model."""
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps(SETTINGS | dict(settings or {})))
        engine = ModelledEngine(options, tp_size, saves_late, **variants)
        try:
            yield engine
        finally:
            engine.shutdown()


@contextmanager
def answers_alone() -> Iterator[Expected]:
    """What the modelled engine answers without us to each prompt alone."""
    llm = LLM(Options(num_blocks=256))

    def answer(prompt: Sequence[int], num_tokens: int) -> Sequence[int]:
        (response,) = llm.generate([prompt], num_tokens)
        assert response.token_ids is not None, response.error
        return response.token_ids

    yield engine_contract.answered_once(answer)
    llm.shutdown()
