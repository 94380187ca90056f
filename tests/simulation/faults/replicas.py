"""Faults of ranks that cache the same bytes and share a copy of them."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_SHARE = "kv_connector/transfer/memory/host_share.py"
_GROUPS = "kv_connector/engines/vllm/groups.py"
_ENVIRONMENT = ".venv-vllm-0.32.0"
_WORLDS = tested("tests/simulation/test_replicas.py")
_TESTS = "tests/transfer/memory/test_host_share.py"

REPLICAS: tuple[Mutant, ...] = (
    Mutant(
        "share-swapped",
        "a rank saves the share of another one, and nobody saves the last",
        (Patch(_SHARE, "job.host_ids % self.count == self.index)", "job.host_ids % self.count == self.index // 2)"),),
        _WORLDS,
    ),
    Mutant(
        "share-mispaired",
        "of its share a rank saves each block as another one",
        (
            Patch(
                _SHARE,
                "host_ids=job.host_ids[is_own]",
                "host_ids=job.host_ids[is_own][::-1]",
            ),
        ),
        _WORLDS,
    ),
    Mutant(
        "share-not-fetched",
        "what storage has is read by no rank",
        (Patch(_SHARE, "return self.index == 0", "return self.index == self.count"),),
        _WORLDS,
    ),
    Mutant(
        "share-of-another-file",
        "a rank takes a file for the one that was offered which has its number now",
        (Patch(_SHARE, "os.pread(file, _MARK_BYTES, 0) == offer.mark\n", "True\n"),),
        tested(f"{_TESTS}::test_a_file_that_is_not_the_one_offered_is_not_mapped"),
    ),
    Mutant(
        "share-alone",
        "ranks share although one of them could not open the memory",
        (Patch(_SHARE, "all((offer, True) in has_opened for offer in here)", "file >= 0"),),
        tested(f"{_TESTS}::test_where_one_rank_cannot_open_the_memory_each_has_its_own"),
    ),
    Mutant(
        "share-closed-early",
        "the memory is gone before others have opened it",
        (
            Patch(
                _SHARE,
                "    has_opened = exchange((own, file >= 0))\n    if own is not None:\n        os.close(own.file)",
                "    if own is not None:\n        os.close(own.file)\n"
                "    has_opened = exchange((own, file >= 0))\n    if own is None:\n        pass",
            ),
        ),
        tested(f"{_TESTS}::test_the_memory_is_there_until_the_slowest_has_opened_it"),
    ),
    Mutant(
        "share-of-other-heads",
        "ranks with heads of their own are taken to cache the same",
        (Patch(_GROUPS, "set(model.architectures) <= HEADS_ALIKE", "True"),),
        tested("integration/tests/test_vllm_startup.py::test_how_many_ranks_of_eight_hold_the_same"),
        _ENVIRONMENT,
    ),
)
