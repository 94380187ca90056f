"""`kv_transfer_params` as they come from whoever sends requests: anything but what is expected is nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base import Request

MOST_TEXT = 256
"""Characters of a name."""


def params_of(request: Request) -> Mapping[str, Any]:
    """What the request says of another engine; empty where it says nothing."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def text(params: Mapping[str, Any], name: str) -> str:
    """A name of at most `MOST_TEXT` characters, or an empty one."""
    value = params.get(name)
    return value if isinstance(value, str) and len(value) <= MOST_TEXT else ""


def ports(params: Mapping[str, Any]) -> tuple[int, ...]:
    """One port for each rank, or that of rank 0; empty where one of them is none."""
    given = params.get("remote_ports") or [params.get("remote_port")]
    if not isinstance(given, list) or not all(type(port) is int and 0 < port < 1 << 16 for port in given):
        return ()
    return tuple(given)
