"""The connector in the model of TensorRT-LLM's executor (`integration/tensorrt_llm`), with one rank and two, with
overlap and without: the contract of adapters, as far as the slot goes.

What the slot cannot do is said here. Where a load fails for good the engine has to be started anew: so does
`ModelledEngine.break_loads(False)`. Storage is not waited for: for the contract's `RESTARTS` there is
`test_what_is_stored_is_there_for_those_that_come_later`. The engine's first cache manager takes nobody's blocks away:
`PREEMPTIONS` run with requests that are replayed, as its second does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.tensorrt_llm.engine import LLM
from integration.tensorrt_llm.executor import Options
from integration.tests.tensorrt_llm_engines import ModelledEngine, running
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, Expected, evict, loadable, prompts

KINDS: dict[str, dict[str, Any]] = {
    "one rank": {"options": Options()},
    "one rank, overlap, late saves": {"options": Options(overlap=True), "saves_late": 5},
    "two ranks, late saves": {"options": Options(), "tp_size": 2, "saves_late": 5},
    "two ranks, overlap": {"options": Options(overlap=True), "tp_size": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[ModelledEngine]:
    """One for all checks."""
    with running(**KINDS[request.param]) as engine:
        yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: ModelledEngine, expected_of_tensorrt_llm: Expected) -> None:
    check(engine, expected_of_tensorrt_llm)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_cache_in_bf16_says_the_same_from_coded_blocks(tp_size: int) -> None:
    """From raw ones, that is: in bf16 what is computed rounds otherwise than what goes on behind a loaded prefix."""
    said = []
    for form in ("raw", "lossless"):
        with running(Options(), tp_size, {"host_form": form}, dtype=torch.bfloat16) as engine:
            asked = prompts(engine, 4, seed="coded")
            computed = [engine.generate([prompt])[0].token_ids for prompt in asked]
            engine.check_idle()  # what is held for a save would be the last that leaves the device
            evict(engine, "coded")
            again = [engine.generate([prompt])[0] for prompt in asked]
            assert [answer.num_loaded for answer in again] == [loadable(engine, prompt) for prompt in asked]
            said.append([computed, [answer.token_ids for answer in again]])
            assert not engine.stats()["refused_blocks"]
            engine.check_idle()
    assert said[0] == said[1]


def test_a_cache_that_cannot_be_coded_is_refused_at_the_start() -> None:
    """It is in fp32 here."""
    with (
        pytest.raises(RuntimeError, match=r"host_form='lossless' gains nothing here: .*; give 'raw'"),
        running(Options(), settings={"host_form": "lossless"}),
    ):
        pass


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("check", engine_contract.PREEMPTIONS, ids=lambda check: check.__name__)
def test_requests_that_are_replayed(check: Check, tp_size: int, expected_of_tensorrt_llm: Expected) -> None:
    """Nobody keeps their blocks for copies: the next step waits for these."""
    with running(Options(evicts=True), tp_size, saves_late=80) as engine:
        check(engine, expected_of_tensorrt_llm)


def test_ranks_share_what_all_of_them_hold() -> None:
    """With multi-head latent attention every rank has the whole cache, and the host one copy of it."""
    options, latent = Options(tokens_per_block=64, num_blocks=16), {"key_only": True, "num_key_value_heads": 1}
    asked = [[5 + i, *range(7, 300)] for i in range(8)]
    alone = LLM(options, **latent)
    answers = [alone.generate([prompt])[0].token_ids for prompt in asked]
    alone.shutdown()
    with running(options, 2, **latent) as engine:
        assert [engine.generate([prompt])[0].token_ids for prompt in asked] == answers
        again = [engine.generate([prompt])[0] for prompt in asked]
        assert [answer.token_ids for answer in again] == answers
        assert [answer.num_loaded for answer in again] == [256] * 8
        stats = engine.stats()
        assert stats["saved_bytes"] * 2 == stats["loaded_bytes"], "each block is saved once and loaded by both"
        engine.check_idle()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_stored_is_there_for_those_that_come_later(
    tp_size: int, expected_of_tensorrt_llm: Expected, tmp_path: Path
) -> None:
    """An engine that was started anew computes a prompt that storage has once more, and loads it the next time."""
    settings = {"storage": {"path": str(tmp_path / "storage"), "capacity": "256MiB"}}
    with running(Options(), tp_size, settings) as engine:
        asked = prompts(engine, 3, seed="stored")
        answers = expected_of_tensorrt_llm(asked, 8)
        assert [answer.token_ids for answer in engine.generate(asked)] == answers
        for _ in range(200):  # an idle engine plans nothing: others ask, meanwhile
            if engine.stats().get("storage_stored_blocks", 0) >= 3 * (len(asked[0]) // engine.block_tokens):
                break
            engine.generate(prompts(engine, 1, 8, seed="meanwhile"), num_tokens=2)
        engine.start(prompts(engine, 3, seed="stopped"), num_tokens=64)
    settings |= {"write_policy": "write_through_selective", "write_through_threshold": 99}  # it is storage that brings
    with running(Options(), tp_size, settings) as engine:
        first = engine.generate(asked)
        assert [answer.token_ids for answer in first] == answers
        evict(engine, "stored")
        again = engine.generate(asked)
        assert [answer.token_ids for answer in again] == answers
        assert [answer.num_loaded for answer in again] == [loadable(engine, prompt) for prompt in asked]
        assert engine.stats()["storage_read_blocks"] > 0
