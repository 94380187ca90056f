"""Settings of the connector (layer 0): one frozen dataclass, checked once at start-up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from .errors import ConfigError
from .values import (
    check_host,
    check_integer,
    check_text,
    choice,
    is_any_address,
    is_one_line,
    parse_size,
    shortened,
    shown,
)

_S = TypeVar("_S", "Config", "StorageConfig", "S3Config", "PeerConfig")
_HOST_AND_PORT = re.compile(r"(?:[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_MODULE_AND_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)
_PREFIX = re.compile(r"(?:[A-Za-z0-9!_.*'()=-]+(?:/[A-Za-z0-9!_.*'()=-]+)*)?", re.ASCII)
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(?:/[\w.~/-]*)?", re.ASCII)
_LONGEST_PREFIX = 512
"""Of the 1,024 bytes that S3 allows for an object's name."""
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


class WritePolicy(str, Enum):
    """When a block is saved to the host: see `index/policy.py`."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PathName(str, Enum):
    """How bytes move between device and host: see `transfer/paths`."""

    AUTO = "auto"
    RUNS = "runs"
    DIRECT = "direct"
    STAGED = "staged"


class LoadChoice(str, Enum):
    """How hits are loaded: see `scheduler/loads/choice.py`."""

    AUTO = "auto"
    SYNC = "sync"
    ASYNC = "async"


class Prefetch(str, Enum):
    """Whether a request waits for what storage has of its prefix."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class Backup(str, Enum):
    """When a block goes from the host to storage: see `scheduler/storage/backups.py`."""

    ON_SAVE = "on_save"
    ON_EVICTION = "on_eviction"
    AT_FINISH = "at_finish"


class PeerRole(str, Enum):
    """What an engine does for others: computes prompts for them, continues what others computed, or both."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class PeerRoute(str, Enum):
    """How blocks get from one engine's device to another's."""

    AUTO = "auto"
    DIRECT = "direct"
    STAGED = "staged"


class Protocol(str, Enum):
    """How Mooncake moves bytes between machines."""

    TCP = "tcp"
    RDMA = "rdma"


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket of Amazon S3, or of a server that speaks its protocol. Credentials are no settings: they are found where
    AWS's own tools find them, see docs/storage_s3.md.

    bucket: its name; it must be there.
    prefix: what the names of all objects begin with, without a `/` at its ends.
    region: the bucket's; where AWS's own tools find it if empty, and `us-east-1` where they do not.
    endpoint: URL of the server, such as `"https://minio.local:9000"`; Amazon's for the region if empty.
    allow_http: whether the endpoint may be one of http: everybody on the way reads and changes what it carries.
    timeout_ms: for one request, with all that it moves; no request is tried again after this.
    connect_timeout_ms: for a connection; at most `timeout_ms`.
    max_retries: further tries of a request that was answered with 5xx (503 is "slow down"), or whose connection broke.
    concurrency: look-ups, reads and writes under way at a time, so many of each, of each rank.
    """

    bucket: str = ""
    prefix: str = "kv"
    region: str = ""
    endpoint: str = ""
    allow_http: bool = False
    timeout_ms: int = 5_000
    connect_timeout_ms: int = 1_000
    max_retries: int = 3
    concurrency: int = 32

    def __post_init__(self) -> None:
        for name in ("bucket", "prefix", "region", "endpoint"):
            check_text(f"storage.s3.{name}", getattr(self, name))
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(f"storage.s3.bucket={shown(self.bucket)} is no bucket's name: give one such as 'my-kv'")
        if len(self.prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(self.prefix) or self._has_dots:
            raise ConfigError(
                f"storage.s3.prefix={shown(self.prefix)} cannot be: give parts of letters, digits and !_.*'()=- with a "
                f"'/' between, such as 'kv/team-a', of at most {_LONGEST_PREFIX} characters"
            )
        if any(character.isspace() for character in self.region):
            raise ConfigError(f"storage.s3.region={shown(self.region)} is no region: give one such as 'eu-central-1'")
        if not isinstance(self.allow_http, bool):
            raise ConfigError(f"storage.s3.allow_http={shown(self.allow_http)} is not a boolean: give true or false")
        self._check_endpoint()
        for name, least, most in (
            ("timeout_ms", 100, 600_000),
            ("connect_timeout_ms", 100, 600_000),
            ("max_retries", 0, 100),
            ("concurrency", 1, 1024),
        ):
            check_integer(f"storage.s3.{name}", getattr(self, name), least, most)
        if self.connect_timeout_ms > self.timeout_ms:
            raise ConfigError(
                f"storage.s3.connect_timeout_ms={self.connect_timeout_ms} is longer than a whole request may take: "
                f"give at most storage.s3.timeout_ms={self.timeout_ms}, or raise that"
            )

    @property
    def _has_dots(self) -> bool:
        return any(part in (".", "..") for part in self.prefix.split("/"))

    def _check_endpoint(self) -> None:
        match = _ENDPOINT.fullmatch(self.endpoint)
        if self.endpoint and (match is None or not 0 < int(match[1] or 1) < 1 << 16):
            raise ConfigError(  # what was given is not shown: it may hold a password
                "storage.s3.endpoint is no URL of a server: give one such as 'https://minio.local:9000'; credentials "
                "belong into the environment"
            )
        if self.endpoint.startswith("http://") and not self.allow_http:
            raise ConfigError(
                f"storage.s3.endpoint={shown(self.endpoint)} is not encrypted: give one of https, or "
                "storage.s3.allow_http=true where everybody on the way may read and change what it carries"
            )


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The storage tier. Sizes accept text such as `"200GiB"`.

    kind: `filesystem` is a folder, which engines of one machine may share, or of several over a network file system;
        `mooncake` is Mooncake Store, memory of many machines that all engines share; `s3` is a bucket of Amazon S3 or
        of a server that speaks its protocol; `module:function` is a backend of your own, see docs/storage_backends.md.
    path: the folder; `~` at its start is the user's own.
    capacity: bytes that may lie there, over all that share it; at least 8 MiB, and somewhat more than a block.
    master: host and port of the Mooncake master.
    metadata: where its transfer engines find each other, an URL; by asking each other where it is `P2PHANDSHAKE`.
    protocol: `tcp` or `rdma`.
    devices: names of RDMA devices, with commas between; empty for all.
    hostname: name or address under which others reach this machine; the one that it reaches the master from if empty.
    segment_memory: bytes of this engine's memory that it lends to the store, over all of its ranks.
    s3: the bucket, for kind `s3`.
    options: what the function of a backend of your own is given, as it stands.
    prefetch: what a request does while its prefix is on its way: start with what is there, wait for all of it, or wait
        until `timeout_ms` after its arrival.
    backup: when a block is written: once it is on the host, when it is next to be evicted from there, or when a request
        that used it has ended.
    max_backup_blocks: host blocks that may wait to be written; what is beyond is not backed up.
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
            check_integer("storage.capacity", self.capacity, _LEAST_CAPACITY)
        elif not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise ConfigError(f'storage.options={shown(self.options)} is not an object: give one such as {{"a": 1}}')

    def _check_s3(self) -> None:
        given: object = self.s3
        if isinstance(given, Mapping):
            object.__setattr__(self, "s3", _build(S3Config, given, "storage.s3."))
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


_PEER_KINDS = ("shared_memory", "nixl")
_LEAST_SECRET = 16
_SECRET_ENV = "KV_CONNECTOR_PEER_SECRET"


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """KV transfers between engines. Sizes accept text such as `"64MiB"`.

    kind: `shared_memory` serves engines of one machine and needs no package; `nixl` any, over whatever UCX finds.
    role: `producer` computes prompts for others, `consumer` continues them, `both` does either.
    route: `direct` writes from pool to pool, and refuses to start where that cannot be done; `staged` goes through host
        memory; `auto` is the first where it can be done, and else the second. Engines that talk to each other must
        arrive at the same one.
    bind: address to listen at for other engines.
    port: rank r listens at this port plus r; 0 takes any that are free, which those then learn who are told by the
        engine itself.
    host: address that others are told; `bind` if empty.
    secret: what all engines that talk to each other know, at least 16 characters; the environment variable
        `secret_env` if empty.
    timeout_ms: for a peer to answer a handshake, or to read what it is sent.
    deadline_ms: how long a producer holds blocks that nobody has asked for, and a consumer waits with nothing arriving.
    staging_memory: bytes of host memory for each link and direction, where blocks go through such.
    """

    kind: str = "shared_memory"
    role: PeerRole = PeerRole.BOTH
    route: PeerRoute = PeerRoute.AUTO
    bind: str = "127.0.0.1"
    port: int = 0
    host: str = ""
    secret: str = field(default="", repr=False)
    secret_env: str = _SECRET_ENV
    timeout_ms: int = 10_000
    deadline_ms: int = 60_000
    staging_memory: int = 64 << 20

    def __post_init__(self) -> None:
        if self.kind not in _PEER_KINDS:
            raise ConfigError(
                f"peer.kind={shown(self.kind)} is unknown: give one of {', '.join(map(repr, _PEER_KINDS))}"
            )
        for name in ("bind", "host"):
            object.__setattr__(self, name, check_host(f"peer.{name}", getattr(self, name)))
        for name in ("secret", "secret_env"):  # neither is shown: who mistakes one for the other has given the secret
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"peer.{name} is not text: give it in quotes")
        object.__setattr__(self, "role", choice(PeerRole, self.role, "peer.role"))
        object.__setattr__(self, "route", choice(PeerRoute, self.route, "peer.route"))
        object.__setattr__(self, "staging_memory", parse_size(self.staging_memory, "peer.staging_memory"))
        for name, least, most in (
            ("port", 0, 65_535),
            ("timeout_ms", 1, 1 << 31),
            ("deadline_ms", 1, 1 << 31),
            ("staging_memory", 1 << 16, 1 << 40),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"peer.{name}={shown(value)}: give an integer from {least} to {most}")
        self._check_address_and_secret()

    def _check_address_and_secret(self) -> None:
        if not self.host:
            object.__setattr__(self, "host", self.bind)
        if is_any_address(self.host):
            raise ConfigError(
                f"peer.host={shown(self.host)} is no address that others can reach: give this machine's, or give it as "
                "peer.bind and leave this out"
            )
        if not self.secret:
            if not self.secret_env or "=" in self.secret_env or not is_one_line(self.secret_env):
                raise ConfigError(
                    f"peer.secret_env names no environment variable: give one such as {_SECRET_ENV!r}, or give "
                    "peer.secret"
                )
            object.__setattr__(self, "secret", os.environ.get(self.secret_env, ""))
        if not _is_encodable(self.secret):
            raise ConfigError(f"peer.secret, or {self._variable}, is not UTF-8: give it as text of that encoding")
        num_characters = len(self.secret.strip())
        if num_characters < _LEAST_SECRET:
            raise ConfigError(
                f"peer.secret has {num_characters} characters: give at least {_LEAST_SECRET}, or set "
                f"{self._variable} to them, the same for all engines that talk to each other; blanks "
                "at its ends do not count"
            )

    @property
    def _variable(self) -> str:
        """In a message: its name only where there is such a variable, for what else was given may be the secret."""
        is_name = self.secret_env == _SECRET_ENV or (is_one_line(self.secret_env) and self.secret_env in os.environ)
        return shortened(self.secret_env) if is_name else "the variable that peer.secret_env names, which is not there,"

    @property
    def produces(self) -> bool:
        """Whether prompts are computed for others."""
        return self.role is not PeerRole.CONSUMER

    @property
    def consumes(self) -> bool:
        """Whether prompts are continued that others computed."""
        return self.role is not PeerRole.PRODUCER


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, with their defaults. Sizes accept text such as `"16GiB"`.

    host_memory: bytes of host memory for cached blocks, over all ranks of the engine; 0 turns the host tier off.
    write_policy: when a computed block is saved to the host.
    write_through_threshold: hits that a block needs under `write_through_selective`.
    write_back_lookahead: device blocks next in line for reuse that `write_back` keeps saved; it grows by itself to
        twice what the requests admitted in one step have had use for.
    save_bandwidth: bytes a second, over all ranks, that saves may take; what is over it is saved in later steps. 0 sets
        no limit, and there is none for the saves of `write_back` before a device block is reused.
    load_choice: `auto` loads, asynchronously or not, or computes, whatever is estimated to be sooner; `sync` and
        `async` load every hit, and that way.
    max_load_stall_ms: under `auto`, a load that would hold running requests up for longer is asynchronous.
    block_major: ask the engine for a device cache in which the layers of a block are neighbours, where it offers one:
        a block is then one long copy.
    copy_path: `auto` picks a path per job from piece size and count; the others force one.
    calibration: what copies take on this machine: `auto` measures it at the first start and remembers it, `off` goes by
        built-in figures, anything else is a file that `kv-connector calibrate --json` wrote.
    layer_group_bytes: loads are cut into layer groups of about this many bytes, one event each; 0: as many as keep the
        link busy, by the calibration.
    staging_memory: device bytes for the rings of the staged path, over both directions.
    pin_memory: page-lock the host pool (in the background) where there is a GPU.
    numa_bind: put the host pool on the GPU's NUMA node.
    trace_loads: time each layer group of a load with events and report the load stall.
    storage: where blocks are kept beyond the host's memory; none by default.
    peer: how blocks are handed to other engines and come from them; not at all by default.
    """

    host_memory: int = 0
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_through_threshold: int = 2
    write_back_lookahead: int = 64
    save_bandwidth: int = 0
    load_choice: LoadChoice = LoadChoice.AUTO
    max_load_stall_ms: int = 2
    block_major: bool = True
    copy_path: PathName = PathName.AUTO
    calibration: str = "auto"
    layer_group_bytes: int = 0
    staging_memory: int = 384 << 20
    pin_memory: bool = True
    numa_bind: bool = True
    trace_loads: bool = False
    storage: StorageConfig | None = None
    peer: PeerConfig | None = None

    def __post_init__(self) -> None:
        for name in ("host_memory", "save_bandwidth", "layer_group_bytes", "staging_memory"):
            object.__setattr__(self, name, parse_size(getattr(self, name), name))
        object.__setattr__(self, "write_policy", choice(WritePolicy, self.write_policy, "write_policy"))
        object.__setattr__(self, "load_choice", choice(LoadChoice, self.load_choice, "load_choice"))
        object.__setattr__(self, "copy_path", choice(PathName, self.copy_path, "copy_path"))
        for name in ("block_major", "pin_memory", "numa_bind", "trace_loads"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shown(getattr(self, name))} is not a boolean: give true or false")
        storage: object = self.storage
        if isinstance(storage, Mapping):
            object.__setattr__(self, "storage", _build(StorageConfig, storage, "storage."))
        elif storage is not None and not isinstance(storage, StorageConfig):
            raise ConfigError(
                f"storage={shown(storage)} is not an object: give one such as "
                '{"path": "/data/kv", "capacity": "1TiB"}'
            )
        peer: object = self.peer
        if isinstance(peer, Mapping):
            object.__setattr__(self, "peer", _build(PeerConfig, peer, "peer."))
        elif peer is not None and not isinstance(peer, PeerConfig):
            raise ConfigError(
                f'peer={shown(peer)} is not an object: give one such as {{"role": "producer", "port": 7100}}'
            )
        if self.storage is not None and not self.host_memory:
            raise ConfigError(
                "host_memory=0 is too small: storage needs host_memory for blocks to come and go through, give a size "
                'such as "16GiB"'
            )
        if not isinstance(self.calibration, str) or not self.calibration:
            raise ConfigError(f"calibration={shown(self.calibration)}: give 'auto', 'off' or the path of a file")
        check_text("calibration", self.calibration)
        for name, least in _LEAST.items():
            check_integer(name, getattr(self, name), least, *_MOST.get(name, ()))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        """A Config from a parsed JSON object; an unknown key is refused with the nearest known one."""
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f'settings={shown(settings)} is not an object: give one such as {{"host_memory": "16GiB"}}'
            )
        return _build(cls, settings)


_LEAST = {
    "host_memory": 0,
    "write_through_threshold": 1,
    "write_back_lookahead": 1,
    "save_bandwidth": 0,
    "max_load_stall_ms": 0,
    "layer_group_bytes": 0,
    "staging_memory": 1 << 20,
}
_MOST = {"staging_memory": (1 << 40,)}


def _build(kind: type[_S], settings: Mapping[str, Any], prefix: str = "") -> _S:
    known = [field.name for field in fields(kind)]
    for key in settings:
        if key not in known:
            near = _suggest(key, known)
            given = shown(prefix + key if isinstance(key, str) else key)
            raise ConfigError(f"unknown setting {given}{near}: known settings are {', '.join(known)}")
    return kind(**settings)


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _suggest(key: object, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(shortened(key) if isinstance(key, str) else "", known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
