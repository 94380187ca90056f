"""Faults of blocks that do not fit into the form of a host block."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_BEFORE_REUSE = "kv_connector/scheduler/saves/before_reuse.py"
_JOBS = "kv_connector/scheduler/saves/jobs.py"
_PLANNER = "kv_connector/scheduler/saves/planner.py"
_REACHABLE = "kv_connector/scheduler/saves/reachable.py"
_ENGINE = "kv_connector/transfer/engine.py"
_LEDGER = "kv_connector/scheduler/ledger.py"
_OPEN_JOBS = "kv_connector/transfer/submission/open_jobs.py"
_SUBMISSIONS = "kv_connector/transfer/submission/submissions.py"
_WORLDS = tested("tests/simulation/test_refusals.py")
_HOST_FORM = "kv_connector/transfer/memory/host_form.py"
_FORM = "tests/transfer/memory/test_host_form.py"
_PACKING = "kv_connector/transfer/paths/packing.py"
_CODED = "tests/transfer/paths/test_coded.py"
_REFUSALS = "kv_connector/scheduler/saves/refusals.py"
_FORM_CHOICE = "kv_connector/transfer/form_choice.py"
_CHOICE = "tests/transfer/test_form_choice.py"
_TESTS = "tests/scheduler/saves/test_refusals.py"
_TRANSFER = tested("tests/transfer/test_refusals.py")

REFUSALS: tuple[Mutant, ...] = (
    Mutant(
        "refused-shown",
        "a block that did not fit is matched, with whatever its host block holds",
        (Patch(_JOBS, "self._refuse(host_ids, ended.missing) if ended.missing else []", "[]"),),
        _WORLDS,
    ),
    Mutant(
        "refused-on-the-last-rank",
        "a block that did not fit on one rank is matched where it did on the last one",
        (Patch(_LEDGER, "self._open[job_id].missing |= frozenset(", "self._open[job_id].missing = frozenset("),),
        _WORLDS,
    ),
    Mutant(
        "refused-fails-all",
        "one block that does not fit fails all of a step's saves",
        (Patch(_JOBS, "        if not ended.ok:\n", "        if ended.missing or not ended.ok:\n"),),
        tested(_TESTS),
    ),
    Mutant(
        "unfit-for-ever",
        "an idle engine saves a block that does not fit again and again",
        (
            Patch(
                _BEFORE_REUSE,
                " for device_id, key in watched if key not in self._refusals]",
                " for device_id, key in watched]",
            ),
        ),
        tested(f"{_TESTS}::test_an_idle_engine_does_not_try_what_did_not_fit_again_and_again"),
    ),
    Mutant(
        "refused-behind",
        "what is computed behind a block that does not fit is saved, where nobody can reach it",
        (Patch(_REACHABLE, "            self._lose_from(reach, size, first + num_fit)\n", "            pass\n"),),
        tested(f"{_TESTS}::test_what_does_not_fit_is_not_tried_again_nor_what_is_behind_it_until_a_reset"),
    ),
    Mutant(
        "refused-behind-its-own",
        "a request goes on saving behind a block of its own that did not fit, and what could be hit goes for it",
        (Patch(_REACHABLE, "if reach.num_refusals < self._refusals.num_found:", "if False:"),),
        tested(f"{_TESTS}::test_a_request_saves_nothing_behind_a_block_of_its_own_that_does_not_fit"),
    ),
    Mutant(
        "refused-after-a-reset",
        "what did not fit is not saved when its hash stands for other bytes",
        (Patch("kv_connector/scheduler/half.py", "        self._saves.reset()\n", ""),),
        tested(f"{_TESTS}::test_what_does_not_fit_is_not_tried_again_nor_what_is_behind_it_until_a_reset"),
    ),
    Mutant(
        "refused-under-another-name",
        "a block of before a reset is refused under the name that its host block had last",
        (Patch(_JOBS, " and self._host.state(b) is BlockState.SWAPPING_TO_HOST]", "]"),),
        tested(_TESTS),
    ),
    Mutant(
        "saved-in-vain",
        "what is computed is saved though too much does not fit",
        (Patch(_PLANNER, "not tables or self._refusals.are_too_many:", "not tables:"),),
        _WORLDS,
    ),
    Mutant(
        "saved-before-reuse-in-vain",
        "what the engine reuses next is saved though too much does not fit",
        (
            Patch(
                _BEFORE_REUSE,
                "not self._is_on or self._refusals.are_too_many:",
                "not self._is_on:",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "idle-in-vain",
        "an engine that saves nothing any more steps for what it would save",
        (
            Patch(
                _BEFORE_REUSE,
                "self._look_ahead.may_find and not self._refusals.are_too_many",
                "self._look_ahead.may_find",
            ),
        ),
        tested(_TESTS),
    ),
    Mutant(
        "off-for-ever",
        "nothing is saved after a reset since what was there before it did not fit",
        (Patch(_REFUSALS, "= 0\n        self.are_too_many = False\n", "= 0\n"),),
        tested(_TESTS),
    ),
    Mutant(
        "judged-by-the-past",
        "blocks of before a reset count against those behind it",
        (Patch(_REFUSALS, "        self._saves.clear()\n        self._num_judged = self._num_refused = 0\n", ""),),
        tested(_TESTS),
    ),
    Mutant(
        "judged-at-once",
        "one prompt that does not fit turns saves off",
        (Patch(_REFUSALS, "self.are_too_many or self._num_judged < self.judged_blocks:", "self.are_too_many:"),),
        tested(_TESTS),
    ),
    Mutant(
        "judged-by-all",
        "what fitted long ago keeps saves on that are in vain",
        (Patch(_REFUSALS, "- self._saves[0][0] >= self.judged_blocks:", "- self._saves[0][0] >= 1 << 62:"),),
        tested(_TESTS),
    ),
    Mutant(
        "judged-by-refusals",
        "blocks that fit are not counted",
        (Patch(_REFUSALS, "self._count(num_fitting + len(refused), ", "self._count(len(refused), "),),
        tested(_TESTS),
    ),
    Mutant(
        "form-of-its-own",
        "a rank takes another form than the others",
        (Patch(_FORM_CHOICE, "objection = self._agreed(objection)", "self._agreed(objection)"),),
        tested(_CHOICE),
    ),
    Mutant(
        "form-unasked",
        "ranks that cannot ask each other come to forms of their own",
        (Patch(_FORM_CHOICE, 'return objection or f"its', 'return objection and f"its'),),
        tested(_CHOICE),
    ),
    Mutant(
        "form-of-another",
        "what did not fit of one model keeps the others raw",
        (
            Patch(
                "kv_connector/build.py", "replace(identity, arrangement=arrangement).digest()", "arrangement.encode()"
            ),
        ),
        tested(_CHOICE),
    ),
    Mutant(
        "unfit-unsaid",
        "ranks do not hear that too much does not fit",
        (Patch("kv_connector/scheduler/half.py", "            unfit=self.refusals.are_too_many,\n", ""),),
        tested(_TESTS),
    ),
    Mutant(
        "refused-too-early",
        "which blocks did not fit is asked before the device has found out",
        (
            Patch(
                _SUBMISSIONS,
                "        self.upcoming = None\n",
                "        self.upcoming = None\n"
                "        self.refusals[:] = [lambda told=list(r()): told for r in self.refusals]\n",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "refused-of-a-lost-device",
        "a copy that failed is asked which blocks did not fit",
        (Patch(_ENGINE, "submission.refused() if submission.ok else ())", "submission.refused())"),),
        _TRANSFER,
    ),
    Mutant(
        "refused-of-another-job",
        "each of the jobs that are copied together hears of all blocks that did not fit",
        (
            Patch(
                _OPEN_JOBS,
                "tuple(filter(refused.__contains__, job.host_ids.tolist())) if refused else ()",
                "tuple(refused)",
            ),
        ),
        _TRANSFER,
    ),
    Mutant(
        "refused-in-the-last-part",
        "only the last part of a long save is asked which blocks did not fit",
        (Patch(_SUBMISSIONS, "for refusals in self.refusals for", "for refusals in self.refusals[-1:] for"),),
        _TRANSFER,
    ),
    Mutant(
        "refused-untold",
        "a rank does not report what did not fit",
        (
            Patch(
                "kv_connector/worker/half.py",
                "for job in moved if job.missing)",
                "for job in stored if job.missing)",
            ),
        ),
        _TRANSFER,
    ),
    Mutant(
        "coded-and-something-else",
        "bytes that are of bf16 in one block and of something else in another are coded",
        (
            Patch(
                "kv_connector/transfer/memory/layout.py",
                "dtypes.pop() if len(dtypes) == 1 else None",
                "max(dtypes, key=torch.bfloat16.__eq__)",
            ),
        ),
        tested(f"{_FORM}::test_bytes_that_are_of_bf16_and_of_something_else_are_not_coded"),
    ),
    Mutant(
        "form-unnamed",
        "blocks of one form are found in storage by an engine that has them in another",
        (Patch(_HOST_FORM, 'f"{layout.arrangement}; {stored_as}" if self.name else ', ""),),
        tested(_FORM),
    ),
    Mutant(
        "verdicts-overwritten",
        "what says which blocks of a save did not fit is given to the next one before it was read",
        (
            Patch(
                _PACKING,
                "while self._taken and self._taken[0][2]() is None:\n            self._taken.popleft()",
                "self._taken.clear()",
            ),
        ),
        tested(_CODED),
    ),
    Mutant(
        "verdicts-of-before",
        "blocks are refused for what did not fit in an earlier save",
        (Patch(_PACKING, "        self.memory.zero_()\n", ""),),
        tested(_CODED),
    ),
    Mutant(
        "verdicts-by-row",
        "host blocks that did not fit are named in the order of the plan, and not in that of the copy",
        (
            Patch(
                "kv_connector/transfer/paths/staged.py",
                "partial(verdicts.refused, ids.host_ids)",
                "partial(verdicts.refused, copy.host_ids)",
            ),
        ),
        tested(_CODED),
    ),
    Mutant(
        "packed-as-raw",
        "what is coded on the host is moved as it is where it is staged",
        (
            Patch(
                _PACKING,
                "found[self._form.is_coded[chosen[0]]] =",
                "found[False] =",
            ),
        ),
        tested(_CODED),
    ),
    Mutant(
        "refused-in-the-last-layer",
        "a block fits if its last layer does",
        (Patch("kv_connector/transfer/paths/torch.py", "torch.stack(fits).all(0)", "fits[-1]"),),
        tested(_CODED),
    ),
)
