"""Faults of loads: what they wait for, who hears of them, who waits for them."""

from __future__ import annotations

from .mutant import Mutant, Patch, simulated, tested
from .scheduler import WORLDS

_LATER_WORLDS = simulated(60, seed=61)

_CHOICE = "kv_connector/scheduler/loads/choice.py"
_GROUPS = "kv_connector/index/groups.py"
_RATES = "kv_connector/scheduler/loads/rates.py"
_LEASES = "kv_connector/scheduler/loads/leases.py"
_HALF = "kv_connector/scheduler/half.py"
_WORKER = "kv_connector/worker/half.py"
_TIMED = "tests/worker/test_half.py"
_ANSWERS = "kv_connector/scheduler/loads/answers.py"
_GONE = "tests/scheduler/loads/test_leases.py"
_TESTS = "tests/scheduler/loads/test_choice.py"
_OF_RATES = "tests/scheduler/loads/test_rates.py"
_LATE = "test_a_step_that_was_over_before_it_was_looked_at_took_no_longer_than_from_its_plan_on"
_EXPECTATIONS = "tests/scheduler/loads/test_expectations.py"

LOADS: tuple[Mutant, ...] = (
    Mutant(
        "lost-blocks-hit",
        "what a failed load was to fill is hit where its request has ended by then",
        (
            Patch(
                "kv_connector/scheduler/half.py",
                "            if report.lost_blocks:\n",
                "            if False:\n",
            ),
        ),
        WORLDS,
    ),
    Mutant(
        "computed-behind-hit",
        "what was computed behind a failed load is hit",
        (Patch(_LEASES, "behind.update(*(ids[first // n :] for n, ids in zip(sizes, tables, strict=False)))", "pass"),),
        _LATER_WORLDS,
    ),
    Mutant(
        "ended-behind-hit",
        "what a request has computed behind a failed load is hit where it had ended or was preempted by then",
        (
            Patch(
                _LEASES,
                "for tables in (*live, *(tables for _, tables in self.dropped_since(lost))):",
                "for tables in live:",
            ),
        ),
        tested(
            "tests/scheduler/loads/test_leases.py"
            "::test_nobody_hits_what_a_failed_load_was_to_fill_nor_what_was_computed_behind_it"
        ),
    ),
    Mutant(
        "told-late",
        "blocks that were lost are reported a step after the load has ended",
        (
            Patch(
                "kv_connector/worker/half.py",
                "        self._lost_blocks |= block_ids\n",
                "        self._lost_blocks, self._told = self._told, block_ids\n",
            ),
            Patch(
                "kv_connector/worker/half.py",
                "        self._lost_blocks: set[int] = set()",
                "        self._told: set[int] = set()\n        self._lost_blocks: set[int] = set()",
            ),
        ),
        tested("tests/worker/test_half.py::test_lost_blocks_are_reported_with_the_load_that_lost_them"),
    ),
    Mutant(
        "reported-early",
        "a load is reported to have ended before its request is named, or its blocks told",
        (
            Patch(
                "kv_connector/worker/half.py",
                "        block_ids, self._has_failed_in_step =",
                "        self._poll()\n        block_ids, self._has_failed_in_step =",
            ),
        ),
        tested("tests/worker/test_half.py::test_a_load_is_reported_in_the_step_that_names_its_request"),
    ),
    Mutant(
        "no-room-to-begin-anew",
        "loads run in the background that leave no room for one that fails and left its window behind",
        (
            Patch(
                _ANSWERS,
                "return num_needed <= self._shared.pool.num_available",
                "return True",
            ),
        ),
        tested(f"{_GONE}::test_a_load_waits_only_where_all_that_wait_could_begin_anew"),
    ),
    Mutant(
        "waiting-not-counted",
        "requests that wait for loads are kept no room to begin anew",
        (Patch(_ANSWERS, " + self._requests.num_missing(groups, size)", ""),),
        tested(f"{_GONE}::test_a_load_waits_only_where_all_that_wait_could_begin_anew"),
    ),
    Mutant(
        "guard-forgotten",
        "a background load does not wait for steps that still use its blocks",
        (Patch(_LEASES, "num_guarded = sum(device_id in used for device_id in device_ids)", "num_guarded = 0"),),
        _LATER_WORLDS,
    ),
    Mutant(
        "guarded-not-last",
        "blocks that steps in flight use are not the last of their load",
        (Patch(_LEASES, "key=lambda pair: pair[0] in used", "key=lambda pair: pair[0] not in used"),),
        tested("tests/scheduler/test_half.py::test_blocks_that_a_step_under_way_writes_are_filled_last"),
    ),
    Mutant(
        "awaited-forgotten",
        "a step does not wait for the announced loads that it reads",
        (Patch(_CHOICE, "            if load.engine_knows:\n", "            if False:\n"),),
        WORLDS,
    ),
    Mutant(
        "unwanted-announced",
        "the load of a request that is gone is announced to the next one of its id",
        (Patch(_CHOICE, "load.may_announce and load.is_wanted and", "load.may_announce and"),),
        tested(_GONE),
    ),
    Mutant(
        "unwanted-unknown",
        "a load does not hear that its request is gone",
        (Patch(_LEASES, "            self._planner.unwanted(job_id)\n", "            pass\n"),),
        tested(_GONE),
    ),
    Mutant(
        "overdue-coalesced",
        "who is coalesced with a load that never ends waits for ever",
        (Patch(_CHOICE, "return self._clock() - load.reserved_at > OVERDUE_SECONDS", "return False"),),
        tested("tests/scheduler/test_watchdog.py"),
    ),
    Mutant(
        "dead-load-coalesced",
        "a later hit waits for a load that was dropped before it was planned",
        (
            Patch(
                _LEASES,
                "        else:\n            self._planner.release(lease.background)\n",
                "",
            ),
        ),
        tested(_GONE),
    ),
    Mutant(
        "failed-load-kept",
        "host blocks whose load has failed are matched again",
        (Patch(_LEASES, "self._shared.host.discard(job.host_ids.tolist())", "pass"),),
        tested(_GONE),
    ),
    Mutant(
        "scarce-blocks-idle",
        "a request has its blocks for as long as its load takes in the background, however many wait for them",
        (Patch(_CHOICE, "found_no_room = before not in (None, LoadMode.COALESCED)", "found_no_room = False"),),
        tested(f"{_OF_RATES}::test_a_request_that_asks_again_has_found_no_room_unless_it_was_told_to_ask_again"),
    ),
    Mutant(
        "filled-by-one-alone",
        "where two loads fill a block nothing is to fill it any more when the first of them has ended",
        (Patch(_LEASES, "self._are_shared |= not self._filling.isdisjoint(filled)", "pass"),),
        tested(f"{_GONE}::test_of_two_loads_to_the_same_blocks_the_second_is_still_under_way_when_the_first_has_ended"),
    ),
    Mutant(
        "shared-no-more",
        "of blocks that two loads fill one is taken to be the last that does, whichever ends",
        (
            Patch(
                _LEASES,
                "self._are_shared = len(self._filling) < sum(map(len, self._open.values()))",
                "self._are_shared = False",
            ),
        ),
        tested(f"{_GONE}::test_of_two_loads_to_the_same_blocks_the_second_is_still_under_way_when_the_first_has_ended"),
    ),
    Mutant(
        "shared-by-the-last-alone",
        "that two loads fill a block is forgotten as soon as a load begins whose blocks are its own",
        (Patch(_LEASES, "self._are_shared |= not", "self._are_shared = not"),),
        tested(f"{_GONE}::test_of_two_loads_to_the_same_blocks_the_second_is_still_under_way_when_the_first_has_ended"),
    ),
    Mutant(
        "begins-alone",
        "a request that begins with others keeps them waiting for no load, and begins behind them, step by step",
        (Patch(_RATES, "return step - max(prompt, in_step) - prompt", "return step - max(prompt, in_step)"),),
        tested(f"{_OF_RATES}::test_a_load_holds_nobody_up_for_as_long_as_launching_a_prompt_does"),
    ),
    Mutant(
        "others-decode-and-wait",
        "a load of a request that begins with others holds up those that decode",
        (Patch(_RATES, "if hit.num_beginning >= hit.num_others:", "if hit.num_beginning:"),),
        tested(f"{_OF_RATES}::test_who_decodes_is_held_up_no_longer_for_the_sake_of_those_who_begin"),
    ),
    Mutant(
        "beside-a-book",
        "a question without a hit that begins beside a hit of a whole book waits for all of its load",
        (
            Patch(
                _RATES,
                "return step - max(prompt, in_step) - prompt",
                "return 0.0",
            ),
        ),
        tested(f"{_OF_RATES}::test_a_load_holds_nobody_up_for_as_long_as_launching_a_prompt_does"),
    ),
    Mutant(
        "behind-no-other-load",
        "a load of the step is hidden behind launching it, though others hide there already",
        (
            Patch(
                _RATES,
                "self._stall(hit, load, self._loading.seconds(num_in_step) or 0.0)",
                "self._stall(hit, load, 0.0)",
            ),
        ),
        tested(f"{_OF_RATES}::test_who_decodes_is_held_up_no_longer_for_the_sake_of_those_who_begin"),
    ),
    Mutant(
        "each-load-a-little",
        "many short loads of one step hold up whoever decodes, for as long as is allowed to each",
        (Patch(_RATES, "        return step - prompt\n", "        return step - max(prompt, in_step)\n"),),
        tested(f"{_OF_RATES}::test_what_short_loads_of_one_step_hold_others_up_for_is_limited_in_all"),
    ),
    Mutant(
        "launches-hide-nothing",
        "a load that launching a prompt would hide goes to the background, and its request waits for both",
        (Patch(_RATES, "max(launch, self._prefill.seconds", "max(0.0, self._prefill.seconds"),),
        tested(f"{_OF_RATES}::test_a_load_holds_nobody_up_for_as_long_as_launching_a_prompt_does"),
    ),
    Mutant(
        "one-token-hides-all",
        "a hit with one token left, which a graph launches in no time, is loaded as if launching it took long",
        (Patch(_RATES, "self.launch_seconds if hit.num_new_tokens > 1 else 0.0", "self.launch_seconds"),),
        tested(f"{_OF_RATES}::test_a_prompt_of_which_one_token_is_left_is_launched_as_one_that_decodes"),
    ),
    Mutant(
        "long-prompts-hide-all",
        "launching a long prompt, which waits for the device, hides loads of others for as long",
        (Patch(_RATES, " and num_tokens <= _LAUNCHED_TOKENS", ""),),
        tested(
            f"{_OF_RATES}::test_launches_are_learned_from_steps_with_short_prompts_whose_thread_has_waited_for_nothing"
        ),
    ),
    Mutant(
        "loads-hide-loads",
        "a step that waits for its load on the thread hides later loads for as long",
        (Patch(_RATES, " and not may_have_waited", ""),),
        tested(
            f"{_OF_RATES}::test_launches_are_learned_from_steps_with_short_prompts_whose_thread_has_waited_for_nothing"
        ),
    ),
    Mutant(
        "layers-wait-and-launch",
        "what layers wait for their loads counts as launching them",
        (Patch(_WORKER, "self._called_at += self._clock() - began", "pass"),),
        tested(f"{_TIMED}::test_what_layers_wait_for_their_loads_does_not_count_as_launching_them"),
    ),
    Mutant(
        "slow-launches-for-good",
        "what launching prompts took while the host was busy hides loads for ever, once all prompts load",
        (Patch(_RATES, "(num_loaded > 0 and most_tokens > 1)", "False"),),
        tested(
            f"{_OF_RATES}::test_what_launching_a_prompt_has_taken_in_bad_times_is_forgotten_though_all_prompts_load"
        ),
    ),
    Mutant(
        "waits-are-launches",
        "a step that loads, or waits for the device, seems to take that long to launch",
        (Patch(_RATES, "planned.limits_launch and 0 < launch_seconds < self.launch_seconds", "planned.limits_launch"),),
        tested(f"{_OF_RATES}::test_a_thread_that_has_waited_for_a_load_or_the_device_has_not_launched_for_as_long"),
    ),
    Mutant(
        "launched-in-front-of-the-load",
        "vLLM starts a step without loads behind its forward pass, so launching seems to take no time",
        (
            Patch(
                _WORKER,
                "        self._forward_seconds, self._called_at = 0.0, self._clock() if plan.computes else None\n",
                "        self._forward_seconds, self._called_at = 0.0, None\n",
            ),
        ),
        tested(f"{_TIMED}::test_how_long_a_forward_pass_takes_the_thread_is_reported_wherever_it_is_among_the_calls"),
    ),
    Mutant(
        "saves-hide-loads",
        "submitting the saves of a step counts as launching it, and hides loads for as long",
        (
            Patch(
                _WORKER,
                "self._clock() - self._called_at)\n            self._called_at = None\n",
                "self._clock() - self._called_at)\n",
            ),
        ),
        tested(f"{_TIMED}::test_how_long_a_forward_pass_takes_the_thread_is_reported_wherever_it_is_among_the_calls"),
    ),
    Mutant(
        "computed-in-no-time",
        "a step whose report is looked at late seems to have computed its prompt in no time, and hits are computed",
        (Patch(_RATES, "if seconds > launch_seconds:", "if seconds > 0:"),),
        tested(f"{_OF_RATES}::{_LATE}"),
    ),
    Mutant(
        "slow-steps-for-good",
        "the speed of computing stays what the first step had, which was compiled, where all others are looked at late",
        (Patch(_RATES, "elif known is None or now - planned.at < known:", "elif known is None:"),),
        tested(f"{_OF_RATES}::{_LATE}"),
    ),
    Mutant(
        "steps-for-good",
        "steps whose reports come in with later ones are remembered for ever",
        (
            Patch(
                _RATES,
                "        while self._steps and self._steps[0].step <= step:\n",
                "        if self._steps and self._steps[0].step <= step:\n",
            ),
        ),
        tested(f"{_OF_RATES}::test_steps_whose_reports_come_in_together_leave_nothing_behind"),
    ),
    Mutant(
        "loads-of-steps-before",
        "what earlier steps have loaded counts as loaded in each later one",
        (
            Patch(
                _CHOICE,
                "        self._num_in_step = 0\n        if not self._background:",
                "        if not self._background:",
            ),
        ),
        tested(f"{_OF_RATES}::test_a_load_holds_nobody_up_for_as_long_as_launching_a_prompt_does"),
    ),
    Mutant(
        "in-the-step-beside-it",
        "a load in the background counts as one of the step, and is in the way of one that is hidden there",
        (
            Patch(
                _LEASES,
                "        else:\n            self._planner.load_in_step(len(lease.host_ids))\n",
                "        self._planner.load_in_step(len(lease.host_ids))\n",
            ),
        ),
        tested(f"{_GONE}::test_what_is_loaded_in_the_background_is_not_in_the_way_of_a_load_of_the_step"),
    ),
    Mutant(
        "in-the-step-and-gone",
        "a load whose request has left before the step was planned counts as one of the step",
        (
            Patch(
                _LEASES,
                "            self._planner.load_in_step(-len(lease.host_ids))\n",
                "            pass\n",
            ),
        ),
        tested(f"{_GONE}::test_a_load_whose_request_leaves_before_the_step_is_planned_is_not_one_of_the_step"),
    ),
    Mutant(
        "begin-unseen",
        "nobody is told who else begins in the step that is being planned",
        (Patch(_ANSWERS, "num_beginning=self._requests.num_beginning", "num_beginning=0"),),
        tested(f"{_GONE}::test_two_hits_that_begin_together_are_loaded_in_one_step_unless_a_third_one_decodes"),
    ),
    Mutant(
        "told-to-ask-again-for-no-room",
        "a request that was told to ask again counts as one that has found no room",
        (Patch(_CHOICE, "before not in (None, LoadMode.COALESCED)", "before is not None"),),
        tested(f"{_OF_RATES}::test_a_request_that_asks_again_has_found_no_room_unless_it_was_told_to_ask_again"),
    ),
    Mutant(
        "everybody-held-up",
        "where blocks are scarce a load holds up any number of others",
        (Patch(_RATES, "stall * (1 + hit.num_others) <=", "stall <="),),
        tested(f"{_OF_RATES}::test_where_blocks_are_scarce_what_counts_is_for_how_long_they_lie_idle"),
    ),
    Mutant(
        "failed-by-request-in-the-step",
        "an engine that hears of failed loads by request only has loads in its steps",
        (
            Patch(
                _CHOICE,
                "return LoadMode.ASYNC if mode is LoadMode.SYNC and not self._fails_by_block else mode",
                "return mode",
            ),
            Patch(
                _CHOICE,
                "if self._choice is LoadChoice.SYNC and self._fails_by_block:",
                "if self._choice is LoadChoice.SYNC:",
            ),
        ),
        tested(f"{_TESTS}::test_no_step_loads_for_an_engine_that_is_told_of_failures_by_request"),
    ),
    Mutant(
        "failed-by-request-announced",
        "an engine that hears of failed loads by request only is told of loads before they have ended",
        (Patch(_CHOICE, "may_announce and self._fails_by_block,", "may_announce,"),),
        tested(f"{_TESTS}::test_no_step_loads_for_an_engine_that_is_told_of_failures_by_request"),
    ),
    Mutant(
        "windows-fitted-once",
        "a hit that was cut short for one window is not whole for another",
        (
            Patch(
                _GROUPS,
                "            if fitted == end:\n                return end\n            end = fitted",
                "            return fitted",
            ),
        ),
        tested("tests/index/test_lookup.py::test_a_hit_that_ends_earlier_for_one_window_is_whole_for_the_others"),
    ),
    Mutant(
        "window-of-the-dropped-block",
        "where the last block is left to be computed, the window in front of it need not be there",
        (
            Patch(
                _GROUPS,
                "self.whole_end(first, end, has)) - 1\n",
                "self.whole_end(first, end, has)) - 1\n            return max(end, first)\n",
            ),
        ),
        tested("tests/index/test_lookup.py"),
    ),
    Mutant(
        "block-behind-the-state",
        "with draft layers the block behind the state has to have a state too",
        (Patch(_GROUPS, "end if self.full else ", ""),),
        tested("tests/index/test_lookup.py"),
    ),
    Mutant(
        "rested-on-the-newest",
        "where two loads fail at once, what was computed behind the older one is hit",
        (Patch(_LEASES, "first = min(loads, default=None)", "first = max(loads, default=None)"),),
        tested(f"{_GONE}::test_of_loads_that_fail_together_the_oldest_says_who_has_rested_on_them"),
    ),
    Mutant(
        "rested-forgotten",
        "what was computed behind a load that fails is hit where an older load has ended since",
        (Patch(_LEASES, "self._dropped[0][0] < oldest", "self._dropped[0][0] <= oldest"),),
        tested(f"{_GONE}::test_what_was_computed_behind_a_load_is_known_until_that_one_ends"),
    ),
    Mutant(
        "rested-before",
        "what was lost before a load was planned counts as computed behind it",
        (Patch(_LEASES, "if first is not None and first <= last]", "if first is not None]"),),
        tested(f"{_GONE}::test_who_had_a_block_before_its_load_was_planned_has_lost_nothing"),
    ),
    Mutant(
        "rested-for-ever",
        "what requests have lost of loads is remembered when those have ended",
        (Patch(_LEASES, "            self._dropped.popleft()\n", "            break\n"),),
        tested(f"{_GONE}::test_nothing_is_kept_of_who_has_shared_a_load_that_has_ended"),
    ),
    Mutant(
        "all-at-once",
        "loads in the background are expected to run beside each other",
        (Patch(_CHOICE, "max(now + self.estimate.delay_seconds, self._busy_until) + seconds", "now + seconds"),),
        tested(f"{_TESTS}::test_loads_follow_one_another_on_the_link"),
    ),
    Mutant(
        "begun-with-the-admission",
        "loads are expected to move bytes from their admission on, and steps wait for those that do not",
        (Patch(_CHOICE, "max(now + self.estimate.delay_seconds, self._busy_until)", "max(now, self._busy_until)"),),
        tested(f"{_TESTS}::test_loads_that_begin_later_than_they_are_admitted_are_announced_later"),
    ),
    Mutant(
        "late-by-the-report",
        "loads count as late until their end is heard of",
        (Patch(_CHOICE, "load.seen_at - load.reserved_at", "self._clock() - load.reserved_at"),),
        tested(f"{_TESTS}::test_of_loads_that_begin_at_once_none_is_announced_later"),
    ),
    Mutant(
        "one-late-load-delays-all",
        "of the last loads the latest says how late the next one is",
        (Patch(_RATES, "sorted(self._delays)[-2]", "sorted(self._delays)[-1]"),),
        tested(f"{_TESTS}::test_one_load_that_was_very_late_delays_no_other"),
    ),
    Mutant(
        "overdue-unnoticed",
        "loads are announced by when they would end if the one in front of them had",
        (Patch(_CHOICE, "        if overdue > 0:\n", "        if False:\n"),),
        tested(f"{_TESTS}::test_loads_behind_one_that_is_late_are_not_announced_before_it_ends"),
    ),
    Mutant(
        "overdue-twice",
        "loads behind one that is late are expected later by that twice",
        (Patch(_CHOICE, "max(0.0, late - self._overdue)", "late"),),
        tested(f"{_TESTS}::test_loads_behind_one_that_is_late_are_not_announced_before_it_ends"),
    ),
    Mutant(
        "failed-load-took-nothing",
        "loads are expected sooner by what one that failed was to take",
        (Patch(_CHOICE, "        if not ok:\n            return\n", ""),),
        tested(f"{_TESTS}::test_a_load_that_failed_makes_no_other_look_sooner"),
    ),
    Mutant(
        "dropped-load-expected",
        "loads are expected behind such as were dropped before they were planned",
        (Patch(_CHOICE, "        self._see_free_link()\n\n    def begin", "\n    def begin"),),
        tested(_EXPECTATIONS),
    ),
    Mutant(
        "failed-load-expected",
        "loads are expected behind such as failed",
        (Patch(_CHOICE, "        self._see_free_link()  # also where a load failed, and nothing was observed\n", ""),),
        tested(_EXPECTATIONS),
    ),
    Mutant(
        "faster-load-counted-twice",
        "a load behind one that was faster than expected is announced before it begins",
        (Patch(_CHOICE, "self._set_over(load)\n        if not ok:", "self.release(load)\n        if not ok:"),),
        tested(_EXPECTATIONS),
    ),
    Mutant(
        "free-while-it-reads",
        "a link is taken to be free while a load is under way whose blocks another one was to read, too",
        (Patch(_CHOICE, "        if load is None and not self._reading:", "        if not self._reading:"),),
        tested(_EXPECTATIONS),
    ),
    Mutant(
        "begun-late-for-ever",
        "how late loads begin is learned while the link is idle, and believed as long as it is busy",
        (Patch(_RATES, "        if seconds < self.delay_seconds:\n", "        if False:\n"),),
        tested(_EXPECTATIONS),
    ),
    Mutant(
        "expected-before-it-can-end",
        "a load that was just admitted is expected to begin with the end of the one in front of it",
        (Patch(_CHOICE, "max(now, load.reserved_at + self.estimate.delay_seconds)", "now"),),
        tested(_EXPECTATIONS),
    ),
    Mutant(
        "awaited-before-it-is-known",
        "steps wait for a load that the engine has not heard of yet",
        (Patch(_CHOICE, " and load.announced_in <= step", ""),),
        tested(f"{_TESTS}::test_a_step_does_not_wait_for_a_load_that_the_engine_has_not_heard_of"),
    ),
    Mutant(
        "coalesced-at-every-look",
        "who waits for another's load is counted each time that it asks",
        (Patch(_CHOICE, "coalesced_loads += before is not mode", "coalesced_loads += 1"),),
        tested(f"{_TESTS}::test_who_asks_again_and_again_rides_on_a_load_once"),
    ),
)
