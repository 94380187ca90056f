"""Config to halves (layer 3): the only place that knows which concrete parts an engine gets."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import Config, StorageConfig
    from .index import CacheIdentity
    from .scheduler import SchedulerHalf
    from .storage.base import Storage
    from .worker import WorkerHalf


def build_scheduler(config: Config, block_size: int, world_size: int = 1, **options: Any) -> SchedulerHalf:
    """The scheduler half of one engine. `block_size` in tokens; `options` as for `SchedulerHalf`."""
    from .scheduler import SchedulerHalf

    return SchedulerHalf(config, block_size, world_size, **options)


def build_worker(
    config: Config, rank: int = 0, world_size: int = 1, identity: CacheIdentity | None = None, **options: Any
) -> WorkerHalf:
    """The worker half of one rank; `options` as for `WorkerHalf`. Imports torch.

    `identity` is that of the scheduler half; storage keeps it beside the blocks.
    """
    from .worker import WorkerHalf

    if config.storage is not None:
        options["open_storage"] = partial(_open_storage, config.storage, identity, rank, world_size)
    return WorkerHalf(config, rank, world_size, **options)


def _open_storage(
    config: StorageConfig,
    identity: CacheIdentity | None,
    rank: int,
    world_size: int,
    block_bytes: int,
    pool: memoryview,
) -> Storage:
    name = (identity.encode() if identity is not None else b"") + f"|rank {rank} of {world_size}".encode()
    digest = hashlib.sha256(b"kvc1.storage" + name).digest()
    if config.kind == "mooncake":
        from .storage.mooncake import MooncakeStorage
        from .storage.mooncake_client import MooncakeClient, MooncakeOptions

        client = MooncakeClient(MooncakeOptions.of(config, world_size))
        return MooncakeStorage(client, digest, block_bytes, pool)
    from .storage.filesystem import FilesystemStorage

    try:
        return FilesystemStorage(Path(config.path), digest, block_bytes, config.capacity)
    except (OSError, ValueError) as error:
        raise ConfigError(f"storage at {config.path!r} cannot be used: {error}") from error
