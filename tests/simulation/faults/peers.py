"""Faults of KV transfer between engines: offers, receives, who may talk."""

from __future__ import annotations

from .mutant import Mutant, Patch, simulated, tested

_OUTGOING = "kv_connector/scheduler/peers/outgoing.py"
_INCOMING = "kv_connector/scheduler/peers/incoming.py"
_COMPANION = "kv_connector/scheduler/peers/companion.py"
_OFFERS = "kv_connector/peer/protocol/offers.py"
_STOPPED = "kv_connector/peer/protocol/stops.py"
_EARLY = "kv_connector/peer/protocol/early.py"
_LEASES = "kv_connector/peer/carriers/leases.py"
_RECEIVES = "kv_connector/peer/protocol/receives.py"
_JOBS = "kv_connector/peer/protocol/jobs.py"
_SESSION = "kv_connector/peer/wire/session.py"
_CHANNEL = "kv_connector/peer/wire/channel.py"
_HALF = "kv_connector/worker/half.py"
_STEP = "kv_connector/worker/peers.py"
_OFFERED = "tests/scheduler/peers/test_outgoing.py"
_ASKED = "tests/scheduler/peers/test_companion.py"
_STOPS = "tests/peer/test_stops.py"
_WANTS = "tests/peer/protocol/test_offers.py"
_RECEIVED = "tests/peer/protocol/test_receives.py"
_HANDSHAKE = "tests/peer/wire/test_handshake.py"
_SEALS = "tests/peer/wire/test_session.py"
_BROKEN = "tests/peer/carriers/staged/test_broken_peers.py"
_SENT = "tests/worker/test_peers.py"

PEERS: tuple[Mutant, ...] = (
    Mutant(
        "reset-before-ranks-know",
        "a reset says that it is done while ranks may still send what was computed before it",
        (
            Patch(
                "kv_connector/scheduler/peers/outgoing.py",
                "        return not self._open\n",
                "        return True\n",
            ),
        ),
        tested("tests/scheduler/peers/test_outgoing.py::test_a_reset_withdraws_what_is_offered_and_what_would_be"),
    ),
    Mutant(
        "preempted-offers",
        "what is offered of a preempted request keeps its blocks",
        (
            Patch(
                _COMPANION,
                'wait for one another."""\n        self._outgoing.suspend(request_id)\n',
                'wait for one another."""\n',
            ),
        ),
        tested(_OFFERED),
    ),
    Mutant(
        "sends-trusted",
        "what was computed behind a failed load is offered",
        (Patch("kv_connector/types.py", "return self.action is PeerAction.SEND", "return False"),),
        tested(_OFFERED),
    ),
    Mutant(
        "failed-send-offered",
        "where a part could not be offered, the rest is",
        (
            Patch(
                _OUTGOING,
                "        if not ended.ok:\n            self._withdraw(transfer)\n        elif",
                "        if",
            ),
        ),
        tested(_OFFERED),
    ),
    Mutant(
        "withdrawn-sends",
        "a request whose prompt is not offered any more goes on offering",
        (
            Patch(
                _OUTGOING,
                "        self._sending = {request_id: other for request_id, other in self._sending.items() "
                "if other is not transfer}\n",
                "",
            ),
        ),
        tested(_OFFERED),
    ),
    Mutant(
        "stale-offered",
        "what was computed before a reset is offered behind it",
        (Patch(_COMPANION, "        if not admission.is_stale:\n", "        if True:\n"),),
        tested(_OFFERED),
    ),
    Mutant(
        "sent-remembered",
        "a transfer that is done stays known until its deadline",
        (
            Patch(
                _OUTGOING,
                "        elif transfer.deadline is not None and not transfer.jobs:\n"
                "            del self._transfers[job.transfer_id]\n",
                "",
            ),
        ),
        tested(_OFFERED),
    ),
    Mutant(
        "never-overdue",
        "what nobody asks for is held for ever",
        (Patch(_OUTGOING, "t.deadline is not None and t.deadline <= now", "False"),),
        tested(f"{_ASKED}::test_a_hand_over_that_nobody_asks_for_is_let_go_at_the_deadline"),
    ),
    Mutant(
        "nones-fill-up",
        "where many KV transfers were not wanted, the next one that is not is held to the deadline",
        (
            Patch(
                _EARLY,
                "        while len(nones) >= MOST_EARLY_NONES:\n            del nones[next(iter(nones))]\n",
                "        if len(nones) >= MOST_EARLY_NONES:\n            return\n",
            ),
        ),
        tested(
            "tests/peer/protocol/test_jobs.py"
            "::test_a_prompt_that_nobody_wants_is_let_go_however_many_others_were_not_wanted"
        ),
    ),
    Mutant(
        "nones-for-ever",
        "what was not wanted before it was offered is remembered as long as the link lives",
        (Patch(_EARLY, "nones and next(iter(nones.values())).deadline <= now:", "False:"),),
        simulated(20),
    ),
    Mutant(
        "withdrawn-awaited",
        "who has asked before anything was offered is not told that nothing will be",
        (
            Patch(
                _OFFERS,
                "            self._refuse(want, NOT_HELD)\n\n    # What",
                "            pass\n\n    # What",
            ),
        ),
        tested(f"{_WANTS}::test_what_will_not_be_offered_is_refused_whenever_it_is_asked_for"),
    ),
    Mutant(
        "withdrawn-unknown",
        "who asks for what was withdrawn waits for it until its deadline",
        (Patch(_EARLY, "if key[0] in self._withdrawn:", "if False:"),),
        tested(f"{_WANTS}::test_what_will_not_be_offered_is_refused_whenever_it_is_asked_for"),
    ),
    Mutant(
        "withdrawn-for-ever",
        "the id of a KV transfer that was withdrawn is refused for as long as the engine lives",
        (Patch(_EARLY, "next(iter(self._withdrawn.values())) <= now:", "False:"),),
        tested(f"{_WANTS}::test_the_id_of_what_was_withdrawn_may_come_again"),
    ),
    Mutant(
        "preempted-for-good",
        "whoever waits for a request that is preempted is refused, though it is offered anew",
        (Patch(_COMPANION, "self._outgoing.suspend(request_id)", "self._outgoing.withdraw(request_id)"),),
        tested(f"{_OFFERED}::test_a_preempted_prompt_is_offered_anew_with_its_names"),
    ),
    Mutant(
        "never-admitted-awaited",
        "nobody is told that a request has ended without having been admitted, or admitted again",
        (Patch(_OUTGOING, "            if transfer_id:\n", "            if False:\n"),),
        tested(f"{_OFFERED}::test_of_a_request_that_ends_before_it_is_admitted_nobody_waits_for_anything"),
    ),
    Mutant(
        "none-of-nothing",
        "another engine is told that nothing is wanted of a prompt of which it has nothing",
        (
            Patch(
                _INCOMING,
                "            if blocks:\n                self._asking",
                "            if True:\n                self._asking",
            ),
        ),
        tested("tests/scheduler/peers/test_incoming.py"),
    ),
    Mutant(
        "asked-stays-pinned",
        "blocks that were to be asked for stay pinned where their request is gone",
        (
            Patch(
                _INCOMING,
                "                self._shared.pool.free_blocks(asking.device_ids)\n                asking",
                "                asking",
            ),
        ),
        tested("tests/scheduler/peers/test_incoming.py"),
    ),
    Mutant(
        "asked-for-nobody",
        "blocks are asked for that their request has lost",
        (
            Patch(
                _INCOMING,
                "                asking.device_ids, asking.request_id = [], None\n",
                "                pass\n",
            ),
        ),
        tested("tests/scheduler/peers/test_incoming.py"),
    ),
    Mutant(
        "received-for-nobody",
        "what is received for a request that has lost its blocks is not called off",
        (
            Patch(
                _INCOMING,
                "self._cancelled += self._receiving.pop(request_id, ())",
                "self._receiving.pop(request_id, ())",
            ),
        ),
        tested("tests/scheduler/peers/test_incoming.py"),
    ),
    Mutant(
        "foreign-ids",
        "block ids that a peer names need not be of its pool",
        (
            Patch(
                _OFFERS, "check_ids(message.blocks, self._peers[link].num_blocks)", "check_ids(message.blocks, 1 << 40)"
            ),
        ),
        tested(f"{_STOPS}::test_who_wants_blocks_outside_of_its_pool_is_dropped"),
    ),
    Mutant(
        "other-prompts",
        "blocks of another prompt are given",
        (Patch(_OFFERS, "elif offer.names[want.stop - 1 - offer.first] != want.name:", "elif False:"),),
        tested(f"{_ASKED}::test_blocks_of_another_prompt_are_refused"),
    ),
    Mutant(
        "stopped-too-early",
        "a producer says that it has stopped while its copies still write",
        (
            Patch(
                _STOPPED,
                "for stop in [stop for stop in self._stops if not stop.pushes]:",
                "for stop in list(self._stops):",
            ),
        ),
        tested(_STOPS),
    ),
    Mutant(
        "stop-not-awaited",
        "blocks are given back while the producer's own copies may still write to them",
        (
            Patch(
                _RECEIVES,
                "if part.phase is _Phase.ASKED and self._transport.is_one_sided:",
                "if False:",
            ),
        ),
        tested(_STOPS),
    ),
    Mutant(
        "lost-link-trusted",
        "blocks are given back at once where a producer that writes into them cannot be reached",
        (
            Patch(
                _RECEIVES,
                "if part.phase is _Phase.CONNECTING or not self._transport.quiet_in(link):",
                "if True:",
            ),
        ),
        tested("tests/simulation/test_network.py"),
    ),
    Mutant(
        "leaseless",
        "a producer writes into another's blocks whatever it has heard of it",
        (
            Patch(
                "kv_connector/peer/carriers/one_sided.py",
                "self._waiting[link], partial(self._leases.may_write, link)",
                "self._waiting[link], lambda: True",
            ),
        ),
        tested("tests/peer/carriers/test_nixl.py"),
    ),
    Mutant(
        "lease-before-the-write-is-made",
        "a write is posted although its lease has ended while it was made",
        (Patch("kv_connector/peer/carriers/nixl.py", "            if not may_write():\n", "            if False:\n"),),
        tested("tests/peer/carriers/test_nixl.py"),
    ),
    Mutant(
        "lease-before-the-copies",
        "copy engines are given a write although its lease has ended while it was made",
        (
            Patch(
                "kv_connector/transfer/paths/peer_writes.py",
                "if is_written := may_write():",
                "if is_written := True:",
            ),
        ),
        tested("tests/transfer/paths/test_peer_writes.py"),
    ),
    Mutant(
        "lease-before-the-kernel",
        "a kernel writes although the lease has ended while its ids were uploaded",
        (
            Patch(
                "kv_connector/transfer/paths/peer_writes.py",
                "            if not may_write():\n",
                "            if False:\n",
            ),
        ),
        tested("tests/transfer/paths/test_peer_writes.py"),
    ),
    Mutant(
        "unposted-forgotten",
        "a write whose lease has ended while it was made is never made again",
        (
            Patch(
                "kv_connector/peer/carriers/one_sided.py",
                "                waiting.appendleft(push)\n",
                "                pass\n",
            ),
        ),
        tested("tests/peer/carriers/test_cuda_ipc.py"),
    ),
    Mutant(
        "lease-from-its-answer",
        "a lease is counted from when its answer was read",
        (
            Patch(
                _LEASES,
                "entry.until, entry.is_answered = entry.asked_at",
                "entry.until, entry.is_answered = self._clock()",
            ),
        ),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "lease-of-another-question",
        "an answer that is late is taken for that to a later question",
        (Patch(_LEASES, "if entry.number == message.number:", "if True:"),),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "fence-without-transfers",
        "what was posted within a lease is not waited for",
        (Patch(_LEASES, "self.turn() + LEASE_SECONDS + self._longest", "self.turn() + LEASE_SECONDS"),),
        tested("tests/simulation/test_network.py"),
    ),
    Mutant(
        "gone-at-once",
        "what a process that has ended had on its way is not waited for",
        (Patch(_LEASES, "ran + GONE_SECONDS", "ran"),),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "fence-of-who-stood-still",
        "a fence goes on while its owner stands still, and what is posted to it waits",
        (Patch(_LEASES, "self._ran += min(passed, STILL_SECONDS)", "self._ran += passed"),),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "fence-goes-on",
        "what waited for an owner that stood still has no longer to land than before",
        (Patch(_LEASES, "if passed > STILL_SECONDS:", "if False:"),),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "fence-for-ever",
        "the fence of an owner that is held up once in every transfer never ends",
        (
            Patch(
                _LEASES,
                "min(max(entry.quiet_at, self._ran + self._longest), entry.latest)",
                "max(entry.quiet_at, self._ran + self._longest)",
            ),
        ),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "gone-for-ever",
        "what a process that has ended had on its way is waited for anew whenever this side is held up",
        (Patch(_LEASES, "            entry.latest = min(entry.latest,", "            min(entry.latest,"),),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "fence-begins-again",
        "a fence that was over is closed again where its owner stands still",
        (Patch(_LEASES, "if entry.quiet_at > before:", "if True:"),),
        tested("tests/peer/carriers/test_leases.py"),
    ),
    Mutant(
        "turns-untold",
        "an owner that has nothing to do is taken for one that stands still, and its fence does not end",
        (
            Patch(
                "kv_connector/peer/carriers/over_channel.py",
                "        self._leases.turn()\n        if self._is_busy():",
                "        if self._is_busy():",
            ),
        ),
        tested("tests/simulation/test_network.py"),
    ),
    Mutant(
        "gone-unproved",
        "a PID that was told is taken for this machine's",
        (Patch("kv_connector/peer/carriers/processes.py", "        if here == told:", "        if True:"),),
        tested("tests/peer/carriers/test_processes.py"),
    ),
    Mutant(
        "failed-write-over",
        "a producer says that it has stopped although parts of a write that failed may land yet",
        (
            Patch(
                "kv_connector/peer/carriers/nixl.py", '            if state != "DONE":  #', "            if False:  #"
            ),
        ),
        tested("tests/peer/carriers/test_nixl.py"),
    ),
    Mutant(
        "writes-unlimited",
        "a consumer that is paused holds a producer's blocks for as long as it is",
        (
            Patch(
                "kv_connector/peer/carriers/nixl.py",
                "_Writing(link, push, handle, self._clock.monotonic() + self.longest_transfer_seconds)",
                '_Writing(link, push, handle, float("inf"))',
            ),
        ),
        tested("tests/simulation/test_network.py"),
    ),
    Mutant(
        "rings-at-once",
        "slots that a peer may write to yet are given to another link",
        (
            Patch(
                "kv_connector/peer/carriers/staged/nixl.py",
                "(num_slots, slot_bytes) and is_quiet():",
                "(num_slots, slot_bytes):",
            ),
        ),
        tested("tests/peer/carriers/staged/test_registered_rings.py"),
    ),
    Mutant(
        "rings-unmapped",
        "slots go with their link although a peer may write to them yet",
        (Patch("kv_connector/peer/carriers/staged/nixl.py", "        self._rings.append(memory)\n", ""),),
        tested("tests/peer/carriers/staged/test_registered_rings.py"),
    ),
    Mutant(
        "keys-alike",
        "caller and listener seal with the same key, so that what one has said can be sent back to it",
        (Patch(_SESSION, '_expand(extracted, b"listener")', '_expand(extracted, b"caller")'),),
        tested(_HANDSHAKE),
    ),
    Mutant(
        "seals-unchecked",
        "whoever carries messages can change them",
        (
            Patch(
                _SESSION,
                "if not hmac.compare_digest(_seal(self._theirs, self._num_opened, message), seal):",
                "if not seal:",
            ),
        ),
        tested("tests/peer/wire/test_fuzz.py::test_nothing_that_anybody_sends_does_harm[relay]"),
    ),
    Mutant(
        "seals-unnumbered",
        "whoever carries messages can leave some out, repeat or swap them",
        (Patch(_SESSION, "_NUMBER.pack(number) + message", "message"),),
        tested(_SEALS),
    ),
    Mutant(
        "nonces-forgotten",
        "what was said over one link can be said again over another",
        (Patch(_SESSION, "hmac.digest(caller_nonce + listener_nonce, secret", 'hmac.digest(b"salt", secret'),),
        tested(_HANDSHAKE),
    ),
    Mutant(
        "nothing-by-anybody",
        "who guesses the id of a KV transfer ends it",
        (
            Patch(
                _OFFERS,
                "if message.name in offer.names:",
                "if True:",
            ),
        ),
        tested("tests/peer/protocol/test_offers.py::test_who_does_not_know_a_prompt_cannot_say_that_nobody_wants_it"),
    ),
    Mutant(
        "early-wants-unbounded",
        "what is wanted of KV transfers that nobody has begun takes any memory",
        (Patch(_EARLY, "num_blocks + len(wanted.block_ids) > MOST_EARLY_BLOCKS", "False"),),
        tested("tests/peer/protocol/test_offers.py::test_what_is_wanted_early_takes_a_bounded_memory"),
    ),
    Mutant(
        "pushed-before-read",
        "blocks are pushed to who has said stop, as nobody has read it yet",
        (
            Patch(
                _JOBS,
                "        for event in events:\n",
                "        self._pass_markers()\n        for event in events:\n",
            ),
        ),
        tested("tests/peer/protocol/test_jobs.py::test_what_peers_have_said_is_heard_before_anything_is_pushed"),
    ),
    Mutant(
        "unmet-heard",
        "what a peer says whose info was refused is taken for what a peer says",
        (Patch("kv_connector/peer/carriers/over_channel.py", "if event.link in self._met:", "if True:"),),
        tested(f"{_HANDSHAKE}::test_what_a_peer_says_behind_an_introduction_that_is_refused_is_nobodys"),
    ),
    Mutant(
        "halves-of-characters",
        "text that cannot be written in UTF-8 is taken",
        (Patch("kv_connector/peer/wire/fields.py", " <= character <= ", " > character > "),),
        tested("tests/peer/wire/test_messages.py"),
    ),
    Mutant(
        "broken-unsaid",
        "that the peer thread has broken stays in the worker half",
        (Patch(_HALF, "self._peers is not None and self._peers.is_broken", "False"),),
        tested(f"{_SENT}::test_a_peer_thread_that_has_broken_is_in_the_next_report"),
    ),
    Mutant(
        "broken-promises",
        "blocks of other engines are promised although the peer thread has broken",
        (Patch(_COMPANION, "        if report.peers_are_broken:\n", "        if False:\n"),),
        tested(
            "tests/scheduler/peers/test_incoming.py::test_where_a_rank_cannot_reach_others_any_more_nothing_is_promised"
        ),
    ),
    Mutant(
        "strangers-first",
        "strangers who say nothing throw out a handshake that this engine has begun",
        (Patch(_CHANNEL, "if not c.is_open and c.handshake.is_caller is is_caller]", "if not c.is_open]"),),
        tested("tests/peer/wire/test_channel.py::test_strangers_throw_out_no_handshake_that_this_side_has_begun"),
    ),
    Mutant(
        "other-users",
        "any user of the machine may send memory",
        (Patch("kv_connector/peer/carriers/staged/ring.py", "if _uid_of(sock) != self._uid:", "if False:"),),
        tested("tests/peer/carriers/staged/test_ring.py"),
    ),
    Mutant(
        "layers-trusted",
        "layers that a step computes on a failed load are sent",
        (
            Patch(
                "kv_connector/worker/half.py",
                "if self._peers is not None and not self._is_distrusted:",
                "if self._peers is not None:",
            ),
        ),
        tested(_SENT),
    ),
    Mutant(
        "awaited-sends-trusted",
        "what a step computes is sent before the loads that it awaited have ended",
        (Patch(_STEP, "        elif self._awaited:\n", "        elif False:\n"),),
        tested(_SENT),
    ),
    Mutant(
        "awaited-layers-trusted",
        "layers are sent before the loads have ended that their step awaited",
        (
            Patch(
                _STEP,
                "self._is_layerwise = bool(self._sends) and not self._awaited",
                "self._is_layerwise = bool(self._sends)",
            ),
        ),
        tested(_SENT),
    ),
    Mutant(
        "failed-awaited-forgotten",
        "what a step computed is sent although a load that it awaited has failed",
        (Patch(_STEP, "            if self._failed_loads & entry.load_ids:\n", "            if False:\n"),),
        tested(_SENT),
    ),
    Mutant(
        "peers-captured",
        "what the peer thread calls spoils a graph that is captured at the time",
        (
            Patch(
                "kv_connector/peer/protocol/jobs.py",
                "            if self._prepare_thread is not None:\n",
                "            if False:\n",
            ),
        ),
        tested("tests/peer/protocol/test_jobs.py::test_the_thread_opts_out_of_captures_before_it_calls_anything"),
    ),
    Mutant(
        "failed-write-unmapped",
        "a pool is unmapped under a write that has failed halfway",
        (
            Patch(
                "kv_connector/peer/carriers/cuda_ipc.py",
                '            self.drop(link, f"a copy to it failed: {error}")\n        try:',
                '            self.drop(link, f"a copy to it failed: {error}")\n'
                "            self._events.append(Pushed(push.number, False))\n            return\n        try:",
            ),
        ),
        tested("tests/peer/carriers/test_cuda_ipc.py"),
    ),
    Mutant(
        "layers-of-the-step-before",
        "layers of a prompt's second part are sent when the first part's are computed",
        (Patch(_STEP, "        self._saved.clear()\n        self._num_saved = 0\n", ""),),
        tested(f"{_SENT}::test_of_each_part_of_a_prompt_no_layer_leaves_before_it_is_computed"),
    ),
    Mutant(
        "received-over-a-reset",
        "what was computed before a reset goes on arriving behind it",
        (Patch(_INCOMING, "        self._cancelled += chain.from_iterable(self._receiving.values())\n", ""),),
        tested("tests/scheduler/peers/test_incoming.py::test_what_is_on_its_way_at_a_reset_is_called_off"),
    ),
    Mutant(
        "silent-producer-trusted",
        "blocks are given back though the producer has not said that it stopped, and its link is open",
        (
            Patch(
                _RECEIVES,
                "if part.phase is _Phase.STOPPING and part.link not in self._peers:",
                "if part.phase is _Phase.STOPPING:",
            ),
        ),
        tested(f"{_RECEIVED}::test_who_does_not_stop_loses_its_link_before_the_blocks_are_given_back"),
    ),
    Mutant(
        "arrived-while-stopping",
        "a transfer that was told to stop has ended when all of it came, though more may be written",
        (Patch(_RECEIVES, "or part.phase is not _Phase.ASKED:", "or False:"),),
        tested(f"{_RECEIVED}::test_what_was_told_to_stop_has_not_ended_though_all_of_it_came"),
    ),
    Mutant(
        "arrived-from-anybody",
        "what another peer says has arrived ends a transfer",
        (
            Patch(
                _RECEIVES,
                "part = self._part_of(event.grant, event.link)",
                "part = next((part for part in self._parts() if part.job.job_id == event.grant), None)",
            ),
        ),
        tested(f"{_RECEIVED}::test_what_comes_over_another_link_does_not_count"),
    ),
    Mutant(
        "arrived-too-far",
        "more blocks than were granted count as all of them",
        (Patch(_RECEIVES, "if stop > part.job.num_blocks or regions.stop > self._num_regions:", "if False:"),),
        tested(f"{_RECEIVED}::test_who_claims_more_blocks_than_were_granted_is_dropped"),
    ),
    Mutant(
        "next-offer-ended",
        "what ends of an earlier offer ends the next one of its name",
        (Patch(_OFFERS, " and self._offers.get(offer.key) is offer:", ":"),),
        tested(
            "tests/peer/protocol/test_offers.py::test_what_ends_of_an_earlier_offer_leaves_the_next_one_of_its_name"
        ),
    ),
    Mutant(
        "stopped-by-anybody",
        "blocks are given back, or not waited for, on the word of a peer that was not asked for them",
        (
            Patch(
                _RECEIVES,
                "part = self._part_of(message.grant, link)",
                "part = next((part for part in self._parts() if part.job.job_id == message.grant), None)",
            ),
        ),
        tested(
            f"{_RECEIVED}::test_another_peer_cannot_say_that_the_producer_has_stopped",
            f"{_RECEIVED}::test_another_peer_cannot_refuse_what_the_producer_sends",
        ),
    ),
    Mutant(
        "deadline-of-the-whole",
        "a transfer that takes long is given up although its blocks keep arriving",
        (
            Patch(
                _RECEIVES,
                "        part.deadline = self._clock() + self._seconds\n        if not part.missing",
                "        if not part.missing",
            ),
        ),
        tested(f"{_RECEIVED}::test_a_transfer_that_goes_on_is_not_given_up_however_long_it_takes"),
    ),
    Mutant(
        "unwanted-promised",
        "who asks for what another did not want is promised blocks that are let go, and waits for nothing",
        (Patch(_OFFERS, "in self.wants or asker.place in self.unwanted", "in self.wants"),),
        tested("tests/peer/protocol/test_offers.py::test_who_asks_for_what_another_did_not_want_is_told_at_once"),
    ),
    Mutant(
        "gone-promised",
        "blocks that were promised to an engine that is gone are held for it",
        (Patch(_OFFERS, "if not event.ok and offer.wants.get(want.asker.place) is want:", "if False:"),),
        tested("tests/peer/protocol/test_offers.py::test_what_was_promised_to_who_is_gone_is_let_go"),
    ),
    Mutant(
        "names-counted-for-ever",
        "after a few names no other is looked up any more",
        (Patch("kv_connector/peer/wire/resolver.py", "        self._under_way.release()\n", ""),),
        tested("tests/peer/wire/test_channel.py::test_any_number_of_names_is_looked_up_one_behind_the_other"),
    ),
    Mutant(
        "callers-trust",
        "who calls takes blocks of another model",
        (
            Patch(
                "kv_connector/peer/wire/handshake.py",
                "        if differences:\n",
                "        if differences and not self.is_caller:\n",
            ),
        ),
        tested(f"{_HANDSHAKE}::test_a_caller_refuses_a_listener_of_another_model"),
    ),
    Mutant(
        "errors-end-the-thread",
        "an error of this side that a peer has found ends the thread that serves all of them",
        (
            Patch(
                _CHANNEL,
                "        except Exception:  # whatever it is that a peer has found: it costs this link\n",
                "        except ArithmeticError:\n",
            ),
        ),
        tested("tests/peer/wire/test_channel.py::test_an_error_of_this_side_costs_the_link_that_met_it"),
    ),
    Mutant(
        "slots-overrun",
        "what lies behind a slot is taken for its last blocks",
        (
            Patch(
                "kv_connector/peer/carriers/staged/slot_receiver.py",
                "if arrived.count * size > ring.slot_bytes:",
                "if False:",
            ),
        ),
        tested(f"{_BROKEN}::test_a_peer_that_claims_more_blocks_than_fit_into_a_slot_is_dropped"),
    ),
)
