"""Config to halves (layer 3): the only place that knows which concrete parts an engine gets."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import PeerRoute
from .errors import ConfigError, KVConnectorError
from .values import shortened, shown

if TYPE_CHECKING:
    from .config import Config, PeerConfig, StorageConfig
    from .index import CacheIdentity
    from .peer.base import PeerIdentity, PeerPool, PeerTransport
    from .peer.protocol.jobs import PeerJobs
    from .peer.wire.peer_info import PeerInfo
    from .scheduler import SchedulerHalf
    from .storage.base import Storage
    from .worker import WorkerHalf


logger = logging.getLogger("kv_connector.peer")


def build_scheduler(config: Config, block_size: int, world_size: int = 1, **options: Any) -> SchedulerHalf:
    """The scheduler half of one engine. `block_size` in tokens; `options` as for `SchedulerHalf`. Raises
    KVConnectorError for a block size or a number of ranks that cannot be, ConfigError for settings."""
    from .scheduler import SchedulerHalf

    _check_argument("block_size", block_size, 1)
    _check_argument("world_size", world_size, 1)
    return SchedulerHalf(config, block_size, world_size, **options)


def build_worker(
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    identity: CacheIdentity | None = None,
    engine_id: str = "",
    **options: Any,
) -> WorkerHalf:
    """The worker half of one rank; `options` as for `WorkerHalf`. Imports torch.

    `identity` and `engine_id` are those of the scheduler half: storage keeps the identity beside the blocks, and other
    engines are told both. Raises KVConnectorError for a rank that is none of `world_size`.
    """
    from .worker import WorkerHalf

    _check_argument("world_size", world_size, 1)
    _check_argument("rank", rank, 0, world_size - 1)
    if config.storage is not None:
        options["open_storage"] = partial(_open_storage, config.storage, identity, rank, world_size)
    if config.peer is not None:
        options["open_peers"] = partial(_open_peers, config.peer, identity, engine_id, rank)
    return WorkerHalf(config, rank, world_size, **options)


def _check_argument(name: str, value: object, least: int, most: int | None = None) -> None:
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise KVConnectorError(f"{name}={shown(value)} cannot be: give an integer {limits}")


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
        from .storage.mooncake.backend import MooncakeStorage
        from .storage.mooncake.client import MooncakeClient, MooncakeOptions

        client = MooncakeClient(MooncakeOptions.of(config, world_size))
        return MooncakeStorage(client, digest, block_bytes, pool)
    from .storage.filesystem.backend import FilesystemStorage

    try:
        return FilesystemStorage(Path(config.path).expanduser(), digest, block_bytes, config.capacity)
    except (OSError, ValueError, RuntimeError) as error:  # the last where `~` is nobody's
        raise ConfigError(f"storage at {shown(config.path)} cannot be used: {shortened(str(error))}") from error


_Where = tuple["PeerInfo", str, int, bytes, float]
_Open = Callable[[], "PeerTransport"]


def _open_peers(
    config: PeerConfig, identity: CacheIdentity | None, engine_id: str, rank: int, pool: PeerPool
) -> PeerJobs:
    from .peer.base import PeerIdentity
    from .peer.protocol.jobs import PeerJobs

    if identity is None:
        raise ConfigError("peer needs the engine's identity: pass it to build_scheduler and build_worker")
    known = PeerIdentity(
        model=identity.model,
        cache_dtype=identity.cache_dtype,
        layout=identity.layout,
        block_size=identity.block_size,
        tp_size=identity.tp_size,
        pp_size=identity.pp_size,
        rank=rank,
        pieces=pool.pieces,
    )
    transport = open_transport(config, known, engine_id, pool)
    deadline, timeout = config.deadline_ms / 1e3, config.timeout_ms / 1e3
    jobs = PeerJobs(
        transport, engine_id, len(pool.regions), rank, deadline, timeout, prepare_thread=pool.prepare_thread
    )
    jobs.start()
    return jobs


def open_transport(config: PeerConfig, identity: PeerIdentity, engine_id: str, pool: PeerPool) -> PeerTransport:
    """The links of one rank, for its pool. Raises ConfigError where they cannot be opened."""
    from .peer.base import PeerError
    from .peer.wire.peer_info import PeerInfo

    info = PeerInfo(identity, engine_id, pool.num_blocks)
    port = config.port + identity.rank if config.port else 0
    where: _Where = info, config.bind, port, config.secret.encode(), config.timeout_ms / 1e3
    open_direct, open_staged = (_nixl if config.kind == "nixl" else _same_host)(pool, where, config.staging_memory)
    if config.route is not PeerRoute.STAGED and open_direct is not None:
        try:
            return open_direct()
        except PeerError as error:
            if config.route is PeerRoute.DIRECT:
                raise ConfigError(
                    f"peer.route='direct' cannot be taken: {error}; give 'auto' or 'staged' to go through host memory"
                ) from error
            logger.warning("blocks for other engines go through host memory: %s", error)
    elif config.route is PeerRoute.DIRECT:
        raise ConfigError(
            f"peer.route='direct' is for GPUs with peer.kind={config.kind!r}: leave it out, or give kind 'nixl'"
        )
    return open_staged()


def _nixl(pool: PeerPool, where: _Where, staging_bytes: int) -> tuple[_Open | None, _Open]:
    from .peer.carriers.nixl import NixlTransport
    from .peer.carriers.nixl_agent import start_agent
    from .peer.carriers.staged.nixl import NixlStagedTransport

    agent = start_agent()
    return partial(NixlTransport, agent, pool, *where), partial(NixlStagedTransport, agent, pool, *where, staging_bytes)


def _same_host(pool: PeerPool, where: _Where, staging_bytes: int) -> tuple[_Open | None, _Open]:
    from .peer.carriers.cuda_ipc import CudaIpcTransport
    from .peer.carriers.staged.shared_memory import SharedMemoryTransport

    open_direct = partial(CudaIpcTransport, pool, *where) if pool.device >= 0 else None
    return open_direct, partial(SharedMemoryTransport, pool, *where, staging_bytes)
