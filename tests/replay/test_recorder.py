"""A user records what his engine serves, and replays it: nothing of the prompts is in the file."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_connector.build import build_scheduler
from kv_connector.config import Config
from kv_connector.engines.settings import Slot, read_config
from kv_connector.errors import ConfigError
from kv_connector.replay import read_trace, write_through_lru
from kv_connector.replay import recorder as recorder_module
from kv_connector.replay.recorder import TraceRecorder, _Ended, _open, _Writer
from kv_connector.types import BlockHash

BLOCK = 4


def path(text: str) -> list[BlockHash]:
    """A block of the engine's for each letter, named by all up to its own."""
    return [BlockHash(text[: index + 1].encode() * 4) for index in range(len(text))]


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def recorded(file: Path, prompts: Sequence[str], **options: int) -> Path:
    recorder = TraceRecorder(file, BLOCK, **options)
    for second, prompt in enumerate(prompts):
        recorder.record(100.0 + second, BLOCK * len(prompt) + 1, 7, path(prompt))
    recorder.close()
    return recorder.path


def test_what_is_replayed_is_what_came(tmp_path: Path) -> None:
    prompts = ["ab", "abc", "x", "abcd", "xy"]
    file = recorded(tmp_path / "trace.jsonl", prompts)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    header, first, *_, last = lines(file)
    assert header == {"format": "kv-connector trace", "version": 1, "block_tokens": BLOCK}
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (0, 9, 7)
    assert last["timestamp"] == 4000
    trace = read_trace(file)
    assert (trace.block_tokens, trace.num_tokens, trace.num_distinct) == (BLOCK, 4 * 12 + 5, 6)
    known = write_through_lru(100)
    assert list(trace.device_hits) == [known.request(path(prompt), 0, now) for now, prompt in enumerate(prompts)]


def test_who_was_admitted_first_and_ended_last_is_replayed_first(tmp_path: Path) -> None:
    """Times count from the request that ended first, so this one's is negative."""
    recorder = TraceRecorder(tmp_path / "trace.jsonl", BLOCK)
    for admitted, prompt in ((101.0, "xyz"), (100.0, "ab")):
        recorder.record(admitted, BLOCK * len(prompt) + 1, 7, path(prompt))
    recorder.close()
    assert [line.get("timestamp") for line in lines(recorder.path)] == [None, 0, -1000]
    assert list(map(len, read_trace(recorder.path).requests)) == [2, 3]


def test_who_knows_the_blocks_finds_none_of_them_in_the_file(tmp_path: Path) -> None:
    """Ids are keyed by what nobody keeps: neither hashes nor ids of another recording of the same prompts are in it."""
    one, other = (recorded(tmp_path / name, ["abc"]) for name in ("one.jsonl", "other.jsonl"))
    ids = [set(lines(file)[1]["hash_ids"]) for file in (one, other)]  # type: ignore[call-overload]
    assert not ids[0] & ids[1] and len(ids[0]) == 3
    plain = {int.from_bytes(block[:8], "big") & ((1 << 63) - 1) for block in path("abc")}
    assert not ids[0] & plain
    assert not any(block.hex() in one.read_text() for block in path("abc"))


def test_a_second_start_shares_no_block_with_the_first(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorded(file, ["ab", "ab"])
    recorded(file, ["ab"])
    trace = read_trace(file)
    assert list(trace.device_hits) == [0, 2, 0]
    assert len(lines(file)) == 5


def test_half_a_line_of_an_engine_that_was_killed_is_dropped(tmp_path: Path) -> None:
    file = recorded(tmp_path / "trace.jsonl", ["ab"])
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:30])
    recorded(file, ["c"])
    assert file.read_bytes().startswith(whole) and len(read_trace(file).requests) == 2


def test_two_engines_have_two_files(tmp_path: Path) -> None:
    recorders = [TraceRecorder(tmp_path / "trace.jsonl", BLOCK) for _ in range(3)]
    assert [recorder.path.name for recorder in recorders] == ["trace.jsonl", "trace.1.jsonl", "trace.2.jsonl"]
    for recorder in recorders:
        recorder.close()
    again = TraceRecorder(tmp_path / "trace.jsonl", BLOCK)
    assert again.path.name == "trace.jsonl"
    again.close()


def test_a_file_has_a_most(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ends between two lines, with one line of the log."""
    with caplog.at_level(logging.WARNING, "kv_connector.trace"):
        file = recorded(tmp_path / "trace.jsonl", ["abcdef"] * 20, most_bytes=1000)
    assert 500 < file.stat().st_size <= 1000 and read_trace(file).num_blocks
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: the recording ends, as a file has at most 1000 bytes"
    ]


def test_what_ends_faster_than_it_is_written_is_left_out_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits for no disk."""
    disk_answers, write = threading.Event(), recorder_module._Writer.write

    def write_late(self: object, ended: object) -> bool:
        disk_answers.wait()
        return write(self, ended)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder_module, "_MOST_WAITING", 2)
    monkeypatch.setattr(recorder_module._Writer, "write", write_late)
    recorder = TraceRecorder(tmp_path / "trace.jsonl", BLOCK)
    with caplog.at_level(logging.WARNING, "kv_connector.trace"):
        for second in range(9):
            recorder.record(float(second), BLOCK, 1, path("a"))
    disk_answers.set()
    recorder.close()
    assert 2 <= len(read_trace(recorder.path).requests) <= 3, "two that waited, and one that was being written"
    assert caplog.messages == [f"{recorder.path}: requests end faster than they are recorded; some are left out"]


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a line, which is taken back."""
    room = [1000]
    write = os.write

    def write_some(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_some)
    with caplog.at_level(logging.WARNING, "kv_connector.trace"):
        file = recorded(tmp_path / "trace.jsonl", ["abcdef"] * 20)
    assert 500 < file.stat().st_size < 1000 and read_trace(file).num_blocks
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(file) in message and "No space left on device" in message


def test_who_deletes_the_file_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is written that nobody will find."""
    recorder = TraceRecorder(tmp_path / "trace.jsonl", BLOCK)
    recorder.path.unlink()
    with caplog.at_level(logging.WARNING, "kv_connector.trace"):
        for second in range(3):
            recorder.record(float(second), 5, 1, path("a"))
        recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{recorder.path}: the recording ends, as the file was deleted"
    ]


def test_who_empties_the_file_finds_a_whole_trace_behind_it(tmp_path: Path) -> None:
    """What rotates logs does so. Without its header blocks would be taken for others, of 512 tokens."""
    file = tmp_path / "trace.jsonl"
    writer = _Writer(_open(file), BLOCK, 1 << 20)
    writer.write(_Ended(1.0, 9, 1, path("ab")))
    os.truncate(file, 0)
    writer.write(_Ended(2.0, 13, 1, path("abc")))
    writer.write(_Ended(3.0, 13, 1, path("abc")))
    writer.close()
    trace = read_trace(file)
    assert (trace.block_tokens, trace.num_tokens, trace.num_distinct) == (BLOCK, 26, 3)


@pytest.mark.parametrize(
    "kept", [b"weights, all of them in one line", b"a table\nof something\nbut no tra", b"\n", b"{}"]
)
def test_a_file_that_is_no_trace_is_left_as_it_is(tmp_path: Path, kept: bytes) -> None:
    """A slip of the keyboard costs nobody a file."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(kept)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="is there and holds something else: give a file that is not there yet"):
        TraceRecorder(file, BLOCK)
    assert file.read_bytes() == kept


def test_a_trace_that_others_may_read_is_not_written_on(tmp_path: Path) -> None:
    file = recorded(tmp_path / "trace.jsonl", ["ab"])
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644, others may open it: give"):
        TraceRecorder(file, BLOCK)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceRecorder(tmp_path / "link", BLOCK)


def test_a_trace_of_another_user_is_not_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who puts one into a folder of all beforehand could read what is added."""
    file = recorded(tmp_path / "trace.jsonl", ["ab"])
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="is the file of another user, "):
        TraceRecorder(file, BLOCK)


def test_what_is_no_file_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match="is no file: give"):
            TraceRecorder(path, BLOCK)


@pytest.mark.parametrize("left", [0, 1, 20, 150])
def test_a_trace_whose_engine_was_killed_can_be_replayed(tmp_path: Path, left: int) -> None:
    """Or that it is writing just now: half of a line is left out."""
    file = recorded(tmp_path / "trace.jsonl", ["ab", "cdefgh"])
    whole = file.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    file.write_bytes(whole + last[:left])
    assert len(last) >= 180 and len(read_trace(file).requests) == 2
    file.write_bytes(whole + last[:-1])
    assert len(read_trace(file).requests) == 3


@pytest.mark.parametrize("rest", ["garbage", '{"hash_ids": [1}'])
def test_what_is_no_trace_at_its_end_is_refused(tmp_path: Path, rest: str) -> None:
    file = recorded(tmp_path / "trace.jsonl", ["ab"])
    file.write_text(file.read_text() + rest)
    with pytest.raises(ConfigError, match="line 3: give one JSON object a line"):
        read_trace(file)


def test_names_of_blocks_may_have_any_characters(tmp_path: Path) -> None:
    """Some of them end a line elsewhere. A file of brackets alone is refused like all that is no trace."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": ["a\u2028b", "\x85"]}\n{"hash_ids": ["a\u2028b"]}', encoding="utf-8")
    assert list(map(len, read_trace(file).requests)) == [2, 1]
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="line 1: give one JSON object a line"):
        read_trace(file)


def _record_and_end(file: Path) -> None:
    recorder = TraceRecorder(file, BLOCK)
    _KEPT.append(recorder)
    for second in range(2000):
        recorder.record(float(second), 9, 1, path("ab"))


_KEPT: list[TraceRecorder] = []
"""What a child of multiprocessing holds until it ends."""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_all_is_written_when_a_process_ends_that_never_closed_it(tmp_path: Path, method: str) -> None:
    """Engines are children of multiprocessing, which run no atexit when they were forked."""
    file = tmp_path / "trace.jsonl"
    child = multiprocessing.get_context(method).Process(target=_record_and_end, args=(file,))
    child.start()
    child.join()
    assert child.exitcode == 0 and len(lines(file)) == 2001


def test_a_disk_that_hangs_holds_no_engine_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it serves nor when it ends."""
    monkeypatch.setattr(recorder_module, "_CLOSE_SECONDS", 0.0)
    is_back = threading.Event()
    write = os.write

    def hang(descriptor: int, data: memoryview) -> int:
        is_back.wait()
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", hang)
        recorder = TraceRecorder(tmp_path / "trace.jsonl", BLOCK)
        for second in range(5000):
            recorder.record(float(second), 9, 1, path("ab"))
        recorder.close()
        is_back.set()


def test_what_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    config = Config(host_memory=1 << 20, record_trace=str(tmp_path / "no" / "such" / "trace.jsonl"))
    with pytest.raises(ConfigError, match=r"record_trace='.*trace\.jsonl' cannot be written: .*; give a file"):
        build_scheduler(config, BLOCK)


def test_engines_that_do_not_tell_of_requests_refuse_it() -> None:
    slot = Slot("SGLang", "pages", "", "", "", (), "")
    with pytest.raises(ConfigError, match="requests of SGLang are not recorded, those of vLLM are: leave it out"):
        read_config({"host_memory": "1GiB", "record_trace": "/tmp/trace.jsonl"}, slot)
