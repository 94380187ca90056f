"""The contract of adapters, kept by the linker in a real SGLang engine in bf16 whose host blocks are coded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.tests.sglang_engines import SglangEngine, running
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, Expected


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[SglangEngine]:
    """One for all checks."""
    with running(models, {"host_form": "lossless"}, dtype="bfloat16", sleep_on_idle=True) as engine:
        yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: SglangEngine, expected_in_bf16: Expected) -> None:
    check(engine, expected_in_bf16)
    assert not engine.stats()["refused_blocks"]
