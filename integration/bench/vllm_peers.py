"""What the engines of a comparison are started with, and what shows that a peer is really what is measured.

A connector is named by its kind and settings behind colons: `none`; vLLM's own `offloading` and `simple`; `lmcache` in
the engine's process; `ours`. Each setting is KEY=VALUE (JSON), of ours also the name of a write policy. All get the
same bytes of host memory. A peer that works without what makes it fast is no comparison: `fault` says so, in the
engine's process, and the engine is left out with that reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from kv_connector.config import Config

PEERS = {
    "offloading": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
    "lmcache": "LMCacheConnectorV1",
}
ROLES = {"producer": "kv_producer", "consumer": "kv_consumer"}
"""Of ours: engines that compute prompts for others, and that continue them."""
_VLLM_CONNECTORS = ("v1/kv_offload", "v1/simple_kv_offload", "distributed/kv_transfer/kv_connector/v1")


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
        raise ValueError(f"connector {name!r} is unknown: give none, ours, {', '.join(PEERS)}, with :KEY=VALUE")
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


def transfer_config(name: str, host_bytes: int, ours: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of vLLM's KVTransferConfig; None for no connector. `ours` are more settings of our connector."""
    kind, settings = parse_connector(name)
    if kind == "none":
        return None
    if kind == "lmcache":  # its memory is set by the environment
        extra = {f"lmcache.{key}": value for key, value in settings.items()}
        # vLLM reads this one itself, to keep the hooks of each layer out of whole CUDA graphs.
        extra |= {key: value for key, value in settings.items() if key == "use_layerwise"}
        return {"kv_connector": PEERS[kind], "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if kind in PEERS:
        extra = {"cpu_bytes_to_use": host_bytes} | settings
        return {"kv_connector": PEERS[kind], "kv_role": "kv_both", "kv_connector_extra_config": extra}
    asked = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "kv_connector.engines.vllm",
        "kv_role": ROLES.get(kind, "kv_both"),
        "kv_connector_extra_config": ({} if kind in ROLES else {"host_memory": host_bytes}) | ours | settings,
    }
    return asked | ({"kv_load_failure_policy": "recompute"} if kind in ROLES else {})


def environment(name: str, host_bytes: int) -> dict[str, str]:
    """Variables that an engine's process starts with because of its connector.

    LMCache's memory is in GiB for each rank, and fractions are allowed. It keeps what is decoded only where it is told
    to: a chat's next turn would compute the answer again. Scheduler and worker side must hash alike.
    """
    if parse_connector(name).kind != "lmcache":
        return {}
    return {
        "PYTHONHASHSEED": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": repr(host_bytes / 2**30),
        "LMCACHE_CHUNK_SIZE": "256",  # its default
        "LMCACHE_SAVE_DECODE_CACHE": "True",
        "LMCACHE_LOG_LEVEL": "INFO",
    }


def fault(name: str, log: str) -> str:
    """Why this process's engine is not what its name says; empty where it is. Called when it has started; `log`: all it
    has written by then."""
    kind, settings = parse_connector(name)
    if kind in ("offloading", "simple"):
        return unknown_settings(settings)
    return _lmcache_fault(log) if kind == "lmcache" else ""


def unknown_settings(settings: dict[str, Any]) -> str:
    """Which of them vLLM's own connectors never read, so that they would do nothing; empty where it reads all.

    They take whatever they are given and say nothing: OffloadingConnector has `sync_load_budget_bytes` from vLLM 0.33
    on, and without it runs as if it had not been asked.
    """
    found = importlib.util.find_spec("vllm")
    roots = [Path(root) for root in (found.submodule_search_locations or ())] if found else []
    files = [file for root in roots for place in _VLLM_CONNECTORS for file in (root / place).rglob("*.py")]
    source = "".join(file.read_text() for file in files) if settings else ""
    missing = [key for key in settings if f'"{key}"' not in source]
    return f"vLLM {importlib.import_module('vllm').__version__} knows no {', '.join(missing)}" if missing else ""


def no_hits(prompt_tokens: int, host_tokens: int) -> str:
    """Why a window of chats says nothing of a peer: it answered or loaded nothing at all. Empty where it did.

    LMCache goes on in a degraded mode where it could not initialize: every request waits, and is computed.
    """
    if not prompt_tokens:
        return "no turn was answered"
    return "" if host_tokens else "no token came from its host memory"


def _lmcache_fault(log: str) -> str:
    """Where its extension does not fit torch, LMCache goes on with Python functions and says so in a line of its log;
    where it cannot initialize, it goes on and computes every request, which then waits for a look-up first.

    Its merged module of operations has a builtin with the extension alone, whose name is another from 0.5.4 on.
    """
    reasons = []
    for module in ("lmcache.cuda_ops", "lmcache.c_ops"):
        try:
            operations = importlib.import_module(module)
        except ImportError as error:
            reasons.append(f"{module}: {error}")
            continue
        if isinstance(getattr(operations, "multi_layer_kv_transfer", None), BuiltinFunctionType):
            return "LMCache could not initialize" if "degraded mode" in log else ""
        reasons.append(f"{module} is Python's")
    return f"LMCache's CUDA backend is not in use ({'; '.join(reasons)})"
