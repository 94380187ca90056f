"""The linker where SGLang takes requests their pages, where the host is small, and over restarts with storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.tests.sglang_engines import running
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Expected, RestartCheck, evict, prompts


def test_retraction(models: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang admits no more than it has room for, on a small device: it is told to retract every few steps."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "12")
    with running(models) as engine:
        for check in engine_contract.PREEMPTIONS:
            check(engine, expected)


@pytest.mark.parametrize("check", engine_contract.RESTARTS, ids=lambda check: check.__name__)
def test_restart(check: RestartCheck, models: Path, expected: Expected, tmp_path: Path) -> None:
    check(lambda settings: running(models, dict(settings)), expected, str(tmp_path / "storage"))


def test_the_second_of_two_who_ask_at_once_is_loaded_as_well(models: Path, expected: Expected) -> None:
    """Where the host is small and all of it promised, nobody is told of what is not there by then."""
    with running(models, {"host_memory": "4MiB"}) as engine:  # 64 blocks
        asked = prompts(engine, 4, seed="small")
        answers = expected(asked, 8)
        for turn in range(4):
            assert [answer.token_ids for answer in engine.generate(asked)] == answers
            assert [answer.token_ids for answer in engine.generate(asked[::-1])] == answers[::-1]
            evict(engine, turn)
        engine.check_idle()
