"""The contract of adapters, kept by the linker in real SGLang engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from integration.tests.sglang_engines import SglangEngine, reference, running, running_alone
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, ContractEngine, Expected


@pytest.fixture(scope="module")
def expected(models: Path) -> Iterator[Expected]:
    """What an engine without us answers."""
    with running_alone(models, max_total_tokens=8192) as engine:
        yield reference(engine)


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[SglangEngine]:
    """One for all checks."""
    with running(models) as engine:
        yield engine


@pytest.fixture(scope="module")
def retracting(models: Path) -> Iterator[SglangEngine]:
    """One that retracts requests every few steps: it admits no more than it has room for, on a small device."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_TEST_RETRACT", "1")
        environment.setenv("SGLANG_TEST_RETRACT_INTERVAL", "12")
        with running(models) as engine:
            yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: SglangEngine, expected: Expected) -> None:
    check(engine, expected)


@pytest.mark.parametrize("check", engine_contract.PREEMPTIONS, ids=lambda check: check.__name__)
def test_retraction(check: Check, retracting: SglangEngine, expected: Expected) -> None:
    check(retracting, expected)


@pytest.mark.parametrize("check", engine_contract.RESTARTS, ids=lambda check: check.__name__)
def test_restart(check: Any, models: Path, expected: Expected, tmp_path: Path) -> None:
    def open_engine(settings: Mapping[str, Any]) -> Any:
        return running(models, dict(settings))

    def known(engine: ContractEngine) -> Expected:
        return expected

    check(open_engine, known, str(tmp_path / "storage"))
