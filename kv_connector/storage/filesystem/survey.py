"""A look at a folder of packs from outside, whoever uses it: nothing here needs to know whose blocks they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..macs import check_of
from .layout import FolderLayout
from .packs import PackHeader, open_file, read_header
from .temporaries import list_temporaries

DAMAGED = "are damaged"


@dataclass(frozen=True, slots=True)
class PackFile:
    """A file that should be a pack; `header` is None where it is not one, or the disk does not give it, and `problem`
    says why. Of what the disk does not give (`was_read`) nobody knows whether it is good."""

    path: Path
    num_bytes: int
    used_ns: int
    header: PackHeader | None
    problem: str = ""
    was_read: bool = True

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


def damaged_blocks(pack: PackFile, secret: bytes = b"") -> dict[int, str]:
    """Slots whose bytes are not those that were written, or that the disk does not give; `DAMAGED`, or why they cannot
    be read. Raises FileNotFoundError where the pack has vanished, and OtherSecretError where its blocks cannot be
    checked with this secret, which is empty where none is known."""
    header = pack.header
    assert header is not None
    check = check_of(header.checksum_bytes, secret, header.identity)
    try:
        descriptor = open_file(pack.path)
    except FileNotFoundError:
        raise
    except OSError as error:
        return dict.fromkeys(range(len(header.checksums)), _unread(error))
    found = {}
    try:
        for slot, (key, checksum) in enumerate(zip(header.keys, header.checksums, strict=True)):
            try:
                block = os.pread(descriptor, header.block_bytes, header.offset(slot))
                if not check.fits(key, memoryview(block), checksum):
                    found[slot] = DAMAGED
            except OSError as error:  # a bad sector: the next block may be good
                found[slot] = _unread(error)
    finally:
        os.close(descriptor)
    return found


def temporary_files(root: Path) -> dict[Path, int]:
    """Packs that are being written, or were when somebody was killed, and their bytes; those that are whole meanwhile
    are left out. Raises OSError as `survey` does."""
    layout = FolderLayout(root)
    layout.require()
    found = {}
    for path in list_temporaries(layout.temporaries):
        with suppress(FileNotFoundError):
            found[path] = _size_and_time(path)[0]
    return found


def _look_at(path: Path) -> PackFile:
    """Raises FileNotFoundError alone: what else the disk says is this pack's problem, and no other's."""
    try:
        status, header, problem = read_header(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        return PackFile(path, *_size_and_time(path), None, _unread(error), was_read=False)
    return PackFile(path, status.st_size, status.st_mtime_ns, header, problem)


def _size_and_time(path: Path) -> tuple[int, int]:
    """Of a file that may be unreadable; nothing and long ago where not even that is known."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _unread(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"
