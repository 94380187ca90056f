"""What tests of whole engines on storage ask for by name."""

from __future__ import annotations

import pytest

from kv_connector.scheduler.storage import reading


@pytest.fixture
def stable_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One start names a prompt's blocks as the next one does."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still for seconds, as a busy host's do, is not a storage that never answers."""
    monkeypatch.setattr(reading, "STALL_SECONDS", 60.0)
