"""What vLLM engines of a comparison are started with, and what shows that a peer is really what is measured.

All get the same bytes of host memory. A peer that works without what makes it fast is no comparison: `fault` says so,
in the engine's process, and the engine is left out with that reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

from integration.bench.peers import ROLES, parse_connector

CONNECTORS = {
    "offloading": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
    "lmcache": "LMCacheConnectorV1",
}
_VLLM_CONNECTORS = ("v1/kv_offload", "v1/simple_kv_offload", "distributed/kv_transfer/kv_connector/v1")


def transfer_config(name: str, host_bytes: int, ours: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of vLLM's KVTransferConfig; None for no connector. `ours` are more settings of our connector."""
    kind, settings = parse_connector(name)
    if kind == "none":
        return None
    if kind == "lmcache":  # its memory is set by the environment
        extra = {f"lmcache.{key}": value for key, value in settings.items()}
        # vLLM reads this one itself, to keep the hooks of each layer out of whole CUDA graphs.
        extra |= {key: value for key, value in settings.items() if key == "use_layerwise"}
        return {"kv_connector": CONNECTORS[kind], "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if kind in CONNECTORS:
        extra = {"cpu_bytes_to_use": host_bytes} | settings
        return {"kv_connector": CONNECTORS[kind], "kv_role": "kv_both", "kv_connector_extra_config": extra}
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
