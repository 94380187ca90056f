"""Fingerprints of weights, from names, sizes, times and samples of their files (layer 0).

    a snapshot of a hub's cache        the commit that its folder is named by: files under it never change
    a folder, or one file              of every file that weights are read from: name, size, time of its last change,
                                       and a digest of its head, where formats keep their headers, and of pages spread
                                       over the rest;
                                       of small files of settings all bytes, and no time

Who replaces weights at the same path changes a time as a rule. Where all files have one that was made up (images that
are built to be equal), the pages tell: training changes whole tensors. A copy is taken for the same weights where it
was made with its times (`cp -p`, `rsync -a`).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path

_HEAD_BYTES = 64 << 10
"""Of a safetensors file the shapes and names of its tensors, as a rule all of them."""
_PAGE_BYTES = 4 << 10
_PAGES = 1024
"""Of all files together: some milliseconds from memory, a tenth of a second from a disk."""
_LEAST_PAGES = 4
_SETTINGS_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz")
_SETTINGS = re.compile(r"(?!tokenizer|generation).*config.*\.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
"""Of Git; a hub's cache has folders `models--NAME/snapshots/COMMIT`."""


def fingerprint_of(path: Path) -> str | None:
    """One line for the weights in a folder or a file: equal where they are the same ones. None where there are none.

    Reads the first 64 KiB and some pages of each file, 1 MiB of settings at most. Raises OSError where something
    cannot be read.
    """
    folder = path.parent if path.is_file() else path
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return f"commit {folder.name}"
    weights, settings = _files(path)
    if not weights:
        return None
    digest = hashlib.sha256()
    num_pages = max(_LEAST_PAGES, _PAGES // len(weights))
    for part in (*(_weights(file, num_pages) for file in weights), *map(_settings, settings)):
        digest.update(part)
    num_bytes = sum(file.stat().st_size for file in weights)
    count = "1 file" if len(weights) == 1 else f"{len(weights)} files"
    return f"{count} of {num_bytes} bytes, {digest.hexdigest()[:32]}"


def changes_of(path: Path) -> tuple[tuple[str | int, ...], ...]:
    """What the file system says of the files that `fingerprint_of` reads, which it does not: while this stays, they do.
    Empty where there are none. Raises OSError where something cannot be looked at."""
    found = []
    for file in (file for files in _files(path) for file in files):
        status = file.stat()
        found.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Of weights and of settings; none where nothing is there."""
    if path.is_file():
        return [path], []
    if not path.is_dir():
        return [], []
    with os.scandir(path) as entries:
        files = sorted(Path(entry) for entry in entries if entry.is_file())
    weights = [file for file in files if file.name.endswith(_WEIGHTS)]
    return weights, [file for file in files if _SETTINGS.fullmatch(file.name)]


def _weights(path: Path, num_pages: int) -> bytes:
    """Its end is one of the pages. They lie where chance has it, but always there: tensors have sizes that are powers
    of two, so pages at equal distances would all miss alike."""
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        last = max(0, status.st_size - _PAGE_BYTES)
        chance = random.Random(status.st_size)
        places = {last, *(chance.randrange(0, last + 1, _PAGE_BYTES) for _ in range(num_pages - 1))}  # each once
        head = os.pread(file.fileno(), _HEAD_BYTES, 0)
        pages = [os.pread(file.fileno(), _PAGE_BYTES, place) for place in sorted(places)]
    return _digest((path.name.encode(), b"%d %d" % (status.st_size, status.st_mtime_ns), head, *pages))


def _settings(path: Path) -> bytes:
    with open(path, "rb") as file:
        return _digest((path.name.encode(), file.read(_SETTINGS_BYTES)))


def _digest(parts: Iterable[bytes]) -> bytes:
    """Of digests: where one part ends and the next begins is told."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
