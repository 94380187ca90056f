"""Faults of KV transfer between engines of different TP sizes: which heads go where, and who waits for whom."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_IDENTITY = "kv_connector/peer/identity.py"
_RECEIVES = "kv_connector/peer/protocol/receives.py"
_OFFERS = "kv_connector/peer/protocol/offers.py"
_EARLY = "kv_connector/peer/protocol/early.py"
_LAYOUT = "kv_connector/transfer/memory/layout.py"
_WORLDS = tested("tests/simulation/test_tp_sizes.py::test_kv_transfers_between_tp_sizes_break_no_promise")
_CONTINUED = "tests/simulation/test_tp_sizes.py::test_every_pair_of_sizes_continues_prompts_of_every_model"
_BYTES = "tests/peer/test_tp_sizes.py"
_CHANNEL = "kv_connector/peer/wire/channel.py"
_SILENT = "tests/peer/wire/test_bounds.py::test_those_who_never_answer_take_a_bounded_number_of_descriptors"

TP_SIZES: tuple[Mutant, ...] = (
    Mutant(
        "shares-swapped",
        "of the ranks that share a piece the first gets the heads of the last",
        (
            Patch(
                _IDENTITY,
                "        return range(first, first + theirs)\n",
                "        return range(ours - theirs - first, ours - first)\n",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "one-producer-awaited",
        "of several ranks that hold a part of a piece each, one is asked and waited for",
        (Patch(_RECEIVES, "        for rank in ranks:\n", "        for rank in ranks[:1]:\n"),),
        _WORLDS,
    ),
    Mutant(
        "first-asker-served",
        "blocks are let go of when the first of the ranks that share them has its heads",
        (Patch(_OFFERS, "if num_done == offer.num_askers > 0 and", "if num_done > 0 and"),),
        tested(f"{_BYTES}::test_blocks_are_held_until_every_rank_has_its_heads"),
    ),
    Mutant(
        "part-of-a-block-trusted",
        "a receive of which one part has failed is taken to be whole",
        (Patch(_RECEIVES, "        receiving.ok = False\n", ""),),
        tested(f"{_BYTES}::test_where_one_producer_is_gone_the_blocks_are_computed"),
    ),
    Mutant(
        "any-rank-will-do",
        "whoever listens at a rank's port is taken to be that rank",
        (Patch(_RECEIVES, "if self._peers[part.link] != part.shard:", "if False:"),),
        tested(f"{_BYTES}::test_ranks_that_are_told_in_another_order_or_number_give_nothing"),
    ),
    Mutant(
        "copies-asked-for",
        "every rank that holds the same bytes is asked for them",
        (Patch(_IDENTITY, "        nums_heads = {heads", "        return True\n        nums_heads = {heads"),),
        tested(f"{_BYTES}::test_of_ranks_that_hold_the_same_one_is_asked"),
    ),
    Mutant(
        "half-asked-for",
        "where the first region's heads are held by a rank in front, no other region of a rank is asked for",
        (Patch(_IDENTITY, "for heads in self.heads}", "for heads in self.heads[:1]}"),),
        tested(f"{_BYTES}::test_each_rank_gets_its_heads"),
    ),
    Mutant(
        "order-of-heads-trusted",
        "heads in rows of tokens are taken for tokens in rows of heads",
        (
            Patch(
                _IDENTITY,
                "few == 1 or small.head_bytes[region] == large.head_bytes[region]",
                "True",
            ),
        ),
        tested(f"{_BYTES}::test_who_cannot_be_served_is_told_why"),
    ),
    Mutant(
        "heads-resliced-directly",
        "whole pieces are written into a pool whose pieces have other heads",
        (Patch("kv_connector/peer/carriers/one_sided.py", "if here.pieces != there.pieces:", "if False:"),),
        tested("tests/simulation/test_tp_sizes.py::test_what_writes_from_pool_to_pool_divides_no_heads"),
    ),
    Mutant(
        "tp-size-in-names",
        "what engines call a block to each other depends on their TP size",
        (Patch("kv_connector/scheduler/companions.py", "identity.undivided() if identity", "identity if identity"),),
        tested(_CONTINUED),
    ),
    Mutant(
        "overlaid-heads-trusted",
        "where layers of other heads lie over each other, one of them says how heads lie",
        (Patch(_LAYOUT, "if num_pieces[region] == 1 else (0, 0)", "if True else (0, 0)"),),
        tested("tests/transfer/memory/test_heads.py"),
    ),
    Mutant(
        "undeclared-heads-trusted",
        "bytes that another layer has, too, which does not say how its heads lie, are divided",
        (Patch(_LAYOUT, "        elif entry.head_dim != given:\n", "        elif False:\n"),),
        tested("tests/transfer/memory/test_heads.py"),
    ),
    Mutant(
        "overlaid-order-forgotten",
        "where layers lie over each other nothing says in which order their heads lie",
        (Patch(_LAYOUT, "part.undivided if is_known else part.arrangement", "part.undivided"),),
        tested("tests/transfer/memory/test_heads.py"),
    ),
    Mutant(
        "any-dimension-counts-heads",
        "a dimension that there is not, or that counts blocks, is said to count heads",
        (
            Patch(
                "kv_connector/transfer/memory/geometry.py",
                "if not -len(shape) <= given < len(shape) or given % len(shape) == dim:",
                "if False:",
            ),
        ),
        tested("tests/transfer/memory/test_heads.py"),
    ),
    Mutant(
        "sizes-of-heads-trusted",
        "pieces of any size are divided by heads",
        (Patch(_IDENTITY, " and same_bytes and same_order", " and same_order"),),
        tested(f"{_BYTES}::test_who_cannot_be_served_is_told_why"),
    ),
    Mutant(
        "two-sizes-promised",
        "engines of two TP sizes are both promised one prompt, and neither has it whole",
        (Patch(_OFFERS, "is_other = self.num_askers not in (0, asker.count)", "is_other = False"),),
        tested(f"{_BYTES}::test_heads_that_an_engine_of_another_size_has_asked_for_are_refused_to_the_next"),
    ),
    Mutant(
        "two-sizes-promised-early",
        "the same before anything is offered",
        (Patch(_EARLY, "if key in wants or counts - {count}:", "if key in wants:"),),
        tested(f"{_BYTES}::test_of_engines_of_two_sizes_that_ask_early_the_first_is_served"),
    ),
    Mutant(
        "asked-for-after-it-failed",
        "of a receive that has failed other ranks are asked for their parts, which come to blocks of other requests",
        (Patch(_RECEIVES, "            return  # another one has failed\n", "            pass\n"),),
        tested(f"{_BYTES}::test_where_one_rank_is_a_wrong_one_no_other_is_asked"),
    ),
    Mutant(
        "nones-of-one-rank",
        "of several ranks that want nothing before it is offered the last one is remembered",
        (Patch(_EARLY, "nones, where = self._nones[asker.place],", "nones, where = self._nones[0],"),),
        tested(f"{_BYTES}::test_as_many_kv_transfers_may_be_unwanted_before_they_begin_whatever_the_sizes"),
    ),
    Mutant(
        "wants-counted-together",
        "the more ranks another engine has, the fewer prompts of it may be asked for early",
        (Patch(_EARLY, "if len(wants) >= MOST_EARLY_WANTS", "if sum(map(len, self._wants.values())) >= 1024"),),
        tested(f"{_BYTES}::test_as_many_kv_transfers_may_be_wanted_before_they_begin_whatever_the_sizes"),
    ),
    Mutant(
        "shorter-prompts-held",
        "ranks that are not asked hold their blocks where less is wanted than they offer",
        (Patch(_OFFERS, "if message.name in offer.names:", "if message.name == offer.names[-1]:"),),
        tested(f"{_BYTES}::test_who_wants_less_than_is_offered_holds_nothing_else"),
    ),
    Mutant(
        "shorter-prompts-held-early",
        "the same where they were told before they had offered",
        (Patch(_EARLY, "found, known = [], set(names)", "found, known = [], {[*names][-1]}"),),
        tested(f"{_BYTES}::test_who_wants_less_than_is_offered_holds_nothing_else"),
    ),
    Mutant(
        "any-number-of-ranks",
        "a request that names many ranks has a link made to each of them",
        (Patch("kv_connector/peer/shards.py", " or large // small > MOST_PARTNERS", ""),),
        tested(f"{_BYTES}::test_a_request_that_names_many_ranks_costs_a_computation"),
    ),
    Mutant(
        "calls-without-end",
        "hosts that never answer take every descriptor of the process",
        (Patch(_CHANNEL, "        self._make_room(MOST_CALLS, is_caller=True)\n", ""),),
        tested(_SILENT),
    ),
    Mutant(
        "calls-of-the-silent",
        "where many hosts never answer no other one is reached until these are given up",
        (
            Patch(
                _CHANNEL,
                "        if len(waiting) >= most:\n            self._lose(",
                "        if is_caller and len(waiting) >= most:\n            raise PeerError('cannot be reached')\n"
                "        if len(waiting) >= most:\n            self._lose(",
            ),
        ),
        tested(_SILENT),
    ),
    Mutant(
        "stages-forgotten",
        "who passes on vLLM's TP size alone names the ranks of one stage",
        (Patch("kv_connector/scheduler/peers/params.py", "first + size * num_stages", "first + size"),),
        tested("tests/scheduler/peers/test_params.py"),
    ),
    Mutant(
        "stages-counted",
        "an engine says as its TP size how many ranks it has",
        (Patch("kv_connector/scheduler/peers/outgoing.py", '"tp_size": tp_size,', '"tp_size": len(ports),'),),
        tested("tests/scheduler/peers/test_companion.py::test_a_pipeline_says_its_tp_size_and_where_each_rank_is"),
    ),
    Mutant(
        "dummies-alike",
        "dummy weights are the same for any TP size, though each rank draws its own",
        (
            Patch(
                "kv_connector/engines/vllm/identity.py",
                'ranks = "" if load_format in _FROM_FILES - _BY_RANK else f", of TP size {tp_size}"',
                'ranks = ""',
            ),
        ),
        tested(
            "integration/tests/test_vllm_identity.py"
            "::test_weights_that_depend_on_how_ranks_divide_them_are_others_for_another_tp_size"
        ),
        ".venv-vllm-0.32.0",
    ),
)
