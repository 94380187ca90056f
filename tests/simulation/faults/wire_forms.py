"""Faults of blocks that are coded on their way to other engines."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_STAGED = "kv_connector/peer/carriers/staged"
_TESTS = "tests/peer/carriers/staged/test_coded_slots.py"
_CODER = "kv_connector/transfer/paths/coded_slots.py"
_SENDER = f"{_STAGED}/slot_sender.py"

WIRE_FORMS: tuple[Mutant, ...] = (
    Mutant(
        "coded-unasked",
        "slots are coded for who decodes other ones, or none",
        (Patch(f"{_STAGED}/transport.py", ' if coded.form == info.extra.get("coded")]', "]"),),
        tested(f"{_TESTS}::test_slots_are_raw_for_who_tells_of_no_such_form"),
    ),
    Mutant(
        "coded-parts",
        "slots are coded for a rank with other heads than this one's",
        (Patch(f"{_STAGED}/transport.py", "if not is_whole or slot_bytes", "if slot_bytes"),),
        tested("tests/peer/carriers/staged/test_coded_sizes.py"),
    ),
    Mutant(
        "coded-rows-anywhere",
        "coded rows begin where the widest loads cannot",
        (Patch(f"{_STAGED}/transport.py", " or slot_bytes % ROW_ALIGN:", ":"),),
        tested(f"{_TESTS}::test_slots_are_raw_for_who_tells_of_no_such_form"),
    ),
    Mutant(
        "coded-unagreed",
        "what is said to be coded is decoded although that was not agreed on",
        (
            Patch(
                f"{_STAGED}/transport.py",
                "[raw, *agreed]",
                "[raw, *self._coded]",
            ),
        ),
        tested(f"{_TESTS}::test_who_says_that_a_slot_is_coded_where_that_was_not_agreed_on_is_dropped"),
    ),
    Mutant(
        "coded-unfit-sent",
        "blocks that do not fit are sent as if they did",
        (Patch(_SENDER, "            if filling.packed.fits():\n", "            if filling.packed.fits() or True:\n"),),
        tested(f"{_TESTS}::test_whatever_is_sent_arrives_as_it_was"),
    ),
    Mutant(
        "coded-unfit-too-early",
        "whether blocks fit is asked before the device has found out",
        (
            Patch(
                _SENDER,
                "if filling.stage is not _Stage.PACKING or not _is_over(filling.marker):",
                "if filling.stage is not _Stage.PACKING:",
            ),
        ),
        tested(f"{_TESTS}::test_whether_blocks_fit_is_asked_when_the_copy_is_over"),
    ),
    Mutant(
        "coded-unfit-forgotten",
        "a push has ended although blocks of it that did not fit are still to be sent",
        (Patch(_SENDER, ".left += len(parts) - 1", ".left -= 1"),),
        tested(_TESTS),
    ),
    Mutant(
        "coded-unfit-kept",
        "each slot whose blocks did not fit is lost to its link",
        (Patch(_SENDER, "            self._free.append(filling.slot)\n", ""),),
        tested(f"{_TESTS}::test_slots_that_held_what_did_not_fit_are_used_again"),
    ),
    Mutant(
        "coded-in-vain",
        "slots are coded for ever though nothing fits",
        (Patch(f"{_STAGED}/forms.py", "                self.is_worth_it = False\n", ""),),
        tested(f"{_TESTS}::test_where_most_does_not_fit_slots_are_tried_no_more"),
    ),
    Mutant(
        "coded-judged-by-all",
        "what seldom does not fit turns coding off in the end",
        (
            Patch(
                f"{_STAGED}/forms.py",
                "            self._num_judged = self._num_refused = 0\n",
                "            self._num_judged = 0\n",
            ),
        ),
        tested(f"{_TESTS}::test_what_does_not_fit_seldom_keeps_slots_coded"),
    ),
    Mutant(
        "coded-overrun",
        "what lies behind a slot is taken for its last rows",
        (
            Patch(
                f"{_STAGED}/slot_receiver.py",
                "size = form.bytes_of(arrived.regions)",
                "size = 1 if type(filled) is not SlotFilled else form.bytes_of(arrived.regions)",
            ),
        ),
        tested(f"{_TESTS}::test_who_claims_what_is_not_so_of_a_coded_slot_is_dropped"),
    ),
    Mutant(
        "coded-unchecked",
        "bytes that are no coded block are decoded into blocks",
        (Patch(_CODER, "                raise TransferError(", "                print("),),
        tested(f"{_TESTS}::test_who_claims_what_is_not_so_of_a_coded_slot_is_dropped"),
    ),
    Mutant(
        "coded-of-one-layer",
        "a block fits if its last layers do",
        (Patch(_CODER, "all_fit = all_fit and bool(fits.all())", "all_fit = bool(fits.all())"),),
        tested(f"{_TESTS}::test_whatever_is_sent_arrives_as_it_was"),
    ),
    Mutant(
        "coded-as-raw",
        "coded rows are taken for pieces as they are",
        (
            Patch(
                _CODER,
                "            if stretch.is_coded:\n                decoded = ",
                "            if False:\n                decoded = ",
            ),
        ),
        tested("tests/simulation/test_coded_peers.py"),
    ),
    Mutant(
        "coded-unfit-after-cancel",
        "what did not fit is packed again and sent although its push was cancelled meanwhile",
        (Patch(_SENDER, "if self._pushes[filling.chunk.number].is_cancelled:", "if False:"),),
        tested(f"{_TESTS}::test_what_did_not_fit_is_not_packed_again_where_its_push_was_cancelled_meanwhile"),
    ),
    Mutant(
        "coded-changed-behind-the-check",
        "a peer changes what was checked before it is decoded",
        (Patch(_CODER, 'torch.empty_like(there, device="cpu").copy_(there)', "there"),),
        tested(f"{_TESTS}::test_what_a_peer_changes_behind_the_check_is_not_decoded"),
    ),
    Mutant(
        "slots-of-a-second-ring",
        "a peer has as much memory mapped as it likes, ring by ring",
        (Patch(f"{_STAGED}/slot_receiver.py", "        if self.way is not None:\n", "        if False:\n"),),
        tested("tests/peer/carriers/staged/test_slot_halves.py::test_a_second_ring_is_not_mapped"),
    ),
    Mutant(
        "slots-freed-twice",
        "a slot that is freed twice is filled while it is read",
        (Patch(_SENDER, "        if freed.slot not in self._told:\n", "        if False:\n"),),
        tested(
            "tests/peer/carriers/staged/test_slot_halves.py::test_a_slot_is_freed_once_and_only_by_who_was_told_of_it"
        ),
    ),
)
