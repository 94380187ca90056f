"""Faults of what is stored with blocks: checksums, MACs, and what says where and how long they are."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested

_CATALOG = "kv_connector/storage/filesystem/catalog.py"
_CHECKED = "kv_connector/storage/checked.py"
_CHECKSUMS = "kv_connector/storage/checksums.py"
_CONTENTS = "kv_connector/storage/filesystem/contents.py"
_FOLDER = "kv_connector/storage/filesystem/folder.py"
_JOURNAL = "kv_connector/storage/filesystem/journal.py"
_MACS = "kv_connector/storage/macs.py"
_PACKS = "kv_connector/storage/filesystem/packs.py"
_BOUNDS = "tests/storage/filesystem/test_bounds.py"
_FOLDER_TESTS = "tests/storage/filesystem/test_folder.py"
_FORGERY = "tests/storage/test_forgery.py"
_SIMULATED_DISK = "tests/simulation/test_disk.py"

MACS: tuple[Mutant, ...] = (
    Mutant(
        "mac-of-any-block",
        "the MAC of a block does not cover its name, so good blocks can change places",
        (Patch(_MACS, "        mac.update(key)\n", ""),),
        tested(f"{_SIMULATED_DISK}::test_nothing_that_is_forged_is_taken_by_who_has_a_secret"),
    ),
    Mutant(
        "mac-of-any-identity",
        "blocks of other models and ranks have the same MACs",
        (Patch(_MACS, '_derived(secret, b"blocks", identity)', '_derived(secret, b"blocks")'),),
        tested(f"{_FORGERY}::test_a_mac_is_of_one_secret_one_identity_one_key_and_all_bytes"),
    ),
    Mutant(
        "crc-for-a-mac",
        "an engine with a secret takes packs that are written without one",
        (
            Patch(
                _CHECKSUMS,
                "return compare_digest(self.of(key, block), stored)",
                "return compare_digest((CRC32 if len(stored) == CRC_BYTES else self).of(key, block), stored)",
            ),
        ),
        tested(f"{_SIMULATED_DISK}::test_nothing_that_is_forged_is_taken_by_who_has_a_secret"),
    ),
    Mutant(
        "one-name-for-all-secrets",
        "engines with another secret find each other's blocks, and delete them as damaged",
        (Patch(_MACS, "marked = _mark(secret, identity) + identity[_MARK_BYTES:]", "marked = identity"),),
        tested(f"{_FORGERY}::test_an_engine_with_another_secret_or_none_finds_nothing_and_deletes_nothing"),
    ),
    Mutant(
        "verify-with-any-secret",
        "kv-connector takes packs of another secret for damaged",
        (
            Patch(
                _MACS,
                "if secret and compare_digest(_mark(secret, identity), identity[:_MARK_BYTES]):",
                "if size == MAC_BYTES:",
            ),
        ),
        tested("tests/cli/test_storage.py::test_verify_deletes_no_pack_whose_secret_it_does_not_know"),
    ),
    Mutant(
        "mac-of-four-bytes",
        "four bytes of a MAC are compared, which a forger may find by trying",
        (
            Patch(
                _CHECKSUMS,
                "return compare_digest(self.of(key, block), stored)",
                "return compare_digest(self.of(key, block)[:4], stored[:4])",
            ),
        ),
        tested(f"{_FORGERY}::test_all_of_a_mac_counts_and_no_part_of_it_is_enough"),
    ),
    Mutant(
        "mac-by-its-beginning",
        "a part of a MAC, or nothing of it, is taken for all of it",
        (
            Patch(
                _CHECKSUMS,
                "return compare_digest(self.of(key, block), stored)",
                "return self.of(key, block).startswith(stored)",
            ),
        ),
        tested(f"{_FORGERY}::test_all_of_a_mac_counts_and_no_part_of_it_is_enough"),
    ),
    Mutant(
        "headers-of-crcs",
        "long packs with MACs are damaged to who reads their headers",
        (Patch(_PACKS, "(KEY_BYTES + max(_VERSIONS))", "(KEY_BYTES + min(_VERSIONS))"),),
        tested(f"{_FORGERY}::test_the_longest_packs_with_macs_are_found_without_an_index"),
    ),
    Mutant(
        "objects-of-one-kind",
        "objects with MACs say that they have CRCs",
        (Patch(_CHECKED, 'MAC_BYTES: b"kvcobj2\\0"', 'MAC_BYTES: b"kvcobj1\\0"'),),
        tested("tests/storage/test_checked.py::test_an_object_says_how_it_is_checked"),
    ),
    Mutant(
        "blocks-of-any-size",
        "packs with blocks of another size are read as if they had ours",
        (Patch(_CONTENTS, " and found.block_bytes == self._block_bytes:", ":"),),
        tested(f"{_FOLDER_TESTS}::test_blocks_of_another_size_only_take_room"),
    ),
    Mutant(
        "mark-of-the-one-before",
        "a pack that is missed as it is looked at again is never looked for, nor counted",
        (
            Patch(
                _CONTENTS,
                "            del self._missed[name]  # first: who misses it meanwhile marks it anew\n",
                "",
            ),
            Patch(
                _CONTENTS,
                "                self._missed[name] = None\n                raise\n",
                "                raise\n            del self._missed[name]\n",
            ),
        ),
        tested(f"{_FOLDER_TESTS}::test_who_misses_a_pack_just_as_it_is_looked_at_again_does_not_lose_it"),
    ),
    Mutant(
        "missed-in-vain",
        "a pack whose size the disk does not tell is looked for once and never again",
        (
            Patch(
                _CONTENTS,
                "                self._missed[name] = None\n                raise\n",
                "                raise\n",
            ),
        ),
        tested(f"{_FOLDER_TESTS}::test_a_pack_whose_size_the_disk_does_not_tell_is_looked_for_until_it_does"),
    ),
    Mutant(
        "looked-for-ever",
        "packs that are gone are looked for with every write",
        (Patch(_CONTENTS, "            del self._missed[name]  # first", "            pass  # first"),),
        tested(f"{_FOLDER_TESTS}::test_a_pack_that_is_gone_is_looked_for_once"),
    ),
    Mutant(
        "used-at-one-time",
        "what is used in one tick of a clock goes in any order",
        (Patch(_CATALOG, "max(now, self._last_ns + 1)", "max(now, self._last_ns)"),),
        tested("tests/storage/filesystem/test_catalog.py"),
    ),
    Mutant(
        "index-of-any-length",
        "an index of any length is taken into memory",
        (Patch(_JOURNAL, " or size > self._most_bytes:", ":"),),
        tested(f"{_BOUNDS}::test_an_index_that_is_too_long_is_not_read_and_is_written_anew"),
    ),
    Mutant(
        "long-index-takes-room",
        "good packs make room for an index that is too long to be read",
        (Patch(_FOLDER, "            self.contents.drop_long_journal()  # it takes no room of good packs\n", ""),),
        tested(f"{_BOUNDS}::test_an_index_that_gets_too_long_costs_a_running_engine_nothing"),
    ),
    Mutant(
        "lowered-and-unread",
        "a folder whose capacity was lowered has an index that is written, and is too long to be read back",
        (Patch(_JOURNAL, "        self._most_bytes = max(self._most_bytes, 2 * num_bytes)\n", ""),),
        tested(f"{_BOUNDS}::test_a_folder_whose_capacity_was_lowered_is_used_on"),
    ),
    Mutant(
        "claims-of-any-size",
        "good packs make room for one that claims exabytes",
        (Patch(_CONTENTS, " and facts[1] <= self._capacity:", ":"),),
        tested(f"{_BOUNDS}::test_what_claims_more_than_a_folder_holds_takes_no_room_of_good_packs"),
    ),
)
