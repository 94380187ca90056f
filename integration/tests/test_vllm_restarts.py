"""The part of the contract of adapters for which vLLM is stopped and started, with storage."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_contract import opened
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Expected, RestartCheck


@pytest.mark.parametrize("check", engine_contract.RESTARTS, ids=lambda check: check.__name__)
def test_restart(
    check: RestartCheck, models: Path, expected: Expected, tmp_path: Path, stable_hashes: None, slow_machine: None
) -> None:
    check(lambda settings: opened(models, settings), expected, str(tmp_path / "storage"))
