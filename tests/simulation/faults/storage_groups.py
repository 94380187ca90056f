"""Faults of storage for models whose layers are of several kinds: names, what is whole, what travels with what."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_NAMES = "kv_connector/scheduler/names.py"
_LEDGER = "kv_connector/scheduler/ledger.py"
_SEARCH = "kv_connector/scheduler/storage/search.py"
_FETCHES = "kv_connector/scheduler/storage/fetches.py"
_PREFETCHES = "kv_connector/scheduler/storage/prefetches.py"
_BACKUPS = "kv_connector/scheduler/storage/backups.py"
_COMPANION = "kv_connector/scheduler/storage/companion.py"
_GROUPING = "kv_connector/scheduler/storage/grouping.py"
_JOBS = "kv_connector/storage/jobs.py"
_OBJECTS = "kv_connector/storage/objects/backend.py"

_PLANS = "tests/scheduler/storage/test_windows.py"
_WORLDS = "tests/simulation/test_storage_groups.py::test_storage_of_layers_of_several_kinds_breaks_no_promise"
_SINGLE = "tests/storage/objects/test_singles.py"

STORAGE_GROUPS: tuple[Mutant, ...] = (
    Mutant(
        "one-name-for-two-groups",
        "blocks of two groups that end in one hash have one name in storage",
        (
            Patch(
                _NAMES,
                "return adopt_hashes(adopt_hash(self._roots.root, self._salt), keys)",
                "return adopt_hashes(adopt_hash(self._roots.root, self._salt), [split_key(key)[0] for key in keys])",
            ),
        ),
        tested(_WORLDS),
    ),
    Mutant(
        "adapters-of-keys",
        "what an adapter has computed of all groups but the first has the name of the model's own",
        (Patch(_NAMES, "self._root_of.get(split_key(key)[0], ", "self._root_of.get(key, "),),
        tested("tests/scheduler/test_names.py"),
    ),
    Mutant(
        "adapters-of-the-first-group",
        "whose a hash is is forgotten where only another group has a block that ends in it",
        (Patch(_NAMES, "groups = range(len(self._grouped.groups))", "groups = range(1)"),),
        tested("tests/scheduler/test_names.py"),
    ),
    Mutant(
        "groups-of-no-identity",
        "engines with other groups of layers find each other's blocks",
        (Patch("kv_connector/index/identity.py", "        if self.groups:\n", "        if False:\n"),),
        tested("tests/storage/filesystem/test_identities.py"),
    ),
    Mutant(
        "pools-of-no-identity",
        "pages of one host pool are found by another one's hashes",
        (Patch("kv_connector/index/identity.py", "        if self.pool:\n", "        if False:\n"),),
        tested("tests/storage/filesystem/test_identities.py"),
    ),
    Mutant(
        "windows-taken-for-whole",
        "of a window that has a gap the rest is fetched, for a hit that is none",
        (Patch(_SEARCH, "return block in self._stored[group] or self._is_held(group, block)", "return True"),),
        tested(f"{_PLANS}::test_a_hit_ends_where_the_window_is_whole"),
    ),
    Mutant(
        "windows-one-block-off",
        "which blocks of a window storage has is told of those behind them",
        (Patch(_SEARCH, "update(b for i, b in enumerate", "update(b + 1 for i, b in enumerate"),),
        tested(f"{_PLANS}::test_a_hit_ends_where_the_window_is_whole"),
    ),
    Mutant(
        "another-for-a-state",
        "what is fetched in place of a state is another block, whose bytes are as good",
        (Patch(_FETCHES, "self._tree.hash_of(nodes[i]) for", "self._tree.hash_of(nodes[i] - singly) for"),),
        tested(_WORLDS),
    ),
    Mutant(
        "fewest-of-any-rank",
        "of windows the rank that has the fewest blocks speaks for all",
        (Patch(_LEDGER, "entry.found & found", "min(entry.found, found)"),),
        tested(f"{_PLANS}::test_of_each_block_every_rank_must_have_its_part"),
    ),
    Mutant(
        "windows-in-groups",
        "blocks of windows are kept several as one object",
        (Patch(_JOBS, "future = move(keys, buffers, job.singly)", "future = move(keys, buffers, False)"),),
        tested("tests/storage/test_jobs.py"),
    ),
    Mutant(
        "single-blocks-in-groups",
        "a store of objects cuts what is kept singly into groups",
        (Patch("kv_connector/storage/objects/groups.py", "size = 1 if singly else", "size ="),),
        tested(_SINGLE),
    ),
    Mutant(
        "single-blocks-behind-a-gap",
        "of blocks that are kept singly those behind one that is missing are taken for missing",
        (
            Patch(
                _OBJECTS,
                "there = self.find_each([place.group.keys[0] for place in unique.values()])",
                "num_there = self._count_leading(list(unique))\n        "
                "there = [place < num_there for place in range(len(unique))]",
            ),
        ),
        tested(_SINGLE),
    ),
    Mutant(
        "windows-by-depth",
        "blocks of windows wait for a group that they are not in",
        (
            Patch(
                _GROUPING,
                "if (depth[node] + 1) % size == 0 or self._is_of_window(node)",
                "if (depth[node] + 1) % size == 0",
            ),
        ),
        tested(f"{_PLANS}::test_windows_are_written_like_the_rest_and_singly"),
    ),
    Mutant(
        "windows-with-the-rest",
        "blocks of windows are written in one job with groups",
        (Patch(_BACKUPS, "if self._grouping.is_single(group[0]) is singly)", "if not singly)"),),
        tested(f"{_PLANS}::test_windows_are_written_like_the_rest_and_singly"),
    ),
    Mutant(
        "at-finish-without-windows",
        "what a request had of windows is not written when it has ended",
        (
            Patch(
                _COMPANION,
                "grouped.find_of(group, grouped.keys(hashes, group))",
                "grouped.find_of(group, grouped.keys(hashes, group)) if group in grouped.full else []",
            ),
        ),
        tested(f"{_PLANS}::test_windows_are_written_like_the_rest_and_singly"),
    ),
    Mutant(
        "near-ends-alone",
        "where none of the ends near the farthest one is whole, nothing is fetched",
        (Patch(_SEARCH, "if not self._stored or end >= high or", "if not self._stored or self._num_ends > _ENDS or"),),
        tested(f"{_PLANS}::test_ends_farther_in_front_are_asked_about_where_none_is_whole"),
    ),
    Mutant(
        "objects-cut-by-windows",
        "a hit that a window ends within an object asks for another object, which there is not",
        (Patch(_SEARCH, "max(self.stop_of(group, end), self._found[group])", "self.stop_of(group, end)"),),
        tested(f"{_PLANS}::test_objects_are_fetched_whole_also_where_a_window_ends_the_hit_within_one"),
    ),
    Mutant(
        "window-of-the-dropped-block-alone",
        "where the last block is computed, and windows alone say that there is one, its window is not fetched",
        (Patch(_SEARCH, "sorted({*blocks, *behind[group]})", "sorted(blocks)"),),
        tested(f"{_PLANS}::test_where_windows_alone_say_what_there_is_they_are_fetched_for_both_ends"),
    ),
    Mutant(
        "state-of-the-dropped-block",
        "where the last block is computed, a state is looked for behind it, where engines keep none",
        (
            Patch(
                _SEARCH,
                "        end = grouped.hit_end(0, end, self._is_there)\n        while",
                "        end = grouped.whole_end(0, end, self._is_there)\n        while",
            ),
        ),
        tested("tests/scheduler/storage/test_search.py"),
    ),
    Mutant(
        "dropped-block-not-fetched",
        "the block that is left to be computed stays in storage, and with it the last one of the hit",
        (Patch(_SEARCH, "-(-(end + self._grouped.drops_last_block) //", "-(-end //"),),
        tested(f"{_PLANS}::test_where_the_last_block_is_computed_one_state_is_enough"),
    ),
    Mutant(
        "last-block-not-looked-at",
        "a prompt that ends with a block misses the state which engines with drafts keep in front of it",
        (
            Patch(
                "kv_connector/scheduler/shared.py",
                "(num_tokens if leaves_block else num_tokens - 1)",
                "(num_tokens - 1)",
            ),
        ),
        tested(f"{_PLANS}::test_a_prompt_that_ends_with_a_block_hits_up_to_the_state_in_front_of_it"),
    ),
    Mutant(
        "whole-prompt-hit",
        "a prompt that ends with a block is hit whole: no token is left to compute",
        (Patch("kv_connector/scheduler/shared.py", "self.grouped.drops_last_block and len", "len"),),
        tested(f"{_PLANS}::test_a_token_of_a_prompt_that_ends_with_a_block_is_left_to_compute"),
    ),
    Mutant(
        "losses-not-made-up-for",
        "one block of storage that is damaged costs a model with states its whole hit",
        (Patch(_PREFETCHES, "return self._grouped.has_windows or (fetch.job", "return (fetch.job"),),
        tested(f"{_PLANS}::test_what_has_not_come_costs_the_hit_what_lies_behind_it_alone"),
    ),
    Mutant(
        "losses-for-ever",
        "what storage says it has and never brings is asked for again and again",
        (Patch(_PREFETCHES, "prefetch.is_done and not prefetch.is_repeated:", "prefetch.is_done:"),),
        tested(f"{_PLANS}::test_what_never_comes_is_asked_for_twice_and_no_more"),
    ),
    Mutant(
        "room-made-of-windows",
        "what the host has of a hit's windows goes for what is fetched of the rest",
        (Patch(_FETCHES, "        self._tree.touch(search.held_windows(end), now)\n", ""),),
        tested(f"{_PLANS}::test_room_is_not_made_of_what_the_hit_needs"),
    ),
    Mutant(
        "blocks-for-tokens",
        "how long a prefix takes to compute is told from the blocks that are fetched for it",
        (
            Patch(
                _PREFETCHES,
                "num_tokens = (end - search.host_end) * self._block_size",
                "num_tokens = num_lacking * self._block_size",
            ),
        ),
        tested(f"{_PLANS}::test_whether_a_prefix_is_sooner_computed_goes_by_its_tokens"),
    ),
)
