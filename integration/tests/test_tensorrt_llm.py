"""The connector in the model of TensorRT-LLM's executor (`integration/tensorrt_llm`), one rank and two, with overlap and
without: the contract of adapters, as far as the slot goes.

What the slot cannot do is said here. Where a load fails for good the engine has to be started anew: so does
`ModelledEngine.break_loads(False)`. Storage is not waited for: `test_what_is_stored_...` asks twice in place of the
contract's `RESTARTS`. Nobody is preempted by the engine's first cache manager; `PREEMPTIONS` run as under its second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.tensorrt_llm.collectives import stand_in
from integration.tensorrt_llm.engine import LLM, Connector
from integration.tensorrt_llm.executor import Executor, Options, Response
from integration.tests import faults
from kv_connector.engines.tensorrt_llm import TieredKVScheduler, TieredKVWorker
from kv_connector.engines.tensorrt_llm.launch import VARIABLE
from kv_connector.errors import ConfigError
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Answer, Check, Expected, evict, prompts

SETTINGS = {"host_memory": "64MiB", "write_policy": "write_through", "pin_memory": False, "calibration": "off"}
OURS = Connector(TieredKVScheduler, TieredKVWorker)
KINDS: dict[str, tuple[int, Options]] = {
    "one rank": (1, Options()),
    "one rank, overlap": (1, Options(overlap=True)),
    "two ranks": (2, Options()),
    "two ranks, overlap": (2, Options(overlap=True)),
}


class ModelledEngine:
    """See `engine_contract.ContractEngine`."""

    num_token_ids = 512

    def __init__(self, options: Options, tp_size: int) -> None:
        self.block_tokens = options.tokens_per_block
        self.device_tokens = options.tokens_per_block * options.num_blocks
        self._kind = options, OURS, tp_size
        self._before: Counter[str] = Counter()  # statistics of engines that have ended
        self.llm = LLM(*self._kind)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[Answer]:
        return self.finish(self.start(prompts, num_tokens, salt))

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[str]:
        return [str(i) for i in self.llm.start(prompts, num_tokens, salt or None)]

    def finish(self, request_ids: Sequence[str]) -> list[Answer]:
        return [_answer(response) for response in self.llm.finish([int(i) for i in request_ids])]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.llm.cancel(int(request_id))

    def reset(self) -> None:
        def forget(executor: Executor) -> None:
            executor.kv.reset()
            assert executor.rank or _scheduler(executor).reset_cache()

        self.llm.call(forget)

    def break_loads(self, broken: bool) -> None:
        if broken:
            self.llm.call(lambda executor: faults.break_loads(_worker(executor)._half, broken))
            return
        self._before.update({"failed_load_jobs": int(self.stats()["failed_load_jobs"])})
        self.shutdown()
        self.llm = LLM(*self._kind)

    def limit_host(self, num_blocks: int | None) -> None:
        self.llm.call(lambda executor: executor.rank or _scheduler(executor)._half.resize_host(num_blocks))

    def stats(self) -> Mapping[str, float]:
        stats: dict[str, float] = _scheduler(self.llm.ranks[0]).stats()
        return stats | {name: stats[name] + count for name, count in self._before.items()}

    def check_idle(self) -> None:
        """An idle engine's ranks tell each other nothing: it is woken up until nothing is under way."""
        for _ in range(1000):
            if not _scheduler(self.llm.ranks[0]).is_busy:
                break
            self.llm.turn()
        self.llm.turn()
        self.llm.call(lambda executor: executor.kv.check_idle())
        scheduler = _scheduler(self.llm.ranks[0])
        scheduler._half.check()
        assert scheduler.stats()["host_leased_blocks"] == 0
        assert not scheduler._live
        assert not scheduler._held

    def shutdown(self) -> None:
        """As the process would end."""
        self.llm.shutdown()
        for executor in self.llm.ranks:
            _worker(executor).shutdown()


def _answer(response: Response) -> Answer:
    request = response.request
    num_hit = request.num_matched + request.num_reused
    return Answer(response.token_ids, request.num_matched, num_hit, request.num_reset, response.error)


def _worker(executor: Executor) -> Any:
    assert executor.manager is not None
    return executor.manager.worker


def _scheduler(executor: Executor) -> Any:
    assert executor.manager is not None
    return executor.manager.scheduler


@contextmanager
def running(options: Options, tp_size: int = 1, settings: Mapping[str, Any] | None = None) -> Iterator[ModelledEngine]:
    """An engine with these settings beside the usual ones."""
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps(SETTINGS | dict(settings or {})))
        engine = ModelledEngine(options, tp_size)
        try:
            yield engine
        finally:
            engine.shutdown()


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """What the engine answers without a connector, to each prompt alone; asked once."""
    known: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}
    llm = LLM(Options(num_blocks=256))

    def answers(asked: Sequence[Sequence[int]], num_tokens: int) -> list[Sequence[int]]:
        keys = [(tuple(prompt), num_tokens) for prompt in asked]
        new = [key for key in dict.fromkeys(keys) if key not in known]
        for key, response in zip(new, llm.generate([key[0] for key in new], num_tokens), strict=True):
            assert response.token_ids is not None, response.error
            known[key] = response.token_ids
        return [known[key] for key in keys]

    yield answers
    llm.shutdown()


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[ModelledEngine]:
    """One for all checks."""
    tp_size, options = KINDS[request.param]
    with running(options, tp_size) as engine:
        yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: ModelledEngine, expected: Expected) -> None:
    check(engine, expected)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("check", engine_contract.PREEMPTIONS, ids=lambda check: check.__name__)
def test_requests_that_are_replayed(check: Check, tp_size: int, expected: Expected) -> None:
    with running(Options(evicts=True), tp_size) as engine:
        check(engine, expected)
