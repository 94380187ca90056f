"""Names of the engines of a comparison.

A connector is named by its kind and settings behind colons: `none`; vLLM's own `offloading` and `simple`; `lmcache` in
vLLM's process; `hicache`, SGLang's own; `ours`. Each setting is KEY=VALUE (JSON), of ours also the name of a write
policy.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from kv_connector.config import Config

PEERS = {
    "offloading": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
    "lmcache": "LMCache",
    "hicache": "HiCache",
}
"""Kinds of others' connectors, and how tables name them."""
ROLES = {"producer": "kv_producer", "consumer": "kv_consumer"}
"""Of ours: engines that compute prompts for others, and that continue them."""

LOSSLESS = 'ours:host_form="lossless"'
"""Of ours, with host blocks in that form, else as by default."""


class Connector(NamedTuple):
    """A name in parts. `settings` by their keys, values as JSON reads them."""

    kind: str
    settings: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.kind == "ours" or self.kind in ROLES


def parse_connector(name: str) -> Connector:
    """Raises ValueError for a kind that is not known, and for a value that is not JSON."""
    kind, *parts = name.split(":")
    if kind not in {"none", "ours", *PEERS, *ROLES}:
        raise ValueError(f"connector {name!r} is unknown: give none, ours, {', '.join(sorted(PEERS))}, with :KEY=VALUE")
    settings: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.rpartition("=")
        if not key and kind != "ours":
            raise ValueError(f"{part!r} of connector {name!r} is no setting: give KEY=VALUE")
        try:
            settings |= {key: json.loads(value)} if key else {"write_policy": value}
        except json.JSONDecodeError:
            raise ValueError(f"{value!r} in connector {name!r} is not JSON: give a number, or text in quotes") from None
    return Connector(kind, settings)


def is_peer(name: str) -> bool:
    """Whether it is someone else's connector."""
    return parse_connector(name).kind in PEERS


def is_default(name: str) -> bool:
    """Whether it is ours with no setting but, perhaps, the write policy that is the default anyway."""
    kind, settings = parse_connector(name)
    return kind == "ours" and settings in ({}, {"write_policy": Config(host_memory=0).write_policy.value})


def slug(name: str) -> str:
    """For names of files."""
    return re.sub("[^a-z0-9]+", "_", name.lower())


def no_hits(prompt_tokens: int, host_tokens: int) -> str:
    """Why a window of chats says nothing of a peer: it answered or loaded nothing at all. Empty where it did.

    LMCache goes on in a degraded mode where it could not initialize: every request waits, and is computed.
    """
    if not prompt_tokens:
        return "no turn was answered"
    return "" if host_tokens else "no token came from its host memory"
