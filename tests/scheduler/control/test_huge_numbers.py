"""Numbers that no float holds are wrong like others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kv_connector.admin.bodies import PinBody
from kv_connector.errors import ConfigError
from kv_connector.scheduler.control.hints import NO_HINTS, hints_of


@pytest.mark.parametrize("ttl_s", [10**400, -(10**400), float("nan"), float("inf")])
def test_a_time_that_no_float_holds_is_ignored_in_a_hint_and_refused_in_a_call(ttl_s: float) -> None:
    told: list[str] = []
    request = SimpleNamespace(kv_transfer_params={"cache": {"ttl_s": ttl_s}})
    assert hints_of(request, told.append) == NO_HINTS and len(told) == 1
    with pytest.raises(ConfigError, match="ttl_s"):
        PinBody(ttl_s=ttl_s).seconds()
