"""What every test of the endpoint has: a token in the environment."""

from __future__ import annotations

import pytest

from kv_connector.config.admin import ADMIN_TOKEN
from tests.admin.stepping import TOKEN


@pytest.fixture(autouse=True)
def token_in_environment(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ADMIN_TOKEN, TOKEN)
    return TOKEN
