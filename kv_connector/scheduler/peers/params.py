"""What both sides make of a request: `kv_transfer_params` as they come from whoever sends requests, where anything but
what is expected is nothing, and where a KV transfer ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base import Request
from ..control.hints import HINTS_KEY
from ..shared import Shared

MOST_TEXT = 256
"""Characters of a name."""
MOST_RANKS = 256
"""Of an engine that may be asked for blocks."""


def params_of(request: Request) -> Mapping[str, Any]:
    """What the request says of another engine; empty where it says nothing."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def passed_on(request: Request) -> dict[str, Any]:
    """What holds for the engine that continues the request as well: its hints, as they came."""
    params = params_of(request)
    return {HINTS_KEY: params[HINTS_KEY]} if HINTS_KEY in params else {}


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


def ports(params: Mapping[str, Any], tp_size: int, num_stages: int) -> tuple[int, ...]:
    """The port of each rank of the producer, stage by stage of its pipeline, which has as many as the one here; empty
    where one of them is none. Who passes on vLLM's own keys alone says that of rank 0 and the TP size; without the
    latter it is `tp_size`, as here."""
    given = params.get("remote_ports")
    if not given:
        first, size = params.get("remote_port"), params.get("tp_size") or tp_size
        if type(first) is not int or type(size) is not int or not 0 < size <= MOST_RANKS:
            return ()
        given = list(range(first, first + size * num_stages))
    if not isinstance(given, list) or len(given) > MOST_RANKS:
        return ()
    return tuple(given) if all(type(port) is int and 0 < port < 1 << 16 for port in given) else ()
