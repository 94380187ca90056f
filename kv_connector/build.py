"""Makes the halves from a `Config` (layer 3): the only place that names concrete backends."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .config import PeerRoute
from .config.peer import MOST_PORT
from .errors import ConfigError, KVConnectorError
from .index import RankIdentity, adopt_hash, describe_groups, root_hash
from .values import path_of, shortened, shown

if TYPE_CHECKING:
    from .config import Config, PeerConfig, StorageConfig
    from .index import BlockGroup, CacheIdentity
    from .peer.base import PeerPool, PeerTransport, PoolRegion
    from .peer.carriers.over_channel import Endpoint
    from .peer.identity import PeerIdentity
    from .peer.protocol.jobs import PeerJobs
    from .scheduler import SchedulerHalf
    from .scheduler.control.keeping import PinKeeper
    from .storage.base import GroupedStorage
    from .storage.checksums import BlockCheck
    from .transfer.memory.host_share import Exchange
    from .worker import WorkerHalf


logger = logging.getLogger("kv_connector.peer")
storage_logger = logging.getLogger("kv_connector.storage")


def build_scheduler(config: Config, block_size: int, world_size: int = 1, **options: Any) -> SchedulerHalf:
    """The scheduler half of one engine, for the scheduler's process and thread. `block_size` in tokens; `world_size`
    ranks report to it; `options` as for `SchedulerHalf`. With `record_trace` it opens that file, with `storage` in a
    folder the pin file. Raises KVConnectorError for an impossible block size or number of ranks, ConfigError for
    settings, and for traces that cannot be exported. An observer that raises is removed, and nothing else fails."""
    from .scheduler import SchedulerHalf
    from .scheduler.observers import GuardedObserver

    _check_argument("block_size", block_size, 1)
    _check_argument("world_size", world_size, 1)
    observers = list(options.pop("observers", ()))
    if config.record_trace:
        from .replay.recorder import TraceRecorder
        from .scheduler.recording import RequestRecorder

        recorder = TraceRecorder(path_of("record_trace", config.record_trace), block_size)
        observers.append(RequestRecorder(recorder.record, options.get("clock", time.monotonic)))
    if config.trace_requests:
        from .scheduler.traces import RequestTraces
        from .tracing import open_tracer

        observers.append(RequestTraces(open_tracer(), config.trace_requests))
    options["observers"] = [GuardedObserver(observer) for observer in observers]
    half = SchedulerHalf(config, block_size, world_size, **options)
    if config.storage is not None and (identity := options.get("identity")) is not None:
        half.keep_pins(_open_pin_keeper(config.storage, identity, options.get("groups", ())))
    return half


def _open_pin_keeper(config: StorageConfig, identity: CacheIdentity, groups: Sequence[BlockGroup]) -> PinKeeper:
    """Of engines whose blocks have the names of this one's and follow one another as its do, in a folder; other
    storage keeps no pins."""
    from .scheduler.control.keeping import NoKeeper, WarningKeeper
    from .storage.filesystem.pin_keeper import FolderPinKeeper
    from .storage.macs import choose_check

    if config.kind != "filesystem":
        return WarningKeeper(config.kind)
    root, kinds = root_hash(identity), describe_groups(groups)
    own = adopt_hash(root, hashlib.sha256(kinds.encode()).digest()) if kinds else root
    check, digest = choose_check(config.secret(), own)
    try:
        return FolderPinKeeper(path_of("storage.path", config.path), digest, check)
    except (OSError, ValueError) as error:  # the worker half says so, too, where it can use no storage
        storage_logger.warning("storage at %s: pins end with this engine: %s", config.path, shortened(str(error)))
        return NoKeeper()


def build_worker(
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    identity: CacheIdentity | None = None,
    engine_id: str = "",
    backend: str = "",
    groups: Sequence[BlockGroup] = (),
    num_replicas: int = 1,
    exchange: Exchange | None = None,
    exchange_all: Exchange | None = None,
    packs_pieces: bool = False,
    **options: Any,
) -> WorkerHalf:
    """The worker half of one rank, for that rank's process; `options` as for `WorkerHalf`. Imports torch; memory is
    allocated and files are opened by `register_kv_caches`, not here.

    `identity` and `engine_id` are those of the scheduler half: storage notes the identity beside the blocks, and other
    engines get both, and `backend`, the attention backend of this rank. `groups` are the scheduler half's, and part of
    the identity. With `num_replicas` 4 the caches of ranks 0 to 3 hold the same bytes, those of ranks 4 to 7 do, and so
    on: they have one name in storage, and those of a machine one copy in host memory, for which `exchange` gathers
    values among them (see `host_share.Exchange`). `exchange_all` does so among all ranks: without it several ranks keep
    their blocks raw under `host_form="auto"`. `packs_pieces` is for an engine that is slowed more by many driver copies
    than by packing kernels (see `AutoPath`). Raises KVConnectorError for a rank outside of `world_size`, or a
    `num_replicas` that does not divide it, and ConfigError for a `peer.port` without enough ports above it for all
    ranks.
    """
    from .transfer.form_choice import FormChooser
    from .transfer.paths.choice import make_path
    from .worker import WorkerHalf

    _check_argument("world_size", world_size, 1)
    _check_argument("rank", rank, 0, world_size - 1)
    _check_replicas(num_replicas, world_size)
    own = RankIdentity(identity, rank, world_size, backend, groups=describe_groups(groups))
    if config.storage is not None:
        options["open_storage"] = partial(
            open_storage, config.storage, replace(own, rank=rank - rank % num_replicas), rank
        )
    if config.peer is not None:
        _check_ports(config.peer.port, world_size)
        options["open_peers"] = partial(_open_peers, config.peer, own, engine_id)
    if exchange is not None and num_replicas > 1:
        from .transfer.memory.host_share import share_host

        options["open_share"] = partial(share_host, exchange)
    name_of = partial(_name_of, own) if identity is not None else lambda arrangement: ""
    options["forms"] = FormChooser(config, world_size, exchange_all, name_of)
    options.setdefault("make_path", partial(make_path, packs_pieces=packs_pieces))
    return WorkerHalf(config, rank, world_size, identity=own.shown() if identity is not None else "", **options)


def _name_of(identity: RankIdentity, arrangement: str) -> str:
    return replace(identity, arrangement=arrangement).digest().hex()


def _check_argument(name: str, value: object, least: int, most: int | None = None) -> None:
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise KVConnectorError(f"{name}={shown(value)} cannot be: give an integer {limits}")


def _check_replicas(num_replicas: int, world_size: int) -> None:
    _check_argument("num_replicas", num_replicas, 1)
    if world_size % num_replicas:
        raise KVConnectorError(
            f"num_replicas={num_replicas} cannot be: world_size={world_size} is no multiple of it; give a divisor"
        )


def _check_ports(port: int, world_size: int) -> None:
    most = MOST_PORT - world_size + 1
    if port > most:
        raise ConfigError(
            f"peer.port={port}: rank {world_size - 1} would listen at port {port + world_size - 1}, which is none; "
            f"give at most {most}, or 0 for any that are free"
        )


def open_storage(
    config: StorageConfig,
    identity: RankIdentity,
    rank: int,
    block_bytes: int,
    pool: memoryview,
    arrangement: str,
    num_served: int,
) -> GroupedStorage:
    """Storage for blocks of `block_bytes`, whole pages of memory, in the host memory `pool`, in form `arrangement`.

    `identity` is that of the first rank with the same bytes, `rank` this one, which opens it for `num_served` ranks.
    May create a folder or connect to a server, and logs the identity. Raises ConfigError where it cannot be used.
    """
    from .storage.checksums import warn_where_slow
    from .storage.macs import choose_check

    warn_where_slow()
    identity = replace(identity, arrangement=arrangement)
    check, digest = choose_check(config.secret(), identity.digest())
    parts = {**identity.parts(), **check.parts}
    storage_logger.info("blocks are stored as %s: %s", digest.hex()[:16], parts)
    if config.kind == "mooncake":
        from .storage.mooncake.client import MooncakeClient, MooncakeOptions
        from .storage.objects.backend import ObjectStorage

        client = MooncakeClient(MooncakeOptions.of(config, num_served, identity.world_size))
        return ObjectStorage("mooncake", client, digest, block_bytes, pool, check=check)
    if config.s3 is not None:
        from .storage.s3.backend import open_s3

        return open_s3(config.s3, digest, block_bytes, check=check)
    if config.is_external:
        from .storage.checked import CheckedStorage, object_bytes
        from .storage.external import StorageContext, open_external

        context = StorageContext(digest, object_bytes(block_bytes), rank, identity.world_size, num_served=num_served)
        inner = open_external(config.kind, config.options, context)
        return CheckedStorage(config.kind, inner, digest, block_bytes, check=check)
    return _open_folder(config, digest, block_bytes, check, parts)


def _open_folder(
    config: StorageConfig, digest: bytes, block_bytes: int, check: BlockCheck, parts: Mapping[str, str]
) -> GroupedStorage:
    """Storage in a folder, which has a note of these parts of the identity then."""
    from .storage.filesystem.backend import FilesystemStorage
    from .storage.filesystem.identities import note_identity
    from .storage.filesystem.layout import warn_of_small_disk

    path = path_of("storage.path", config.path)
    try:
        storage = FilesystemStorage(path, digest, block_bytes, config.capacity, check=check)
    except (OSError, ValueError) as error:
        reason = shortened(str(error))
        if isinstance(error, OSError) and error.errno is not None:  # the system's, which knows of no setting
            reason += "; give storage.path a folder that this user may write to, or one that can be made"
        raise ConfigError(f"storage at {shown(config.path)} cannot be used: {reason}") from error
    warn_of_small_disk(path, config.capacity)
    note_identity(path, digest, parts)
    return storage


_Open = Callable[[], "PeerTransport"]


def _open_peers(config: PeerConfig, identity: RankIdentity, engine_id: str, pool: PeerPool) -> PeerJobs:
    from .peer.protocol.jobs import PeerJobs

    known = _peer_identity(replace(identity, arrangement=pool.arrangement), pool.regions)
    transport = open_transport(config, known, engine_id, pool)
    deadline, timeout = config.deadline_ms / 1e3, config.timeout_ms / 1e3
    jobs = PeerJobs(transport, engine_id, known, deadline, timeout, prepare_thread=pool.prepare_thread)
    jobs.start()
    return jobs


def _peer_identity(identity: RankIdentity, regions: Sequence[PoolRegion]) -> PeerIdentity:
    from .peer.identity import PeerIdentity

    cache, rank = identity.cache, identity.rank
    if cache is None:
        raise ConfigError("peer needs the engine's identity: pass it to build_scheduler and build_worker")
    own = {name: getattr(identity, name) for name in ("backend", "arrangement", "groups")}
    pieces = tuple(region.piece_bytes for region in regions)
    heads = tuple(region.num_heads for region in regions), tuple(region.head_bytes for region in regions)
    return PeerIdentity(**asdict(cache), rank=rank, pieces=pieces, heads=heads[0], head_bytes=heads[1], **own)


def open_transport(config: PeerConfig, identity: PeerIdentity, engine_id: str, pool: PeerPool) -> PeerTransport:
    """The transport of one rank, for its pool; listens at its port. Raises ConfigError where that cannot be done."""
    from .peer.base import PeerError
    from .peer.carriers.over_channel import Endpoint
    from .peer.wire.peer_info import PeerInfo

    info = PeerInfo(identity, engine_id, pool.num_blocks)
    port = config.port + identity.rank if config.port else 0
    endpoint = Endpoint(info, config.bind, port, config.secret.encode(), config.timeout_ms / 1e3)
    open_direct, open_staged = (_nixl if config.kind == "nixl" else _same_host)(pool, endpoint, config.staging_memory)
    if config.route is not PeerRoute.STAGED and open_direct is not None:
        try:
            transport = open_direct()
            if pool.coder is not None:
                logger.info(
                    "blocks for other engines go from pool to pool: peer.wire_form='lossless' codes none of them"
                )
            return transport
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


def _nixl(pool: PeerPool, endpoint: Endpoint, staging_bytes: int) -> tuple[_Open | None, _Open]:
    from .peer.carriers.nixl import NixlTransport
    from .peer.carriers.nixl_agent import start_agent
    from .peer.carriers.staged.nixl import NixlStagedTransport

    agent = start_agent()
    open_staged = partial(NixlStagedTransport, agent, pool, endpoint, staging_bytes)
    return partial(NixlTransport, agent, pool, endpoint), open_staged


def _same_host(pool: PeerPool, endpoint: Endpoint, staging_bytes: int) -> tuple[_Open | None, _Open]:
    from .peer.carriers.cuda_ipc import CudaIpcTransport
    from .peer.carriers.staged.shared_memory import SharedMemoryTransport

    open_direct = partial(CudaIpcTransport, pool, endpoint) if pool.device >= 0 else None
    return open_direct, partial(SharedMemoryTransport, pool, endpoint, staging_bytes)
