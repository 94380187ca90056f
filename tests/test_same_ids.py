"""A request id that comes again while the load of its aborted bearer is under way."""

from __future__ import annotations

import pytest

from kv_connector.config import Config
from kv_connector.types import StepPlan
from kv_connector.worker import WorkerHalf
from tests import fakes
from tests.fakes import LateWorker, PatternModel, check_engine, make_engine


class SlowLink(LateWorker):
    """Only loads that a step awaits are hurried; those behind them on the link stay late."""

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        due = [job for job in self._late_loads if job.job_id in plan.awaited_loads]
        if due:
            self._late_loads = [job for job in self._late_loads if job.job_id not in plan.awaited_loads]
            self._transfer.submit_background_load(due, self._transfer.mark())
        WorkerHalf.bind_connector_metadata(self, plan)


def test_the_second_request_does_not_take_the_load_of_the_first_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load is about to end when its request is aborted; the second one's has hardly begun."""
    monkeypatch.setattr(fakes, "LateWorker", SlowLink)
    model = PatternModel()
    settings = {"write_policy": "write_through", "load_choice": "async", "layer_group_bytes": 1}
    engine = make_engine(Config(host_memory=1 << 20, **settings), 40, 4, model, max_step_tokens=200)  # type: ignore[arg-type]
    assert engine.connector is not None
    (worker,) = engine._runner.workers
    first_prompt, second_prompt = ([start + i for i in range(33)] for start in (100, 300))
    for prompt in (first_prompt, second_prompt):
        engine.add(prompt, 1)
        engine.run()
    engine.scheduler.device.reset()
    engine.add(first_prompt, 1)
    engine.run()
    engine.scheduler.device.reset()
    worker.hold = True
    other = engine.add([700 + i for i in range(5)], 60, "other")
    engine.step()
    estimate = engine.connector._loads.estimate
    estimate.lead_seconds = lambda num_steps: -1.0
    engine.add(first_prompt, 3, "same")
    engine.step()
    engine.scheduler.abort("same")
    second = engine.add(second_prompt, 3, "same")
    engine.step()
    estimate.lead_seconds = lambda num_steps: 1e9
    for _ in range(5):
        engine.step()
    estimate.lead_seconds = lambda num_steps: -1.0
    worker.hold = False
    engine.run()
    assert second.output_token_ids == model.expected_tokens(second_prompt, 3)
    assert other.output_token_ids == model.expected_tokens([700 + i for i in range(5)], 60)
    check_engine(engine)
    engine.shutdown()
