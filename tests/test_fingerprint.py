"""What tells weights from others, told from some of their bytes and their times."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kv_connector.fingerprint import changes_of, fingerprint_of
from tests.waiting import until

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files of weights beside settings and what decides no byte of a cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 200_000)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


def test_the_same_weights_have_the_same_fingerprint_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    first = fingerprint_of(model)
    assert first is not None
    assert first.startswith("2 files of 400000 bytes, ")
    assert fingerprint_of(model) == first
    assert fingerprint_of(Path(shutil.copytree(model, tmp_path / "copy"))) == first, "copied with their times"
    (model / "README.md").write_text("a good model")
    (model / "tokenizer_config.json").write_text('{"a": 1}')
    os.utime(model / "config.json", ns=(0, 0))
    assert fingerprint_of(model) == first, "none of these decides what a layer computes"


@pytest.mark.parametrize("change", ["time", "head", "tail", "size", "name", "fewer", "more", "settings"])
def test_whatever_is_replaced_is_noticed(model: Path, change: str) -> None:
    """Each alone, the time left as it was unless it is the time."""
    first = fingerprint_of(model)
    path = model / "model-1.safetensors"
    status = path.stat()
    content = bytearray(path.read_bytes())
    if change == "head":
        content[1000] ^= 1
    elif change == "tail":
        content[-1] ^= 1
    elif change == "size":
        content += b"\1"
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "time")))
    if change == "name":
        path.rename(model / "model-2.safetensors")
    elif change == "fewer":
        path.unlink()
    elif change == "more":
        (model / "other.bin").write_bytes(b"")
    elif change == "settings":
        (model / "hf_quant_config.json").write_text('{"quant_algo": "FP8"}')
    assert fingerprint_of(model) != first


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"]
)
def test_what_prepares_images_belongs_to_the_weights(model: Path, name: str) -> None:
    (model / name).write_text('{"max_pixels": 12845056}')
    first = fingerprint_of(model)
    (model / name).write_text('{"max_pixels": 100352}')
    assert fingerprint_of(model) != first


def test_weights_with_times_that_were_made_up_are_told_by_their_pages(tmp_path: Path) -> None:
    """In images that are built to be equal all times are. Training changes whole tensors, if only some of them."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.safetensors"
        with open(path, "wb") as file:
            file.truncate(1 << 30)
            for layer in range(32):  # one matrix of each, a hundredth of all bytes
                file.seek(((layer + 1) << 24) + 12_345)
                file.write((name[:1] * 320_000).encode())
        os.utime(path, ns=(1, 1))
    first, second = (fingerprint_of(tmp_path / name) for name in ("first", "second"))
    assert first != second


def test_a_snapshot_of_a_hub_is_its_commit(model: Path, tmp_path: Path) -> None:
    """As their cache lays it out: the same on every machine, whatever the times of a download."""
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    shutil.copytree(model, folder)
    assert fingerprint_of(folder) == f"commit {COMMIT}"
    assert fingerprint_of(folder / "model-0.safetensors") == f"commit {COMMIT}"


def test_one_file_is_weights_too(model: Path) -> None:
    """Such as a GGUF file, which may have any name."""
    first = fingerprint_of(model / "model-0.safetensors")
    assert first is not None
    assert first.startswith("1 file of 200000 bytes, ")
    os.utime(model / "model-0.safetensors", ns=(1, 1))
    assert fingerprint_of(model / "model-0.safetensors") != first


def test_where_no_weights_are_there_is_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint_of(tmp_path) is None
    assert fingerprint_of(tmp_path / "org" / "name") is None


def test_whole_files_are_not_read(tmp_path: Path) -> None:
    """200 files of a gigabyte: a few megabytes of them are looked at."""
    for number in range(200):
        with open(tmp_path / f"model-{number:03}.safetensors", "wb") as file:
            file.truncate(1 << 30)
    before = _bytes_read()
    assert fingerprint_of(tmp_path) is not None
    assert _bytes_read() - before < 200 * (96 << 10)


def _bytes_read() -> int:
    """By this process, by all its calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


@pytest.mark.parametrize("change", ["time", "content", "in place", "fewer", "more", "settings"])
def test_a_change_is_seen_without_reading(model: Path, change: str) -> None:
    """Also one that leaves times and sizes as they were; what decides nothing is not looked at."""
    first = changes_of(model)
    (model / "README.md").write_text("a good model")
    assert changes_of(model) == first != ()
    path = model / "model-1.safetensors"
    status = path.stat()

    def is_another_moment() -> bool:
        """For the file system, whose clock goes in steps of milliseconds."""
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return path.stat().st_ctime_ns != status.st_ctime_ns

    if change == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif change == "content":
        new = path.with_name("new")
        new.write_bytes(bytes(status.st_size))
        new.replace(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "in place":
        until(is_another_moment)
    elif change == "fewer":
        path.unlink()
    elif change == "more":
        (model / "other.bin").write_bytes(b"")
    elif change == "settings":
        (model / "config.json").write_text("{ }")
    assert changes_of(model) != first
    assert changes_of(model / "nowhere") == ()
