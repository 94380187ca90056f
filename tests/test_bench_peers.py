"""All engines of a comparison get the same memory, and are what their names say."""

from __future__ import annotations

import builtins
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from integration.bench.options import connectors
from integration.bench.peers import is_default, is_peer
from integration.bench.vllm_engine import VllmOptions
from integration.bench.vllm_peers import environment, fault, transfer_config

SIZE = int(7.5 * 2**30)


def extra(name: str, **ours: Any) -> Any:
    asked = transfer_config(name, SIZE, ours)
    return asked and asked["kv_connector_extra_config"]


def test_all_have_the_same_bytes() -> None:
    assert extra("offloading") == extra("simple") == {"cpu_bytes_to_use": SIZE}
    assert extra("ours") == {"host_memory": SIZE}
    assert float(environment("lmcache", SIZE)["LMCACHE_MAX_LOCAL_CPU_SIZE"]) * 2**30 == SIZE
    assert float(environment("lmcache", SIZE + 1)["LMCACHE_MAX_LOCAL_CPU_SIZE"]) * 2**30 == SIZE + 1
    assert transfer_config("none", SIZE, {}) is None


def test_settings_stand_behind_a_name() -> None:
    assert extra("offloading:sync_load_budget_bytes=1048576") == {
        "cpu_bytes_to_use": SIZE,
        "sync_load_budget_bytes": 1048576,
    }
    assert extra("lmcache:use_layerwise=true") == {"lmcache.use_layerwise": True, "use_layerwise": True}
    assert extra("ours:write_through:save_bandwidth=null") == {
        "host_memory": SIZE,
        "write_policy": "write_through",
        "save_bandwidth": None,
    }
    assert extra("producer", peer={"kind": "nixl"}) == {"peer": {"kind": "nixl"}}


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("redis", "give none, ours, hicache"),
        ("hicache", "give none, offloading, simple"),
        ("offloading:lru", "give KEY=VALUE"),
        ("simple:lazy_offload=perhaps", "give a number, or text in quotes"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_the_fix(name: str, fix: str) -> None:
    with pytest.raises(ArgumentTypeError, match=fix):
        connectors(VllmOptions.kinds.split(","), f"none,{name}")


def test_ours_is_the_default_policy_unless_another_is_named() -> None:
    assert [name for name in ("ours", "ours:adaptive", "ours:write_through", "offloading") if is_default(name)] == [
        "ours",
        "ours:adaptive",
    ]
    assert not is_default("ours:save_bandwidth=1")
    assert [name for name in ("none", "offloading", "simple", "lmcache:x=1", "ours") if is_peer(name)] == [
        "offloading",
        "simple",
        "lmcache:x=1",
    ]


def test_two_runs_beside_each_other_compile_into_folders_of_their_own() -> None:
    first, second = (VllmOptions("lmcache", SIZE, 1024, 512, device=device).environment() for device in (0, 1))
    assert first["VLLM_CACHE_ROOT"] != second["VLLM_CACHE_ROOT"]
    assert (first.get("CUDA_VISIBLE_DEVICES"), second["CUDA_VISIBLE_DEVICES"]) == (None, "1")
    assert first["LMCACHE_SAVE_DECODE_CACHE"] == "True" and first["PYTHONHASHSEED"] == "0"
    assert not any(key.startswith("LMCACHE") for key in VllmOptions("ours", SIZE, 1024, 512).environment())


def test_lmcache_on_python_functions_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", ModuleType("lmcache"))
    operations = ModuleType("lmcache.c_ops")
    monkeypatch.setitem(sys.modules, "lmcache.c_ops", operations)
    operations.multi_layer_kv_transfer = lambda: None  # type: ignore[attr-defined]
    assert "CUDA backend is not in use" in fault("lmcache", "")
    operations.multi_layer_kv_transfer = builtins.len  # type: ignore[attr-defined]
    assert fault("lmcache", "LMCache initialized for role KVConnectorRole.WORKER") == ""
    assert "initialize" in fault("lmcache", ". System will operate in degraded mode (recompute).")
    assert fault("none", "") == fault("ours", "degraded mode") == ""


def test_a_setting_that_vllm_never_reads_is_void(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "v1" / "kv_offload").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.32.0'\n")
    (package / "v1" / "kv_offload" / "spec.py").write_text('extra.get("eviction_policy", "lru")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert fault('offloading:eviction_policy="arc"', "") == ""
    assert fault("offloading:sync_load_budget_bytes=1", "") == "vLLM 0.32.0 knows no sync_load_budget_bytes"
