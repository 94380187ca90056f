"""The contract of adapters, kept by the connector in a real vLLM engine in bf16 whose host blocks are coded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_contract import opened
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, ContractEngine, Expected

CHECKS = [check for check in engine_contract.CHECKS if check not in engine_contract.PREEMPTIONS]
"""In bf16 vLLM's kernels for the CPU round by what else is in the batch, so that it answers the others otherwise than
alone, also where blocks are raw; `test_vllm_lossless.py` has a test in their place."""


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[ContractEngine]:
    """One for all checks."""
    with opened(models, {"host_form": "lossless"}, dtype="bfloat16") as engine:
        yield engine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: ContractEngine, expected_in_bf16: Expected) -> None:
    check(engine, expected_in_bf16)
    assert not engine.stats()["refused_blocks"]
