"""Our connector in a real vLLM engine on the CPU: bytes, tokens, policies, groups, drafts, faults and resets.

Tokens are compared with what the same engine answers from its own prefix cache: a hit of the same length there and
here computes the same shapes, so equal bytes give equal tokens to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.models import tiny
from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    check_loaded_bytes_and_tokens,
    prompts,
    running,
    transfer_config,
    vllm_version,
)
from kv_connector.engines.vllm.steps import TELLS_FAILED_REQUESTS

POLICIES = ("adaptive", "write_through", "write_through_selective", "write_back")
DRAFT = {"method": "eagle", "num_speculative_tokens": 2}


@pytest.mark.parametrize("choice", ["sync", "async"])
@pytest.mark.parametrize("model", ["dense", "windows"])
def test_a_loaded_prefix_has_the_bytes_and_gives_the_tokens_of_a_cached_one(
    folder: Path, model: str, choice: str
) -> None:
    check_loaded_bytes_and_tokens(folder, model, choice)


def test_the_first_request_after_the_start_is_hit_by_the_second(folder: Path) -> None:
    """It ends in the first step there is: the scheduler knows by then what memory the ranks have. The policy is the
    default one."""
    config = transfer_config({})
    asked = prompts(1)
    with running(folder, warm_up=False, kv_transfer_config=config) as engine:
        answers = engine.alone(asked, 1)
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        assert engine.alone(asked, 1) == answers
        stats = engine.stats()
        engine.check_all_free()
    assert stats["host_hit_tokens"] == 13 * BLOCK_SIZE


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_working_set_larger_than_the_device(folder: Path, policy: str) -> None:
    config = transfer_config({"write_policy": policy})
    asked = prompts(6)
    with running(folder, num_blocks=40, kv_transfer_config=config) as engine:
        rounds = [engine.alone(asked) for _ in range(4)]
        stats = engine.stats()
        engine.check_all_free()
    assert all(answers == rounds[0] for answers in rounds)
    assert stats["host_hit_tokens"] >= 6 * 13 * BLOCK_SIZE
    assert stats["saved_blocks"] == stats["host_cached_blocks"] == 6 * 13


def test_one_prefix_asked_by_many_at_once_is_loaded_once(folder: Path) -> None:
    """Requests that share a prefix wait for the first one's load; nobody convoys behind nobody."""
    config = transfer_config({"write_policy": "write_through", "load_choice": "async"})
    (prefix,) = prompts(1, 416)
    asked = [[*prefix, *tail] for tail in prompts(6, 20, seed=3)]
    with running(folder, num_blocks=100, kv_transfer_config=config) as engine:
        engine.alone([prefix])
        engine.alone([prefix])
        expected = engine.alone(asked)
        engine.llm.reset_prefix_cache()
        answers = engine.generate(asked)
        stats = engine.stats()
        engine.check_all_free()
    assert answers == expected
    assert stats["async_loads"] == 1
    assert stats["loaded_blocks"] == 13


@pytest.mark.skipif(vllm_version().startswith("0.20"), reason="its drafts do not run on the CPU")
def test_draft_layers_are_saved_and_loaded_and_the_last_block_is_computed(folder: Path) -> None:
    draft = DRAFT | {"model": str(tiny.write_draft(folder))}
    config = transfer_config({"write_policy": "write_through"})
    asked = prompts(2)
    with running(folder, num_blocks=120, kv_transfer_config=config, speculative_config=draft) as engine:
        cold = engine.alone(asked)
        assert len(engine.layer_names()) == 5
        from_device = engine.alone(asked)
        saved = engine.cached_bytes()
        engine.llm.reset_prefix_cache()
        from_host = engine.alone(asked)
        loaded = engine.cached_bytes()
        stats = engine.stats()
        engine.check_all_free()
    assert stats["device_hit_tokens"] == stats["host_hit_tokens"] == 2 * 12 * BLOCK_SIZE
    assert from_host == from_device == cold
    keys = [key for key in saved if key in loaded]
    assert len(keys) >= 2 * 12
    assert sum(saved[key] == loaded[key] for key in keys) >= 2 * 12


@pytest.mark.parametrize("has_drafts", [False, True])
def test_what_launching_a_prompt_takes_is_known_wherever_vllm_calls_start_load_kv(
    folder: Path, has_drafts: bool
) -> None:
    """In front of the forward pass or, from 0.32 on, behind that of a step that loads nothing; where tokens are drafted
    the report comes in front of `wait_for_save`. The worker's clock shows how many forward passes there were."""
    options: dict[str, Any] = {}
    if has_drafts:
        if vllm_version().startswith("0.20"):
            pytest.skip("its drafts do not run on the CPU")
        options["speculative_config"] = DRAFT | {"model": str(tiny.write_draft(folder))}
    with running(folder, num_blocks=160, **options) as engine:
        engine.llm.collective_rpc(_count_forward_passes)
        engine.alone(prompts(8, 40), 2)
        engine.drain()
        assert engine.half._loads.estimate.launch_seconds == 1.0
        engine.check_all_free()


@pytest.mark.usefixtures("two_ranks_on_the_cpu")
def test_two_ranks_agree(folder: Path) -> None:
    config = transfer_config({"write_policy": "write_through"})
    asked = prompts(4)
    with running(folder, num_blocks=40, kv_transfer_config=config, tensor_parallel_size=2) as engine:
        rounds = [engine.alone(asked) for _ in range(3)]
        stats = engine.stats()
        engine.check_all_free()
    assert all(answers == rounds[0] for answers in rounds)
    assert stats["host_hit_tokens"] == 2 * 4 * 13 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("model", "choice", "failure"),
    [
        ("dense", "sync", "recompute"),
        ("dense", "sync", "fail"),
        ("dense", "async", "recompute"),
        ("dense", "async", "fail"),
        ("windows", "sync", "recompute"),
        ("windows", "sync", "fail"),
    ],
)
def test_a_failed_load_is_a_miss_or_one_failed_request(folder: Path, model: str, choice: str, failure: str) -> None:
    """Under `recompute` the user sees a slow answer; under `fail`, vLLM's default, one request ends with an error."""
    if model == "windows" and not TELLS_FAILED_REQUESTS:
        pytest.skip("this vLLM cannot be told of a load that failed with more than one group of blocks")
    settings = {"write_policy": "write_through", "load_choice": choice}
    config = transfer_config(settings, kv_load_failure_policy=failure)
    asked = prompts(2)
    with running(folder, model, num_blocks=160, kv_transfer_config=config) as engine:
        expected = engine.alone(asked)
        expected = engine.alone(asked)
        engine.llm.reset_prefix_cache()
        engine.break_loads(True)
        broken = engine.alone(asked)
        engine.break_loads(False)
        again = engine.alone(asked)
        stats = engine.stats()
        engine.check_all_free()
    assert stats["failed_load_jobs"] == 2
    if failure == "recompute":
        assert broken == expected
    else:
        assert all(len(answer) < 8 for answer in broken)
    assert again == expected, "the engine goes on, and what failed once is not tried again"


def test_preempted_requests_come_back_from_the_host(folder: Path) -> None:
    """Eight requests that grow at once do not fit: some lose their blocks, and no token changes."""
    config = transfer_config({"write_policy": "write_through"})
    asked = prompts(8, 100)
    with running(folder, num_blocks=200, kv_transfer_config=config) as engine:
        expected = engine.alone(asked, 200)
    with running(folder, num_blocks=40, kv_transfer_config=config) as engine:
        answers = engine.generate(asked, 200)
        stats = engine.stats()
        engine.check_all_free()
    assert answers == expected
    assert stats["sync_loads"] + stats["async_loads"] > 0


def _count_forward_passes(worker: Any) -> None:
    """Instead of seconds, for the worker half."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    num_passes = [0.0]

    def count(*_: object) -> None:
        num_passes[0] += 1

    get_kv_transfer_group()._worker.half._clock = lambda: num_passes[0]
    worker.model_runner.get_model().register_forward_pre_hook(count)
