"""Pins of an engine in a storage folder: what comes back at the next start, and what is never believed."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from kv_connector.storage.checksums import CRC32, BlockCheck
from kv_connector.storage.filesystem import pin_file, pin_keeper
from kv_connector.storage.filesystem.layout import PINS, FolderLayout
from kv_connector.storage.filesystem.pin_file import MOST_BYTES, PinFile, TimedPin
from kv_connector.storage.filesystem.pin_keeper import FolderPinKeeper
from kv_connector.storage.macs import choose_check
from kv_connector.types import BlockHash, KeptPin

IDENTITY, OTHER = bytes(range(32)), bytes(range(1, 33))


class Clock:
    """Seconds since 1970 that a test sets."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


def pin(name: str, num_blocks: int = 3, seconds: float | None = 60.0, is_of_request: bool = True) -> KeptPin:
    hashes = tuple(BlockHash(f"{name}{i}".encode().ljust(32, b".")) for i in range(num_blocks))
    return KeptPin(hashes, "team-a", seconds, is_of_request)


def keeper(
    root: Path, identity: bytes = IDENTITY, clock: Clock | None = None, check: BlockCheck = CRC32
) -> FolderPinKeeper:
    return FolderPinKeeper(root, identity, check, clock or Clock())


def keep(root: Path, *pins: KeptPin) -> Path:
    """Of an engine that has ended; the file that it has left."""
    one = keeper(root)
    one.take()
    for each in pins:
        one.kept(each)
    one.close()
    (path,) = (root / PINS).glob("*.pins")
    return path


def taken(root: Path, identity: bytes = IDENTITY, clock: Clock | None = None) -> list[KeptPin]:
    one = keeper(root, identity, clock)
    try:
        return one.take()
    finally:
        one.close()


def test_what_was_pinned_comes_back_with_the_time_that_is_left(tmp_path: Path) -> None:
    mine, operators = pin("a"), pin("b", seconds=None, is_of_request=False)
    path = keep(tmp_path, mine, operators)
    later = Clock()
    later.now += 20
    assert taken(tmp_path, clock=later) == [operators, mine._replace(seconds=40.0)]
    later.now += 41
    assert taken(tmp_path, clock=later) == [operators], "its time is over"
    assert [oct(p.stat().st_mode & 0o777) for p in (path.parent, path)] == ["0o700", "0o600"]
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".pins"], "no half of a file is left"


def test_what_was_let_go_of_does_not_come_back(tmp_path: Path) -> None:
    keep(tmp_path, pin("a"), pin("b"))
    one = keeper(tmp_path)
    assert len(one.take()) == 2
    one.ended(pin("a").name)
    one.ended(pin("never").name)
    one.close()
    assert taken(tmp_path) == [pin("b")]


def test_what_nobody_touched_is_kept_for_the_start_behind(tmp_path: Path) -> None:
    keep(tmp_path, pin("a"), pin("b"))
    keep(tmp_path, pin("c"))
    assert {each.block_hashes for each in taken(tmp_path)} == {pin(name).block_hashes for name in "abc"}


def test_engines_that_share_a_folder_have_pins_of_their_own(tmp_path: Path) -> None:
    one, two = keeper(tmp_path), keeper(tmp_path)
    one.kept(pin("one"))
    two.kept(pin("two"))
    one.close()
    two.close()
    one, two = keeper(tmp_path), keeper(tmp_path)
    assert (one.take(), two.take()) == ([pin("one")], [pin("two")])
    two.ended(pin("two").name)
    two.close()
    one.close()
    assert taken(tmp_path) == [pin("one")]


def test_engines_of_another_identity_find_nothing(tmp_path: Path) -> None:
    path = keep(tmp_path, pin("a"))
    assert taken(tmp_path, OTHER) == []
    path.rename(path.with_name(f"{OTHER.hex()[:16]}-0.pins"))
    assert taken(tmp_path, OTHER) == [], "whatever the file is called"


def test_whoever_knows_no_secret_pins_nothing(tmp_path: Path) -> None:
    check, identity = choose_check(b"a secret of sixteen", IDENTITY)
    path = keep(tmp_path, pin("a"))
    forged = bytearray(path.read_bytes())
    forged[8:40] = identity
    path.with_name(f"{identity.hex()[:16]}-0.pins").write_bytes(forged)
    one = keeper(tmp_path, identity, check=check)
    assert one.take() == []
    one.kept(pin("b"))
    one.close()
    assert keeper(tmp_path, identity, check=check).take() == [pin("b")]


def version(data: bytes) -> bytes:
    """In files of this one lies what operators gave, too, though no prompt had shown it."""
    return b"KVCPINS1" + data[8:]


def cut(data: bytes) -> bytes:
    return data[:-5]


def turned(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def huge(data: bytes) -> bytes:
    return data + bytes(MOST_BYTES)


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("spoil", [version, cut, turned, huge, empty])
def test_what_is_not_as_it_was_written_is_no_pin_and_one_line(
    spoil: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep(tmp_path, pin("a"))
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    assert taken(tmp_path) == []
    (line,) = caplog.messages
    assert "the pins of the last start are lost" in line
    keep(tmp_path, pin("b"))
    assert taken(tmp_path) == [pin("b")], "and is written over"


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    path = keep(tmp_path, pin("a", 1))
    data = path.read_bytes()
    file = PinFile(path.parent, IDENTITY, CRC32)
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x80]) + data[i + 1 :])
        with pytest.raises(ValueError, match="it "):
            file.read()
    file.close()


def test_links_and_what_others_may_write_to_are_not_read(tmp_path: Path) -> None:
    path = keep(tmp_path, pin("a"))
    os.chmod(path, 0o666)
    assert taken(tmp_path) == []
    os.chmod(path, 0o600)
    assert taken(tmp_path) == [pin("a")]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert taken(tmp_path) == []
    path.unlink()
    os.mkfifo(path)
    assert taken(tmp_path) == [], "nor is a pipe waited for"
    path.unlink()
    for each in path.parent.iterdir():
        each.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path / "00")
    with pytest.raises(OSError, match="pins"):
        keeper(tmp_path)


def test_a_full_disk_is_a_line_of_the_log_and_the_file_of_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(tmp_path, pin("a"))
    before = path.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(pin_file.os, "replace", full)
        keep(tmp_path, pin("b"))
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "No space left" in caplog.text
    assert path.read_bytes() == before
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".pins"]


def test_what_a_killed_engine_was_writing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are killed so, there is one half-written file at most for each engine that uses the folder."""

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        file = PinFile(keep(tmp_path, pin("a")).parent, IDENTITY, CRC32)
        pins = file.read()
        with monkeypatch.context() as patch:
            patch.setattr(pin_file.os, "replace", kill)
            with pytest.raises(KeyboardInterrupt):
                file.write(pins)
        file.close()
        assert len(list((tmp_path / PINS).glob("*.new"))) == 1
    assert taken(tmp_path) == [pin("a")]
    keep(tmp_path, pin("b"))
    assert sorted(path.suffix for path in (tmp_path / PINS).iterdir()) == [".lock", ".pins"]


def test_what_a_file_has_no_room_for_is_what_requests_pinned_for_the_shortest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_file, "MOST_BYTES", 400)
    operators = pin("o", seconds=5.0, is_of_request=False)
    keep(tmp_path, pin("short", seconds=10.0), pin("long", seconds=90.0), operators)
    assert taken(tmp_path) == [operators, pin("long", seconds=90.0)]
    (line,) = caplog.messages
    assert "no room for 1 of the pins" in line


def test_a_folder_of_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("keep")
    with pytest.raises(OSError, match="not empty"):
        keeper(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]
    assert not FolderLayout(tmp_path).is_ours()


def test_what_changes_while_the_file_is_written_for_the_last_time_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = keeper(tmp_path)
    writes, is_written, may_go_on = PinFile.write, threading.Event(), threading.Event()

    def slow(file: PinFile, pins: list[TimedPin]) -> int:
        is_written.set()
        assert may_go_on.wait(30)
        return writes(file, pins)

    monkeypatch.setattr(PinFile, "write", slow)
    monkeypatch.setattr(pin_keeper, "_PAUSE_SECONDS", 0.0)
    one.kept(pin("a"))
    assert is_written.wait(30)
    one.kept(pin("b"))
    closing = threading.Thread(target=one.close)
    closing.start()
    assert one._desk._closing.wait(30)
    may_go_on.set()
    closing.join()
    assert taken(tmp_path) == [pin("a"), pin("b")]


def test_what_a_killed_engine_has_left_half_written_is_written_over(tmp_path: Path) -> None:
    path = keep(tmp_path, pin("a"))
    for start in range(3):
        path.with_suffix(".new").write_bytes(b"half")
        keep(tmp_path, pin(str(start)))
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".pins"]


@pytest.mark.parametrize("length", [1, 8, 16, 33, 64])
def test_hashes_of_any_length_come_back(tmp_path: Path, length: int) -> None:
    short = KeptPin((BlockHash(bytes(length)),), "default", None, False)
    keep(tmp_path, short, pin("a"))
    assert taken(tmp_path) == [short, pin("a")]
