"""Libraries of CUDA that are packed for one GPU: only what it cannot run is blanked."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from integration.one_architecture import main

PTX, CODE = 1, 2


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(code), architecture)
    return header.ljust(64, b"\x11") + code


def binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


CODES = {name: name.encode() * 8 for name in ("a75", "a80", "a86", "a90", "b120", "b80", "ptx9", "ptx8")}
BLANK = {name: bytes(len(code)) for name, code in CODES.items()}


def library(codes: dict[str, bytes]) -> bytes:
    """Two fat binaries, of which one has code of capability 9.0 and the other PTX for it, and what looks like one."""
    both = binary(
        entry(CODE, 75, codes["a75"]),
        entry(CODE, 80, codes["a80"]),
        entry(CODE, 86, codes["a86"]),
        entry(CODE, 90, codes["a90"]),
        entry(PTX, 90, codes["ptx9"]),
    )
    compiled = binary(entry(CODE, 80, codes["b80"]), entry(CODE, 120, codes["b120"]), entry(PTX, 80, codes["ptx8"]))
    looks_like_one = b"\x50\xed\x55\xba" + b"code of the host" * 3
    return b"\x7fELF----" + both.ljust(-(-len(both) // 8) * 8, b"-") + looks_like_one.ljust(56, b"-") + compiled


@pytest.mark.parametrize(
    ("architecture", "kept"),
    [(90, {"a90", "ptx8"}), (86, {"a80", "a86", "b80"}), (80, {"a80", "b80"}), (70, {"ptx9", "ptx8"})],
)
def test_what_a_gpu_cannot_run_is_blanked_and_nothing_moves(tmp_path: Path, architecture: int, kept: set[str]) -> None:
    path, empty = tmp_path / "lib.so", tmp_path / "empty.so"
    path.write_bytes(library(CODES))
    empty.write_bytes(b"")
    assert main([str(architecture), str(path), str(empty)]) == 0
    assert path.read_bytes() == library(BLANK | {name: CODES[name] for name in kept})


def test_a_file_of_another_format_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(binary(entry(CODE, 90, b"code")[:-1] + b"\x00").replace(struct.pack("<I", 64), bytes(4)))
    with pytest.raises(ValueError, match="no entry of a fat binary"):
        main(["90", str(path)])


@pytest.mark.parametrize("length", [1, 8, 15])
def test_what_only_looks_like_a_binary_at_the_end_of_a_file_is_left(tmp_path: Path, length: int) -> None:
    path = tmp_path / "lib.so"
    content = library(CODES).ljust(800, b"-") + binary()[: 3 + length]
    path.write_bytes(content)
    assert main(["90", str(path)]) == 0
    assert path.read_bytes()[-3 - length :] == content[-3 - length :]


def test_a_binary_that_ends_in_a_header_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 24) + bytes(24))
    with pytest.raises(ValueError, match="no entry of a fat binary"):
        main(["90", str(path)])
