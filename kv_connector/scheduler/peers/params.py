"""What both sides make of a request: `kv_transfer_params` as they come from whoever sends requests, where anything but
what is expected is nothing, and where a KV transfer ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base import Request
from ..shared import Shared

MOST_TEXT = 256
"""Characters of a name."""


def params_of(request: Request) -> Mapping[str, Any]:
    """What the request says of another engine; empty where it says nothing."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def transfer_end(request: Request, shared: Shared) -> int:
    """Block hashes of the prompt that a KV transfer has: a hit of every block group may end there, and at least one
    token is left to compute. Producer and consumer count alike. Engines with draft layers keep the state in front of
    the last whole block, as a hit of theirs leaves that to be computed."""
    grouped, num_hashes = shared.grouped, (request.num_tokens - 1) // shared.block_size
    state_sizes = [group.hashes_per_block for group in grouped.groups if group.states_are_told]
    if grouped.drops_last_block and state_sizes:
        size = max(state_sizes)
        num_hashes = max(0, shared.num_useful(request.num_tokens) // size - 1) * size
    return num_hashes - num_hashes % grouped.hashes_per_hit


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
