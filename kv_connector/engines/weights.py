"""Which weights an engine has loaded, by the path or the name that it was given."""

from __future__ import annotations

import logging
from pathlib import Path

from ..fingerprint import changes_of, fingerprint_of

logger = logging.getLogger("kv_connector.engines")


def local_fingerprint(name: str, revision: str | None = None, download_dir: str | None = None) -> str | None:
    """The fingerprint of weights by a path, or by a hub's name if downloaded; None, and a line in the log, if they
    cannot be read."""
    path = Path(name).expanduser()
    try:
        if not path.exists():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
        return fingerprint_of(path)
    except (OSError, ValueError) as error:
        logger.warning("the weights of %s cannot be read: %s", name, error)
        return None


def local_changes(name: str) -> tuple[tuple[str | int, ...], ...]:
    """Of the files at a path, see `changes_of`: empty where it is none, or cannot be looked at."""
    try:
        return changes_of(Path(name).expanduser())
    except OSError:
        return ()


def named_weights(name: str, load_format: object, revision: str | None = None, download_dir: str | None = None) -> str:
    """Their fingerprint; without one their name, and a line in the log."""
    found = local_fingerprint(name, revision, download_dir)
    if found is None:
        logger.warning(
            "the weights of %s are identified by this name alone: when they are replaced, clear the storage", name
        )
    return f"{found or name} {load_format}"
