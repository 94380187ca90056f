"""Faults of what goes first on the host."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_EVICTION = "kv_connector/index/eviction.py"
_REUSE = "kv_connector/index/reuse.py"
_TREE = "kv_connector/index/tree.py"
_RECENT = "kv_connector/index/recent.py"
_MATCHES = "tests/index/test_recent.py"
_MATCHED_AGAIN = f"{_MATCHES}::test_a_match_is_what_a_look_up_of_each_hash_finds"
_RATES = "kv_connector/index/rates.py"
_FRAILTY = "kv_connector/index/frailty.py"
_TIER = "kv_connector/index/tier.py"
_PLANNER = "kv_connector/scheduler/saves/planner.py"
_REACHABLE = "kv_connector/scheduler/saves/reachable.py"
_TESTS = "tests/index/test_reuse.py"
_LEARNED = "tests/index/test_rates.py"
_LATELY = "tests/index/test_frailty.py"
_LOOKS = "tests/index/test_looks.py"
_RUNS = "tests/index/test_eviction.py"
_DECLINED = "tests/scheduler/saves/test_declined.py"

REUSE: tuple[Mutant, ...] = (
    Mutant(
        "looked-at-for-longer",
        "a column of the index is kept for longer than it is looked at, and cannot grow while that lasts",
        (
            Patch(
                _REUSE,
                "        tree = self._tree\n        faded, since = column(tree.visits)[nodes],",
                "        tree, visits = self._tree, column(self._tree.visits)\n        faded, since = visits[nodes],",
            ),
        ),
        tested("tests/index/test_columns.py"),
    ),
    Mutant(
        "matched-in-new-rows",
        "a path that was matched before still has a row that was forgotten and has become the same block's again",
        (Patch(_RECENT, "added[node] > num_additions or known[node]", "known[node]"),),
        tested(f"{_MATCHES}::test_a_path_that_has_come_again_in_other_rows_is_matched_there"),
    ),
    Mutant(
        "never-matched-again",
        "all hashes of a prompt that waits are compared at each step",
        (Patch(_TREE, "self._recent.shared(hashes) or [node]", "[node]"),),
        tested(f"{_MATCHES}::test_a_prompt_that_waits_is_matched_by_what_was_remembered"),
    ),
    Mutant(
        "remembered-by-age",
        "of the prompts that wait the oldest is matched hash by hash, as others have come behind it",
        (Patch(_RECENT, "            self._paths.pop(name, None)\n", ""),),
        tested(f"{_MATCHES}::test_a_prompt_that_waits_is_matched_by_what_was_remembered"),
    ),
    Mutant(
        "matched-by-the-first-block-alone",
        "prompts with the same system prompt are matched hash by hash, as each is looked for on the path of another",
        (Patch(_RECENT, "paths.get(hashes[-1]) or paths.get(hashes[0])", "paths.get(hashes[0])"),),
        tested(f"{_MATCHES}::test_a_prompt_that_waits_is_matched_by_what_was_remembered"),
    ),
    Mutant(
        "matched-by-the-last-block-alone",
        "a part of a prompt is matched hash by hash, though all of it was matched before",
        (Patch(_RECENT, "paths.get(hashes[-1]) or paths.get(hashes[0])", "paths.get(hashes[-1])"),),
        tested(f"{_MATCHES}::test_a_part_of_a_prompt_is_matched_by_all_of_it"),
    ),
    Mutant(
        "matched-by-length",
        "a prompt that begins like a path that was matched before is taken for it",
        (Patch(_RECENT, "added[node] > num_additions or known[node] != hashes[index]", "added[node] > num_additions"),),
        tested(_MATCHED_AGAIN),
    ),
    Mutant(
        "matched-apart",
        "blocks that follow nothing are remembered as a path: of those in front of one that stays some have gone",
        (Patch(_TREE, "if follow_one_another and", "if"),),
        tested(_MATCHED_AGAIN),
    ),
    Mutant(
        "match-shared",
        "who changes what a match returned changes what later ones return",
        (Patch(_TREE, "        return nodes[:]\n", "        return nodes\n"),),
        tested(f"{_MATCHES}::test_who_changes_what_a_match_returned_changes_no_later_match"),
    ),
    Mutant(
        "everything-is-saved",
        "what is worth less than all that is there takes its place",
        (
            Patch(_EVICTION, "min(self._head(older_than), (most, NEVER, 0))", "self._head(older_than)"),
            Patch(_EVICTION, "if time == NEVER or worth > most:", "if time == NEVER:"),
        ),
        tested(f"{_TESTS}::test_what_is_worth_less_than_all_that_is_there_is_declined"),
    ),
    Mutant(
        "a-night-is-a-day",
        "what comes new is worth what its kind is, though nothing comes back of what came lately",
        (Patch(_REUSE, "worth * self._newcomers_factor(), PRIORITY", "worth, PRIORITY"),),
        tested(f"{_TESTS}::test_a_batch_at_night_drives_out_little_and_by_day_new_prompts_are_let_in_again"),
    ),
    Mutant(
        "a-night-without-end",
        "what was expected lately never fades, and so nothing new is ever let in again",
        (Patch(_FRAILTY, "self._expected = _FADING * self._expected + expected", "self._expected += expected"),),
        tested(f"{_LATELY}::test_a_morning_makes_good_for_a_night_in_twice_the_time_that_is_lately"),
    ),
    Mutant(
        "better-than-its-kind",
        "where more comes back than should, what is new drives out what has shown that it comes back",
        (Patch(_FRAILTY, "return min(1.0, (prior", "return (1.0 * (prior"),),
        tested(f"{_LATELY}::test_where_as_much_comes_back_as_should_or_more_nothing_is_worth_less"),
    ),
    Mutant(
        "nothing-is-learned",
        "what is due to be learned when a step has ended is not",
        (Patch("kv_connector/scheduler/half.py", "            self.reuse.learn()  #", "            #"),),
        tested("tests/scheduler/test_hits.py::test_what_a_request_teaches_is_learned_when_its_step_has_ended"),
    ),
    Mutant(
        "parts-without-end",
        "what was seen at the looks of a part is learned again with each later part",
        (Patch(_REUSE, "        self._part_events[:] = self._part_exposure[:] = 0.0\n", ""),),
        tested(f"{_LOOKS}::test_a_part_is_learned_once_from_all_that_was_seen_at_its_looks"),
    ),
    Mutant(
        "looks-back-to-the-part",
        "at each look exposure is counted from where the part began, so that less comes back than is expected",
        (Patch(_REUSE, "self._open() * (time - self._looked_at)", "self._open() * (time - self._learned_at)"),),
        tested(f"{_LOOKS}::test_a_part_is_learned_once_from_all_that_was_seen_at_its_looks"),
    ),
    Mutant(
        "lately-is-ever",
        "what was asked for long ago is expected to come back, too, and counts as missing where that does not count",
        (Patch(_REUSE, "float(expected[:, ages].sum())", "float(expected.sum())"),),
        tested(f"{_LOOKS}::test_between_two_looks_what_is_known_is_expected_to_come_back_as_often_as_its_kind"),
    ),
    Mutant(
        "a-night-without-priority",
        "a priority adds less to what comes new while little comes back",
        (
            Patch(
                _REUSE,
                "return min(worth * self._newcomers_factor(), PRIORITY_STEP / 2) + PRIORITY_STEP * priority",
                "return (worth + PRIORITY_STEP * priority) * self._newcomers_factor()",
            ),
        ),
        tested(f"{_LOOKS}::test_a_priority_adds_what_it_does_however_little_comes_back"),
    ),
    Mutant(
        "those-that-left-come-back",
        "what is new is let in as if those who have left were still to come back, though only the new ones do",
        (Patch(_REUSE, "return lately / self._before.factor(_BEFORE_PRIOR * self._part_length)", "return lately"),),
        tested(f"{_LOOKS}::test_where_only_what_is_new_comes_back_more_of_it_is_let_in"),
    ),
    Mutant(
        "new-before-priority",
        "where older blocks stay away what is new drives out what has a higher priority",
        (
            Patch(
                _REUSE, "min(worth * self._newcomers_factor(), PRIORITY_STEP / 2)", "worth * self._newcomers_factor()"
            ),
        ),
        tested(f"{_LOOKS}::test_however_many_stay_away_what_is_new_is_worth_less_than_a_higher_priority"),
    ),
    Mutant(
        "the-day-has-left",
        "at night the prompts of the day are taken for gone, and documents that nobody repeats drive them out",
        (Patch(_REUSE, "if lately < _AS_EXPECTED:", "if lately < 0:"),),
        tested(f"{_LOOKS}::test_where_neither_comes_back_what_is_new_is_worth_no_more_for_that"),
    ),
    Mutant(
        "one-prompt-tells",
        "a prompt that stays away has all blocks taken for gone",
        (Patch(_REUSE, "self._before.factor(_BEFORE_PRIOR * self._part_length)", "self._before.factor(1.0)"),),
        tested(f"{_LOOKS}::test_few_prompts_that_stay_away_do_not_tell_that_all_have_left"),
    ),
    Mutant(
        "expected-of-long-ago",
        "what is expected is what the longest memory says, long after a load has become another",
        (Patch(_RATES, "np.tensordot(self._beliefs(), self._rates, axes=1)", "self._rates[0]"),),
        tested(f"{_LEARNED}::test_what_is_expected_is_what_the_memories_say_that_are_believed"),
    ),
    Mutant(
        "all-popular-alike",
        "what was asked for eight times is taken for what was asked for five times",
        (Patch(_REUSE, "(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)", "(0, 1, 3, 7, 15, 31)"),),
        tested(f"{_TESTS}::test_how_often_a_block_was_asked_for_is_told_apart_by_half_octaves"),
    ),
    Mutant(
        "of-use-or-not",
        "what is asked for while the device has it counts as a use of the host",
        (Patch(_REUSE, "cells[is_of_use]", "cells"),),
        tested(f"{_TESTS}::test_what_is_asked_for_while_the_device_has_it_makes_no_use_of_the_host"),
    ),
    Mutant(
        "every-chat-begins-anew",
        "the newest blocks of a chat are taken for those of a new one",
        (Patch("kv_connector/index/tree.py", "visits = self.visits_behind(parent)", "visits = 0"),),
        tested(f"{_TESTS}::test_the_newest_blocks_of_a_chat_are_of_its_visits_and_those_of_a_branch_are_new"),
    ),
    Mutant(
        "branches-are-their-stem",
        "a chat that begins behind a prompt of others is taken for one that comes back",
        (
            Patch(
                "kv_connector/index/tree.py",
                "return 0 if parent == ROOT or has_children else",
                "return 0 if parent == ROOT else",
            ),
        ),
        tested(f"{_TESTS}::test_the_newest_blocks_of_a_chat_are_of_its_visits_and_those_of_a_branch_are_new"),
    ),
    Mutant(
        "gone-and-looked-at",
        "rows of blocks that were forgotten count as blocks that nobody asks for",
        (Patch("kv_connector/index/tree.py", "            asked[node] = NONE\n", ""),),
        tested(f"{_TESTS}::test_what_is_forgotten_is_exposed_to_nothing"),
    ),
    Mutant(
        "pins-are-children",
        "the newest blocks of a chat that is pinned are taken for those of a new one",
        (Patch("kv_connector/index/tree.py", ") > self.pins[parent]", ") > 0"),),
        tested(f"{_TESTS}::test_the_newest_blocks_of_a_chat_that_is_pinned_are_of_its_visits"),
    ),
    Mutant(
        "visits-never-fade",
        "whatever comes back at all counts as what comes back all the time, once an engine has run for long",
        (Patch(_REUSE, "np.exp2(-since / (_HALF_LIFE * max(1, self._capacity)))", "1.0"),),
        tested(f"{_TESTS}::test_what_is_asked_for_now_and_then_never_counts_as_much_as_what_is_asked_for_all_the_time"),
    ),
    Mutant(
        "one-offs-make-unpopular",
        "a stretch of prompts that come once makes what was popular before look like one of them",
        (Patch(_REUSE, "tree.num_visits - column(tree.visited)[nodes]", "tree.time - column(tree.asked)[nodes]"),),
        tested(f"{_TESTS}::test_prompts_that_come_once_make_nothing_less_popular"),
    ),
    Mutant(
        "like-the-others-for-long",
        "what has not come back for long is taken for what comes back, as others do",
        (Patch(_RATES, "_PRIOR_EVENTS = 1.0", "_PRIOR_EVENTS = 16.0"),),
        tested(f"{_LEARNED}::test_a_class_that_nobody_asks_for_is_soon_not_taken_for_the_others"),
    ),
    Mutant(
        "ages-that-nobody-met",
        "what is asked for at an age at which nothing was looked at counts for nothing",
        (Patch(_RATES, "    exposure = np.maximum(exposure, events * half_widths)\n", ""),),
        tested(f"{_LEARNED}::test_what_comes_back_at_an_age_that_was_never_looked_at_is_worth_most"),
    ),
    Mutant(
        "the-longest-memory-alone",
        "what is asked for goes by a load that has long gone",
        (Patch(_RATES, "[0.998, 0.99, 0.95, 0.8]", "[0.998]"),),
        tested(f"{_LEARNED}::test_a_load_that_becomes_another_for_good_is_learned_in_a_few_parts"),
    ),
    Mutant(
        "foretold-once-and-for-all",
        "a memory that was right for long is believed for long after it was wrong",
        (Patch(_RATES, "_FORGETTING = 0.9", "_FORGETTING = 1.0"),),
        tested(f"{_LEARNED}::test_a_load_that_becomes_another_for_good_is_learned_in_a_few_parts"),
    ),
    Mutant(
        "the-shortest-memory-alone",
        "what the latest few parts happened to show is taken for what is to be",
        (Patch(_RATES, "[0.998, 0.99, 0.95, 0.8]", "[0.8]"),),
        tested(f"{_LEARNED}::test_a_load_that_stays_what_it_is_is_known_by_all_that_was_seen"),
    ),
    Mutant(
        "waits-that-nobody-saw",
        "what comes back after longer than a memory goes back is kept for as if it came soon",
        (Patch(_RATES, "(spent > 0) & is_known", "spent > 0"),),
        tested(f"{_LEARNED}::test_who_comes_back_after_longer_than_a_memory_goes_back_is_not_who_comes_soon"),
    ),
    Mutant(
        "what-never-was-never-comes",
        "where nothing was asked for at some age, memories are not told apart any more",
        (Patch(_RATES, "1 / np.maximum(1.0, self._exposure.sum(axis=(1, 2), keepdims=True))", "0.0"),),
        tested(f"{_LEARNED}::test_what_nobody_has_seen_before_leaves_the_memories_to_be_compared"),
    ),
    Mutant(
        "classes-for-ever",
        "a block of another class by now stays where it was",
        (
            Patch(
                _EVICTION,
                "(found := self._order.class_of(node)) != index",
                "(found := index) != index",
            ),
        ),
        tested(f"{_TESTS}::test_a_block_of_another_class_is_found_there"),
    ),
    Mutant(
        "neighbours-are-alike",
        "what a prefix begins with goes with what nobody asks for behind it",
        (
            Patch(
                _EVICTION,
                "is_alike = own_time == time and asked[parent] == time_asked and visits[parent] == num_visits",
                "is_alike = own_time == time",
            ),
        ),
        tested(f"{_TESTS}::test_what_many_ask_for_outlives_the_prompt_that_went_on_behind_it"),
    ),
    Mutant(
        "runs-that-are-used",
        "a block goes that a copy uses, as many in front of a victim are compared at once",
        (Patch(_EVICTION, " or any(map(self._refs.__getitem__, block_ids))", ""),),
        tested(f"{_RUNS}::test_what_is_compared_at_once_goes_as_what_is_looked_at_one_by_one"),
    ),
    Mutant(
        "runs-that-are-pinned",
        "a block goes that an operator has pinned, as many in front of a victim are compared at once",
        (Patch(_EVICTION, " or any(tree.pins[first:node])", ""),),
        tested(f"{_RUNS}::test_what_is_compared_at_once_goes_as_what_is_looked_at_one_by_one"),
    ),
    Mutant(
        "runs-with-holes",
        "a block that is not there goes, as many in front of a victim are compared at once",
        (Patch(_EVICTION, "NONE in block_ids or ", ""),),
        tested(f"{_RUNS}::test_what_is_compared_at_once_goes_as_what_is_looked_at_one_by_one"),
    ),
    Mutant(
        "runs-with-branches",
        "a block goes in front of another, as many in front of a victim are compared at once",
        (Patch(_EVICTION, " or kids[first:node].count(1) < count", ""),),
        tested(f"{_RUNS}::test_what_another_chat_goes_on_from_outlives_that_chat"),
    ),
    Mutant(
        "runs-that-wait",
        "blocks are evicted twice that wait as the leaves they were, as many are compared at once",
        (Patch(_EVICTION, "is_kept or 1 in self._queued[first:node]", "is_kept"),),
        tested(f"{_RUNS}::test_a_block_that_waits_in_another_class_is_evicted_once"),
    ),
    Mutant(
        "runs-of-any-age",
        "what was used since goes with what is behind it, as many are compared at once",
        (Patch("kv_connector/index/tree.py", "            and _is_constant(self.used[rows])\n", ""),),
        tested(f"{_RUNS}::test_a_block_that_was_used_since_outlives_what_is_older"),
    ),
    Mutant(
        "runs-of-any-worth",
        "what many ask for goes with what is behind it, as many are compared at once",
        (
            Patch(
                "kv_connector/index/tree.py",
                "            and _is_constant(self.asked[rows])\n            and _is_constant(self.visits[rows])\n",
                "",
            ),
        ),
        tested(f"{_RUNS}::test_what_is_compared_at_once_goes_as_what_is_looked_at_one_by_one"),
    ),
    Mutant(
        "windows-are-learned",
        "what is learned decides about blocks of windows, of which nothing can be",
        (
            Patch(
                "kv_connector/scheduler/half.py",
                "Recency(self.tree) if self._grouped.has_windows else self.reuse",
                "self.reuse",
            ),
            Patch(_PLANNER, "policy.declines and not grouped.has_windows", "policy.declines"),
        ),
        tested(f"{_DECLINED}::test_with_windows_the_least_recently_used_goes_and_nothing_is_declined"),
    ),
    Mutant(
        "declined-and-waiting",
        "what was declined is tried again in every step",
        (
            Patch(
                _PLANNER,
                "                new = self._reachable.declined(state.reach, size, keys, new)\n",
                "                pass\n",
            ),
        ),
        tested(_DECLINED),
    ),
    Mutant(
        "waited-declined-and-waiting",
        "what waited for bandwidth and was declined then is tried again in every step",
        (
            Patch(
                _PLANNER,
                "                table.unsaved = deque(self._reachable.declined(reach, size, keys, table.unsaved))\n",
                "                pass\n",
            ),
        ),
        tested(f"{_DECLINED}::test_what_waited_for_bandwidth_and_is_declined_waits_no_more"),
    ),
    Mutant(
        "saved-behind-a-hole",
        "blocks are saved that nobody can reach on the host, as what was in front of them has gone",
        (
            Patch(
                _PLANNER,
                "            self._reachable.look_for_holes(state.reach, hashes, tables, num_hashes)\n",
                "            pass\n",
            ),
        ),
        tested(f"{_DECLINED}::test_nothing_is_saved_behind_what_has_gone_from_the_host"),
    ),
    Mutant(
        "waited-and-saved-behind-a-hole",
        "blocks that waited for bandwidth are saved though what was in front of them has gone",
        (Patch(_REACHABLE, "first = table.unsaved[0] if table.unsaved", "first = 0 if table.unsaved"),),
        tested(f"{_DECLINED}::test_what_waited_for_bandwidth_is_not_saved_behind_what_has_gone"),
    ),
    Mutant(
        "saved-behind-another-group-s-hole",
        "one group's blocks are saved that no look-up can reach, as another group's in front of them have gone",
        (
            Patch(
                _REACHABLE,
                "        for group in self._grouped.full:\n            table",
                "        for group in (0,):\n            table",
            ),
        ),
        tested(f"{_DECLINED}::test_nothing_is_saved_of_one_group_behind_a_hole_of_another"),
    ),
    Mutant(
        "saved-behind-what-another-group-declines",
        "one group's blocks are saved that no look-up can reach, as another group declines its own in the same step",
        (
            Patch(
                _PLANNER,
                "saved = self._reachable.of(state.reach, taken.size, taken.keys, taken.saved)",
                "saved = taken.saved",
            ),
        ),
        tested(f"{_DECLINED}::test_what_one_group_declines_is_given_back_of_the_other"),
    ),
    Mutant(
        "declined-and-kept",
        "room that was made for blocks which another group has declined since is lost",
        (Patch(_PLANNER, "        self._host.release(taken.host_ids[len(saved) :])\n", ""),),
        tested(f"{_DECLINED}::test_what_one_group_declines_is_given_back_of_the_other"),
    ),
    Mutant(
        "room-of-another-group",
        "what is saved of one group takes the place of what another continues",
        (Patch(_TIER, "[node for path in paths for node in", "[node for path in paths[:1] for node in"),),
        tested(f"{_DECLINED}::test_room_for_one_group_is_not_made_out_of_what_another_continues"),
    ),
    Mutant(
        "window-saved-behind-a-hole",
        "blocks of a window are saved that no look-up can reach, as those of full attention in front have gone",
        (
            Patch(_PLANNER, "wanted = self._reachable.of(state.reach, size, keys, [i", "wanted = list([i"),
            Patch(
                _PLANNER,
                "saved = self._reachable.of(state.reach, taken.size, taken.keys, taken.saved)",
                "saved = taken.saved",
            ),
        ),
        tested(f"{_DECLINED}::test_nothing_is_saved_of_one_group_behind_a_hole_of_another"),
    ),
    Mutant(
        "declined-and-forgotten",
        "what is computed behind a declined block is in no counter",
        (
            Patch(
                _PLANNER,
                "self._reachable.of(state.reach, size, keys, new)\n            if not",
                "new[: self._reachable.num_pinned(keys, new)]\n            if not",
            ),
        ),
        tested(f"{_DECLINED}::test_what_is_computed_behind_a_declined_block_is_declined_and_counted_once"),
    ),
    Mutant(
        "declined-and-pinned",
        "a pin does not reach what a request computes after it was declined, or behind a save that failed",
        (Patch(_REACHABLE, "num_kept += self.num_pinned(keys, indices[num_kept:])", "pass"),),
        tested(
            f"{_DECLINED}::test_a_pin_reaches_what_a_request_computes_after_it_was_declined",
            f"{_DECLINED}::test_what_is_pinned_is_saved_behind_a_save_that_failed",
        ),
    ),
    Mutant(
        "nothing-for-storage-behind-a-hole",
        "the rest of a prompt never comes to storage, as its beginning has gone from the host",
        (Patch(_PLANNER, "pinned=False) and not is_in_storage", "pinned=False)"),),
        tested(f"{_DECLINED}::test_nothing_is_saved_behind_what_has_gone_from_the_host"),
    ),
    Mutant(
        "pinned-and-declined",
        "what an operator has pinned is declined",
        (Patch(_REACHABLE, "if node is None or not self._tree.pins[node] or keys", "if True or keys"),),
        tested(_DECLINED),
    ),
    Mutant(
        "pinned-in-front",
        "what is behind a pinned block takes the place of whatever there is",
        (Patch(_REACHABLE, "return num_pinned\n", "return len(indices) * (num_pinned > 0)\n"),),
        tested(f"{_DECLINED}::test_what_is_pinned_lends_its_place_to_nothing_behind_it"),
    ),
)
