"""Blank the code of all GPUs but one in CUDA libraries, so that a bundle of them packs into a third.

    python -m integration.one_architecture 90 FILE ...        of compute capability 9.0; the files are changed in place

A library carries its kernels once for each architecture, in fat binaries: a header, and then entries with a header and
their code each. The driver takes an entry by what its header says, so headers stay as they are and nothing moves: code
that this GPU cannot run becomes zeros, and so does PTX, which serves later GPUs, where there is code for it. Formats as
in the sources of cuda-fatbin-decompression (https://github.com/n-eiling/cuda-fatbin-decompression).
"""

from __future__ import annotations

import argparse
import mmap
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MAGIC = struct.pack("<I", 0xBA55ED50)
_BINARY = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, -, bytes of this header, bytes behind it, architecture
_PTX, _CODE = 1, 2


class Entry(NamedTuple):
    """Where the code of an entry lies in its file, in bytes, and what it is of."""

    kind: int
    architecture: int
    start: int
    end: int


def fat_binaries(file: mmap.mmap) -> Iterator[list[Entry]]:
    """The entries of each of a file's fat binaries. Raises ValueError where one is not as expected."""
    position = 0
    while 0 <= (position := file.find(_MAGIC, position)) <= len(file) - _BINARY.size:
        _, version, header, size = _BINARY.unpack_from(file, position)
        start, position = position, position + len(_MAGIC)
        if start % 8 or (version, header) != (1, _BINARY.size) or start + header + size > len(file):
            continue  # it only looks like one
        yield list(_entries(file, start + header, start + header + size))
        position = start + header + size


def _entries(file: mmap.mmap, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        whole = position + _ENTRY.size <= end
        kind, _, header, size, architecture = _ENTRY.unpack_from(file, position) if whole else (0,) * 5
        if header < _ENTRY.size or position + header + size > end:
            raise ValueError(f"at byte {position}: no entry of a fat binary")
        yield Entry(kind, architecture, position + header, position + header + size)
        position += header + size


def keep_one(path: Path, architecture: int) -> int:
    """Blank what a GPU of this compute capability (90 for 9.0) cannot run or has no need of; returns how many bytes.

    Code runs on GPUs of its major number, from its minor number on. PTX is left where there is no such code."""
    num_blanked = 0
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as file:
        for entries in fat_binaries(file):
            usable = {entry for entry in entries if entry.kind == _CODE and _runs(entry, architecture)}
            for entry in entries:
                if entry not in usable and (entry.kind == _CODE or (entry.kind == _PTX and usable)):
                    file[entry.start : entry.end] = bytes(entry.end - entry.start)
                    num_blanked += entry.end - entry.start
    return num_blanked


def _runs(entry: Entry, architecture: int) -> bool:
    return entry.architecture // 10 == architecture // 10 and entry.architecture <= architecture


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", type=int, help="90 for compute capability 9.0")
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    for path in options.files:
        if path.stat().st_size:
            print(f"{path.name}: {keep_one(path, options.architecture) >> 20} MiB blanked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
