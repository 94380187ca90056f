"""Block hashes: the same everywhere, and different whenever the cached bytes could be."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.errors import ConfigError
from kv_connector.index import BlockHasher, CacheIdentity, MultimodalItem, adopt_hash, adopt_hashes, root_hash
from kv_connector.types import BlockHash

IDENTITY = CacheIdentity("org/model@main", "bfloat16", "NHD", 4)
ROOT = root_hash(IDENTITY)
PROMPT = list(range(100, 112))


def hashes(tokens: list[int], items: list[MultimodalItem] | None = None, root: BlockHash = ROOT) -> list[BlockHash]:
    return BlockHasher(4, root, items or []).update(tokens)


def test_the_encoding_is_the_documented_one() -> None:
    parts = ["org/model@main", "bfloat16", "NHD", "4", "1", "1", *[""] * 5]  # the last are not given
    identity = b"".join(b"\1" + struct.pack("<I", len(part)) + part.encode() for part in parts)
    root = hashlib.sha256(b"kvc1.root\1" + struct.pack("<I", len(identity)) + identity + b"\0\0").digest()
    assert root == ROOT
    item = MultimodalItem(b"image", start=5, length=1)
    first = hashlib.sha256(b"kvc1.block" + root + struct.pack("<5I", 4, 1, 2, 3, 4)).digest()
    image = struct.pack("<I", 5) + b"image" + struct.pack("<q", 1)
    second = hashlib.sha256(b"kvc1.block" + first + struct.pack("<5I", 4, 5, 6, 7, 8) + image).digest()
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], [item]) == [first, second]


def test_another_process_with_another_hash_seed_names_blocks_alike() -> None:
    program = (
        "from kv_connector.index import *\n"
        "root = root_hash(CacheIdentity('org/model@main', 'bfloat16', 'NHD', 4), lora='a', salt='s')\n"
        "print(BlockHasher(4, root).update(list(range(12)))[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {hashes(list(range(12)), root=root_hash(IDENTITY, lora="a", salt="s"))[-1].hex()}


@pytest.mark.parametrize(
    "other",
    [
        root_hash(CacheIdentity("org/model@other", "bfloat16", "NHD", 4)),
        root_hash(CacheIdentity("org/model@main", "fp8", "NHD", 4)),
        root_hash(CacheIdentity("org/model@main", "bfloat16", "HND", 4)),
        root_hash(CacheIdentity("org/model@main", "bfloat16", "NHD", 8)),
        root_hash(CacheIdentity("org/model@main", "bfloat16", "NHD", 4, tp_size=2)),
        root_hash(CacheIdentity("org/model@main", "bfloat16", "NHD", 4, pp_size=2)),
        root_hash(IDENTITY, lora="adapter"),
        root_hash(IDENTITY, salt="adapter"),
        root_hash(IDENTITY, lora=""),
        root_hash(IDENTITY, lora="a", salt="b"),
        root_hash(IDENTITY, lora="ab"),
    ],
)
def test_whatever_changes_the_bytes_changes_every_block(other: BlockHash) -> None:
    assert not set(hashes(PROMPT)) & set(hashes(PROMPT, root=other))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(1, 7), max_size=20))
def test_growing_token_by_token_equals_hashing_at_once(tokens: list[int], cuts: list[int]) -> None:
    items = [MultimodalItem(bytes([start]), start, length) for start, length in enumerate(cuts)]
    hasher, length = BlockHasher(4, ROOT, items), 0
    for cut in cuts:
        length = min(length + cut, len(tokens))
        hasher.update(tokens[:length])
    hasher.update(tokens)
    assert hasher.hashes == hashes(tokens, items)
    assert len(hasher.hashes) == len(tokens) // 4


@given(st.integers(0, 14), st.integers(0, 12))
def test_an_item_counts_in_exactly_the_blocks_that_it_overlaps(start: int, length: int) -> None:
    plain = hashes(PROMPT)
    with_item = hashes(PROMPT, [MultimodalItem(b"image", start, length)])
    overlapped = [block for block in range(3) if max(start, block * 4) < min(start + length, block * 4 + 4)]
    first = overlapped[0] if overlapped else 3
    assert with_item[:first] == plain[:first]
    assert not set(with_item[first:]) & set(plain[first:])  # chained: all that follows differs too
    if len(overlapped) > 1:  # the item is in each of them: a shorter one gives the same first block and another second
        shorter = hashes(PROMPT, [MultimodalItem(b"image", start, (first + 1) * 4 - start)])
        assert shorter[first] == with_item[first]
        assert shorter[first + 1] != with_item[first + 1]


def test_an_item_that_touches_a_block_from_outside_is_not_in_it() -> None:
    """Ends where the block starts, or starts where the block ends."""
    plain = hashes(PROMPT)
    assert hashes(PROMPT, [MultimodalItem(b"image", 4, 4)])[0] == plain[0]
    chained = BlockHasher(4, hashes(PROMPT, [MultimodalItem(b"image", 0, 4)])[0]).update(PROMPT[4:])
    assert hashes(PROMPT, [MultimodalItem(b"image", 0, 4)])[1:] == chained


def test_hashes_that_an_engine_computed_are_adopted() -> None:
    names = {adopt_hash(ROOT, engine_hash) for engine_hash in (b"", b"\0", b"engine", b"engine2")}
    assert len(names) == 4
    assert adopt_hash(root_hash(IDENTITY, salt="x"), b"engine") not in names


@given(st.lists(st.one_of(st.binary(max_size=40), st.binary(min_size=32, max_size=32)), max_size=8))
def test_adopted_names_depend_on_the_hash_and_the_root_and_nothing_else(engine_hashes: list[bytes]) -> None:
    """Hashes of 32 bytes have a short way: their names are made in bulk, and are distinct from all others."""
    names = adopt_hashes(ROOT, engine_hashes)
    assert names == b"".join(adopt_hash(ROOT, engine_hash) for engine_hash in engine_hashes)
    split = [names[start : start + 32] for start in range(0, len(names), 32)]
    assert len(set(split)) == len(set(engine_hashes))
    assert not set(split) & set(engine_hashes)
    other = adopt_hashes(root_hash(IDENTITY, salt="x"), engine_hashes)
    assert not set(split) & {other[start : start + 32] for start in range(0, len(other), 32)}


@pytest.mark.parametrize("tokens", [[1, 2, 3, -1], [1, 2, 3, 2**32], [1, 2, 3, "x"]])
def test_an_impossible_token_is_named(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be integers from 0"):
        hashes(tokens)


def test_an_impossible_block_size_is_named() -> None:
    with pytest.raises(ConfigError, match="block_size=0"):
        BlockHasher(0, ROOT)
