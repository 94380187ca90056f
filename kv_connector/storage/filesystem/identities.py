"""Which identities a folder of packs has seen, to be read by people: `identities/DIGEST.json`, a small object of text.

Packs name a digest only. The file of the same first 16 digits says what it stands for, so that a start on a model whose
weights or settings have changed can say what is different, and what of the folder it cannot use. Nothing is decided by
these files; whoever deletes them loses one line of a log. What has another name is nobody's business here, and neither
the folder nor a file in it is followed where it is a link.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .layout import IDENTITIES

logger = logging.getLogger("kv_connector.storage")

_OURS = re.compile(r"[0-9a-f]{16}\.json")
_MOST_BYTES = 64 << 10
_SAME = ("model", "rank", "pool")
_MOST_FILES = 256
"""Those used last are kept."""


def note_identity(root: Path, digest: bytes, parts: Mapping[str, str]) -> None:
    """Called once at a start, before anything is read. Logs what differs from the last start on the same model, rank
    and pool in this folder. A disk that fails costs a line in the log."""
    own = f"{digest.hex()[:16]}.json"
    try:
        with _opened(root / IDENTITIES) as folder:
            names = _last_used_first(folder)
            _warn_of_change(root, parts, next(_alike(folder, names, parts), parts))
            _write(folder, own, parts)
            for name in names[_MOST_FILES:]:
                if name != own:  # which has just been used
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
    except OSError as error:
        logger.warning("storage at %s: what identifies its blocks cannot be noted there: %s", root, error)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the folder itself, made where there is none. Raises OSError, also for a link."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _last_used_first(folder: int) -> list[str]:
    """Names of files that are ours."""
    used_ns = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another start has deleted it
                    used_ns[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    return sorted(used_ns, key=used_ns.__getitem__, reverse=True)


def _alike(folder: int, names: list[str], parts: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """What the files say that are of the same model, rank and pool."""
    for name in names:
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(_read(folder, name))
            if isinstance(found, dict) and all(found.get(name) == parts.get(name) for name in _SAME):
                yield {name: str(value) for name, value in found.items()}


def _warn_of_change(root: Path, parts: Mapping[str, str], last: Mapping[str, str]) -> None:
    changes = [
        f"{name} was {last.get(name, '')!r} and is {parts.get(name, '')!r}"
        for name in dict.fromkeys((*last, *parts))
        if last.get(name, "") != parts.get(name, "")
    ]
    if changes:
        text = "storage at %s: nothing that the last engine stored for model %r can be used: %s"
        logger.warning(text, root, parts.get("model", ""), "; ".join(changes))


def _read(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _write(folder: int, name: str, parts: Mapping[str, str]) -> None:
    """Whole or not at all: others read it while they start."""
    temporary = f"{secrets.token_hex(8)}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "w") as file:
            json.dump(dict(parts), file, indent=1)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
