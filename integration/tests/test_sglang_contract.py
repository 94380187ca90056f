"""The contract of adapters, kept by the linker in real SGLang engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.tests.sglang_engines import SglangEngine, running
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, Expected, evict, prompts


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[SglangEngine]:
    """One for all checks."""
    with running(models) as engine:
        yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: SglangEngine, expected: Expected) -> None:
    check(engine, expected)


def test_who_asks_second_is_loaded_as_well(engine: SglangEngine, expected: Expected) -> None:
    """Where the host is small and all of it promised, nobody is told of what is not there by then."""
    asked = prompts(engine, 4, seed="small")
    answers = expected(asked, 8)
    engine.limit_host(64)
    try:
        for turn in range(4):
            assert [answer.token_ids for answer in engine.generate(asked)] == answers
            assert [answer.token_ids for answer in engine.generate(asked[::-1])] == answers[::-1]
            evict(engine, turn)
    finally:
        engine.limit_host(None)
    engine.check_idle()
