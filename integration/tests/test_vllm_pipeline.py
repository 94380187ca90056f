"""Pipelines of real vLLM engines: each stage keeps and loads its own layers, and a hit is what all stages have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.test_vllm_hybrid import ask_and_hit, forget_device, options
from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    check_loaded_bytes_and_tokens,
    prompts,
    running,
    transfer_config,
)
from kv_connector.engines.vllm import specs
from kv_connector.engines.vllm.groups import TELLS_STATES
from kv_connector.errors import KVConnectorError

pytestmark = pytest.mark.usefixtures("stable_hashes", "slow_machine", "two_ranks_on_the_cpu")

STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    # On a CPU vLLM makes what a stage receives into where it warms up, which it does to compile.
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager", "cudagraph_mode": "NONE"},
}


@pytest.mark.parametrize(("model", "choice"), [("dense", "sync"), ("windows", "async")])
def test_each_stage_has_its_layers_back(tmp_path: Path, model: str, choice: str) -> None:
    check_loaded_bytes_and_tokens(tmp_path, model, choice, **STAGES)


def test_requests_come_and_go_while_stages_are_apart(tmp_path: Path) -> None:
    """Two chunks of a prompt are under way at a time, in one stage each, and requests lose their blocks in between. In
    bfloat16 a GPU has other tokens beside other requests, with a connector or without one."""
    config = transfer_config({"write_policy": "write_through"})
    options: dict[str, Any] = {"num_blocks": 60, "kv_transfer_config": config, "max_num_batched_tokens": 256} | STAGES
    if torch.cuda.is_available():
        options |= {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
    asked = prompts(6, 700)
    with running(tmp_path, **options) as engine:
        expected = engine.alone(asked, 40)
        for _ in range(2):
            assert engine.generate(asked, 40) == expected
            assert engine.llm.reset_prefix_cache()
        stats = engine.stats()
        engine.check_all_free()
    assert stats["host_hit_tokens"] > 6 * 20 * BLOCK_SIZE


@pytest.mark.parametrize(("choice", "failure"), [("async", "recompute"), ("sync", "fail")])
def test_what_one_stage_has_not_loaded_no_stage_has(tmp_path: Path, choice: str, failure: str) -> None:
    settings = {"write_policy": "write_through", "load_choice": choice}
    config = transfer_config(settings, kv_load_failure_policy=failure)
    asked = prompts(2)
    with running(tmp_path, num_blocks=160, kv_transfer_config=config, **STAGES) as engine:
        computed, cached = engine.alone(asked), engine.alone(asked)  # GPUs add up otherwise in a step of another shape
        engine.llm.reset_prefix_cache()
        engine.break_loads(True, rank=1)
        broken = engine.alone(asked)
        engine.break_loads(False, rank=1)
        again = engine.alone(asked)
        stats = engine.stats()
        engine.check_all_free()
    assert stats["failed_load_jobs"] == 2
    if failure == "recompute":
        assert broken == computed
        assert again == cached
    else:
        assert all(len(answer) < 8 for answer in broken)
        assert again == computed, "what failed once is not tried again"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_must_not_be_planned_on_ends_the_engine_and_says_why(tmp_path: Path, rank: int) -> None:
    """The chunk behind the one that was not loaded is under way by then in the first stage; nobody stands still."""
    config = transfer_config({"write_policy": "write_through"}, kv_load_failure_policy="recompute")
    (prompt,) = prompts(1, 700)
    with running(tmp_path, num_blocks=160, kv_transfer_config=config, **STAGES) as engine:
        engine.alone([prompt])
        engine.drain()
        engine.llm.reset_prefix_cache()
        engine.break_loads(True, rank)
        with pytest.raises(KVConnectorError, match="kv_load_failure_policy=fail"):
            engine.alone([prompt])


def storage_config(folder: Path) -> dict[str, Any]:
    storage = {"path": str(folder / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    return transfer_config({"write_policy": "write_through", "storage": storage})


def test_storage_is_found_by_the_same_stages_and_by_no_other_ranks(tmp_path: Path) -> None:
    """Two stages and two ranks of tensor parallelism have blocks of the same size, and other bytes in them."""
    options = {"num_blocks": 100, "kv_transfer_config": storage_config(tmp_path)}
    asked = prompts(2)
    with running(tmp_path, **options, **STAGES) as engine:
        engine.wait_for_storage()
        engine.alone(asked)
        expected = engine.alone(asked)
        engine.check_all_free()
        assert engine.stats()["backed_up_blocks"] == 2 * 13
    with running(tmp_path, **options, **STAGES) as engine:
        engine.wait_for_storage()
        assert engine.alone(asked) == expected
        assert engine.stats()["fetched_blocks"] == 2 * 13
    with running(tmp_path, **options, tensor_parallel_size=2) as engine:
        engine.wait_for_storage()
        engine.alone(asked)
        assert engine.stats()["fetched_blocks"] == 0


def test_storage_is_found_by_no_other_split_of_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers with and without windows lie over each other, stages of four and of five have blocks of one size."""
    options = {"num_blocks": 160, "kv_transfer_config": storage_config(tmp_path)}
    asked, fetched = prompts(2), []
    for split in ("5,1", "4,2"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
        with running(tmp_path, "windows", **options, **STAGES) as engine:
            engine.wait_for_storage()
            engine.alone(asked)
            engine.check_all_free()
            assert engine.stats()["backed_up_blocks"] > 0
            fetched.append(engine.stats()["fetched_blocks"])
    assert fetched == [0, 0]


@pytest.fixture
def layouts_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU attention wants one layout, and a stage without any takes all: vLLM does not start with stages that say
    different ones. On GPUs they say the same."""
    from vllm.v1.engine import core

    resolve = core.resolve_kv_cache_layout

    def resolve_common(config: Any, layouts: Sequence[Sequence[str]], *args: Any) -> Any:
        common = [name for name in layouts[0] if all(name in others for others in layouts)]
        return resolve(config, [common], *args)

    monkeypatch.setattr(core, "resolve_kv_cache_layout", resolve_common)


@pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Kimi-Linear has such a stage there")
@pytest.mark.usefixtures("whole_blocks_are_copied", "layouts_of_all_stages")
def test_a_stage_without_attention_is_answered_from_the_host_and_with_blocks_alike_from_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pads blocks of states to those of attention in each stage for itself: of a stage that has none they stay as
    small as they were asked for. Its hits end inside of the other ones' blocks then, and a warning says what helps."""
    warned: list[str] = []
    monkeypatch.setattr(specs.logger, "warning", lambda line, *args: warned.append(line % args))
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    storage = {"path": str(tmp_path / "store"), "capacity": "1GiB", "prefetch": "wait_complete"}
    settings: dict[str, Any] = options("delta", storage=storage) | {"num_blocks": 120} | STAGES
    asked = [prompt[:500] for prompt in prompts(2, 600)]
    with running(tmp_path, "delta", **settings) as engine:
        small, size = sorted(set(engine.scheduler.connector._scheduler.shape.block_sizes))
        assert small == BLOCK_SIZE
        ask_and_hit(engine, asked)
        from_device, on_device = ask_and_hit(engine, asked)
        assert on_device == [480, 480]
        forget_device(engine)
        assert ask_and_hit(engine, asked) == (from_device, on_device)
        engine.check_all_free()
    assert len(warned) == 1 and f"--block-size {size} " in warned.pop()
    answers = []
    for _ in range(2):
        with running(tmp_path, "delta", block_size=size, **settings) as engine:
            engine.wait_for_storage()
            answers += [ask_and_hit(engine, asked) for _ in range(2)]
            from_storage = engine.stats()["storage_hit_tokens"]
            engine.check_all_free()
    computed, from_device, *again = answers
    whole = 499 // size * size
    assert computed[1] == [0, 0] and from_device[1] == [whole, whole]
    assert again == [from_device, from_device]
    assert from_storage == 2 * whole
    assert not warned
