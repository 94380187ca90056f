"""An operator and a storage folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kv_connector.cli import main
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.packs import pack_bytes
from tests.storage.storages import BLOCK, IDENTITY, exists, get, key, put

PACK = pack_bytes(4, BLOCK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three packs of one identity, used in this order, and one of another."""
    store = FilesystemStorage(tmp_path, IDENTITY, BLOCK, 8 << 20)
    for name in "abc":
        put(store, keys_of(name))
    store.close()
    other = FilesystemStorage(tmp_path, b"o" * 32, BLOCK, 8 << 20)
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
    assert lines[1].split()[:3] == [(b"o" * 32).hex()[:16], "1", "4"]
    assert lines[2].split()[:3] == [IDENTITY.hex()[:16], "3", "12"]
    assert lines[3].split()[:4] == ["in", "all", "4", "16"]
    assert main(["storage", "ls", str(folder), "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [(b"o" * 32).hex()[:16], IDENTITY.hex()[:16]]


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
    ("arguments", "words"),
    [
        (["--device", "-1"], "--device=-1 is too small: give at least 0"),
        (["--show", "built-in", "--bytes", "9" * 900], f"is too large: give at most {1 << 40}"),
        (["--show", "built-in", "--bytes", "0"], "--bytes=0 is too small: give at least 1"),
        (["--show", "latin"], "'latin' cannot be read: 'utf-8' codec can't decode"),
        (["--show", "deep"], "deep is no result of `kv-connector calibrate`"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes(b"\xe4\xf6\xfc")
    Path("deep").write_text("[" * 60_000)
    assert main(["calibrate", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_an_engine_that_uses_the_folder_only_misses(folder: Path) -> None:
    store = FilesystemStorage(folder, IDENTITY, BLOCK, 8 << 20)
    assert exists(store, keys_of("a")) == 4
    assert main(["storage", "rm", str(folder), "--all"]) == 0
    assert get(store, keys_of("a")) == [False] * 4
    assert put(store, keys_of("a")) == [True] * 4
    assert get(store, keys_of("a")) == [True] * 4
    store.close()


def test_what_copies_take_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator looks at a result, keeps it, and looks at the kept one."""
    kept = tmp_path / "costs.json"
    assert main(["calibrate", "--show", "built-in", "--json", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "64 KiB" in shown and " staged" in shown and " runs" in shown and "layer groups of" in shown
    assert main(["calibrate", "--show", str(kept), "--bytes", "64MiB"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == shown.splitlines()[1:]
    kept.write_text("{}")
    assert main(["calibrate", "--show", str(kept)]) == 2
    assert "measure anew" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "GPU 0: there are 0 here" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "costs.json"
    assert main(["calibrate", "--json", str(kept)]) == 0
    assert "measured on" in capsys.readouterr().out
    assert main(["calibrate", "--show", str(kept)]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stat", "/no/such/folder"], "/no/such/folder"),
        (["gc", ".", "--capacity", "many"], "--capacity='many' is not a size"),
        (["rm", "."], "nothing to delete: give names, --identity or --all"),
        (["ls", ".", "--limit", "-1"], "--limit=-1 is too small: give at least 1"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", *arguments]) == 2
    assert words in capsys.readouterr().err
