"""Faults of KV transfers of models whose layers are of several kinds."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_OUTGOING = "kv_connector/scheduler/peers/outgoing.py"
_INCOMING = "kv_connector/scheduler/peers/incoming.py"
_PARAMS = "kv_connector/scheduler/peers/params.py"
_OFFERS = "kv_connector/peer/protocol/offers.py"
_HALF = "kv_connector/scheduler/half.py"
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
        "a window is given from one block behind where it was asked for",
        (
            Patch(
                _OUTGOING,
                "return table.block_ids[part.next_block : stop] if",
                "back = part.group > 0 and part.next_block > 0\n"
                "        return table.block_ids[part.next_block - back : stop - back] if",
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
        (Patch(_PARAMS, "num_hashes - num_hashes % shared.grouped.hashes_per_hit", "num_hashes"),),
        tested(f"{_GROUPS}::test_a_transfer_ends_where_blocks_of_every_size_do"),
    ),
    Mutant(
        "peer-begins-within-a-block",
        "blocks from elsewhere are put into one that the engine has hit, and others may hold",
        (
            Patch(
                _HALF,
                "num_brought <= 0 or num_computed_tokens % (size * self._grouped.hashes_per_hit)",
                "num_brought <= 0",
            ),
        ),
        tested(f"{_GROUPS}::test_a_hit_that_ends_within_a_block_is_not_continued_from_elsewhere"),
    ),
    Mutant(
        "peer-without-room",
        "who waits for a window from elsewhere may have no room to begin anew",
        (Patch(_HALF, "return num_brought if self._has_room_to_wait(request) else 0", "return num_brought"),),
        tested(f"{_GROUPS}::test_a_request_without_room_to_begin_anew_is_computed"),
    ),
    Mutant(
        "peer-null-offered",
        "what the engine does not hold is offered",
        (Patch(_OUTGOING, "if any(NO_BLOCK in device_ids for device_ids in new.values()):", "if False:"),),
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
)
