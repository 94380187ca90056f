"""Faults of the worker half."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested
from .scheduler import WORLDS

_HALF = "kv_connector/worker/half.py"
_ARRIVALS = "kv_connector/worker/arrivals.py"
_TESTS = "tests/worker/test_half.py"
_KEY = "job.request_id, job.admission"

WORKER: tuple[Mutant, ...] = (
    Mutant(
        "fence-forgotten",
        "the step behind an idle engine's copies does not wait for them",
        (Patch(_HALF, "self._engine.fence()", "pass"),),
        WORLDS,
    ),
    Mutant(
        "planned-ahead-trusted",
        "a step that was planned before a load had failed saves what rests on it",
        (Patch(_HALF, "self._distrusted_step > plan.reported_step", "self._distrusted_step == plan.step"),),
        tested(f"{_TESTS}::test_a_step_with_a_failed_load_saves_nothing"),
    ),
    Mutant(
        "step-trusted",
        "a step whose load has failed saves what it has computed",
        (
            Patch(
                _HALF,
                "        if self._is_distrusted:\n            # Whatever",
                "        if False:\n            # Whatever",
            ),
        ),
        tested(f"{_TESTS}::test_a_step_with_a_failed_load_saves_nothing"),
    ),
    Mutant(
        "awaited-trusted",
        "a step that awaited a load that has failed saves what it has computed",
        (
            Patch(
                _HALF,
                "self._fail_loads(self._transfer.wait_jobs(plan.awaited_loads))",
                "self._transfer.wait_jobs(plan.awaited_loads)",
            ),
        ),
        tested(f"{_TESTS}::test_a_step_that_awaits_a_load_that_failed_saves_nothing"),
    ),
    Mutant(
        "rank-takes-all",
        "each rank takes the host memory of all",
        (Patch(_HALF, "self._config.host_memory // self._world_size,", "self._config.host_memory,"),),
        tested(f"{_TESTS}::test_all_ranks_together_take_the_host_memory_of_the_engine"),
    ),
    Mutant(
        "hooks-trusted",
        "layers that were never seen to wait are expected to",
        (Patch(_HALF, "if full_graph or not self._hooked >= self._layers:", "if full_graph:"),),
        tested(_TESTS),
    ),
    Mutant(
        "full-graph-forgotten",
        "a full graph is replayed without waiting for its load, once all layers were seen to wait",
        (Patch(_HALF, "if full_graph or not self._hooked >= self._layers:", "if not self._hooked >= self._layers:"),),
        tested(_TESTS),
    ),
    Mutant(
        "not-ready-yet",
        "host blocks count before their memory is ready",
        (Patch(_HALF, "self._host.num_ready_blocks if self._host", "self._host.num_blocks if self._host"),),
        tested(_TESTS),
    ),
    Mutant(
        "arrivals-by-id",
        "what a request waits for is known by its id alone",
        (
            Patch(_ARRIVALS, f"setdefault(({_KEY})", "setdefault((job.request_id, 0)"),
            Patch(
                _ARRIVALS,
                f"continue\n            wait = self._waits[{_KEY}]",
                "continue\n            wait = self._waits[job.request_id, 0]",
            ),
            Patch(
                _ARRIVALS,
                f"wait = self._waits[{_KEY}]\n        wait.job_ids",
                "wait = self._waits[job.request_id, 0]\n        wait.job_ids",
            ),
            Patch(_ARRIVALS, f"del self._waits[{_KEY}]", "del self._waits[job.request_id, 0]"),
        ),
        tested("tests/worker/test_arrivals.py"),
    ),
    Mutant(
        "announced-trusted",
        "the failure of a load that was announced casts no doubt on the steps that read it",
        (Patch(_ARRIVALS, "return not ok and wait.is_announced", "return False"),),
        tested("tests/worker/test_arrivals.py"),
    ),
    Mutant(
        "announced-lost-unsaid",
        "that a load failed which was announced is not told as one of a step's",
        (
            Patch(
                _ARRIVALS,
                "        self._has_failed_in_step |= wait.is_announced and bool(wait.lost)\n",
                "",
            ),
        ),
        tested("tests/worker/test_arrivals.py::test_only_what_steps_may_have_read_casts_doubt_on_them"),
    ),
    Mutant(
        "ended-before-trusted",
        "an announced load that has failed before the step that awaits it casts no doubt on that step",
        (
            Patch(
                _HALF,
                "            self._distrusted_step = self._step  # the engine hears of it with this report",
                "            pass  # the engine hears of it with this report",
            ),
            Patch(
                _HALF,
                "        if self._arrivals.end(job_id, ok):\n            self._distrusted_step = self._step",
                "        self._arrivals.end(job_id, ok)",
            ),
        ),
        tested(
            f"{_TESTS}::test_a_step_planned_before_an_announced_load_was_known_to_fail_saves_nothing",
        ),
    ),
)
