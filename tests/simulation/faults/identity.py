"""Faults of what names the bytes: something that decides them is left out."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_FINGERPRINT = "kv_connector/fingerprint.py"
_NAMES = "kv_connector/scheduler/names.py"
_BUILD = "kv_connector/build.py"
_IDENTITIES = "tests/storage/filesystem/test_identities.py"
_ADAPTED = "tests/scheduler/test_names.py"

IDENTITY: tuple[Mutant, ...] = (
    Mutant(
        "ends-of-weights",
        "of weights with made-up times their two ends alone are looked at",
        (Patch(_FINGERPRINT, "for _ in range(num_pages - 1))}", "for _ in range(0))}"),),
        tested("tests/test_fingerprint.py"),
    ),
    Mutant(
        "images-without-names",
        "what prepares images is not in the identity",
        (
            Patch(
                _FINGERPRINT,
                "(?!tokenizer|generation)",
                "(?!tokenizer|generation|preprocessor|processor)",
            ),
        ),
        tested("tests/test_fingerprint.py"),
    ),
    Mutant(
        "times-of-weights-unread",
        "weights that were replaced by others with the same two ends are the same",
        (Patch(_FINGERPRINT, 'b"%d %d" % (status.st_size, status.st_mtime_ns)', 'b"%d" % status.st_size'),),
        tested("tests/test_fingerprint.py"),
    ),
    Mutant(
        "content-of-weights-unread",
        "weights that were replaced with their times kept are the same",
        (Patch(_FINGERPRINT, ", head, *pages))", "))"),),
        tested("tests/test_fingerprint.py"),
    ),
    Mutant(
        "settings-of-weights-unread",
        "how weights are quantised is not looked at",
        (Patch(_FINGERPRINT, "*map(_settings, settings)", "*()"),),
        tested("tests/test_fingerprint.py"),
    ),
    Mutant(
        "rank-unnamed",
        "ranks that have a part of a block each are given one another's",
        (
            Patch(
                "kv_connector/index/identity.py", 'f"{self.rank} of {self.world_size}"', 'f"any of {self.world_size}"'
            ),
        ),
        tested("tests/simulation/test_context.py::test_ranks_that_share_out_a_context_break_no_promise"),
    ),
    Mutant(
        "arrangement-unnamed",
        "a folder takes blocks with heads in front of tokens for those with heads behind",
        (
            Patch(
                _BUILD,
                "identity = replace(identity, arrangement=arrangement)",
                "identity = replace(identity, arrangement='')",
            ),
        ),
        tested(_IDENTITIES),
    ),
    Mutant(
        "arrangement-by-size",
        "dimensions are named in their order and not in that of the bytes",
        (
            Patch(
                "kv_connector/transfer/memory/geometry.py",
                "if i != dim and size > 1), key=lambda i: (-strides[i], i))",
                "if i != dim and size > 1), key=lambda i: i)",
            ),
        ),
        tested("tests/transfer/memory/test_layout.py"),
    ),
    Mutant(
        "backend-unnamed",
        "a folder gives one attention backend what another has written",
        (Patch("kv_connector/index/identity.py", '"backend": self.backend', '"backend": ""'),),
        tested(_IDENTITIES),
    ),
    Mutant(
        "change-unsaid",
        "nobody is told why a folder is of no use any more",
        (Patch("kv_connector/storage/filesystem/identities.py", "    if changes:\n", "    if False:\n"),),
        tested(_IDENTITIES),
    ),
    Mutant(
        "anybodys-identities",
        "files of somebody else beside those that say whose blocks a folder holds are deleted",
        (Patch("kv_connector/storage/filesystem/identities.py", "if _OURS.fullmatch(entry.name) and", "if"),),
        tested(_IDENTITIES),
    ),
    Mutant(
        "adapters-unnamed",
        "a retrained adapter finds what it has computed before",
        (Patch(_NAMES, "BlockHash(bytes(32)), adapter_of)", "BlockHash(bytes(32)))"),),
        tested(_ADAPTED),
    ),
    Mutant(
        "ended-adapters-unnamed",
        "blocks that are stored behind the end of their request have no adapter",
        (
            Patch(
                _NAMES,
                "            self._note(noted)\n            self._forget_lost()\n",
                "            self._forget_lost()\n",
            ),
        ),
        tested(_ADAPTED),
    ),
    Mutant(
        "shared-hashes-named",
        "a block that one of two adapters has computed is stored as one of them's",
        (Patch(_NAMES, "if known != noted.root:", "if False:"),),
        tested(_ADAPTED),
    ),
)
