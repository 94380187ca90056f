"""Faults of what goes first on the host."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_REUSE = "kv_connector/index/reuse.py"
_TIER = "kv_connector/index/tier.py"
_TESTS = "tests/index/test_reuse.py"

REUSE: tuple[Mutant, ...] = (
    Mutant(
        "everything-is-saved",
        "what is worth less than all that is there takes its place",
        (
            Patch(_TIER, "min(queue.first(older_than), (most, _NEVER, 0))", "queue.first(older_than)"),
            Patch(
                "kv_connector/index/eviction.py", 'if time == float("inf") or worth > most:', 'if time == float("inf"):'
            ),
        ),
        tested(f"{_TESTS}::test_what_is_worth_less_than_all_that_is_there_is_declined"),
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
                "return 0 if parent == ROOT or self._keeps[parent] & (_LEAVING - 1) else",
                "return 0 if parent == ROOT else",
            ),
        ),
        tested(f"{_TESTS}::test_the_newest_blocks_of_a_chat_are_of_its_visits_and_those_of_a_branch_are_new"),
    ),
    Mutant(
        "gone-and-looked-at",
        "rows of blocks that were forgotten count as blocks that nobody asks for",
        (Patch("kv_connector/index/tree.py", "                asked[node] = NONE\n", ""),),
        tested(f"{_TESTS}::test_what_is_forgotten_is_exposed_to_nothing"),
    ),
    Mutant(
        "declined-and-waiting",
        "what was declined is tried again in every step",
        (Patch("kv_connector/scheduler/saves/planner.py", "                num_done = num_looked_at\n", ""),),
        tested("tests/scheduler/saves/test_declined.py"),
    ),
    Mutant(
        "pinned-and-declined",
        "what an operator has pinned is declined",
        (
            Patch(
                "kv_connector/scheduler/saves/planner.py",
                "self._policy.declines and not is_pinned else",
                "self._policy.declines else",
            ),
        ),
        tested("tests/scheduler/saves/test_declined.py"),
    ),
)
