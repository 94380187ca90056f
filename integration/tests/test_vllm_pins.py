"""Pins of a real vLLM engine that outlive it: engines one after the other, so none of another module's beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.test_vllm_control import HOST_BLOCKS, PROMPT_BLOCKS, ask, hits
from integration.tests.vllm_engines import prompts, running, transfer_config

pytestmark = pytest.mark.usefixtures("stable_hashes", "slow_machine")


def test_a_pinned_conversation_survives_a_restart_and_a_flood_behind_it(tmp_path: Path) -> None:
    (conversation, plain), flood = prompts(2, seed=58), prompts(8, seed=59)
    storage = {"path": str(tmp_path / "store"), "capacity": "256MiB", "prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage})
    with running(tmp_path, num_blocks=60, kv_transfer_config=config) as engine:
        answer = ask(engine, conversation, {"pin": True, "ttl_s": 600})
        ask(engine, plain)
        assert engine.stats()["backed_up_blocks"] >= 2 * PROMPT_BLOCKS
    with running(tmp_path, num_blocks=60, kv_transfer_config=config) as engine:
        engine.drain()
        assert engine.stats()["pinned_blocks"] == PROMPT_BLOCKS
        assert engine.half.host.num_copies == PROMPT_BLOCKS, "it was read from storage, though nobody asked"
        engine.half.resize_host(HOST_BLOCKS)
        for prompt in flood:
            ask(engine, prompt)
        assert hits(engine, conversation) == (PROMPT_BLOCKS, 0)
        assert hits(engine, plain) == (PROMPT_BLOCKS, PROMPT_BLOCKS), "of the other one only storage knows"
        assert ask(engine, conversation, {"pin": False}) == answer
        engine.check_all_free()
    with running(tmp_path, num_blocks=60, kv_transfer_config=config) as engine:
        engine.drain()
        assert engine.stats()["pinned_blocks"] == 0, "it was let go of"
