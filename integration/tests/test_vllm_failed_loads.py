"""Loads that fail twice in a real vLLM engine, where vLLM does not look: no later request reads their bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    VllmEngine,
    prompts,
    running,
    schedule_ahead,
    transfer_config,
)
from kv_connector.engines.vllm.steps import TELLS_FAILED_REQUESTS, ReportMetadata
from kv_connector.errors import KVConnectorError
from kv_connector.types import StepReport
from tests.waiting import until


def give_up(engine: VllmEngine) -> None:
    """The clients of all requests go away."""
    engine.abort(list(engine.scheduler.requests))


def fail_and_give_up(engine: VllmEngine, prompt: list[int], in_the_step: bool) -> None:
    """A request whose load fails, and that is aborted while the step runs or right behind it."""
    from vllm import SamplingParams

    llm, executor = engine.llm.llm_engine, engine.core.model_executor
    execute = executor.execute_model

    def execute_and_give_up(*args: Any, **options: Any) -> Any:
        executor.execute_model = execute
        output = execute(*args, **options)
        give_up(engine)
        return output

    engine.break_loads(True)
    if in_the_step:
        executor.execute_model = execute_and_give_up
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm.add_request("given up", {"prompt_token_ids": prompt}, params)
    llm.step()
    give_up(engine)
    until(lambda: not llm.has_unfinished_requests(), llm.step, engine.stats)
    engine.break_loads(False)
    engine.drain()


@pytest.mark.parametrize(
    ("failure", "in_the_step", "ahead"),
    [
        ("fail", True, True),
        ("fail", True, False),
        ("recompute", False, False),
        ("recompute", True, True),
    ],
)
def test_what_a_given_up_request_has_not_loaded_is_hit_by_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: str, in_the_step: bool, ahead: bool
) -> None:
    """vLLM handles aborts before it hears of failed loads, and then looks only at the requests that are left."""
    if ahead:
        schedule_ahead(monkeypatch)
    settings = {"write_policy": "write_through", "load_choice": "sync"}
    config = transfer_config(settings, kv_load_failure_policy=failure)
    (prompt,) = prompts(1, seed=5)
    with running(folder, num_blocks=100, kv_transfer_config=config) as engine:
        engine.alone([prompt])
        expected = engine.alone([prompt])
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        engine.alone(prompts(16, seed=9))  # other bytes in all blocks
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        fail_and_give_up(engine, prompt, in_the_step)
        assert engine.alone([prompt]) == expected
        assert engine.stats()["failed_load_jobs"] == 1
        engine.check_all_free()


@pytest.mark.parametrize("is_given_up", [True, False])
def test_who_shares_what_was_not_loaded_does_not_count_on_another_to_compute_it(
    folder: Path, is_given_up: bool
) -> None:
    """vLLM has the first request of a step compute shared blocks, also where that one goes away before it has, or takes
    several steps for it; and what the other one computes is saved."""
    from vllm import SamplingParams

    settings = {"write_policy": "write_through", "load_choice": "sync"}
    config = transfer_config(settings, kv_load_failure_policy="recompute")
    options: dict[str, Any] = {} if is_given_up else {"long_prefill_token_threshold": 2 * BLOCK_SIZE}
    (prompt,) = prompts(1, seed=5)
    asked = {"first": [*prompt, 7], "second": [*prompt, 8]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with running(folder, num_blocks=100, kv_transfer_config=config, **options) as engine:
        expected = dict(zip(asked, engine.alone([*asked.values()]), strict=True))
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        engine.alone(prompts(16, seed=9))  # other bytes in all blocks
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        engine.break_loads(True)
        llm, answers = engine.llm.llm_engine, dict[str, list[int]]()
        for name, tokens in asked.items():
            llm.add_request(name, {"prompt_token_ids": tokens}, params)
        llm.step()
        engine.break_loads(False)
        if is_given_up:
            first, _ = engine.scheduler.requests
            engine.abort([first])

        def step() -> None:
            answers.update({out.request_id: [*out.outputs[0].token_ids] for out in llm.step() if out.finished})

        until(lambda: not llm.has_unfinished_requests(), step, engine.stats)
        assert answers.pop("second") == expected["second"]
        assert answers.pop("first", None) == (None if is_given_up else expected["first"])
        assert engine.stats()["failed_load_jobs"] == 1
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        assert engine.alone([*asked.values()]) == [*expected.values()], "from the host, where wrong bytes were saved"
        engine.check_all_free()


@pytest.mark.parametrize("choice", ["sync", "async"])
def test_with_windows_alone_a_load_that_fails_gives_no_wrong_token(folder: Path, choice: str) -> None:
    """Nothing was loaded in front of the window, where vLLM would go on if it were told of blocks: the whole prompt is
    computed, and where vLLM can be told of nothing else the engine ends."""
    settings = {"write_policy": "write_through", "load_choice": choice}
    config = transfer_config(settings, kv_load_failure_policy="recompute")
    (prompt,) = prompts(1, seed=5)
    with running(folder, "windows_alone", num_blocks=100, kv_transfer_config=config) as engine:
        engine.alone([prompt])
        expected = engine.alone([prompt])
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        engine.break_loads(True)
        if not TELLS_FAILED_REQUESTS:
            with pytest.raises(KVConnectorError, match="its model has sliding windows"):
                engine.alone([prompt])
            return
        assert engine.alone([prompt]) == expected
        engine.break_loads(False)
        assert engine.stats()["failed_load_jobs"] == 1
        engine.drain()
        assert engine.llm.reset_prefix_cache()
        assert engine.alone([prompt]) == expected
        assert engine.stats()["failed_load_jobs"] == 1
        engine.check_all_free()


def test_a_load_that_fails_behind_vllms_back_ends_the_engine_and_not_in_wrong_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request waits, where vLLM looks for nobody: without its blocks it has been preempted, and a step in flight
    may have read what was not loaded. With them it is computed, see `test_vllm_no_room.py`."""
    from vllm.v1.request import RequestStatus

    with running(folder) as engine:
        role = engine.scheduler.connector._scheduler
        monkeypatch.setattr(role.half, "holding", lambda lost: ["waits"])
        output = SimpleNamespace(invalid_block_ids={6}, kv_connector_worker_meta=None)
        for status, blocks, drops_output, ends in (
            (RequestStatus.WAITING_FOR_REMOTE_KVS, [5, 6, 7], False, False),
            (RequestStatus.RUNNING, [5, 6, 7], False, False),
            (RequestStatus.WAITING, [5, 6, 7], False, False),
            (RequestStatus.WAITING, [6, 7, 8], False, False),
            (RequestStatus.PREEMPTED, [5, 6, 7], True, False),
            (RequestStatus.PREEMPTED, [], True, False),
            (RequestStatus.PREEMPTED, [], False, True),
        ):
            tables = [blocks]
            monkeypatch.setattr(role.half, "block_ids", lambda request_id, tables=tables: tables)
            role._live["waits"] = request = SimpleNamespace(
                request_id="waits",
                status=status,
                num_computed_tokens=64 if blocks else 0,
                drop_stale_output=drops_output,
                skip_reading_prefix_cache=False,
            )
            if ends:
                with pytest.raises(KVConnectorError, match="the load of request waits failed twice"):
                    role.update_connector_output(output)
                continue
            role.update_connector_output(output)
            is_told = status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and 6 in blocks
            assert request.num_computed_tokens == (blocks.index(6) * BLOCK_SIZE if is_told else 64 if blocks else 0)
            assert request.skip_reading_prefix_cache == (is_told and blocks[0] == 6)
        del role._live["waits"]
        monkeypatch.undo()
        engine.check_all_free()


@pytest.mark.parametrize("order", [("runs", "waits"), ("waits", "runs")])
def test_one_request_whose_step_is_planned_on_is_enough(
    folder: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """Whoever else waits for the same blocks: the engine ends, and no request is taken to have computed more."""
    from vllm.v1.request import RequestStatus

    with running(folder) as engine:
        role = engine.scheduler.connector._scheduler
        tables = {"runs": [[6, 7, 8]], "waits": [[4, 5, 6]]}
        monkeypatch.setattr(role, "shape", replace(role.shape, recomputes=True, takes_nothing_back=True))
        monkeypatch.setattr(role.half, "holding", lambda lost: order)
        monkeypatch.setattr(role.half, "block_ids", tables.__getitem__)
        for name, status in (("runs", RequestStatus.RUNNING), ("waits", RequestStatus.WAITING)):
            role._live[name] = SimpleNamespace(
                request_id=name,
                status=status,
                num_computed_tokens=40,
                drop_stale_output=False,
                skip_reading_prefix_cache=False,
            )
        meta = ReportMetadata((StepReport(1, 0, has_failed_in_step=True),))
        output = SimpleNamespace(invalid_block_ids={6}, kv_connector_worker_meta=meta)
        with pytest.raises(KVConnectorError, match="1 blocks failed twice in a step"):
            role.update_connector_output(output)
        assert (role._live["runs"].num_computed_tokens, role._live["waits"].num_computed_tokens) == (0, 40)
        role._live["runs"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
        monkeypatch.setattr(role.half, "update_connector_output", lambda reports: None)
        role.update_connector_output(output)  # no step can have read the blocks of one that still loads
        del role._live["runs"], role._live["waits"]
        monkeypatch.undo()
        engine.check_all_free()
