"""Faults of the scheduler half itself: requests, steps in flight, fences, resets, ranks, jobs."""

from __future__ import annotations

from .mutant import Mutant, Patch, simulated, tested

_HALF = "kv_connector/scheduler/half.py"
_SCHEDULED = "kv_connector/scheduler/scheduled.py"
_HITS = "kv_connector/scheduler/hits.py"
_LEDGER = "kv_connector/scheduler/ledger.py"
_REQUESTS = "kv_connector/scheduler/requests.py"
_STEPS = "tests/scheduler/test_steps.py"
_RESET_OF_TWO = "tests/scheduler/peers/test_incoming.py"
_RESET = "tests/scheduler/test_reset.py"
_FENCES = "tests/scheduler/test_fence.py"
_FENCE = "self._fence.take(overwrites=bool(num_tokens or loads or background or plan.peer))"
WORLDS = simulated(60)

SCHEDULER: tuple[Mutant, ...] = (
    Mutant(
        "drafts-unguarded",
        "where drafts may be rejected, a block that a step still writes is not guarded",
        (
            Patch(
                "kv_connector/scheduler/steps.py",
                "return min(num_computed_tokens, max(num_tokens - 1, 0))",
                "return num_computed_tokens",
            ),
        ),
        tested(f"{_STEPS}::test_where_drafts_may_be_rejected_the_block_of_the_last_known_token_is_guarded"),
    ),
    Mutant(
        "freed-forgotten",
        "blocks of a preempted request are not guarded",
        (
            Patch(
                _REQUESTS,
                "self._steps.freed(chain.from_iterable(table.block_ids for table in state.tables))",
                "pass",
            ),
        ),
        tested(f"{_STEPS}::test_blocks_that_a_step_reads_for_a_preempted_request_are_guarded"),
    ),
    Mutant(
        "silence-trusted",
        "a preemption that nobody tells of is not one",
        (
            Patch(
                _HALF,
                "if self._requests.is_silently_preempted(request.request_id, block_ids, num_local_tokens):",
                "if False:",
            ),
        ),
        tested(_STEPS),
    ),
    Mutant(
        "preempted-anew",
        "a request that was admitted again since loses its new blocks to an old preemption",
        (
            Patch(
                _REQUESTS,
                "return state is not None and bool(state.tables) and request_id not in self._admitted",
                "return state is not None and bool(state.tables)",
            ),
        ),
        tested(
            "tests/scheduler/test_half.py::test_a_request_preempted_between_steps_and_admitted_again_keeps_its_new_load"
        ),
    ),
    Mutant(
        "fence-never",
        "no step waits for copies whose blocks an idle engine has let go of",
        (Patch(_HALF, "replace(plan, fence=True)", "replace(plan, fence=False)"),),
        tested("tests/scheduler/test_fence.py"),
    ),
    Mutant(
        "fence-for-the-model",
        "a step that only loads in the background does not wait for copies that are not pinned any more",
        (Patch(_HALF, _FENCE, "self._fence.take(overwrites=bool(num_tokens or loads or plan.peer))"),),
        tested("tests/scheduler/test_fence.py"),
    ),
    Mutant(
        "fence-not-for-peers",
        "a step that only receives does not wait for copies that are not pinned any more",
        (Patch(_HALF, _FENCE, "self._fence.take(overwrites=bool(num_tokens or loads or background))"),),
        tested("tests/scheduler/test_fence.py"),
    ),
    Mutant(
        "reset-saves",
        "what was computed before a reset is saved behind it",
        (
            Patch(
                _REQUESTS,
                "        state.is_stale = bool(state.tables)\n",
                "",
            ),
        ),
        tested(_RESET),
    ),
    Mutant(
        "stale-forgotten",
        "what a load brings that was planned before a reset is new behind it",
        (Patch(_REQUESTS, "state.is_stale &= bool(state.tables)", "state.is_stale = False"),),
        tested("tests/scheduler/peers/test_outgoing.py::test_what_was_loaded_before_a_reset_is_not_offered_behind_it"),
    ),
    Mutant(
        "session-begins-anew",
        "what a session has computed before a reset is saved behind it with the session's next input",
        (
            Patch(
                _REQUESTS,
                "return not num_local_tokens or not _go_on(self._states[request_id].tables, block_ids)",
                "return True",
            ),
        ),
        tested(f"{_RESET}::test_a_session_that_goes_on_after_a_reset_saves_nothing_that_rests_on_its_old_blocks"),
    ),
    Mutant(
        "reset-too-early",
        "a reset is called done while loads bring what was cached",
        (Patch(_HALF, "is_done and not any(map(self._brings_old, self._requests))", "is_done"),),
        tested(_RESET),
    ),
    Mutant(
        "reset-never-done",
        "a reset waits for a load that has failed, of a request that nobody admits until the reset is done",
        (
            Patch(
                _HALF,
                "return state.awaits_load and (state.awaits_both or not self._ledger",
                "return state.awaits_load and (True or not self._ledger",
            ),
        ),
        tested(_RESET),
    ),
    Mutant(
        "reset-done-beside-a-part",
        "a reset is done while a request waits for two parts of which one has failed: the engine may keep the other",
        (Patch(_HALF, "(state.awaits_both or not self", "(not self"),),
        tested(_RESET_OF_TWO),
    ),
    Mutant(
        "largest-rank",
        "a step counts as reported where one rank has reported it",
        (Patch("kv_connector/scheduler/ranks.py", "min(report.step for", "max(report.step for"),),
        tested(f"{_STEPS}::test_a_step_is_in_flight_until_every_rank_has_reported_the_next"),
    ),
    Mutant(
        "same-id-not-awaited",
        "a request is looked up while a load for another one of its id is under way",
        (
            Patch(
                _HALF,
                "if self._ledger.is_awaited(request_id) or self._loads.is_coalesced(request_id):",
                "if self._loads.is_coalesced(request_id):",
            ),
        ),
        tested(
            "tests/scheduler/loads/test_leases.py::test_an_id_that_comes_again_waits_for_the_load_of_the_one_before"
        ),
    ),
    Mutant(
        "unpinned-in-part",
        "a part of a pinned prefix can be unpinned, and the rest never",
        (
            Patch(
                "kv_connector/scheduler/control/pins.py",
                'return len(block_hashes), block_hashes[-1] if block_hashes else BlockHash(b""), is_of_request',
                'return 0, block_hashes[0] if block_hashes else BlockHash(b""), is_of_request',
            ),
        ),
        tested("tests/scheduler/test_half.py::test_a_prefix_is_unpinned_as_it_was_pinned_and_no_other_way"),
    ),
    Mutant(
        "watchdog-asleep",
        "a rank that reports nothing any more goes unnoticed",
        (Patch("kv_connector/scheduler/watchdog.py", "self.hangs = bool(overdue)", "self.hangs = False"),),
        tested("tests/scheduler/test_watchdog.py"),
    ),
    Mutant(
        "distrust-forgotten",
        "what was computed behind a failed load is kept",
        (Patch(_LEDGER, "            self._distrust_after(job_id)\n", "            pass\n"),),
        tested(
            "tests/scheduler/saves/test_budget.py"
            "::test_what_a_plan_ahead_saves_behind_a_load_that_failed_is_never_matched"
        ),
    ),
    Mutant(
        "one-rank-is-enough",
        "a job has ended when one rank has reported it",
        (
            Patch(
                _LEDGER, "        if not entry.waiting_for:\n            self._end(entry)", "        self._end(entry)"
            ),
        ),
        tested("tests/scheduler/test_half.py"),
    ),
    Mutant(
        "leases-dropped",
        "host blocks that a job writes can be evicted",
        (Patch(_LEDGER, "        self._host.release(entry.host_ids)\n", "        pass\n"),),
        tested("tests/scheduler/test_half.py"),
    ),
    Mutant(
        "fence-of-the-last-idle-time",
        "an engine that goes idle twice before a step does not wait for the copies of the first time",
        (
            Patch(
                "kv_connector/scheduler/fence.py",
                "self._is_due |= self._ledger.unpin()",
                "self._is_due = self._ledger.unpin()",
            ),
        ),
        tested(f"{_FENCES}::test_an_engine_that_goes_idle_again_before_any_step_still_waits"),
    ),
    Mutant(
        "unpinned-without-a-fence",
        "an idle engine's copies let go of blocks where nothing waits for them before they are written to",
        (Patch(_HALF, "not len(self._requests) and self._unpins_when_idle", "not len(self._requests)"),),
        tested(f"{_FENCES}::test_an_engine_that_writes_to_blocks_before_any_fence_has_them_pinned"),
    ),
    Mutant(
        "windows-unguarded",
        "blocks of windows that a step writes are not guarded",
        (
            Patch(
                _SCHEDULED,
                "for size, table in zip(sizes, state.tables, strict=False):\n                written",
                "for size, table in zip(sizes, state.tables[:1], strict=False):\n                written",
            ),
        ),
        tested(f"{_STEPS}::test_blocks_of_every_group_that_a_step_writes_are_guarded"),
    ),
    Mutant(
        "found-on-the-last-rank",
        "of what ranks find in storage the last answer counts, and not the least",
        (
            Patch(
                _LEDGER,
                "entry.found = found if entry.found is None else entry.found & found",
                "entry.found = found",
            ),
        ),
        tested("tests/scheduler/storage/test_companion.py::test_ranks_agree_on_the_shortest_prefix"),
    ),
    Mutant(
        "distrust-too-early",
        "what was saved before a load was planned is thrown away where that fails",
        (Patch(_LEDGER, "if later_id > job_id and entry.job", "if entry.job"),),
        tested("tests/scheduler/test_ledger.py::test_what_was_computed_before_a_load_that_fails_is_kept"),
    ),
    Mutant(
        "distrust-behind-saves",
        "what is saved behind a save that fails is thrown away",
        (Patch(_LEDGER, "if not (isinstance(job, CopyJob) and job.brings):", "if False:"),),
        tested("tests/scheduler/test_ledger.py::test_a_save_that_fails_spoils_no_other"),
    ),
    Mutant(
        "slid-window-begins-anew",
        "what a session has computed before a reset is saved behind it where a window has slid since",
        (
            Patch(
                _REQUESTS,
                "all(new in (old, NO_BLOCK) for old, new in zip(table.block_ids, ids, strict=False))",
                "all(new == old for old, new in zip(table.block_ids, ids, strict=False))",
            ),
        ),
        tested(f"{_RESET}::test_a_session_whose_window_has_slid_goes_on_after_a_reset"),
    ),
    Mutant(
        "gone-are-admitted",
        "who has lost its blocks since its admission is taken for admitted",
        (Patch(_REQUESTS, "        self._admitted.pop(state.request.request_id, None)\n", ""),),
        tested("tests/scheduler/test_requests.py::test_who_has_lost_its_blocks_since_its_admission_is_not_planned"),
    ),
    Mutant(
        "remembered-too-little",
        "of a large host's evicted blocks no more are remembered than of a small one's",
        (Patch("kv_connector/scheduler/ranks.py", "max(LEAST_REMEMBERED, 2 * capacity)", "LEAST_REMEMBERED"),),
        tested("tests/scheduler/test_ranks.py::test_twice_as_many_blocks_are_remembered_as_the_host_has"),
    ),
    Mutant(
        "recomputed-in-blocks",
        "tokens that are computed though the host has them are counted as blocks",
        (
            Patch(
                _HITS,
                "metrics.recomputed_tokens += num_recomputed * size",
                "metrics.recomputed_tokens += num_recomputed",
            ),
        ),
        tested("tests/scheduler/test_hits.py"),
    ),
    Mutant(
        "missed-on-the-host",
        "blocks that are on the host are counted as being saved yet",
        (Patch(_HITS, "is not BlockState.SWAPPING_TO_HOST", "is BlockState.ABSENT"),),
        tested("tests/scheduler/test_hits.py"),
    ),
)
