"""Storage backends that are not ours: named by the setting `storage.kind` as `module:function`.

The function is called in the worker process of each rank, or of the first of those that share host memory, and returns
a `Storage`. `checked.py` wraps it: only bytes that were written under the same key reach a block.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..values import shortened, shown
from .base import Storage

STORAGE_VERSION = 1
"""Of `Storage` and `StorageContext`: it grows with each change that breaks existing backends."""

_CALLS = ("exists", "read", "write", "remove", "stats", "close")


@dataclass(frozen=True, slots=True)
class StorageContext:
    """What a backend is told when it is opened.

    identity: 32 bytes that name everything that decides a block's bytes (model, weights, layout, rank of how many).
        Keys depend on it already: use it only to keep blocks of one identity in one place.
    object_bytes: bytes of every object: whole pages, in memory that begins on a page.
    rank, world_size: this rank and the number of the engine's ranks. Each opens a backend of its own; of ranks with the
        same identity only the first on a machine, for all of them.
    num_served: for how many ranks; of a resource that is given for the whole engine this backend gets
        `num_served / world_size`.
    version: see `STORAGE_VERSION`.
    """

    identity: bytes
    object_bytes: int
    rank: int = 0
    world_size: int = 1
    version: int = STORAGE_VERSION
    num_served: int = 1


def open_external(kind: str, options: Mapping[str, Any], context: StorageContext) -> Storage:
    """The backend that `kind` names. Imports and calls the user's code. Raises ConfigError where that fails."""
    module_name, _, name = kind.partition(":")
    try:
        open_storage = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever importing it raises
        raise ConfigError(
            f"storage.kind={shown(kind)} cannot be imported ({shortened(repr(error))}): give 'module:function' as this "
            "process can import it"
        ) from error
    try:
        storage = open_storage(context, dict(options))
    except Exception as error:
        raise ConfigError(f"storage.kind={shown(kind)} cannot be opened: {shortened(repr(error))}") from error
    missing = [call for call in _CALLS if not callable(getattr(storage, call, None))]
    if missing:
        raise ConfigError(
            f"storage.kind={shown(kind)} returned {shown(storage)}, which has no {', '.join(missing)}: return a "
            "kv_connector.storage.Storage"
        )
    opened: Storage = storage
    return opened
