"""Faults of models whose layers are of several kinds: blocks of several sizes, recurrent states."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_LOOKUP = "kv_connector/index/lookup.py"
_GROUPS = "kv_connector/index/groups.py"
_LEASES = "kv_connector/scheduler/loads/leases.py"
_PLANNER = "kv_connector/scheduler/saves/planner.py"
_REACHABLE = "kv_connector/scheduler/saves/reachable.py"
_HALF = "kv_connector/scheduler/half.py"
_SCHEDULED = "kv_connector/scheduler/scheduled.py"
_BACKUPS = "kv_connector/scheduler/storage/backups.py"
_GROUPING = "kv_connector/scheduler/storage/grouping.py"
_WORLDS = tested("tests/simulation/test_layer_groups.py::test_layers_of_several_kinds_break_no_promise")
_ENDS = tested("tests/simulation/test_ends.py::test_hits_that_end_inside_of_blocks_break_no_promise")
_HITS = "tests/index/test_lookup.py::test_a_hit_is_the_longest_prefix_that_every_group_can_serve"
_SAVES = "tests/scheduler/saves/test_states.py"
_WINDOWS = "tests/scheduler/saves/test_windows.py"

LAYER_GROUPS: tuple[Mutant, ...] = (
    Mutant(
        "state-one-block-off",
        "a state is saved under the name of the block in front of its own",
        (
            Patch(
                _PLANNER,
                "[end - 1] = block.block_id",
                "[max(0, end - 1 - self._hashes_per_block[block.group])] = block.block_id",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "state-of-another",
        "what a table has at a state's place is saved in place of the block that the engine tells",
        (Patch(_PLANNER, "if not grouped.groups[g].states_are_told)", ")"),),
        _WORLDS,
    ),
    Mutant(
        "group-not-loaded",
        "of a hit the blocks of the last group are not loaded",
        (
            Patch(
                _LEASES,
                "[*map(NO_BLOCK.__ne__, device_ids)]",
                "[each != NO_BLOCK and table is tables[0] for each in device_ids]",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "named-by-the-first-hash",
        "a block has the hash at its beginning, which does not cover what it holds",
        (Patch(_GROUPS, "range(size - 1, len(self) * size, size)", "range(0, len(self) * size, size)"),),
        _WORLDS,
    ),
    Mutant(
        "chunk-begins-behind",
        "a hit does without the first block of the chunk that its next token is in",
        (Patch(_GROUPS, "return end - end % self.chunk_blocks", "return end - max(0, end % self.chunk_blocks - 1)"),),
        tested("tests/simulation/test_chunks.py::test_chunked_attention_breaks_no_promise"),
    ),
    Mutant(
        "windows-truncated",
        "a request goes on behind blocks in front of its window, which no load was to fill",
        (Patch(_GROUPS, "len(groups) == 1 and groups[0].is_full", "len(groups) == 1"),),
        _WORLDS,
    ),
    Mutant(
        "ends-within-a-block",
        "a hit may end within a block of a group",
        (Patch(_GROUPS, "fitted = end - end % self.hashes_per_hit", "fitted = end"),),
        tested(_HITS),
    ),
    Mutant(
        "begins-within-a-block",
        "a hit may begin within a block of a group",
        (Patch(_LOOKUP, "if first % grouped.hashes_per_hit:", "if False:"),),
        tested(_HITS),
    ),
    Mutant(
        "copies-of-one-group",
        "how long a load takes is told from the blocks of one group",
        (
            Patch(
                _LOOKUP,
                "return sum(map(len, self._grouped.needed(first, first + length)))",
                "return len(self._grouped.needed(first, first + length)[0])",
            ),
        ),
        tested(_HITS),
    ),
    Mutant(
        "behind-in-blocks-of-another",
        "what lies behind a failed load is looked for at the same places of all tables, whatever blocks they have",
        (Patch(_LEASES, "behind.update(*(ids[first // n :]", "behind.update(*(ids[first :]"),),
        tested("tests/scheduler/loads/test_leases.py"),
    ),
    Mutant(
        "written-in-blocks-of-another",
        "what a step may write to is looked for at the same places of all tables, whatever blocks they have",
        (
            Patch(
                _SCHEDULED,
                "written += table.block_ids[first // size :]",
                "written += table.block_ids[first // sizes[0] :]",
            ),
        ),
        tested("tests/scheduler/test_steps.py"),
    ),
    Mutant(
        "unreachable-in-blocks-of-another",
        "what nobody can reach of a group is told by blocks of another",
        (
            Patch(
                _REACHABLE,
                "min(reach.first_unreachable, first * size)",
                "min(reach.first_unreachable, first)",
            ),
        ),
        tested(_SAVES),
    ),
    Mutant(
        "states-behind-the-rest",
        "where there is no room for all, full attention has what a state needs, which cannot wait",
        (
            Patch(_PLANNER, "        taken = self._take_told(progress, told)\n", "        taken: list[_Taken] = []\n"),
            Patch(
                _PLANNER,
                "        for part in taken:\n",
                "        taken += self._take_told(progress, told)\n        for part in taken:\n",
            ),
        ),
        tested(_SAVES),
    ),
    Mutant(
        "unscheduled-states-forgotten",
        "states of requests that the step does not compute are not saved",
        (Patch(_SCHEDULED, "for request_id, states in told.items():", "for request_id, states in ():"),),
        tested(_SAVES),
    ),
    Mutant(
        "states-counted-as-blocks",
        "a request is thought to hold a state for each block of its prompt, so that hits are computed anew",
        (
            Patch(
                "kv_connector/scheduler/requests.py",
                "min(need, _MOST_STATES) if group.states_are_told else need",
                "need",
            ),
        ),
        tested(f"{_SAVES}::test_a_hit_waits_for_its_load_where_the_device_has_room_for_its_states"),
    ),
    Mutant(
        "unnamed-state",
        "a state within a block is saved as that in front of the block",
        (Patch(_PLANNER, "if not inside and end", "if end"),),
        tested(f"{_SAVES}::test_what_has_no_name_is_not_saved_as_something_else"),
    ),
    Mutant(
        "state-of-a-farther-end",
        "a hit that ends inside of a block takes the state at another end in it",
        (Patch(_LOOKUP, "last = end if group in self._grouped.windows else ", "last = "),),
        _ENDS,
    ),
    Mutant(
        "rows-that-are-not-there",
        "of attention a copy of the block serves ends behind the one that it was kept for",
        (
            Patch(_LOOKUP, "ends = range(last, end - 1, -1)", "ends = range(last, last - size, -1)"),
            Patch(_LOOKUP, "(min(e, most) for e in behind", "(min(end + size - 1, most) for e in behind"),
        ),
        _ENDS,
    ),
    Mutant(
        "a-block-without-its-end",
        "a hit goes on into a block of attention of which there is no copy",
        (Patch(_LOOKUP, "if self._resident(hashes, group, e) is not None), end)", "), end)"),),
        _ENDS,
    ),
    Mutant(
        "ends-beside-other-engines",
        "other engines go on where the host ends inside of a block, and fill that as well",
        (Patch(_HALF, "ends_within and config.peer is None", "ends_within"),),
        _ENDS,
    ),
    Mutant(
        "ends-in-storage",
        "storage is given copies that it never looks for",
        (Patch(_GROUPING, "not (inside[node] or transient[node])", "not transient[node]"),),
        tested(f"{_SAVES}::test_ends_inside_of_blocks_stay_on_the_host"),
    ),
    Mutant(
        "ends-in-place-of-blocks",
        "an end inside of a block goes to storage in place of what its host block held before",
        (
            Patch(
                _BACKUPS,
                "        self._note_replaced(host_ids)\n        marked",
                "        self._note_replaced(self._grouping.whole(host_ids))\n        marked",
            ),
        ),
        tested(f"{_SAVES}::test_an_end_inside_of_a_block_is_not_written_in_place_of_what_its_host_block_held"),
    ),
    Mutant(
        "blocks-taken-for-ends",
        "a block whose row of the tree was an end's before never goes to storage",
        (Patch("kv_connector/index/tree.py", "            inside[node] = 0\n", ""),),
        tested("tests/index/test_tree.py::test_a_row_that_is_used_again_is_no_end_inside_of_a_block"),
    ),
    Mutant(
        "ends-with-drafts",
        "a hit ends inside of a block behind which a draft layer needs rows that it has not",
        (Patch(_GROUPS, "ends_within and not drop_last_block", "ends_within"),),
        tested("tests/index/test_lookup.py::test_no_hit_ends_inside_of_a_block_that_is_left_to_draft_layers"),
    ),
    Mutant(
        "hole-in-a-window",
        "a place of a window's table without a block is saved as if there were one",
        (Patch(_PLANNER, "if ids[i] != NO_BLOCK and may_need", "if may_need"),),
        tested(f"{_WINDOWS}::test_a_place_without_a_block_is_not_saved"),
    ),
    Mutant(
        "window-ends-too-soon",
        "the block that a hit ends with is taken to have left the window",
        (
            Patch(
                _GROUPS,
                "self.first_needed(-(-num_tokens // block_tokens))",
                "self.first_needed(num_tokens // block_tokens + 1)",
            ),
        ),
        tested(f"{_WINDOWS}::test_a_block_that_a_hit_ends_with_is_in_the_window"),
    ),
)
