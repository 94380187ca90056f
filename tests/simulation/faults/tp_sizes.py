"""Faults of KV transfer between engines of different TP sizes: which heads go where, and who waits for whom."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_IDENTITY = "kv_connector/peer/identity.py"
_RECEIVES = "kv_connector/peer/protocol/receives.py"
_OFFERS = "kv_connector/peer/protocol/offers.py"
_LAYOUT = "kv_connector/transfer/memory/layout.py"
_WORLDS = tested("tests/simulation/test_tp_sizes.py::test_kv_transfers_between_tp_sizes_break_no_promise")
_CONTINUED = "tests/simulation/test_tp_sizes.py::test_every_pair_of_sizes_continues_prompts_of_every_model"
_BYTES = "tests/peer/test_tp_sizes.py"

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
)
