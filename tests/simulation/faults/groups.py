"""Faults of storage that keeps several blocks as one: names, places, and what is whole."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_OBJECTS = "kv_connector/storage/objects"
_JOBS = "kv_connector/storage/jobs.py"
_PREFETCHES = "kv_connector/scheduler/storage/prefetches.py"
_SEARCH = "kv_connector/scheduler/storage/search.py"
_BACKUPS = "kv_connector/scheduler/storage/backups.py"
_GROUPING = "kv_connector/scheduler/storage/grouping.py"

_BACKEND = "tests/storage/objects/test_backend.py"
_PLANS = "tests/scheduler/storage/test_groups.py"
_WORLDS = "tests/simulation/test_objects.py"

GROUPS: tuple[Mutant, ...] = (
    Mutant(
        "groups-named-by-their-first",
        "a group has the name of its first block, which others of that prefix have too",
        (Patch(f"{_OBJECTS}/groups.py", "self.name(keys[-1])", "self.name(keys[0])"),),
        tested(f"{_BACKEND}::test_of_several_ends_the_longest_counts"),
    ),
    Mutant(
        "groups-unchecked",
        "what lies under a group's name is taken for it",
        (
            Patch(
                f"{_OBJECTS}/backend.py",
                "if (header.identity, header.keys) != (self._identity, group.keys):",
                "if header.identity != self._identity:",
            ),
            Patch(f"{_OBJECTS}/backend.py", "if fits(group.keys[i], buffer, checksums[i])]", "]"),
        ),
        tested(f"{_BACKEND}::test_damage_and_foreign_bytes_are_misses"),
    ),
    Mutant(
        "an-end-is-whole",
        "a group that ends early counts as a whole one",
        (
            Patch(
                f"{_OBJECTS}/backend.py",
                "max((place for place, is_there in enumerate(there, 1) if is_there), default=0)",
                "size * any(there)",
            ),
        ),
        tested(f"{_BACKEND}::test_the_end_of_a_prefix_is_found_by_whoever_goes_on_from_it"),
    ),
    Mutant(
        "the-first-end-counts",
        "of several ends within a group the shortest is found",
        (Patch(f"{_OBJECTS}/backend.py", "max((place for place, is_there", "min((place for place, is_there"),),
        tested(f"{_BACKEND}::test_of_several_ends_the_longest_counts"),
    ),
    Mutant(
        "one-name-twice",
        "a group is asked for twice in one call, of which a store answers one",
        (Patch(f"{_OBJECTS}/backend.py", "or place.group.name in batch ", ""),),
        tested("tests/storage/test_backends.py"),
    ),
    Mutant(
        "fetched-into-the-next",
        "blocks of a group come to the host blocks of those behind them",
        (Patch(_JOBS, "_UNWANTED if place in skipped else next(wanted)", "next(wanted, _UNWANTED)"),),
        tested("tests/storage/test_jobs.py", _WORLDS),
    ),
    Mutant(
        "missing-by-key",
        "blocks that a fetch has not brought are told by their places in the group",
        (
            Patch(
                _JOBS,
                "moved = [is_moved for place, is_moved in enumerate(future.result()) if place not in skipped]",
                "moved = future.result()",
            ),
        ),
        tested("tests/storage/test_jobs.py"),
    ),
    Mutant(
        "looked-up-anywhere",
        "a look-up begins where the host's blocks end, whatever group that is in",
        (
            Patch(
                _SEARCH,
                "self.first = {group: grouping.start(num_held) for group, num_held in held.items()}",
                "self.first = held",
            ),
        ),
        tested(f"{_PLANS}::test_a_look_up_begins_with_a_group_and_a_fetch_brings_what_the_host_lacks_of_it"),
    ),
    Mutant(
        "fetched-again",
        "what storage has of a group counts as lacking, though the host has it",
        (
            Patch(
                _SEARCH,
                "[first + i for i in (*self._host.absent(path), *range(len(path), len(keys)))]",
                "list(range(first, first + len(keys)))",
            ),
        ),
        tested(f"{_PLANS}::test_a_host_that_has_some_of_a_group_makes_room_for_the_rest_and_no_more"),
    ),
    Mutant(
        "fetches-cut-groups",
        "a group is fetched in two jobs, each of which names a part of it",
        (Patch("kv_connector/scheduler/storage/grouping.py", "else self.start(blocks[i])", "else blocks[i]"),),
        tested(f"{_PLANS}::test_no_group_is_cut_in_two_by_the_jobs_of_a_fetch"),
    ),
    Mutant(
        "ends-in-the-middle",
        "a group that ends early is written in front of others, which are cut in the wrong places",
        (
            Patch(
                _BACKUPS,
                "while waiting and len(groups[-1]) == whole:",
                "while waiting:",
            ),
        ),
        tested(f"{_PLANS}::test_a_group_shorter_than_others_is_the_last_of_its_job"),
    ),
    Mutant(
        "written-before-saved",
        "a group is written of which a block is still being saved",
        (Patch(_BACKUPS, "        if on_its_way is None:\n", "        if True:\n"),),
        tested(f"{_PLANS}::test_saves_that_arrive_out_of_order_make_a_group_with_the_last_of_them"),
    ),
    Mutant(
        "behind-for-ever",
        "a group that waited for a block is not written when that has come",
        (
            Patch(
                _BACKUPS,
                "        if self._behind:\n            self._offer(",
                "        if False:\n            self._offer(",
            ),
        ),
        tested(f"{_PLANS}::test_saves_that_arrive_out_of_order_make_a_group_with_the_last_of_them"),
    ),
    Mutant(
        "written-with-a-hole",
        "a group is written with other bytes for a block that is not on the host",
        (
            Patch(
                _GROUPING,
                "return [] if self._host.absent(nodes) else host_ids",
                "return host_ids",
            ),
        ),
        tested(f"{_PLANS}::test_a_group_with_a_hole_waits_for_who_fills_it"),
    ),
    Mutant(
        "ends-unwritten",
        "what a request has of a group when it ends is never written",
        (
            Patch(
                _BACKUPS,
                "return self._when is Backup.AT_FINISH or self._grouping.num_blocks > 1",
                "return self._when is Backup.AT_FINISH",
            ),
        ),
        tested(f"{_PLANS}::test_whole_groups_are_written_as_they_come_and_the_rest_when_the_request_ends"),
    ),
    Mutant(
        "the-smaller-group-counts",
        "where ranks have groups of different sizes, the last that reports decides",
        (
            Patch(
                "kv_connector/scheduler/ranks.py",
                "self.group_blocks = max(self.group_blocks, report.group_blocks)",
                "self.group_blocks = report.group_blocks",
            ),
        ),
        tested("tests/scheduler/test_ranks.py::test_the_largest_group_of_any_rank_is_that_of_all"),
    ),
)
