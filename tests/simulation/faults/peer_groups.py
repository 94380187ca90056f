"""Faults of KV transfers of models whose layers are of several kinds."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_OUTGOING = "kv_connector/scheduler/peers/outgoing.py"
_INCOMING = "kv_connector/scheduler/peers/incoming.py"
_PARAMS = "kv_connector/scheduler/peers/params.py"
_OFFERS = "kv_connector/peer/protocol/offers.py"
_SCHEDULED = "kv_connector/scheduler/scheduled.py"
_ANSWERS = "kv_connector/scheduler/loads/answers.py"
_WORLDS = tested("tests/simulation/test_peer_groups.py::test_kv_transfers_of_layers_of_several_kinds_break_no_promise")
_GROUPS = "tests/scheduler/peers/test_groups.py"
_OFFERED = "tests/peer/protocol/test_offers.py"

PEER_GROUPS: tuple[Mutant, ...] = (
    Mutant(
        "peer-group-forgotten",
        "of a prompt from elsewhere the blocks of the last group are not asked for",
        (
            Patch(
                _INCOMING,
                "in enumerate(self._shared.grouped.needed(first, first + admission.num_brought)):",
                "in enumerate(self._shared.grouped.needed(first, first + admission.num_brought)[:1]):",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "peer-window-short",
        "a window from elsewhere lacks its first block",
        (
            Patch(
                _INCOMING,
                "            start = blocks.stop - len(device_ids)\n",
                "            device_ids = device_ids[group > 0 and len(device_ids) > 1 :]\n"
                "            start = blocks.stop - len(device_ids)\n",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "peer-window-off",
        "of a window the blocks are given that are one in front of those that were asked for",
        (
            Patch(
                _OUTGOING,
                "table[part.next_block : num_hashes // group.hashes_per_block]",
                "([*table[:1], *table] if part.blocks.start else table)"
                "[part.next_block : num_hashes // group.hashes_per_block]",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "peer-window-late",
        "what has left a window is offered when the whole prompt is computed, whoever has the block by then",
        (
            Patch(
                _OUTGOING,
                "        if not any(new.values()):\n",
                "        if num_hashes < transfer.end:\n            return\n        if not any(new.values()):\n",
            ),
        ),
        tested(f"{_GROUPS}::test_of_a_window_its_end_is_offered_as_it_is_computed"),
    ),
    Mutant(
        "peer-ends-within-a-block",
        "a KV transfer ends where a block of some group does not",
        (Patch(_PARAMS, "num_hashes - num_hashes % grouped.hashes_per_hit", "num_hashes"),),
        tested(f"{_GROUPS}::test_a_transfer_ends_where_blocks_of_every_size_do"),
    ),
    Mutant(
        "peer-ends-behind-states",
        "with draft layers a KV transfer ends where engines keep no state",
        (Patch(_PARAMS, "if grouped.drops_last_block and state_sizes:", "if False:"),),
        tested(f"{_GROUPS}::test_a_transfer_ends_with_the_last_state_that_engines_keep"),
    ),
    Mutant(
        "peer-ends-within-a-states-block",
        "with draft layers a KV transfer ends one hash in front of the prompt's, and not one block of states",
        (Patch(_PARAMS, "size = max(state_sizes)", "size = 1"),),
        tested(f"{_GROUPS}::test_a_transfer_ends_with_the_last_state_that_engines_keep"),
    ),
    Mutant(
        "peer-begins-within-a-block",
        "blocks from elsewhere are put into one that the engine has hit, and others may hold",
        (
            Patch(
                _ANSWERS,
                "num_brought <= 0 or num_computed_tokens % (size * self._grouped.hashes_per_hit)",
                "num_brought <= 0",
            ),
        ),
        tested(f"{_GROUPS}::test_a_hit_that_ends_within_a_block_is_not_continued_from_elsewhere"),
    ),
    Mutant(
        "peer-without-room",
        "who waits for a window from elsewhere may have no room to begin anew",
        (Patch(_ANSWERS, "return num_brought if self._has_room_to_wait(request) else 0", "return num_brought"),),
        tested(f"{_GROUPS}::test_a_request_without_room_to_begin_anew_is_computed"),
    ),
    Mutant(
        "peer-null-offered",
        "what the engine does not hold is offered",
        (Patch(_OUTGOING, "if any(NO_BLOCK in device_ids for device_ids in new.values()) or", "if"),),
        tested(f"{_GROUPS}::test_what_the_engine_does_not_hold_is_not_offered"),
    ),
    Mutant(
        "peer-null-asked",
        "blocks are asked for that the engine does not hold",
        (
            Patch(
                _INCOMING,
                "_held(admission.tables[group].block_ids[blocks.start : blocks.stop])",
                "admission.tables[group].block_ids[blocks.start : blocks.stop]",
            ),
        ),
        tested(f"{_GROUPS}::test_what_a_window_has_left_is_not_asked_for"),
    ),
    Mutant(
        "peer-groups-begin-apart",
        "who asks for a window before it is computed is told that there is none",
        (
            Patch(
                _OUTGOING,
                "if new[part.group] or not transfer.has_begun:",
                "if new[part.group]:",
            ),
        ),
        tested(f"{_GROUPS}::test_of_a_window_its_end_is_offered_as_it_is_computed"),
    ),
    Mutant(
        "peer-groups-withdrawn-apart",
        "of a prompt that is withdrawn the groups behind the first are offered on",
        (
            Patch(
                _OFFERS,
                "[key for key in self._offers if key[0] == transfer_id]",
                "[key for key in self._offers if key == (transfer_id, 0)]",
            ),
        ),
        tested(f"{_OFFERED}::test_a_prompt_is_withdrawn_with_all_of_its_groups"),
    ),
    Mutant(
        "peer-window-overrun",
        "who asks for what lies in front of a window waits for it",
        (
            Patch(
                _OFFERS,
                "elif not offer.first <= want.first < want.stop <= offer.first + len(offer.names):",
                "elif False:",
            ),
        ),
        tested(f"{_OFFERED}::test_of_a_window_only_what_is_offered_can_be_had"),
    ),
    Mutant(
        "overlaid-layers-trusted",
        "what layers of several groups lie in leaves when the first of them has written",
        (
            Patch(
                "kv_connector/worker/peers.py",
                "ready = self._layout.num_complete(self._num_saved)",
                "ready = self._layout.last_region(names[self._num_saved - 1]) + 1",
            ),
        ),
        tested("tests/worker/test_peers.py::test_what_layers_of_several_groups_lie_in_leaves_behind_the_last_of_them"),
    ),
    Mutant(
        "peer-groups-untold",
        "engines whose models have other block groups exchange blocks",
        (Patch("kv_connector/build.py", '("backend", "arrangement", "groups")', '("backend", "arrangement")'),),
        tested("tests/peer/test_identity.py::test_block_groups_are_told"),
    ),
    Mutant(
        "peer-state-one-block-off",
        "the state of another end is offered for that at the end",
        (
            Patch(
                _OUTGOING,
                "if (state.group, state.num_tokens) == (part.group, num_tokens)]",
                "if state.group == part.group]",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "peer-state-of-the-table",
        "what a table has at the end's place is offered for the state there, whatever the engine tells",
        (
            Patch(
                _OUTGOING,
                "if not told and not transfer.has_begun and item.num_computed_tokens == num_tokens:",
                "if item.num_computed_tokens + item.num_scheduled_tokens >= num_tokens:",
            ),
        ),
        tested(f"{_GROUPS}::test_the_state_at_the_end_is_offered_where_the_engine_says_that_it_is"),
    ),
    Mutant(
        "peer-state-missing",
        "a prompt without a state at its end is offered, and who asks for it waits for nothing",
        (Patch(_OUTGOING, " or (num_hashes == transfer.end and is_short)", ""),),
        tested(f"{_GROUPS}::test_without_a_state_at_the_end_nothing_is_offered"),
    ),
    Mutant(
        "peer-state-of-a-hit-forgotten",
        "a prompt that the producer has cached is not continued elsewhere",
        (Patch(_OUTGOING, "        if not told and not transfer.has_begun and", "        if False and"),),
        tested(f"{_GROUPS}::test_the_state_that_a_request_begins_with_is_offered_where_it_is_that_at_the_end"),
    ),
    Mutant(
        "peer-states-of-loads-unheard",
        "a state that is told of a request that is not scheduled is not offered",
        (
            Patch(
                _SCHEDULED,
                "        self._companions.scheduled(item, state.tables, told)",
                "        if item.num_scheduled_tokens:\n"
                "            self._companions.scheduled(item, state.tables, told)",
            ),
        ),
        tested(f"{_GROUPS}::test_a_state_that_was_loaded_is_offered_though_the_request_is_not_scheduled_yet"),
    ),
    Mutant(
        "empty-load",
        "a load of nothing is begun where what the host has lies in front of windows",
        (
            Patch(
                "kv_connector/scheduler/loads/leases.py",
                "        if not lease.device_ids:\n            return None\n",
                "",
            ),
        ),
        tested(f"{_GROUPS}::test_a_host_that_has_only_a_state_in_front_of_the_end_loads_nothing"),
    ),
)
