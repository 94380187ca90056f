"""Mooncake Store's Python client behind a few typed calls: the only file that knows its names and error codes.

Every call blocks, and raises `StoreUnreachable` where the master does not answer. Requests by name and memory address;
nothing is copied. Measured with 0.3.13: a read from a dead master is tried for 4.5 s and a lookup is not, so each
batch is looked up first; `setup` keeps the interpreter lock and tries a dead master for 90 s, so the master's port is
tried first; a thread that waits for bytes spins, and four that read 8 MiB each are half as fast as one that reads
32 MiB, so one call reads at a time and one writes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import StorageConfig
from ...errors import ConfigError
from ...extras import pip_line
from ..objects.client import Answer, StoreUnreachable, Transfer

_UNREACHABLE = range(-999, -899)  # errors of calls to the master
_CONNECT_SECONDS = 1.0
_LOCAL_BUFFER_BYTES = 16 << 20  # of Mooncake's own copies, which are not made here
_DEFAULTS = {
    "MC_LOG_LEVEL": "error",  # its log goes to stderr; faults are told by ours
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # A pool has lanes, and each waits for one fragment after the other to an owner of memory that does not answer:
    # measured, 50 s for 64 blocks. Without one all fail together after the progress timeout.
    "MC_TCP_ENABLE_CONNECTION_POOL": "0",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
}
"""Settings of Mooncake that are not those it comes with, where the user has set none."""


_ANSWERS = {-704: Answer.MISSING, -200: Answer.NO_ROOM}


def load_mooncake() -> Any:
    """The module `mooncake.store`, of whichever build is installed. Sets what is missing of `_DEFAULTS` in the
    environment, where Mooncake reads it. Raises ConfigError where it cannot be imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store
    except ImportError as error:
        is_missing = error.name in ("mooncake", "mooncake.store")
        libraries = "install the system's libibverbs1, libnuma1 and libcurl4"
        fix = pip_line("mooncake-transfer-engine-non-cuda") if is_missing else libraries
        raise ConfigError(f"storage.kind='mooncake' cannot be used: {error}: {fix}") from error
    return store


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """`segment_bytes`: memory of this process that the store may use. `hostname`: how others reach this process; found
    out where it is empty. The others are as in `StorageConfig`."""

    master: str
    metadata: str
    protocol: str
    devices: str
    hostname: str
    segment_bytes: int

    @classmethod
    def of(cls, config: StorageConfig, num_served: int, world_size: int) -> MooncakeOptions:
        """For `num_served` of `world_size` ranks, which lend `config.segment_memory` together."""
        segment_bytes = config.segment_memory * num_served // world_size
        protocol = config.protocol.value
        return cls(config.master, config.metadata, protocol, config.devices, config.hostname, segment_bytes)


class MooncakeClient:
    """See `StoreClient`."""

    def __init__(self, options: MooncakeOptions) -> None:
        """Imports Mooncake and connects to nothing yet. Raises ConfigError where it is not installed."""
        self._module = load_mooncake()
        self._options = options
        self._store: Any = None
        self._regions: Sequence[tuple[int, int]] = ()
        self._lock = threading.Lock()
        self._get_lock = threading.Lock()
        self._put_lock = threading.Lock()

    def connect(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `StoreClient.connect`."""
        host, port = self._options.master.rsplit(":", 1)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as link:
                own_address = str(link.getsockname()[0])
        except (OSError, UnicodeError) as error:  # the latter where the name has a part that is empty or too long
            raise StoreUnreachable(
                f"no master at {self._options.master}: {error}; start mooncake_master there, or mend storage.master"
            ) from error
        with self._lock:
            if self._store is None:
                self._store = self._join(self._options.hostname or own_address, regions)
        self.exist(["kvc1.probe"])

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See `StoreClient.exist`."""
        codes = self._open_store().batch_is_exist(list(names))
        self._check(codes)
        return [code == 1 for code in codes]

    def get(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """See `StoreClient.get`."""
        there = self.exist([transfer.name for transfer in transfers])
        wanted = [transfer for transfer, exists in zip(transfers, there, strict=True) if exists]
        with self._get_lock:
            answers = iter(self._move(self._open_store().batch_get_into_multi_buffers, wanted))
        return [next(answers) if exists else Answer.MISSING for exists in there]

    def put(self, transfers: Sequence[Transfer]) -> list[Answer]:
        """See `StoreClient.put`."""
        with self._put_lock:
            return self._move(self._open_store().batch_put_from_multi_buffers, transfers)

    def last_fault(self) -> str:
        """See `StoreClient.last_fault`."""
        return "an owner of its memory does not answer"

    def remove(self, names: Sequence[str]) -> list[bool]:
        """See `StoreClient.remove`."""
        codes = self._open_store().batch_remove(list(names), True)
        self._check(codes)
        return [code == 0 for code in codes]

    def close(self) -> None:
        """See `StoreClient.close`."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            for start, _ in self._regions:
                store.unregister_buffer(start)
            store.close()

    def _join(self, hostname: str, regions: Sequence[tuple[int, int]]) -> Any:
        options = self._options
        if hostname.startswith("127."):  # it refuses loopback addresses that it was not told of
            os.environ.setdefault("MC_TCP_BIND_ADDRESS", hostname)
        store = self._module.MooncakeDistributedStore()
        code = store.setup(
            hostname,
            options.metadata,
            options.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            options.protocol,
            options.devices,
            options.master,
        )
        for start, num_bytes in regions if code == 0 else ():
            code = code or store.register_buffer(start, num_bytes)
        if code != 0:
            store.close()
            raise StoreUnreachable(
                f"cannot join the store of {options.master} as {hostname}: error {code}; see that others reach this "
                "machine as storage.hostname, and that storage.protocol and storage.devices work here"
            )
        self._regions = regions
        return store

    def _open_store(self) -> Any:
        store = self._store
        if store is None:
            raise StoreUnreachable(f"not connected to {self._options.master}")
        return store

    def _move(self, call: Callable[..., list[int]], transfers: Sequence[Transfer]) -> list[Answer]:
        if not transfers:
            return []
        codes = call(
            [transfer.name for transfer in transfers],
            [[fragment.address for fragment in transfer.fragments] for transfer in transfers],
            [[fragment.num_bytes for fragment in transfer.fragments] for transfer in transfers],
        )
        self._check(codes)
        return [Answer.OK if code >= 0 else _ANSWERS.get(code, Answer.FAULT) for code in codes]

    def _check(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code in _UNREACHABLE:
                raise StoreUnreachable(f"the master at {self._options.master} does not answer: error {code}")
