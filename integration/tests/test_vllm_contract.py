"""The contract of adapters, kept by the connector in a real vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_contract import opened
from integration.tests.vllm_engines import schedule_ahead
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, ContractEngine, Expected


@pytest.fixture(scope="module", params=["step by step", "ahead"])
def engine(models: Path, request: pytest.FixtureRequest) -> Iterator[ContractEngine]:
    """One for all checks; the second plans a step while another one is under way."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "ahead":
            schedule_ahead(monkeypatch)
        with opened(models) as engine:
            yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS + engine_contract.PREEMPTIONS[:1], ids=lambda c: c.__name__)
def test_contract(check: Check, engine: ContractEngine, expected: Expected) -> None:
    check(engine, expected)
