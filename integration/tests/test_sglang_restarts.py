"""The linker where SGLang takes requests their pages, and over restarts with storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.tests.sglang_engines import SglangEngine, running
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Expected, RestartCheck


@pytest.mark.parametrize("check", engine_contract.RESTARTS, ids=lambda check: check.__name__)
def test_restart_behind_retraction(check: RestartCheck, models: Path, expected: Expected, tmp_path: Path) -> None:
    """SGLang admits no more than it has room for, on a small device: the first engine is told to retract every few
    steps. The next one is not, and finds what that one has stored."""
    preemptions = list(engine_contract.PREEMPTIONS)

    @contextmanager
    def open_engine(settings: Mapping[str, Any]) -> Iterator[SglangEngine]:
        with running(models, dict(settings)) as engine:
            if preemptions:
                engine.retract_every(12)
            while preemptions:
                preemptions.pop(0)(engine, expected)
            yield engine

    check(open_engine, expected, str(tmp_path / "storage"))
