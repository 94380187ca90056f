"""Ranks of real vLLM engines that cache the same: one head of keys and values that both have, or on GPUs, where vLLM
caches prefixes of it, multi-head latent attention. The host has one copy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    check_loaded_bytes_and_tokens,
    prompts,
    running,
    transfer_config,
)

pytestmark = pytest.mark.usefixtures("stable_hashes", "slow_machine", "two_ranks_on_the_cpu")
RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
each_model = pytest.mark.parametrize("model", ["one_head", "latent"] if torch.cuda.is_available() else ["one_head"])


def test_ranks_hear_of_those_that_have_their_head_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, and two heads that two of them have each."""
    from kv_connector.engines.vllm import worker

    def tell(values: list[Any], value: object, group: object) -> None:
        values[:] = ["0", "1", "2", "3"]

    monkeypatch.setattr(worker.torch.distributed, "all_gather_object", tell)
    heard = []
    for rank in range(4):
        group = SimpleNamespace(world_size=4, rank_in_group=rank, cpu_group=None)
        monkeypatch.setattr(worker, "get_tp_group", lambda group=group: group)
        heard.append("".join(map(str, worker._exchange(2, str(rank)))))
    assert heard == ["01", "01", "23", "23"]


def test_ranks_of_all_stages_hear_of_one_another_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two ranks."""
    from kv_connector.engines.vllm import worker

    def tell(values: list[Any], value: object, group: tuple[str, int]) -> None:
        kind, rank = group
        own = [rank - rank % 2, rank - rank % 2 + 1]
        assert value == (rank if kind == "tp" else own)
        values[:] = own if kind == "tp" else [[0, 1], [2, 3]]

    monkeypatch.setattr(worker.torch.distributed, "all_gather_object", tell)
    for rank in range(4):
        for kind in ("tp", "pp"):
            group = SimpleNamespace(world_size=2, cpu_group=(kind, rank))
            monkeypatch.setattr(worker, f"get_{kind}_group", lambda group=group: group)
        assert worker._exchange_all(rank) == [0, 1, 2, 3]


def test_ranks_come_to_one_form_of_host_blocks(tmp_path: Path) -> None:
    """Raw, on the CPU; they ask each other before they share their memory."""
    config = transfer_config({"write_policy": "write_through", "host_form": "auto"})
    with running(tmp_path, "one_head", num_blocks=100, kv_transfer_config=config, **RANKS) as engine:
        expected = engine.alone(prompts(1))
        assert engine.alone(prompts(1)) == expected
        assert engine.stats()["saved_blocks"] > 0
        assert engine.stats()["saves_are_off"] == 0


@pytest.mark.parametrize("choice", ["sync", "async"])
@each_model
def test_each_rank_has_its_cache_back(tmp_path: Path, model: str, choice: str) -> None:
    """Of every block one of them has saved what both load."""
    check_loaded_bytes_and_tokens(tmp_path, model, choice, **RANKS)


@each_model
def test_two_ranks_hold_as_many_tokens_as_one(tmp_path: Path, model: str) -> None:
    """In the same memory, of which each would have half without sharing."""
    held = []
    for ranks in (1, 2):
        config = transfer_config({"write_policy": "write_through", "host_memory": "24MiB"})
        options = {"num_blocks": 40, "kv_transfer_config": config, "tensor_parallel_size": ranks}
        with running(tmp_path, model, **options) as engine:
            engine.alone(prompts(1))
            held.append(engine.stats()["host_capacity_blocks"])
    assert held[0] == held[1] > 10


@each_model
def test_storage_has_one_copy_which_ranks_find_again(tmp_path: Path, model: str) -> None:
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage})
    options = {"num_blocks": 100, "kv_transfer_config": config, **RANKS}
    asked = prompts(2)
    with running(tmp_path, model, **options) as engine:
        engine.wait_for_storage()
        engine.alone(asked)
        expected = engine.alone(asked)
        engine.check_all_free()
        assert engine.stats()["storage_written_blocks"] == 2 * 13
    with running(tmp_path, model, **options) as engine:
        engine.wait_for_storage()
        assert engine.alone(asked) == expected
        assert engine.stats()["fetched_blocks"] == 2 * 13
        assert engine.stats()["storage_hit_tokens"] == 2 * 13 * BLOCK_SIZE
        assert engine.stats()["storage_missed_blocks"] == engine.stats()["storage_written_blocks"] == 0


@each_model
def test_what_one_rank_has_not_loaded_none_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """What is computed again has the tokens of what was computed first, and a hit those of a hit: a GPU adds up in
    another order in a step of another shape. Model Runner V2, which GPUs have, cannot compute it again."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = transfer_config({"write_policy": "write_through"}, kv_load_failure_policy="recompute")
    asked = prompts(2)
    with running(tmp_path, model, num_blocks=160, kv_transfer_config=config, async_scheduling=False, **RANKS) as e:
        computed = e.alone(asked)
        expected = e.alone(asked)
        e.llm.reset_prefix_cache()
        e.break_loads(True, rank=1)
        assert e.alone(asked) == computed
        e.break_loads(False, rank=1)
        assert e.alone(asked) == expected
        assert e.stats()["failed_load_jobs"] == 2
        e.check_all_free()
