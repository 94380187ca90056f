"""Which identities a folder of packs has seen, to be read by people: `identities/DIGEST.json`, a small object of text.

Packs name a digest only. The file of the same first 16 digits says what it stands for, so that a start on a model whose
weights or settings have changed can say what is different, and what of the folder it cannot use. Nothing is decided by
these files; whoever deletes them loses one line of a log.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("kv_connector.storage")

_FOLDER = "identities"
_MOST_BYTES = 64 << 10
_MOST_FILES = 256
"""Those used last are kept."""


def note_identity(root: Path, digest: bytes, parts: Mapping[str, str]) -> None:
    """Called once at a start, before anything is read. Logs what differs from the last start on the same model and rank
    in this folder. A disk that fails costs a line in the log."""
    folder = root / _FOLDER
    own = folder / f"{digest.hex()[:16]}.json"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        _warn_of_change(root, parts, next(_alike(files, parts), parts))
        _write(own, parts)
        for path in files[_MOST_FILES:]:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("storage at %s: what identifies its blocks cannot be noted there: %s", root, error)


def _alike(files: list[Path], parts: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """What the files say that are of the same model and rank."""
    for path in files:
        with suppress(OSError, ValueError):
            found = json.loads(_read(path))
            if isinstance(found, dict) and all(found.get(name) == parts.get(name) for name in ("model", "rank")):
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


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _write(path: Path, parts: Mapping[str, str]) -> None:
    """Whole or not at all: others read it while they start."""
    temporary = path.with_name(f"{secrets.token_hex(8)}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            json.dump(dict(parts), file, indent=1)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
