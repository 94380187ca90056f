"""Our connector in a real vLLM engine on a GPU: streams, CUDA graphs and the kernels are real here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM is needed")

from integration.models import tiny
from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    check_around_sleeps,
    check_loaded_bytes_and_tokens,
    prompts,
    running,
    transfer_config,
)
from kv_connector.errors import KVConnectorError
from kv_connector.transfer.cuda.streams import Event
from kv_connector.transfer.engine import TransferEngine
from kv_connector.types import CopyJob, Direction

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("choice", ["sync", "async"])
@pytest.mark.parametrize("model", ["dense", "windows"])
def test_a_loaded_prefix_has_the_bytes_and_gives_the_tokens_of_a_cached_one(
    tmp_path: Path, model: str, choice: str
) -> None:
    check_loaded_bytes_and_tokens(tmp_path, model, choice)


@pytest.mark.parametrize("choice", ["sync", "async"])
def test_a_cache_that_keeps_layers_apart_is_served_too(tmp_path: Path, choice: str) -> None:
    check_loaded_bytes_and_tokens(tmp_path, "dense", choice, block_major=False)


@pytest.mark.parametrize("choice", ["sync", "async"])
def test_cuda_graphs_wait_for_their_load(tmp_path: Path, choice: str) -> None:
    check_loaded_bytes_and_tokens(tmp_path, "dense", choice, enforce_eager=False)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_an_announced_load_that_is_late_is_waited_for_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """Every load is announced in the step that begins it, and begins a good while later than it was expected to."""
    submit = TransferEngine.submit_background_load

    def late(self: TransferEngine, jobs: Sequence[CopyJob], after: Event) -> frozenset[int]:
        with torch.cuda.stream(self._queues[Direction.LOAD].lane.stream):
            torch.cuda._sleep(60_000_000)
        return submit(self, jobs, after)

    monkeypatch.setattr(TransferEngine, "submit_background_load", late)
    config = transfer_config({"write_policy": "write_through", "load_choice": "async", "max_load_stall_ms": 10_000})
    asked = prompts(6)
    with running(tmp_path, num_blocks=40, kv_transfer_config=config, enforce_eager=enforce_eager) as engine:
        rounds = [engine.alone(asked) for _ in range(5)]
        stats = engine.stats()
        engine.check_all_free()
    assert all(answers == rounds[1] for answers in rounds[1:]), "all of the same shape: the rest of the prompt"
    assert stats["awaited_async_loads"] >= 12


def test_a_hit_that_leaves_one_token_may_be_a_full_graph(tmp_path: Path) -> None:
    """Such a step looks like a decode: no hook runs in it, and the load is waited for in front of it."""
    config = transfer_config({"write_policy": "write_through", "load_choice": "sync"})
    asked = prompts(4, 13 * BLOCK_SIZE + 1)
    with running(tmp_path, num_blocks=160, kv_transfer_config=config, enforce_eager=False) as engine:
        engine.alone(asked)
        from_device = engine.alone(asked, 16)
        for _ in range(3):
            engine.drain()
            assert engine.llm.reset_prefix_cache()
            assert engine.alone(asked, 16) == from_device
        assert engine.stats()["host_hit_tokens"] == 3 * 4 * 13 * BLOCK_SIZE
        engine.check_all_free()


def test_draft_layers_are_saved_and_loaded(tmp_path: Path) -> None:
    draft = {
        "method": "eagle",
        "model": str(tiny.write_draft(tmp_path)),
        "num_speculative_tokens": 2,
    }
    config = transfer_config({"write_policy": "write_through"})
    asked = prompts(2)
    with running(tmp_path, num_blocks=120, kv_transfer_config=config, speculative_config=draft) as engine:
        engine.alone(asked)
        engine.alone(asked)
        engine.drain()
        saved = engine.cached_bytes()
        assert len(engine.layer_names()) == 5
        engine.llm.reset_prefix_cache()
        engine.alone(asked)
        loaded = engine.cached_bytes()
        assert engine.stats()["host_hit_tokens"] == 2 * 12 * BLOCK_SIZE
        engine.check_all_free()
    assert sum(saved[key] == loaded[key] for key in saved.keys() & loaded.keys()) >= 2 * 12


@pytest.mark.parametrize("dtype", ["fp8", "int8_per_token_head"])
def test_quantised_caches_are_bytes_like_any_other(tmp_path: Path, dtype: str) -> None:
    """The second has the scale of every token and head behind its keys and values."""
    check_loaded_bytes_and_tokens(tmp_path, "dense", "sync", kv_cache_dtype=dtype)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_failed_load_ends_an_engine_whose_runner_would_go_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Model Runner V2 does not hear that tokens were not computed after all; the runner before it computes them."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    config = transfer_config({"write_policy": "write_through"}, kv_load_failure_policy="recompute")
    asked = prompts(2)
    with running(tmp_path, num_blocks=160, kv_transfer_config=config, async_scheduling=False) as engine:
        computed = engine.alone(asked)
        engine.drain()
        engine.llm.reset_prefix_cache()
        engine.break_loads(True)
        if runner == "V2":
            with pytest.raises(KVConnectorError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
                engine.alone(asked)
            return
        assert engine.alone(asked) == computed
        assert engine.stats()["failed_load_jobs"] == 2
        engine.check_all_free()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("choice", ["sync", "async"])
def test_two_ranks_load_what_each_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has used CUDA, and a fork could not
    check_loaded_bytes_and_tokens(tmp_path, "dense", choice, tensor_parallel_size=2)


def test_a_cache_of_latents_is_copied_too(tmp_path: Path) -> None:
    """MLA: one vector a token instead of keys and values."""
    check_loaded_bytes_and_tokens(tmp_path, "latent", "sync")


def test_sleep_and_wake(tmp_path: Path) -> None:
    """Sleeping forgets every cache; what comes after is right."""
    config = transfer_config({"write_policy": "write_through"})
    asked = prompts(3)
    with running(tmp_path, num_blocks=100, kv_transfer_config=config, enable_sleep_mode=True) as engine:
        expected = engine.alone(asked)
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
        before = engine.stats()["host_hit_tokens"]
        assert engine.alone(asked) == expected
        assert engine.stats()["host_hit_tokens"] == before
        engine.check_all_free()


@pytest.mark.parametrize("block_major", [True, False])
@pytest.mark.parametrize("path", ["auto", "staged", "direct", "runs"])
def test_saves_and_loads_around_two_sleeps(tmp_path: Path, path: str, block_major: bool) -> None:
    """What copies own on the device lies outside of the memory that vLLM discards when it sleeps."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(check_around_sleeps, tmp_path, path, block_major).result()


def test_a_working_set_larger_than_the_device(tmp_path: Path) -> None:
    config = transfer_config({"write_policy": "write_back"})
    asked = prompts(6)
    with running(tmp_path, num_blocks=40, kv_transfer_config=config) as engine:
        engine.alone(asked)
        rounds = [engine.alone(asked) for _ in range(4)]
        stats = engine.stats()
        engine.check_all_free()
    assert all(answers == rounds[0] for answers in rounds)
    assert stats["host_hit_tokens"] >= 3 * 6 * 13 * BLOCK_SIZE
