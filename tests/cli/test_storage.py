"""An operator and a storage folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path

import pytest

from kv_connector.cli import main
from kv_connector.storage.filesystem import survey
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.packs import pack_bytes
from kv_connector.storage.filesystem.temporaries import new_path
from kv_connector.storage.macs import choose_check
from tests.storage.storages import BLOCK, IDENTITY, exists, get, key, put

PACK = pack_bytes(4, BLOCK)
OTHER = b"o" * 32
SECRET = "what our engines know"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three packs of one identity, used in this order, and one of another."""
    store = FilesystemStorage(tmp_path, IDENTITY, BLOCK, 8 << 20)
    for name in "abc":
        put(store, keys_of(name))
    store.close()
    other = FilesystemStorage(tmp_path, OTHER, BLOCK, 8 << 20)
    put(other, keys_of("d"))
    other.close()
    return tmp_path


def keys_of(name: str) -> list[bytes]:
    return [key(f"{name}{i}") for i in range(4)]


def found(folder: Path) -> list[int]:
    store = FilesystemStorage(folder, IDENTITY, BLOCK, 8 << 20)
    result = [exists(store, keys_of(name)) for name in "abc"]
    assert all(all(get(store, keys_of(name))) for name, count in zip("abc", result, strict=True) if count)
    store.close()
    return result


def test_stat_and_ls_tell_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "stat", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == [OTHER.hex()[:16], "1", "4"]
    assert lines[2].split()[:3] == [IDENTITY.hex()[:16], "3", "12"]
    assert lines[3].split()[:4] == ["in", "all", "4", "16"]
    assert main(["storage", "ls", str(folder), "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [OTHER.hex()[:16], IDENTITY.hex()[:16]]


def test_stat_passes_over_what_is_written_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two packs are being written; one of them is whole between the look at the folder and the look at its files."""
    listed = survey.list_temporaries
    kept, renamed = (new_path(folder / "tmp") for _ in range(2))
    for path in (kept, renamed):
        path.write_bytes(bytes(2048))

    def listed_and_renamed(place: Path) -> list[Path]:
        found = list(listed(place))
        renamed.unlink()
        return found

    monkeypatch.setattr(survey, "list_temporaries", listed_and_renamed)
    assert main(["storage", "stat", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 temporary files, 2.0 KiB"


def test_verify_finds_every_flipped_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "verify", str(folder)]) == 0
    assert "4 packs, 0 without a good block, 0 with some; 16 blocks, 0 damaged" in capsys.readouterr().out
    first, second, third, _ = sorted(folder.rglob("*.pack"))
    flip(first, 2)
    second.write_bytes(b"nonsense")
    for slot in range(4):
        flip(third, slot)
    assert main(["storage", "verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"{first}: of 4 blocks [2] are damaged" in out
    assert f"{second}: it ends after 8 bytes" in out
    assert f"{third}: of 4 blocks [0, 1, 2, 3] are damaged" in out
    assert "4 packs, 2 without a good block, 1 with some; 12 blocks, 5 damaged" in out


def test_verify_deletes_packs_without_a_good_block_and_no_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third, fourth = sorted(folder.rglob("*.pack"))
    flip(first, 2)
    second.write_bytes(b"nonsense")
    for slot in range(4):
        flip(third, slot)
    assert main(["storage", "verify", "--delete", str(folder)]) == 1, "a damaged block is still there"
    assert "4 packs, 2 without a good block and deleted, 1 with some" in capsys.readouterr().out
    assert sorted(folder.rglob("*.pack")) == [first, fourth]
    assert main(["storage", "rm", str(folder), first.stem]) == 0
    assert main(["storage", "verify", "--delete", str(folder)]) == 0
    assert "1 packs, 0 without a good block, 0 with some; 4 blocks, 0 damaged" in capsys.readouterr().out


@pytest.fixture
def guarded(folder: Path) -> list[Path]:
    """Packs with MACs in the same folder."""
    before = set(folder.rglob("*.pack"))
    check, identity = choose_check(SECRET.encode(), IDENTITY)
    store = FilesystemStorage(folder, identity, BLOCK, 8 << 20, check=check)
    for name in "ef":
        put(store, keys_of(name))
    store.close()
    return sorted(set(folder.rglob("*.pack")) - before)


def test_packs_with_macs_are_checked_by_who_knows_the_secret(
    folder: Path, guarded: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = ["storage", "verify", str(folder)]
    assert main(verify) == 2, "not all of it could be checked"
    out = capsys.readouterr().out
    assert "6 packs, 0 without a good block, 0 with some; 16 blocks, 0 damaged; 2 packs whose blocks can be" in out
    assert "secret only: give it in KV_CONNECTOR_STORAGE_SECRET or with --secret-env" in out
    monkeypatch.setenv("OURS", SECRET)
    assert main([*verify, "--secret-env", "OURS"]) == 0
    assert "6 packs, 0 without a good block, 0 with some; 24 blocks, 0 damaged\n" in capsys.readouterr().out
    monkeypatch.setenv("KV_CONNECTOR_STORAGE_SECRET", SECRET)
    flip(guarded[0], 2)
    assert main(verify) == 1
    assert f"{guarded[0]}: of 4 blocks [2] are damaged" in capsys.readouterr().out


@pytest.mark.parametrize("secret", ["", "that of somebody else"])
def test_verify_deletes_no_pack_whose_secret_it_does_not_know(
    folder: Path,
    guarded: list[Path],
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for slot in range(4):
        flip(guarded[0], slot)
    if secret:
        monkeypatch.setenv("KV_CONNECTOR_STORAGE_SECRET", secret)
    assert main(["storage", "verify", "--delete", str(folder)]) == 2
    out = capsys.readouterr().out
    assert "; 2 packs whose blocks can be checked with" in out
    assert ("the given one is not theirs" in out) == bool(secret)
    assert set(guarded) <= set(folder.rglob("*.pack"))
    monkeypatch.setenv("KV_CONNECTOR_STORAGE_SECRET", SECRET)
    assert main(["storage", "verify", "--delete", str(folder)]) == 0
    assert [pack.exists() for pack in guarded] == [False, True]


def test_stat_says_how_blocks_are_checked(
    folder: Path, guarded: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Under identities that begin with other digits than those of engines without the secret."""
    assert main(["storage", "stat", str(folder)]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    marked = choose_check(SECRET.encode(), IDENTITY)[1].hex()[:16]
    assert lines[marked][1:3] == ["2", "8"]
    assert [lines[name][7] for name in (marked, IDENTITY.hex()[:16])] == ["MAC", "CRC-32"]


def flip(pack: Path, slot: int) -> None:
    """A bit of one block."""
    text = bytearray(pack.read_bytes())
    text[4096 + slot * BLOCK + 5] ^= 128
    pack.write_bytes(text)


def test_gc_deletes_what_was_used_longest_ago(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "gc", str(folder), "--capacity", str(2 * PACK)]) == 0
    assert "deleted 2 packs" in capsys.readouterr().out
    assert found(folder) == [0, 0, 4]
    assert main(["storage", "gc", str(folder), "--capacity", "1GiB"]) == 0
    assert "deleted 0 packs" in capsys.readouterr().out


def test_rm_deletes_by_name_and_by_identity(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["storage", "ls", str(folder)])
    oldest = capsys.readouterr().out.splitlines()[-1].split()[0]
    assert main(["storage", "rm", str(folder), oldest]) == 0
    assert found(folder) == [0, 4, 4]
    assert main(["storage", "rm", str(folder), "--identity", IDENTITY.hex()[:8]]) == 0
    assert found(folder) == [0, 0, 0]
    assert len(list(folder.rglob("*.pack"))) == 1
    assert main(["storage", "rm", str(folder), "--all"]) == 0
    assert not list(folder.rglob("*.pack"))


@pytest.mark.parametrize(
    "arguments",
    [[""], ["", "--all"], ["--identity", ""], ["--all", "--identity", ""], ["nothing-of-this-name"], ["{}", "nothing"]],
)
def test_rm_deletes_nothing_by_a_name_that_is_none(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty variable in a script is not every pack, and one slip among names deletes none of them."""
    packs = sorted(folder.rglob("*.pack"))
    given = [argument.format(packs[0].stem) for argument in arguments]
    assert main(["storage", "rm", str(folder), *given]) == 2
    assert capsys.readouterr().err.startswith("error: no")
    assert sorted(folder.rglob("*.pack")) == packs


@pytest.mark.parametrize(
    "arguments",
    [
        ["--all", "--identity", OTHER.hex()],
        ["{}", "--all"],
        ["{}", "--identity", OTHER.hex()],
        ["--identity", "zz"],
        ["--identity", IDENTITY.hex().upper() + "00"],
    ],
)
def test_rm_deletes_nothing_where_it_is_not_clear_what(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Who adds --all to an identity means all of it, not everybody's; a misspelt one is said, as a name is."""
    packs = sorted(folder.rglob("*.pack"))
    given = [argument.format(packs[0].stem) for argument in arguments]
    assert main(["storage", "rm", str(folder), *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no") and "nothing was deleted" in error
    assert sorted(folder.rglob("*.pack")) == packs


class Disk:
    """Gives EIO for pages of some files, and for what is deleted, until it is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bad: dict[int, Collection[int]] = {}
        self._kept: set[str] = set()
        self._pread, self._unlink = os.pread, os.unlink
        monkeypatch.setattr(os, "pread", self.pread)
        monkeypatch.setattr(os, "unlink", self.unlink)

    def lose(self, pack: Path, *offsets: int) -> None:
        """Nothing can be read from there."""
        self._bad[pack.stat().st_ino] = offsets

    def keep(self, pack: Path) -> None:
        """It cannot be deleted."""
        self._kept.add(str(pack))

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        if offset in self._bad.get(os.fstat(descriptor).st_ino, ()):
            raise OSError(errno.EIO, "Input/output error")
        return self._pread(descriptor, count, offset)

    def unlink(self, path: os.PathLike[str], **options: int) -> None:
        if str(path) in self._kept:
            raise OSError(errno.EIO, "Input/output error", str(path))
        self._unlink(path, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_pack_that_the_disk_does_not_give_is_told_and_hides_no_other(
    folder: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its header, one block, all blocks; and a damaged one behind them. `verify` deletes nothing that may be good."""
    first, second, third, fourth = packs = sorted(folder.rglob("*.pack"))
    disk.lose(first, 0)
    disk.lose(second, 4096 + BLOCK)
    flip(second, 2)
    disk.lose(third, *(4096 + slot * BLOCK for slot in range(4)))
    for slot in range(4):
        flip(fourth, slot)
    for command in ("stat", "ls"):
        assert main(["storage", command, str(folder)]) == 0
        assert "(not read)" in capsys.readouterr().out
    for options, left in (([], packs), (["--delete"], packs[:3])):
        assert main(["storage", "verify", *options, str(folder)]) == 1
        out = capsys.readouterr().out
        assert f"{first}: cannot be read (Input/output error)" in out
        assert f"{second}: of 4 blocks [1] cannot be read (Input/output error); of 4 blocks [2] are damaged" in out
        assert f"{third}: of 4 blocks [0, 1, 2, 3] cannot be read" in out
        assert f"{fourth}: of 4 blocks [0, 1, 2, 3] are damaged" in out
        assert "4 packs, 1 without a good block" in out and "1 with some; 12 blocks, 10 damaged; 2 packs that" in out
        assert sorted(folder.rglob("*.pack")) == left
    assert main(["storage", "rm", str(folder), first.stem]) == 0
    assert sorted(folder.rglob("*.pack")) == [second, third]
    disk.lose(second, 0)
    assert main(["storage", "gc", str(folder), "--capacity", "0"]) == 0
    assert not list(folder.rglob("*.pack"))


def test_verify_is_not_content_where_a_pack_alone_cannot_be_read(folder: Path, disk: Disk) -> None:
    """Nobody knows whether it is good: a script that looks at the exit status is not told that all is well."""
    assert main(["storage", "verify", str(folder)]) == 0
    disk.lose(next(folder.rglob("*.pack")), 0)
    assert main(["storage", "verify", str(folder)]) == 1


def test_a_pack_that_cannot_be_deleted_is_told_and_keeps_no_other(
    folder: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third, fourth = sorted(folder.rglob("*.pack"))
    for pack in (first, third):
        pack.write_bytes(b"nonsense")
    disk.keep(first)
    assert main(["storage", "verify", "--delete", str(folder)]) == 1
    told = capsys.readouterr()
    assert str(first) in told.err and "2 without a good block, 0 with some" in told.out, "not all of them are deleted"
    assert sorted(folder.rglob("*.pack")) == [first, second, fourth]
    assert main(["storage", "rm", str(folder), "--all"]) == 2
    told = capsys.readouterr()
    assert str(first) in told.err and "deleted 2 packs" in told.out
    assert sorted(folder.rglob("*.pack")) == [first]


def test_an_engine_that_uses_the_folder_only_misses(folder: Path) -> None:
    store = FilesystemStorage(folder, IDENTITY, BLOCK, 8 << 20)
    assert exists(store, keys_of("a")) == 4
    assert main(["storage", "rm", str(folder), "--all"]) == 0
    assert get(store, keys_of("a")) == [False] * 4
    assert put(store, keys_of("a")) == [True] * 4
    assert get(store, keys_of("a")) == [True] * 4
    store.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stat", "/no/such/folder"], "/no/such/folder"),
        (["gc", ".", "--capacity", "many"], "--capacity='many' is not a size"),
        (["rm", "."], "nothing to delete: give names, --identity or --all"),
        (["ls", ".", "--limit", "-1"], "--limit=-1 is too small: give at least 1"),
        (["verify", ".", "--secret-env", "NOT_SET"], "that --secret-env names is not set in this process"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", *arguments]) == 2
    assert words in capsys.readouterr().err
