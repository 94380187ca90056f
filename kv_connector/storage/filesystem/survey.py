"""A look at a folder of packs from outside, whoever uses it: nothing here needs to know whose blocks they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checksums import crc32
from .layout import FolderLayout
from .packs import PackHeader, open_file, read_header
from .temporaries import list_temporaries


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
        return self.path.stem


def survey(root: Path) -> Iterator[PackFile]:
    """Every pack of the folder, by name; those that vanish meanwhile are left out. Raises OSError for no folder and for
    one that is not ours."""
    layout = FolderLayout(root)
    layout.require()
    for name in sorted(layout.pack_names()):
        try:
            yield _look_at(layout.path(name))
        except FileNotFoundError:
            continue


def damaged_blocks(pack: PackFile) -> list[int]:
    """Slots whose bytes are not those that were written. Raises OSError."""
    header = pack.header
    assert header is not None
    damaged = []
    descriptor = open_file(pack.path)
    try:
        for slot, checksum in enumerate(header.checksums):
            if crc32(os.pread(descriptor, header.block_bytes, header.offset(slot))) != checksum:
                damaged.append(slot)
    finally:
        os.close(descriptor)
    return damaged


def temporary_files(root: Path) -> list[Path]:
    """Packs that are being written, or were when somebody was killed. Raises OSError as `survey` does."""
    layout = FolderLayout(root)
    layout.require()
    return sorted(list_temporaries(layout.temporaries))


def _look_at(path: Path) -> PackFile:
    status, header, problem = read_header(path)
    return PackFile(path, status.st_size, status.st_mtime_ns, header, problem)
