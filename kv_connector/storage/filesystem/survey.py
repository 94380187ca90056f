"""A look at a folder of packs from outside, whoever uses it: nothing here needs to know whose blocks they are."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .folder import SUFFIX
from .packs import PackHeader, read_header


@dataclass(frozen=True, slots=True)
class PackFile:
    """A file that should be a pack; `header` is None where it is not one, and `problem` says why."""

    path: Path
    num_bytes: int
    used_ns: int
    header: PackHeader | None
    problem: str = ""

    @property
    def name(self) -> str:
        """Its 64 hexadecimal digits."""
        return self.path.name.removesuffix(SUFFIX)


def survey(root: Path) -> Iterator[PackFile]:
    """Every pack of the folder, in no order; those that vanish meanwhile are left out. Raises OSError for no folder."""
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir() and entry.name != "tmp")
    for folder in folders:
        for path in sorted((root / folder).glob(f"*{SUFFIX}")):
            try:
                yield _look_at(path)
            except FileNotFoundError:
                continue


def damaged_blocks(pack: PackFile) -> list[int]:
    """Slots whose bytes are not those that were written. Raises OSError."""
    header = pack.header
    assert header is not None
    damaged = []
    with open(pack.path, "rb", buffering=0) as file:
        for slot, checksum in enumerate(header.checksums):
            file.seek(header.offset(slot))
            if zlib.crc32(file.read(header.block_bytes)) != checksum:
                damaged.append(slot)
    return damaged


def temporary_files(root: Path) -> list[Path]:
    """Packs that are being written, or were when somebody was killed."""
    folder = root / "tmp"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _look_at(path: Path) -> PackFile:
    status, header, problem = read_header(path)
    return PackFile(path, status.st_size, status.st_mtime_ns, header, problem)
