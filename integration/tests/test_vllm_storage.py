"""Storage behind a real vLLM engine: what one engine has computed, the next one finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration import s3_server
from integration.mooncake_master import running_store, why_not
from integration.tests.vllm_engines import BLOCK_SIZE, cached_tokens_by_source, prompts, running, transfer_config
from kv_connector.errors import ConfigError

NUM_BLOCKS = 4 * 13

pytestmark = pytest.mark.usefixtures("stable_hashes", "slow_machine")


def answers_of_two(folder: Path, config: dict[str, Any], asked: list[list[int]]) -> list[list[int]]:
    """An engine computes prompts, and the next one answers them from storage alone, the same as from the device."""
    with running(folder, num_blocks=200, kv_transfer_config=config) as engine:
        engine.wait_for_storage()
        engine.alone(asked)
        from_device = engine.alone(asked)
        engine.check_all_free()
        stats = engine.stats()
    assert (stats["backed_up_blocks"], stats["fetched_blocks"]) == (NUM_BLOCKS, 0)
    with running(folder, num_blocks=200, kv_transfer_config=config) as engine:
        engine.wait_for_storage()
        assert engine.alone(asked) == from_device
        engine.check_all_free()
        assert cached_tokens_by_source() in ({}, {"disk": NUM_BLOCKS * BLOCK_SIZE})
        assert engine.llm.reset_prefix_cache()
        assert engine.alone(asked) == from_device, "they are on the host now"
        assert cached_tokens_by_source() in ({}, dict.fromkeys(("disk", "host"), NUM_BLOCKS * BLOCK_SIZE))
        stats = engine.stats()
    assert (stats["fetched_blocks"], stats["host_hit_tokens"]) == (NUM_BLOCKS, 2 * NUM_BLOCKS * BLOCK_SIZE)
    return from_device


def test_the_next_engine_answers_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    storage = {"path": str(folder), "capacity": "64MiB", "prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage})
    asked = prompts(4)
    from_device = answers_of_two(tmp_path, config, asked)
    packs = list(folder.rglob("*.pack"))
    assert packs
    for path in packs:
        with open(path, "r+b") as file:  # a bit of every pack's first block
            file.seek(4096 + 100)
            byte = file.read(1)[0]
            file.seek(4096 + 100)
            file.write(bytes([byte ^ 1]))
    with running(tmp_path, num_blocks=200, kv_transfer_config=config) as engine:
        assert engine.alone(asked) == from_device, "damage is a miss"
        engine.check_all_free()
        assert engine.stats()["storage_corrupt_blocks"] > 0


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_an_engine_answers_from_mooncake_what_only_another_one_has_seen(tmp_path: Path) -> None:
    with running_store(64 << 20) as master:
        check_shared_store(tmp_path, {"kind": "mooncake", "master": master.address}, master.kill)


@pytest.mark.skipif(s3_server.why_not() is not None, reason=s3_server.why_not() or "")
def test_an_engine_answers_from_a_bucket_what_only_another_one_has_seen(tmp_path: Path) -> None:
    with s3_server.running_s3() as server:
        check_shared_store(tmp_path, s3_server.s3_settings(server.endpoint), server.kill)


def check_shared_store(folder: Path, storage: dict[str, Any], kill: Callable[[], None]) -> None:
    """What one engine has seen the next one answers from this storage, and computes once its server was killed."""
    asked = prompts(4)
    storage = storage | {"prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage})
    from_device = answers_of_two(folder, config, asked)
    kill()
    with running(folder, num_blocks=200, kv_transfer_config=config) as engine:
        assert engine.alone(asked) == from_device, "a dead store is a miss"
        engine.check_all_free()
        assert engine.stats()["fetched_blocks"] == 0


def test_a_reset_of_the_connector_hides_what_storage_has(tmp_path: Path) -> None:
    """It is called when weights change: bytes of before must not come back."""
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage})
    asked = prompts(2)
    with running(tmp_path, num_blocks=200, kv_transfer_config=config) as engine:
        first = engine.alone(asked)
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.alone(asked) == first
        assert engine.stats()["fetched_blocks"] == 0
        engine.check_all_free()


def test_names_that_change_with_every_start_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    config = transfer_config({"storage": {"path": str(tmp_path / "store"), "capacity": "64MiB"}})
    with (
        pytest.raises((ConfigError, RuntimeError), match="PYTHONHASHSEED=0"),
        running(tmp_path, kv_transfer_config=config, prefix_caching_hash_algo="xxhash"),
    ):
        pass
    assert os.environ.get("PYTHONHASHSEED") is None
