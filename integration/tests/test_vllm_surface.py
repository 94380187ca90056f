"""What vLLM calls on a connector, in this version and in one that has no build for this machine."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from integration.vllm_surface import surface
from kv_connector.engines.vllm import TieredKVConnector

HERE = surface(Path(base.__file__).read_text())
NEWER = json.loads((Path(__file__).parent / "vllm_surface_0.33.0.json").read_text())
SECRET = "known to all of them"
LEFT_TO_VLLM = {
    "bind_kv_cache_manager": "it gives the block pool to `bind_gpu_block_pool`",
    "finish_forward": "nothing of a step ends with its forward pass alone; where `post_forward(defer_finalize=True)` "
    "reports it before `wait_for_save`, its saves are told of with a later one",
    "get_finished_count": "every rank reports",
    "get_kv_connector_kv_cache_events": "events are the scheduler's",
    "get_mem_pool_context": "the cache may lie in any memory",
    "has_connector_metadata": "as vLLM keeps it",
    "register_finished_partial_tail": "states inside of a block are left to the device",
    "reset_capture_state": "nothing of ours is captured",
    "restore_kv_caches": "addresses are the same after a sleep, and what a NIC has registered may not sleep: see "
    "`supports_sleep_mode`; what CUDA IPC exports is no memory that may sleep",
    "role": "as vLLM keeps it",
    "set_host_xfer_buffer_ops": "copies are ours",
    "supports_divergent_local_hybrid_hits": "states that lag behind on the device are not restored",
    "unregister_kv_caches": "as `restore_kv_caches`; no copy is under way, since `has_pending_push_work` is waited for",
}
"""Calls of 0.33.0 that our connector does not answer itself, and why."""


@pytest.mark.parametrize("called", [HERE, NEWER], ids=["this version", "0.33.0"])
def test_our_methods_take_what_vllm_gives_them(called: dict[str, list[str]]) -> None:
    for name, parameters in called.items():
        method = vars(TieredKVConnector).get(name)
        if method is None or isinstance(method, property):
            continue
        own = inspect.signature(getattr(TieredKVConnector, name)).parameters
        takes = [parameter for parameter in own if parameter != "self"]
        assert takes[: len(parameters)] == parameters, name


def test_every_call_of_the_newest_version_is_answered_or_left_to_vllm_for_a_reason() -> None:
    assert {name for name in NEWER if name not in vars(TieredKVConnector)} == set(LEFT_TO_VLLM)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (None, True),
        ({"kind": "shared_memory", "secret": SECRET}, True),
        ({"kind": "nixl", "secret": SECRET}, False),
        ({"kind": "nixl", "secret": SECRET, "route": "direct"}, False),
        ({"kind": "nixl", "secret": SECRET, "route": "staged"}, True),
    ],
)
def test_only_memory_that_a_nic_has_registered_may_not_sleep(peer: dict[str, Any] | None, expected: bool) -> None:
    given = {"host_memory": "1GiB"} | ({"peer": peer} if peer is not None else {})
    config = SimpleNamespace(kv_connector_extra_config=given)
    assert TieredKVConnector.supports_sleep_mode(config) is expected
