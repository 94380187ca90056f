"""Requests in the model of TensorRT-LLM's executor that end otherwise: whose load or forward pass fails, that are given
up, or whose blocks are still being saved."""

from __future__ import annotations

from typing import Any

import pytest

from integration import faults
from integration.tensorrt_llm.executor import Options
from integration.tests.tensorrt_llm_engines import delay_saves, running, scheduler_of, worker_of
from kv_connector.testing.engine_contract import Expected, evict, loadable, prompts
from tests.waiting import until


@pytest.mark.parametrize("tp_size", [1, 2])
def test_after_a_load_that_has_failed_nothing_is_computed_any_more(
    tp_size: int, expected_of_tensorrt_llm: Expected
) -> None:
    """The engine keeps the blocks of the requests that it has answered with the error, as if they were computed."""
    with running(Options(), tp_size) as engine:
        (prompt,) = asked = prompts(engine, 1, seed="failing")
        assert engine.generate(asked)[0].token_ids == expected_of_tensorrt_llm(asked, 8)[0]
        evict(engine, "failing")
        engine.break_loads(True)
        (said,) = engine.generate(asked)
        assert said.token_ids is None
        assert "restart the engine" in said.error
        engine.llm.call(lambda executor: faults.break_loads(worker_of(executor)._half, False))
        for later in ([*prompt, 7], prompt, prompts(engine, 1, seed="another")[0]):
            (said,) = engine.generate([later])
            assert said.token_ids is None


def test_with_overlap_a_load_that_has_failed_ends_the_executor() -> None:
    """As any error of the forward pass does there; whoever was waiting has been answered."""
    with running(Options(overlap=True)) as engine:
        asked = prompts(engine, 1, seed="failing")
        engine.generate(asked)
        evict(engine, "failing")
        engine.break_loads(True)
        assert "restart the engine" in engine.generate(asked)[0].error
        until(lambda: bool(engine.llm.error))  # which its thread notes when whoever was waiting has been answered


def test_rank_0_takes_in_what_failed_though_the_other_has_ended_before() -> None:
    """With overlap each rank ends by itself; whoever was waiting is answered by rank 0, behind what it took in."""
    with running(Options(overlap=True), 2) as engine:
        asked = prompts(engine, 1, seed="failing")
        engine.generate(asked)
        evict(engine, "failing")
        scheduler, other = scheduler_of(engine.llm.ranks[0]), engine.llm._threads[1]
        take_reports = scheduler.take_reports

        def take_late(reports: Any) -> None:
            if any(report.failed for report in reports):
                other.join()
            take_reports(reports)

        scheduler.take_reports = take_late
        engine.break_loads(True)
        assert "restart the engine" in engine.generate(asked)[0].error
        assert engine.stats()["failed_load_jobs"] == 1


def test_one_rank_whose_load_fails_stops_all() -> None:
    with running(Options(), 2) as engine:
        asked = prompts(engine, 1, seed="one rank")
        engine.generate(asked)
        evict(engine, "one rank")
        engine.llm.call(lambda e: faults.break_loads(worker_of(e)._half, e.rank == 1))
        assert "restart the engine" in engine.generate(asked)[0].error
        assert engine.llm.call(lambda executor: worker_of(executor)._is_broken) == [True, True]


def test_a_rank_that_hears_late_of_a_failed_load_keeps_step_with_the_others() -> None:
    """In a step that loads nothing: the ranks tell each other at its end."""
    with running(Options(), 2) as engine:
        engine.llm.call(lambda e: setattr(worker_of(e), "_has_lost", e.rank == 1))
        (said,) = engine.generate(prompts(engine, 1, seed="late"))
        assert "restart the engine" in said.error
        assert not engine.llm.error
        assert engine.llm.call(lambda executor: worker_of(executor)._is_broken) == [True, True]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_a_failed_forward_pass_has_not_computed_is_not_saved(
    tp_size: int, expected_of_tensorrt_llm: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Options(), tp_size) as engine:
        asked, others = prompts(engine, 2, seed="forward"), prompts(engine, 1, seed="before")
        engine.generate(others)  # there are host blocks once the ranks have said so

        with monkeypatch.context() as patch:
            patch.setattr(engine.llm.ranks[0], "_compute", lambda *args: ([], "out of memory"))
            assert [answer.error for answer in engine.generate(asked)] == ["out of memory"] * 2
        engine.llm.call(lambda executor: executor.kv.reset())  # where the engine has kept what it has not computed
        again = engine.generate(asked)
        assert [answer.num_loaded for answer in again] == [0, 0]
        assert [answer.token_ids for answer in again] == expected_of_tensorrt_llm(asked, 8)
        engine.check_idle()


def test_a_request_that_has_ended_is_held_while_its_blocks_are_saved(expected_of_tensorrt_llm: Expected) -> None:
    with running(Options(), saves_late=5) as engine:
        (executor,) = engine.llm.ranks
        held = []
        for prompt in prompts(engine, 4, seed="held"):
            assert engine.generate([prompt], num_tokens=2)[0].token_ids == expected_of_tensorrt_llm([prompt], 2)[0]
            held.append(len(scheduler_of(executor)._held))
        assert any(held), "no save was late"
        engine.check_idle()


@pytest.mark.parametrize("fails", [False, True], ids=["canceled", "forward pass fails"])
def test_blocks_of_a_request_that_was_given_up_are_not_saved_with_the_bytes_of_another(
    fails: bool, expected_of_tensorrt_llm: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM frees them at once and says nothing; here saves that read them have not begun."""
    with running(Options(num_blocks=20)) as engine:
        (prompt,) = asked = prompts(engine, 1, seed="given up")
        engine.llm.call(lambda executor: delay_saves(executor, 10**6))
        executor = engine.llm.ranks[0]
        forward, num_steps = executor._forward, iter(range(10**6))

        def given_up(batch: Any) -> Any:
            results = forward(batch)
            if next(num_steps) == 1:
                if fails:
                    raise RuntimeError("a kernel has failed")
                batch[0].is_canceled = True
            return results

        monkeypatch.setattr(executor, "_forward", given_up)
        (said,) = engine.generate(asked, num_tokens=32)
        assert said.token_ids is None
        scheduler = scheduler_of(executor)
        assert len(scheduler._live) == 1, "nobody has said that it has ended"
        (other,) = prompts(engine, 1, 18 * engine.block_tokens, seed="takes all blocks")
        engine.generate([other], num_tokens=2)
        assert not scheduler._live
        assert len(scheduler._half._requests) == 0
        late = worker_of(executor)._half._engine
        late._most = 0
        engine.llm.call(lambda executor: late._submit(lambda left: True))
        for turn in range(3):
            evict(engine, f"given up {turn}")
        (again,) = engine.generate(asked)
        assert again.token_ids == expected_of_tensorrt_llm(asked, 8)[0]
        assert again.num_loaded == loadable(engine, prompt)
        engine.check_idle()
