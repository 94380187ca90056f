"""A start says what has changed since the last one in the same folder, and the folder says whose blocks it holds."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kv_connector.build import open_storage
from kv_connector.config import StorageConfig
from kv_connector.index import CacheIdentity, RankIdentity
from kv_connector.storage.filesystem.identities import note_identity

BLOCK = 4096
CACHE = CacheIdentity("org/model@main", "auto/bfloat16", "", 16, engine="vllm 0.32.0", weights="commit a")
RANK = RankIdentity(CACHE, 0, 1, "FlashAttention", "uint8[0:64 1:64] in 4096")


def start(folder: Path, identity: RankIdentity, caplog: pytest.LogCaptureFixture, keys: list[bytes]) -> tuple[int, str]:
    """An engine opens the folder, writes a block for each key, and ends: how many were there, and its warnings."""
    caplog.clear()
    config = StorageConfig(path=str(folder), capacity=16 << 20)
    pool = bytearray(len(keys) * BLOCK)
    storage = open_storage(config, identity, 0, BLOCK, memoryview(pool), identity.arrangement, 1)
    try:
        buffers = [memoryview(pool)[i * BLOCK : (i + 1) * BLOCK] for i in range(len(keys))]
        found = storage.exists(keys).result(60)
        storage.write(keys, buffers).result(60)
    finally:
        storage.close()
    return found, "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


def test_a_change_is_said_with_both_values_and_finds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = [bytes([i]) * 32 for i in range(3)]
    assert start(tmp_path, RANK, caplog, keys) == (0, "")
    assert start(tmp_path, RANK, caplog, keys) == (3, "")
    retrained = replace(RANK, cache=replace(CACHE, weights="commit b"))
    found, said = start(tmp_path, retrained, caplog, keys)
    assert found == 0
    assert "weights was 'commit a' and is 'commit b'" in said
    assert said.count(" was ") == 1, "nothing else has changed"
    assert start(tmp_path, retrained, caplog, keys) == (3, "")
    found, said = start(tmp_path, RANK, caplog, keys)
    assert found == 3, "what was stored for the weights of before is still theirs"
    assert "weights was 'commit b' and is 'commit a'" in said


@pytest.mark.parametrize(
    "other",
    [
        replace(RANK, backend="FlashInfer"),
        replace(RANK, groups="full of 1, window 8 of 1"),
        replace(RANK, pool="swa"),
        replace(RANK, rank=1, world_size=2),
        replace(RANK, cache=replace(CACHE, model="org/other@main")),
        *(
            replace(RANK, cache=replace(CACHE, **{name: "other"}))
            for name in ("engine", "config", "settings", "weights", "draft_weights", "cache_dtype", "layout")
        ),
        replace(RANK, cache=None),
        replace(RANK, arrangement="uint8[1:64 0:64] in 4096"),
    ],
)
def test_whatever_differs_is_another_identity(
    other: RankIdentity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [b"k" * 32]
    assert other.digest() != RANK.digest()
    start(tmp_path, RANK, caplog, keys)
    assert start(tmp_path, other, caplog, keys)[0] == 0
    assert start(tmp_path, RANK, caplog, keys)[0] == 1


def test_pools_of_one_engine_are_no_changes_of_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is opened at every start."""
    windows = replace(RANK, pool="swa", arrangement="float16[0:64 1:64] in 8192")
    for identity in (RANK, windows, RANK, windows):
        assert start(tmp_path, identity, caplog, [])[1] == ""
    assert "arrangement was" in start(tmp_path, replace(windows, arrangement=RANK.arrangement), caplog, [])[1]


def test_the_folder_says_whose_blocks_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, RANK, caplog, [])
    (path,) = (tmp_path / "identities").iterdir()
    told = json.loads(path.read_text())
    assert (told["model"], told["weights"], told["rank"]) == ("org/model@main", "commit a", "0 of 1")
    assert told["arrangement"] == "uint8[0:64 1:64] in 4096"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert path.name == f"{RANK.digest().hex()[:16]}.json", "as `kv-connector storage stat` shows it"


def test_other_models_and_damage_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder is shared, and anything may lie in it."""
    start(tmp_path, replace(RANK, cache=replace(CACHE, model="org/other@main")), caplog, [])
    folder = tmp_path / "identities"
    found = ['{"model": "org/mo', "[1]", "[" * 60_000]  # torn, of another kind, and deeper than Python reads
    for number, text in enumerate(found):
        (folder / f"{number:016x}.json").write_text(text)
    (folder / f"{10:016x}.json").mkdir()
    (folder / f"{11:016x}.json").symlink_to("/dev/zero")
    os.mkfifo(folder / f"{12:016x}.json")
    assert start(tmp_path, RANK, caplog, []) == (0, "")


@pytest.mark.parametrize("lie", ["in the folder", "behind a link", "behind links"])
def test_files_of_somebody_else_are_left_alone(lie: str, tmp_path: Path) -> None:
    """However many there are, and whatever points at them: those with other names, and those that are elsewhere."""
    root, folder = tmp_path / "store", tmp_path / "store" / "identities"
    root.mkdir()
    theirs = folder if lie == "in the folder" else tmp_path / "documents"
    theirs.mkdir()
    name = "letter{}.json" if lie == "in the folder" else "{:016x}.json"
    for number in range(300):
        (theirs / name.format(number)).write_text("{}")
    before = sorted(theirs.iterdir())
    if lie == "behind a link":
        folder.symlink_to(theirs)
    elif lie == "behind links":
        folder.mkdir()
        for path in before:
            (folder / path.name).symlink_to(path)
    for digest in (b"a" * 32, b"b" * 32):
        note_identity(root, digest, {"model": "m"})
    assert all(path.read_text() == "{}" for path in before)
    if lie != "in the folder":
        assert sorted(theirs.iterdir()) == before, "nothing is written there either"
    if lie == "behind links":
        assert all((folder / path.name).is_symlink() for path in before)


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "identities").write_text("a file")
    note_identity(tmp_path, b"d" * 32, RANK.parts())
    assert "cannot be noted there" in caplog.text


def test_files_of_long_ago_go(tmp_path: Path) -> None:
    for number in range(300):
        note_identity(tmp_path, number.to_bytes(32, "little"), {"model": str(number)})
    names = [f"{number.to_bytes(32, 'little').hex()[:16]}.json" for number in range(300)]
    folder = tmp_path / "identities"
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[300 - 257 :])
    for number in range(3):  # one more than are kept, and the first of all starts again
        (folder / f"{number:016x}.json").write_text("{}")
    oldest = folder / names[300 - 257]
    os.utime(oldest, ns=(0, 0))
    note_identity(tmp_path, (300 - 257).to_bytes(32, "little"), {"model": "again"})
    assert json.loads(oldest.read_text()) == {"model": "again"}
