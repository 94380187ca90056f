"""Faults of the connector for TensorRT-LLM, shown by tests in the model of its executor."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_FOLDER = "kv_connector/engines/tensorrt_llm"
_CONTRACT = "integration/tests/test_tensorrt_llm.py"
_FAILURES = "integration/tests/test_tensorrt_llm_failures.py"
_SLOT = "integration/tests/test_tensorrt_llm_slot.py"


def _mutant(name: str, title: str, file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(name, title, (Patch(f"{_FOLDER}/{file}", old, new),), tested(test))


TENSORRT_LLM: tuple[Mutant, ...] = (
    _mutant(
        "offers-unleased",
        "what TensorRT-LLM is told that it can load may be evicted before it does",
        "scheduler.py",
        "            self._half.host.acquire(live.offered_ids)\n",
        "            live.offered_ids = []\n",
        f"{_SLOT}::test_what_was_offered_is_leased_until_it_is_loaded",
    ),
    _mutant(
        "ended-unheld",
        "blocks of a request that has ended are given to others while they are saved",
        "scheduler.py",
        "        if not self._used.any_of(block_ids):\n            return False\n",
        "        if True:\n            return False\n",
        f"{_CONTRACT}::test_contract",
    ),
    _mutant(
        "held-for-ever",
        "a request that is held when its copies end is never let go",
        "scheduler.py",
        "        free = [i for i in request_ids if not self._used.any_of(self._held.get(i, ()))]\n",
        "        free = [i for i in request_ids if i not in self._held]\n",
        f"{_FAILURES}::test_a_request_that_has_ended_is_held_while_its_blocks_are_saved",
    ),
    _mutant(
        "replays-unfenced",
        "blocks that were taken from a live request are written while they are saved",
        "scheduler.py",
        "return replace(plan, fence=True) if lost else plan",
        "return plan",
        f"{_CONTRACT}::test_requests_that_are_replayed",
    ),
    _mutant(
        "given-up-unfenced",
        "blocks of a request that was given up, of which nobody says so, are written while they are saved",
        "scheduler.py",
        "        self._has_lost_blocks |= self._used.any_of(block_ids)\n",
        "",
        f"{_FAILURES}::test_blocks_of_a_request_that_was_given_up_are_not_saved_with_the_bytes_of_another",
    ),
    _mutant(
        "given-up-kept",
        "what is known of a request that was given up is kept for ever",
        "scheduler.py",
        "            if holder is not None and holder.allocation == allocation:\n",
        "            if False:\n",
        f"{_FAILURES}::test_blocks_of_a_request_that_was_given_up_are_not_saved_with_the_bytes_of_another",
    ),
    _mutant(
        "offers-used-up",
        "a step is believed to compute behind all that was offered, also where less is used",
        "requests.py",
        "if is_first and self.is_whole_prompt else 0",
        "if is_first else 0",
        f"{_SLOT}::test_a_part_of_an_offer_is_loaded_where_blocks_for_no_more_are_there",
    ),
    _mutant(
        "larger-blocks",
        "attention has made blocks larger than was asked for, and nobody looks",
        "scheduler.py",
        "if is_whole_prompt and len(block_ids) <",
        "if False and len(block_ids) <",
        f"{_SLOT}::test_blocks_of_another_size_than_was_asked_for",
    ),
    _mutant(
        "computes-after-failure",
        "steps that load nothing go on after a load has failed, on blocks that were never computed",
        "worker.py",
        "        if self._is_broken:\n            raise",
        "        if self._is_broken and plan.loads:\n            raise",
        f"{_FAILURES}::test_after_a_load_that_has_failed_nothing_is_computed_any_more",
    ),
    _mutant(
        "fails-alone",
        "a rank whose load has failed does not stop the others",
        "worker.py",
        "any(rank.has_lost for rank in told)",
        "self._has_lost",
        f"{_FAILURES}::test_one_rank_whose_load_fails_stops_all",
    ),
    _mutant(
        "told-apart",
        "a rank that alone knows of a failed load calls a collective that the others do not",
        "worker.py",
        "if plan.loads or self._is_broken:",
        "if plan.loads or self._has_lost:",
        f"{_FAILURES}::test_a_rank_that_hears_late_of_a_failed_load_keeps_step_with_the_others",
    ),
    _mutant(
        "uncomputed-saved",
        "what a forward pass that has failed was to compute is saved as if it had",
        "worker.py",
        "            half.bind_connector_metadata(replace(plan, saves=(), storage=(), cancelled_storage=()))\n",
        "            return self._untold.append((half.wait_for_save(), self._report())[1])\n",
        f"{_FAILURES}::test_what_a_failed_forward_pass_has_not_computed_is_not_saved",
    ),
    _mutant(
        "adapter-numbers",
        "the number of an adapter is taken for its weights in the next start",
        "identity.py",
        'f"{adapter} {self._nonce}"',
        'f"{adapter}"',
        f"{_SLOT}::test_names_cover_salts_adapters_and_images",
    ),
    _mutant(
        "images-unnamed",
        "blocks of images that have no hash are saved under the placeholders in the prompt",
        "scheduler.py",
        "            if live.is_named:\n",
        "            if True:\n",
        f"{_SLOT}::test_images_without_a_hash_are_neither_saved_nor_loaded",
    ),
    _mutant(
        "storage-unasked",
        "what storage has of a request is forgotten when that is allocated, which is at once",
        "scheduler.py",
        "        self._half.on_new_request(sought)\n",
        "",
        f"{_CONTRACT}::test_what_is_stored_is_there_for_those_that_come_later",
    ),
)
