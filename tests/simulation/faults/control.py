"""Faults of what requests and operators say of the cache: pins, times to live, private requests, tenants."""

from __future__ import annotations

from .mutant import Mutant, Patch, simulated, tested

_ACTIONS = "kv_connector/admin/actions.py"
_ADMIN_PINS = "kv_connector/admin/pins.py"
_BACKUPS = "kv_connector/scheduler/storage/backups.py"
_BUILD = "kv_connector/build.py"
_CONTROL = "kv_connector/scheduler/control/control.py"
_GROUPING = "kv_connector/scheduler/storage/grouping.py"
_GROUPS = "kv_connector/index/groups.py"
_OPERATIONS = "kv_connector/scheduler/operations.py"
_PIN_FILE = "kv_connector/storage/filesystem/pin_file.py"
_PIN_KEEPER = "kv_connector/storage/filesystem/pin_keeper.py"
_PINS = "kv_connector/scheduler/control/pins.py"
_PLANNER = "kv_connector/scheduler/saves/planner.py"
_PREFETCHES = "kv_connector/scheduler/storage/prefetches.py"
_REACHABLE = "kv_connector/scheduler/saves/reachable.py"
_RETURNING = "kv_connector/scheduler/control/returning.py"
_TENANTS = "kv_connector/index/tenants.py"
_TERMS = "kv_connector/index/terms.py"
_TIER = "kv_connector/index/tier.py"
_EXPIRY = "kv_connector/scheduler/control/expiry.py"
_FILES = "tests/storage/filesystem/test_pins.py"
_HINTS = "tests/scheduler/control/test_hints.py"
_INDEX = "tests/index/test_tenants.py"
_KEEPING = "tests/scheduler/control/test_keeping.py"
_ODD = "tests/scheduler/control/test_odd_hashes.py"
_REFUSALS = "tests/scheduler/saves/test_refusals.py"
_SHARES = "tests/scheduler/control/test_tenants.py"
_STEERING = "tests/admin/test_steering.py"
_STORAGE = "tests/scheduler/control/test_storage.py"
_TIMES = "tests/scheduler/control/test_times_to_live.py"

CONTROL: tuple[Mutant, ...] = (
    Mutant(
        "pin-of-a-request-forgotten",
        "what a request asks to be pinned is evicted like anything else",
        (Patch(_CONTROL, "            self._pin(request, state)\n", "            pass\n"),),
        tested("tests/scheduler/control/test_hints.py::test_a_pinned_prompt_outlives_a_flood_until_its_time_is_over"),
    ),
    Mutant(
        "pin-undone-comes-back",
        "what was let go of is pinned again by the next start",
        (Patch(_PINS, "            self.keeper.ended(name)\n", ""),),
        tested(f"{_KEEPING}::test_what_is_let_go_of_does_not_come_back_whether_it_was_pinned_again_by_then"),
    ),
    Mutant(
        "pin-undone-before-it-is-back",
        "what was let go of while it waited to be pinned again is pinned all the same",
        (Patch(_CONTROL, "            self._returning.drop(request.block_hashes)\n", ""),),
        tested(f"{_KEEPING}::test_what_is_let_go_of_does_not_come_back_whether_it_was_pinned_again_by_then"),
    ),
    Mutant(
        "pin-of-another-identity",
        "an engine pins what one of another model has pinned",
        (Patch(_PIN_FILE, "        if identity != self._identity:\n", "        if False:\n"),),
        tested(f"{_FILES}::test_engines_of_another_identity_find_nothing"),
    ),
    Mutant(
        "pin-for-ever",
        "a pin is not let go of when its time is over",
        (Patch(_CONTROL, "        self.pins.expire(now)\n", ""),),
        simulated(60),
    ),
    Mutant(
        "pin-cut-short",
        "a pin that was asked for again ends when the first was to",
        (
            Patch(
                _PINS,
                "        self._extend(name, pin, ttl_s)\n        return True",
                "        if not pin.deadline:\n            self._extend(name, pin, ttl_s)\n        return True",
            ),
        ),
        tested(
            "tests/scheduler/control/test_hints.py::test_a_pin_asked_for_again_lasts_longer_and_none_lasts_for_ever"
        ),
    ),
    Mutant(
        "pins-without-end",
        "requests may pin all of the host",
        (Patch(_PINS, "has_room = self.num_blocks + num_new <= int(self._share * capacity)", "has_room = True"),),
        tested("tests/scheduler/control/test_hints.py::test_pins_of_requests_hold_a_share_of_the_host_at_most"),
    ),
    Mutant(
        "pins-of-others-undone",
        "who ends a conversation lets go of what others have pinned in front of it",
        (Patch(_PINS, "if any(self._grouped.tree.pins[node] > num_own for node in last):", "if False:"),),
        tested(f"{_HINTS}::test_a_conversation_is_let_go_of_and_not_what_others_have_pinned"),
    ),
    Mutant(
        "private-saved",
        "what is not to be cached is saved",
        (Patch(_PLANNER, "state.is_stale or not state.is_saved or", "state.is_stale or"),),
        simulated(60),
    ),
    Mutant(
        "expired-though-used",
        "what has been used since its time began is dropped",
        (Patch(_EXPIRY, " and tree.used[node] <= used]", "]"),),
        tested(f"{_HINTS}::test_what_is_used_again_in_time_stays"),
    ),
    Mutant(
        "expired-under-a-load",
        "a block whose time ends while a load reads it is matched ever after",
        (
            Patch(
                _TIER,
                "                self.discard((self._block[node],))\n",
                "                if not self._refs[self._block[node]]:\n"
                "                    self.discard((self._block[node],))\n",
            ),
        ),
        tested(
            "tests/scheduler/control/test_hints.py::test_what_is_loaded_as_its_time_ends_is_matched_no_more_and_freed_behind_the_load"
        ),
    ),
    Mutant(
        "transient-stored",
        "what has a time to live goes to storage, which keeps it",
        (Patch(_GROUPING, "if not (inside[node] or transient[node])", "if not inside[node]"),),
        tested(f"{_STORAGE}::test_what_has_a_time_to_live_goes_to_storage_once_somebody_asks_who_set_none"),
    ),
    Mutant(
        "share-taken",
        "a tenant that floods takes what is another one's",
        (
            Patch(_TENANTS, "not is_full and held[other] > self.shares[other]", "not is_full"),
            Patch(_TENANTS, "min(count, held[giver] - self.shares[giver], self", "min(count, self"),
        ),
        tested(f"{_INDEX}::test_where_who_borrows_has_blocks_in_use_nobody_else_gives_for_him"),
    ),
    Mutant(
        "share-not-given-back",
        "who has borrowed keeps what is worth more than the blocks of whom it belongs to",
        (Patch(_TENANTS, "worth = NEVER if self._is_owed(held, tenant, giver) else most", "worth = most"),),
        tested(f"{_SHARES}::test_a_share_is_given_back_whatever_its_blocks_are_worth"),
    ),
    Mutant(
        "quota-ignored",
        "a tenant holds more than its quota where there is room",
        (Patch(_TIER, "if self.tenants is None else min(self.pool.num_free, self.tenants.room(tenant))", ""),),
        simulated(60),
    ),
    Mutant(
        "quota-over-free-blocks",
        "free blocks that a tenant is given do not count when others are evicted for it",
        (Patch(_TENANTS, "            held[tenant] += num_free\n", "            pass\n"),),
        simulated(60),
    ),
    Mutant(
        "tenant-of-the-wrong-node",
        "blocks behind the first of a prefix are the default tenant's",
        (Patch(_TERMS, "self.tenant[parent] if parent else terms.tenant", "0 if parent else terms.tenant"),),
        simulated(60),
    ),
    Mutant(
        "tenant-not-charged",
        "room for a tenant's blocks is made as if they were the default one's",
        (
            Patch(
                _PLANNER,
                "self._host.allocate_behind(len(indices) - num_pinned, paths, now, worth, terms.tenant)",
                "self._host.allocate_behind(len(indices) - num_pinned, paths, now, worth)",
            ),
        ),
        simulated(60),
    ),
    Mutant(
        "priority-forgotten",
        "room for what has a low priority is made by what has a higher one",
        (
            Patch(_PLANNER, "if self._declines else terms.most_worth\n", 'if self._declines else float("inf")\n'),
            Patch(_PLANNER, "indices[num_pinned], terms.priority\n", "indices[num_pinned], 2\n"),
        ),
        tested("tests/scheduler/control/test_hints.py::test_a_lower_priority_goes_first_and_makes_no_room_for_itself"),
    ),
    Mutant(
        "warming-called-off",
        "what a request was there to have fetched is called off as it ends",
        (Patch(_PREFETCHES, "if prefetch.is_thorough and not prefetch.is_done and", "if False and"),),
        tested(f"{_STORAGE}::test_what_was_asked_to_be_fetched_is_though_its_request_goes_away"),
    ),
    Mutant(
        "warmed-for-ever",
        "prefixes that were warmed are never forgotten, so that no more are taken",
        (
            Patch(
                _PREFETCHES, "for prefetch in self._warming if not prefetch.is_done]", "for prefetch in self._warming]"
            ),
        ),
        tested(f"{_STORAGE}::test_so_many_prefixes_are_warmed_at_a_time_and_others_behind_them"),
    ),
    Mutant(
        "drained-in-part",
        "what finds no room in the queue of a drained host is dropped",
        (Patch(_BACKUPS, "(room := self._room()):", "(room := 1 << 30):"),),
        tested(f"{_STORAGE}::test_a_host_is_drained_in_as_many_steps_as_it_takes"),
    ),
    Mutant(
        "pins-asked-again",
        "who pins the same again and again fills the memory",
        (Patch(_PINS, "> 2 * len(self._pins) + _LEAST", "> 1e9 + _LEAST"),),
        tested(f"{_HINTS}::test_what_is_pinned_again_and_again_leaves_nothing_behind"),
    ),
    Mutant(
        "prefix-of-a-mistake",
        "hashes that somebody gives and that are no prefix stop an engine when a request has them",
        (Patch(_OPERATIONS, "if are_given and not self._grouped.knows_prefix(block_hashes):", "if False:"),),
        simulated(60),
    ),
    Mutant(
        "prefix-of-a-mistake-pinned",
        "hashes that somebody gives and that are no prefix are pinned",
        (
            Patch(
                _OPERATIONS,
                "        self._check_known(block_hashes, are_given)\n        self._control.pins.pin",
                "        self._control.pins.pin",
            ),
        ),
        tested(f"{_ODD}::test_a_hint_to_pin_behind_a_hit_meets_nothing_that_an_operator_gave_by_mistake"),
    ),
    Mutant(
        "prefix-of-a-mistake-warmed",
        "hashes that somebody gives and that are no prefix are read from storage",
        (
            Patch(
                _OPERATIONS,
                "        self._check_known(block_hashes, are_given)\n        return self._companions.warm",
                "        return self._companions.warm",
            ),
        ),
        tested(f"{_ODD}::test_what_no_request_has_shown_as_a_prefix_is_refused_and_nothing_is_changed"),
    ),
    Mutant(
        "pinned-though-private",
        "what an operator has pinned is saved before its reuse of a request that is not to be cached",
        (Patch(_PINS, "Terms(tenant, is_barred=True)", "Terms(tenant)"),),
        tested(f"{_TIMES}::test_a_pin_saves_nothing_of_who_is_not_to_be_cached"),
    ),
    Mutant(
        "window-as-old-as-before",
        "blocks of a window that are saved anew are the first to go",
        (Patch(_PLANNER, "            self._tree.touch(nodes, now)\n", ""),),
        tested(f"{_TIMES}::test_a_window_that_is_saved_anew_is_not_the_first_to_go"),
    ),
    Mutant(
        "window-as-the-first-said",
        "of two requests that compute a window at a time, the first to end says how long it lives",
        (Patch(_EXPIRY, "            self._last |= dict.fromkeys(nodes, self._num_added)\n", ""),),
        tested(f"{_TIMES}::test_a_window_that_two_have_computed_at_a_time_lives_as_long_as_the_last_to_end_says"),
    ),
    Mutant(
        "window-as-young-as-its-request",
        "blocks of a window outlive others on a host that is full for having a time to live",
        (
            Patch(
                _EXPIRY,
                "            self._last |= dict.fromkeys(nodes, self._num_added)\n",
                "            self._last |= dict.fromkeys(nodes, self._num_added)\n"
                "            grouped.tree.touch(nodes, used)\n",
            ),
        ),
        tested(f"{_TIMES}::test_a_window_with_a_time_makes_room_by_when_it_was_computed"),
    ),
    Mutant(
        "pins-of-other-groups",
        "what was given for a prefix where blocks follow nothing is pinned as one where they do",
        (Patch(_BUILD, "hashlib.sha256(kinds.encode()).digest()) if kinds else root", "bytes(32))"),),
        tested(f"{_KEEPING}::test_pins_come_back_where_blocks_follow_one_another_as_before"),
    ),
    Mutant(
        "row-of-another-tenant",
        "what a cleared tenant gives is a block of another's, which goes twice",
        (Patch(_TENANTS, "self._tenant_of[node] == tenant and self._evictable(node)", "self._evictable(node)"),),
        tested(f"{_INDEX}::test_a_row_that_another_tenant_has_now_is_not_what_a_cleared_one_gives"),
    ),
    Mutant(
        "pin-undone-that-had-no-room",
        "what was let go of while there was no room for it is pinned when the host grows",
        (
            Patch(
                _RETURNING,
                "        self._refused = [item for item in self._refused if item[0].name not in names]\n",
                "",
            ),
        ),
        tested(f"{_KEEPING}::test_what_is_let_go_of_while_there_is_no_room_does_not_come_back"),
    ),
    Mutant(
        "pins-without-a-host-wait-busily",
        "an engine whose host has no block is stepped for ever for pins of its last start",
        (Patch(_RETURNING, "        if not self._shared.host.pool.capacity:\n            return False\n", ""),),
        tested(f"{_KEEPING}::test_pins_of_tenants_come_back_as_theirs_and_one_is_cleared_without_the_others"),
    ),
    Mutant(
        "drained-but-for-the-end",
        "a prompt's last blocks, which fill no group, are not drained",
        (Patch(_BACKUPS, ", *self._host.leaves(host_ids))", ",)"),),
        tested(f"{_STORAGE}::test_the_end_of_a_prompt_that_fills_no_group_is_drained"),
    ),
    Mutant(
        "expiries-unbounded",
        "long prompts that are to be dropped in time fill the memory",
        (Patch(_EXPIRY, " or self._num_hashes > _MOST_HASHES", ""),),
        tested(f"{_HINTS}::test_prompts_that_are_to_be_dropped_in_time_are_remembered_up_to_a_bound"),
    ),
    Mutant(
        "drained-in-its-place",
        "what has a time to live, and took the place of what was to be drained, goes to storage",
        (Patch(_BACKUPS, " and self._grouping.whole((end,))", ""),),
        tested(f"{_STORAGE}::test_what_takes_the_place_of_what_was_to_be_drained_is_drained_on_its_own_terms"),
    ),
    Mutant(
        "expired-though-others-had-it",
        "a time to live drops what others had cached before who set none",
        (Patch(_EXPIRY, "if tree.terms.transient[node] and tree.used", "if tree.used"),),
        tested(f"{_HINTS}::test_what_others_had_cached_before_who_set_no_time_stays"),
    ),
    Mutant(
        "terms-of-who-was-first",
        "of what two requests compute at a time the terms of the first one hold",
        (Patch(_PLANNER, "        self.asked(shown_before, terms)\n", ""),),
        tested(f"{_HINTS}::test_what_two_compute_at_a_time_is_on_the_terms_of_both"),
    ),
    Mutant(
        "saved-though-over",
        "what the device has is saved before reuse though its time is over",
        (Patch(_EXPIRY, "            tree.terms.bar(nodes)\n", ""),),
        tested(f"{_HINTS}::test_what_the_device_has_is_not_saved_before_reuse_when_its_time_is_over"),
    ),
    Mutant(
        "saved-though-cleared",
        "what the device has of a tenant that was cleared is saved before reuse",
        (Patch(_CONTROL, "        tree.terms.bar_tenant(tenant)\n", ""),),
        tested(f"{_SHARES}::test_what_a_cleared_tenant_has_on_the_device_is_not_saved_before_reuse"),
    ),
    Mutant(
        "barred-for-ever",
        "what was cleared is not saved before reuse either when a request has asked for it again",
        (Patch(_TERMS, "        column(self.barred)[rows] = 0\n", ""),),
        tested(f"{_SHARES}::test_what_a_cleared_tenant_has_on_the_device_is_not_saved_before_reuse"),
    ),
    Mutant(
        "refused-pin-again-and-again",
        "a pinned block that does not fit is saved with each request for it, until nothing is saved any more",
        (Patch(_REACHABLE, "not self._tree.pins[node] or keys[index] in self._refusals", "not self._tree.pins[node]"),),
        tested(f"{_REFUSALS}::test_a_pinned_block_that_does_not_fit_is_not_tried_again_and_turns_nothing_off"),
    ),
    Mutant(
        "warmed-for-the-default-tenant",
        "what is read ahead of a tenant's takes the default one's room",
        (Patch(_PREFETCHES, "terms_of(tenant)", "terms_of(0)"),),
        tested(f"{_KEEPING}::test_what_is_read_for_a_tenant_is_charged_to_it"),
    ),
    Mutant(
        "read-though-let-go-of",
        "a prefix that was unpinned, or whose tenant was cleared, is read to the host all the same",
        (Patch(_RETURNING, "if pin.name not in self._pins:", "if False:"),),
        tested(f"{_KEEPING}::test_what_was_unpinned_or_cleared_before_it_was_read_is_not_read"),
    ),
    Mutant(
        "last-pins-lost",
        "what changes while the file of pins is written as the engine ends is lost",
        (
            Patch(
                _PIN_KEEPER,
                "            is_last = self._closing.wait(_PAUSE_SECONDS)  # nothing changes any more\n"
                "            self._write_changes()\n",
                "            self._closing.wait(_PAUSE_SECONDS)\n"
                "            self._write_changes()\n"
                "            is_last = self._closing.is_set()\n",
            ),
        ),
        tested(f"{_FILES}::test_what_changes_while_the_file_is_written_for_the_last_time_is_written_too"),
    ),
    Mutant(
        "given-hashes-taken",
        "the endpoint says of an operator's hashes that the engine has named them",
        (
            Patch(_ADMIN_PINS, "ttl_s, tenant, prefix.are_given)", "ttl_s, tenant, False)"),
            Patch(_ACTIONS, "owner, prefix.are_given)", "owner, False)"),
        ),
        tested(f"{_STEERING}::test_hashes_are_taken_once_requests_have_shown_them_as_a_prompts_first_blocks"),
    ),
    Mutant(
        "given-hashes-of-another-place",
        "an operator's hashes are pinned though the first of them is known as one in the middle of a prompt",
        (Patch(_GROUPS, "if node is None or parents[node] != before:", "if node is None:"),),
        tested(f"{_STEERING}::test_hashes_are_taken_once_requests_have_shown_them_as_a_prompts_first_blocks"),
    ),
    Mutant(
        "given-hashes-of-a-window",
        "the name of a window's copy is taken for the hash of a prompt's first block",
        (Patch(_GROUPS, " or any(split_key(block_hash)[1] for block_hash in hashes)", ""),),
        tested("tests/index/test_prefixes.py::test_of_all_lists_those_are_known_that_requests_have_shown"),
    ),
    Mutant(
        "pin-lost-as-it-is-given-again",
        "what is pinned is let go of when its hashes are given again and the tree has forgotten them by then",
        (Patch(_ADMIN_PINS, "prefix = Prefix(pinned.block_hashes, are_given=False)", "pass"),),
        tested("tests/admin/test_pins.py::test_what_is_pinned_stays_so_when_it_is_given_again"),
    ),
    Mutant(
        "pins-of-a-version-without-checks",
        "a file of pins is believed in which there may be what no prompt has shown",
        (Patch(_PIN_FILE, "if magic != _MAGIC:", 'if magic not in (_MAGIC, b"KVCPINS1"):'),),
        tested(f"{_FILES}::test_what_is_not_as_it_was_written_is_no_pin_and_one_line"),
    ),
)
