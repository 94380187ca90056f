"""Real engines that plan a step while another one is under way, as they do on GPUs: reuse, resets, failed loads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    prompts,
    running,
    schedule_ahead,
    transfer_config,
    vllm_version,
)
from kv_connector.engines.vllm import specs
from kv_connector.errors import KVConnectorError

pytestmark = pytest.mark.skipif(vllm_version().startswith("0.20"), reason="its runner plans ahead on GPUs only")


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_resets_while_steps_and_saves_are_under_way(folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """In front of every step of a busy engine that plans ahead: no reset is refused, no token changes."""
    from vllm import SamplingParams

    schedule_ahead(monkeypatch)
    config = transfer_config({"write_policy": policy})
    asked = prompts(6, seed=24)
    with running(folder, num_blocks=100, kv_transfer_config=config) as engine:
        assert engine.core.batch_queue_size == 2
        expected = engine.alone(asked, 12)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(asked):
            engine.llm.llm_engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
        answers: dict[str, list[int]] = {}
        num_pinned = 0
        for step in range(600):
            if not engine.llm.llm_engine.has_unfinished_requests():
                break
            if step % 7 in (2, 3):
                num_pinned += engine.half.has_pending_block_frees()
                forgets_host = step % 2 == 0
                assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=forgets_host)
            for output in engine.llm.llm_engine.step():
                answers[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        assert num_pinned, "no reset met a save under way"
        assert [answers[str(index)] for index in range(6)] == expected
        assert engine.llm.reset_prefix_cache()
        assert engine.alone(asked, 12) == expected, "what was saved around the resets"
        engine.check_all_free()


@pytest.mark.parametrize(("model", "choice"), [("dense", "sync"), ("dense", "async"), ("windows", "sync")])
def test_an_engine_that_plans_ahead_gives_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, choice: str
) -> None:
    """As engines on GPUs do: blocks are reused, loaded and saved while the step before is still under way."""
    asked = prompts(8, 300)
    config = transfer_config({"write_policy": "write_through", "load_choice": choice})
    with running(folder, model, num_blocks=300, kv_transfer_config=config) as engine:
        expected = engine.generate(asked, 24)
    schedule_ahead(monkeypatch)
    with running(folder, model, num_blocks=120 if model == "windows" else 40, kv_transfer_config=config) as engine:
        assert engine.core.batch_queue_size == 2
        rounds = [engine.generate(asked, 24) for _ in range(3)]
        stats = engine.stats()
        engine.check_all_free()
    assert all(answers == expected for answers in rounds)
    assert stats["host_hit_tokens"] > 8 * 4 * BLOCK_SIZE


@pytest.mark.parametrize(("choice", "failure"), [("sync", "recompute"), ("sync", "fail"), ("async", "recompute")])
def test_a_failed_load_never_gives_a_wrong_token_where_the_next_step_is_planned_already(
    folder: Path, monkeypatch: pytest.MonkeyPatch, choice: str, failure: str
) -> None:
    """vLLM that plans ahead takes the next step's tokens for good and caches what they rest on. A request that waits
    for its load is computed, or ends; where it does not wait and is to be computed, the engine ends and says why."""
    schedule_ahead(monkeypatch)
    settings = {"write_policy": "write_through", "load_choice": choice}
    config = transfer_config(settings, kv_load_failure_policy=failure)
    asked = prompts(2)
    with running(folder, num_blocks=100, kv_transfer_config=config) as engine:
        engine.generate(asked)
        expected = engine.generate(asked)
        engine.drain()
        engine.llm.reset_prefix_cache()
        engine.break_loads(True)
        if (choice, failure) == ("sync", "recompute"):
            with pytest.raises(KVConnectorError, match="kv_load_failure_policy=fail"):
                engine.generate(asked)
            return
        broken = engine.generate(asked)
        engine.break_loads(False)
        again = engine.generate(asked)
        engine.check_all_free()
    assert broken == (expected if failure == "recompute" else [[], []])
    assert again == expected


def test_a_failed_load_ends_an_engine_whose_runner_counts_a_requests_tokens_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Model Runner V2 does, which runs on GPUs only: ours is told that it runs here. Nothing is planned ahead."""
    monkeypatch.setattr(specs, "runs_model_runner_v2", lambda vllm_config: True)
    config = transfer_config({"write_policy": "write_through"}, kv_load_failure_policy="recompute")
    asked = prompts(2)
    with running(folder, num_blocks=100, kv_transfer_config=config, async_scheduling=False) as engine:
        engine.alone(asked)
        engine.drain()
        engine.llm.reset_prefix_cache()
        engine.break_loads(True)
        with pytest.raises(KVConnectorError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            engine.alone(asked)
