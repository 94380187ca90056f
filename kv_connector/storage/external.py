"""Storage backends that are not ours: named by the setting `storage.kind` as `module:function`.

The function is called in the worker half of each rank, or of the first of those that share host memory, and returns a
`Storage`. Whatever that does, `checked.py`
stands in front of it: no byte reaches a block that is not what was written.
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
"""Of `Storage` and `StorageContext`: it grows where a backend that was written for an older one would not do."""

_CALLS = ("exists", "read", "write", "remove", "stats", "close")


@dataclass(frozen=True, slots=True)
class StorageContext:
    """What a backend is told when it is opened.

    identity: 32 bytes that name everything that decides a block's bytes (model, weights, layout, rank of how many).
        Keys name it too: it is of use to keep what belongs together in one place, and to no other end.
    object_bytes: bytes of every object: whole pages, in memory that begins on a page.
    rank, world_size: of the engine's ranks. Each opens a backend of its own; of those with the same identity the first
        on a machine alone, for all of them.
    num_served: how many ranks that are; what an operator gives the engine as a whole is this backend's by so many parts
        of `world_size`.
    version: see `STORAGE_VERSION`.
    """

    identity: bytes
    object_bytes: int
    rank: int = 0
    world_size: int = 1
    version: int = STORAGE_VERSION
    num_served: int = 1


def open_external(kind: str, options: Mapping[str, Any], context: StorageContext) -> Storage:
    """The backend that `kind` names. Imports and calls code of the user's. Raises ConfigError where there is none."""
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
