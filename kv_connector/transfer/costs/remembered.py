"""Small texts in the user's cache folder that outlive a start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("kv_connector.transfer")


def cache_folder() -> Path:
    """Where they are kept: in `XDG_CACHE_HOME`, or `~/.cache`. Raises OSError for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv_connector"
    except RuntimeError as error:  # as in a container that runs under any number
        raise OSError(f"{error} Give XDG_CACHE_HOME.") from error


def recall(name: str) -> str | None:
    """What was remembered under this name of a file; None where nothing is known."""
    try:
        return (cache_folder() / name).read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the latter of bytes that are no text
        logger.warning("%s, which an earlier start may have left, cannot be read: %s", name, error)
        return None


def is_known(name: str) -> bool:
    """Whether something was remembered under this name, whether or not it can be read."""
    try:
        os.stat(cache_folder() / name)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("whether an earlier start has left %s cannot be seen: %s", name, error)
        return False
    return True


def remember(name: str, text: str) -> Path | None:
    """Keep a text under this name, whole or not at all; the file, or None where it cannot be written."""
    try:
        path = cache_folder() / name
        temporary = path.with_suffix(f".{os.getpid()}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_text(text)
            temporary.chmod(0o600)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # it is there where something failed
    except OSError as error:
        logger.warning("%s cannot be written, and is not remembered: %s", name, error)
        return None
    return path
