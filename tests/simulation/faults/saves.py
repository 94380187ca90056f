"""Faults of saves, and of the host tier that they fill."""

from __future__ import annotations

from .mutant import Mutant, Patch, simulated, tested
from .scheduler import WORLDS

_BEFORE_REUSE = "kv_connector/scheduler/saves/before_reuse.py"
_JOBS = "kv_connector/scheduler/saves/jobs.py"
_PLANNER = "kv_connector/scheduler/saves/planner.py"
_LOOK_AHEAD = "kv_connector/scheduler/saves/lookahead.py"
_TESTS = "tests/index/test_tier.py"
_TIER = "kv_connector/index/tier.py"
_EVICTION = "kv_connector/index/eviction.py"

SAVES: tuple[Mutant, ...] = (
    Mutant(
        "pin-forgotten",
        "blocks of a save are not pinned in the engine's pool",
        (Patch(_JOBS, "        self._shared.pool.touch(device_ids)\n", ""),),
        tested("tests/scheduler/test_half.py::test_a_conversation_comes_back_from_the_host"),
    ),
    Mutant(
        "matched-too-early",
        "a block is matched while its save is under way",
        (
            Patch(
                _JOBS,
                "        return (job,)\n",
                "        self._host.fill(host_ids)\n        return (job,)\n",
            ),
        ),
        tested("tests/scheduler/test_half.py::test_a_conversation_comes_back_from_the_host"),
    ),
    Mutant(
        "failed-save-kept",
        "blocks whose save has failed are matched",
        (
            Patch(
                _JOBS,
                "            self._host.discard(host_ids)\n",
                "            self._on_saved(self._host.fill(host_ids))\n",
            ),
        ),
        WORLDS,
    ),
    Mutant(
        "refused-block-told",
        "routers are told of blocks that a save had no room of their form for",
        (Patch(_JOBS, "if names is None or len(filled) < len(names):", "if names is None:"),),
        tested("tests/scheduler/saves/test_refusals.py::test_one_block_that_does_not_fit_costs_no_other"),
    ),
    Mutant(
        "names-of-some",
        "of a step that saves what is computed and what is reused first routers are told of the one alone",
        (Patch(_JOBS, "if len(names) == len(host_ids):", "if names:"),),
        simulated(1, seed=710006),
    ),
    Mutant(
        "look-ahead-not-renewed",
        "under write_back what steps take is not looked at again until something is freed",
        (Patch(_LOOK_AHEAD, " and self._num_ahead >= self._most_taken:", ":"),),
        tested("tests/scheduler/test_step_cost.py::test_no_step_takes_blocks_that_were_not_looked_at"),
    ),
    Mutant(
        "groups-not-counted",
        "under write_back a step of many block groups takes blocks that were not looked at",
        (
            Patch(
                _BEFORE_REUSE,
                "return sum(-(-num_hashes // group.hashes_per_block) for group in self._grouped.groups)",
                "return -(-num_hashes // self._grouped.groups[0].hashes_per_block)",
            ),
        ),
        tested("tests/scheduler/test_step_cost.py::test_no_step_takes_blocks_that_were_not_looked_at"),
    ),
    Mutant(
        "forgotten-comes-back",
        "a prefix that was forgotten is known again where nothing behind it is to be, and is never settled",
        (
            Patch(
                "kv_connector/index/tree.py",
                "            return []  # without its prefix, which nobody would settle\n",
                "            pass\n",
            ),
        ),
        tested("tests/index/test_tree.py::test_nothing_of_a_forgotten_prefix_does_not_bring_it_back"),
    ),
    Mutant(
        "hits-not-taken",
        "under write_back blocks behind those that are hit on the device are taken unsaved",
        (
            Patch(
                _LOOK_AHEAD,
                "self._num_ahead -= num_hit",
                "self._num_ahead -= 0",
            ),
        ),
        tested(
            "tests/scheduler/test_step_cost.py::test_what_was_looked_at_and_is_hit_on_the_device_is_looked_at_no_more"
        ),
    ),
    Mutant(
        "preempted-not-looked-for",
        "under write_back the blocks of a preempted request are taken unsaved",
        (
            Patch(
                "kv_connector/scheduler/half.py",
                "        self._leases.leave(request_id)\n        self._saves.before_reuse.changed()\n        self",
                "        self._leases.leave(request_id)\n        self",
            ),
        ),
        tested("tests/scheduler/test_step_cost.py::test_what_was_preempted_is_looked_for_as_what_has_ended_is"),
    ),
    Mutant(
        "newer-makes-room",
        "under write_back a newer block makes room for an older one",
        (
            Patch(
                _BEFORE_REUSE,
                "self._host.allocate_up_to(1, self._tree.used[node], self._tree.terms.tenant[node])",
                "self._host.allocate_up_to(1)",
            ),
        ),
        tested("tests/scheduler/saves/test_planner.py"),
    ),
    Mutant(
        "newer-parents-go",
        "a parent that is newer than what needs room is evicted with its children",
        (
            Patch(_EVICTION, "(time < older_than and (worth, time, parent) < due)", "(worth, time, parent) < due"),
            Patch(_EVICTION, "is_ahead = time < older_than and (worth", "is_ahead = (worth"),
        ),
        tested(f"{_TESTS}::test_a_block_is_kept_for_its_own_time_however_old_what_was_behind_it_is"),
    ),
    Mutant(
        "leased-evicted",
        "eviction takes blocks that copies use",
        (
            Patch(
                _EVICTION,
                "if num_kids or block_id == NONE or refs[block_id] or (",
                "if num_kids or block_id == NONE or (",
            ),
            Patch(_TIER, "            and self._refs[block_id] == 0\n", ""),
        ),
        tested(f"{_TESTS}::test_what_a_copy_uses_stays_however_old_it_is"),
    ),
    Mutant(
        "left-window-saved",
        "blocks are saved that have left their window by drafts in flight, and may be anybody's",
        (
            Patch(
                _PLANNER,
                "first = max(table.next_block, held)",
                "first = table.next_block",
            ),
        ),
        tested("tests/scheduler/test_steps.py::test_a_block_that_has_left_its_window_by_drafts_in_flight_is_not_saved"),
    ),
    Mutant(
        "left-chunk-saved",
        "blocks are saved that lie in front of the chunk that the engine is in, and may be anybody's",
        (Patch("kv_connector/index/groups.py", "return self.first_needed(num_tokens // block_tokens)", "return 0"),),
        tested(
            "tests/scheduler/saves/test_windows.py"
            "::test_of_a_chunk_is_saved_what_the_next_token_or_another_request_may_see"
        ),
    ),
    Mutant(
        "computed-anew-unsaved",
        "what is computed anew behind a failed load is not saved, nor what the step of the load computed",
        (Patch("kv_connector/scheduler/requests.py", "                    table.next_block = 0\n", ""),),
        tested("tests/scheduler/saves/test_planner.py::test_what_is_computed_anew_behind_a_failed_load_is_saved"),
    ),
    Mutant(
        "evicted-twice",
        "a parent that waits as the leaf it was is evicted with its child, and once more",
        (Patch(_EVICTION, " or queued[parent]:", ":"),),
        tested("tests/index/test_reuse.py::test_no_block_is_lost_or_given_twice_whatever_is_asked_for"),
    ),
    Mutant(
        "idle-step-ends-drafts",
        "a step without requests ends the one before it, whose drafts still write",
        (
            Patch(
                "kv_connector/scheduler/steps.py",
                "if number <= step][:-1]",
                "if number < step]",
            ),
        ),
        tested("tests/scheduler/test_steps.py::test_a_step_without_requests_does_not_end_the_drafts_of_the_one_before"),
    ),
    Mutant(
        "forgotten-row-saved",
        "a block that was forgotten as room was made for it is saved under whatever block gets its row",
        (
            Patch(
                _BEFORE_REUSE,
                "            node = self._tree.get(key)\n            if not room or node is None:",
                "            if not room or node is None:",
            ),
        ),
        tested(
            "tests/scheduler/saves/test_planner.py::test_a_block_that_is_forgotten_as_room_is_made_for_it_is_not_saved"
        ),
    ),
    Mutant(
        "waited-unused",
        "blocks that have waited for room are evicted before older ones",
        (Patch(_PLANNER, "        self._tree.touch(targets, now)\n", ""),),
        tested("tests/scheduler/saves/test_planner.py::test_what_has_waited_for_room_counts_as_used_when_it_is_saved"),
    ),
    Mutant(
        "window-saved-for-no-hit",
        "of a window with smaller blocks than others have blocks are saved that no hit loads",
        (Patch(_PLANNER, " and may_need(group, i)}", "}"),),
        tested("tests/scheduler/saves/test_windows.py::test_of_a_window_is_saved_what_lies_in_front_of_where_hits_end"),
    ),
    Mutant(
        "window-saved-one-short",
        "of a window with smaller blocks than others have one that a hit needs is not saved",
        (
            Patch(
                "kv_connector/index/groups.py",
                "entry.first_needed((block // per_hit + 1) * per_hit)",
                "entry.first_needed((block // per_hit + 1) * per_hit) + (per_hit > 1)",
            ),
        ),
        tested("tests/index/test_lookup.py"),
    ),
)
