"""Settings of the storage tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from ..errors import ConfigError
from ..values import check_integer, check_text, choice, parse_size, shown
from .choices import Backup, Prefetch, Protocol
from .mapping import from_mapping
from .s3 import S3Config
from .secrets import STORAGE_SECRET, secret_of

_HOST_AND_PORT = re.compile(r"(?:[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_MODULE_AND_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_LEAST_SEGMENT = 16 << 20
_LEAST_CAPACITY = 8 << 20
"""What a folder is written in: see `storage/filesystem/backend.py`."""
_EXTERNAL = "module:function"
_KEYS_OF_KIND = {
    "filesystem": ("path", "capacity"),
    "mooncake": ("master", "metadata", "protocol", "devices", "hostname", "segment_memory"),
    "s3": ("s3",),
    _EXTERNAL: ("options",),
}
"""What only one kind of storage has a use for."""


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The storage tier. Sizes accept text such as `"200GiB"`.

    kind: `filesystem` is a folder, which engines of one machine may share, or of several over a network file system;
        `mooncake` is Mooncake Store, memory of many machines that all engines share; `s3` is a bucket of Amazon S3 or
        of a server that speaks its protocol; `module:function` is a backend of your own, see docs/storage_backends.md.
    path: for `filesystem`, required: the folder; `~` at its start is the user's home.
    capacity: for `filesystem`, required: the most bytes of blocks in it, over all engines that share it; at least 8
        MiB, and somewhat more than a block.
    master: for `mooncake`, required: host and port of its master, such as `"10.0.0.1:50051"`.
    metadata: for `mooncake`: URL of the metadata server by which its transfer engines find each other; with
        `P2PHANDSHAKE` they ask each other and need none.
    protocol: for `mooncake`: how it moves bytes between machines.
    devices: for `mooncake`: names of RDMA devices, with commas between; empty for all.
    hostname: for `mooncake`: name or address under which others reach this machine; if empty, the one from which it
        reaches the master.
    segment_memory: for `mooncake`: bytes of this engine's memory that it lends to the store, over all of its ranks.
    s3: for `s3`, required: the bucket, an object. See the settings `storage.s3.` below.
    options: for `module:function`: passed to the function unchanged.
    prefetch: what a request does while its prefix is looked up in storage and read.
    timeout_ms: how long a request waits for storage under `timeout`, from when it was first seen.
    backup: when a block is written.
    max_backup_blocks: host blocks that may wait to be written; blocks beyond that are not backed up.
    secret_env: the environment variable with a secret of at least 16 characters, the same for all engines that share
        the storage: blocks carry MACs instead of checksums, so that whoever lacks the secret cannot forge blocks. With
        none, the default, they carry checksums.
    """

    kind: str = "filesystem"
    path: str = ""
    capacity: int = 0
    master: str = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: Protocol = Protocol.TCP
    devices: str = ""
    hostname: str = ""
    segment_memory: int = 0
    s3: S3Config | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prefetch: Prefetch = Prefetch.TIMEOUT
    timeout_ms: int = 200
    backup: Backup = Backup.ON_SAVE
    max_backup_blocks: int = 4096
    secret_env: str = field(default="", repr=False)  # who mistakes it for the secret shows it to nobody

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or (self.kind not in _KEYS_OF_KIND and not self.is_external):
            raise ConfigError(
                f"storage.kind={shown(self.kind)} is unknown: give one of {', '.join(map(repr, _KEYS_OF_KIND))}"
            )
        for name in ("path", "master", "metadata", "devices", "hostname"):
            check_text(f"storage.{name}", getattr(self, name))
        for name in ("capacity", "segment_memory"):
            object.__setattr__(self, name, parse_size(getattr(self, name), f"storage.{name}"))
        object.__setattr__(self, "protocol", choice(Protocol, self.protocol, "storage.protocol"))
        self._check_kind()
        object.__setattr__(self, "prefetch", choice(Prefetch, self.prefetch, "storage.prefetch"))
        object.__setattr__(self, "backup", choice(Backup, self.backup, "storage.backup"))
        for name, least in (("timeout_ms", 0), ("max_backup_blocks", 1)):
            check_integer(f"storage.{name}", getattr(self, name), least, 1 << 31)
        self.secret()

    def secret(self) -> bytes:
        """What `secret_env` holds, read now: it is kept nowhere; empty without one. Raises ConfigError."""
        if self.secret_env == "":
            return b""
        whose = "all engines that share the storage"
        return secret_of("storage.secret_env", self.secret_env, STORAGE_SECRET, whose)

    @property
    def is_external(self) -> bool:
        """Whether `kind` names a backend of the user's own."""
        return _MODULE_AND_FUNCTION.fullmatch(self.kind) is not None

    def _check_kind(self) -> None:
        kind = _EXTERNAL if self.is_external else self.kind
        for part in fields(self):
            owner = next((kind for kind, names in _KEYS_OF_KIND.items() if part.name in names), kind)
            value = getattr(self, part.name)
            if owner != kind and value != (part.default if part.name != "options" else {}):
                given = value.value if isinstance(value, Enum) else value
                raise ConfigError(f"storage.{part.name}={shown(given)} is for kind {owner!r} only: leave it out")
        if kind == "mooncake":
            self._check_mooncake()
        elif kind == "s3":
            self._check_s3()
        elif kind == "filesystem":
            if not self.path.strip():
                raise ConfigError(f"storage.path={shown(self.path)}: give the folder to keep blocks in")
            if not self.capacity:
                raise ConfigError("storage.capacity=0: give how much may lie in the folder, such as '500GiB'")
            check_integer("storage.capacity", self.capacity, _LEAST_CAPACITY)
        elif not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise ConfigError(f'storage.options={shown(self.options)} is not an object: give one such as {{"a": 1}}')

    def _check_s3(self) -> None:
        given: object = self.s3
        if isinstance(given, Mapping):
            object.__setattr__(self, "s3", from_mapping(S3Config, given, "storage.s3."))
        elif not isinstance(given, S3Config):
            raise ConfigError(f'storage.s3={shown(given)} is not an object: give one such as {{"bucket": "my-kv"}}')

    def _check_mooncake(self) -> None:
        if not _HOST_AND_PORT.fullmatch(self.master) or not 0 < int(self.master.rpartition(":")[2]) < 1 << 16:
            raise ConfigError(f'storage.master={shown(self.master)}: give its host and port, such as "10.0.0.1:50051"')
        if not self.metadata:
            raise ConfigError("storage.metadata='': give the URL of a metadata server, or 'P2PHANDSHAKE'")
        check_integer("storage.segment_memory", self.segment_memory, 0)
        if 0 < self.segment_memory < _LEAST_SEGMENT:
            given = shown(self.segment_memory)
            raise ConfigError(f"storage.segment_memory={given} is too small: give 0 or at least {_LEAST_SEGMENT}")
