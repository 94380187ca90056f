"""Settings of the connector (layer 0): one frozen dataclass, checked once at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..errors import ConfigError
from ..values import check_integer, check_share, check_text, choice, parse_size, shown
from .admin import AdminConfig
from .choices import (
    Backup,
    HostFormName,
    LoadChoice,
    PathName,
    PeerRole,
    PeerRoute,
    Prefetch,
    Protocol,
    WireForm,
    WritePolicy,
)
from .mapping import from_mapping, object_of
from .peer import PeerConfig
from .s3 import S3Config
from .storage import StorageConfig
from .tenants import TenantConfig, tenants_of

__all__ = [
    "AdminConfig",
    "Backup",
    "Config",
    "HostFormName",
    "LoadChoice",
    "PathName",
    "PeerConfig",
    "PeerRole",
    "PeerRoute",
    "Prefetch",
    "Protocol",
    "S3Config",
    "StorageConfig",
    "TenantConfig",
    "WireForm",
    "WritePolicy",
]

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
_CHOICES: Mapping[str, type[Enum]] = {
    "write_policy": WritePolicy,
    "load_choice": LoadChoice,
    "host_form": HostFormName,
    "copy_path": PathName,
}
_OBJECTS: Mapping[str, tuple[type[StorageConfig | PeerConfig | AdminConfig], str]] = {
    "storage": (StorageConfig, '{"path": "/data/kv", "capacity": "1TiB"}'),
    "peer": (PeerConfig, '{"role": "producer", "port": 7100}'),
    "admin": (AdminConfig, '{"bind": "127.0.0.1:7200"}'),
}
"""Settings that are objects themselves, each with an example of one."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, with their defaults. Sizes accept text such as `"16GiB"`.

    host_memory: bytes of host memory for cached blocks, over all ranks of the engine; 0 turns the host tier off.
    write_policy: when a computed block is saved to the host.
    write_through_threshold: later requests for a block before `write_through_selective` saves it; its first use does
        not count.
    write_back_lookahead: device blocks next in line for reuse that `write_back` keeps saved; raised by itself to twice
        the largest demand of a step.
    save_bandwidth: bytes a second, over all ranks, that saves may take; blocks over that are saved in later steps. 0
        sets no limit, and there is none for the saves of `write_back` before a device block is reused.
    load_choice: how a hit is loaded.
    max_load_stall_ms: under `auto`, a load that would stall running requests for longer than this, with the others of
        its step, goes to the background, unless device blocks are scarce. The time that launching the step takes
        anyway, or computing the rest of the request's own prompt, is no stall; nor, where all others begin in the same
        step, is that of a later step that they are spared.
    block_major: ask the engine for a device cache in which the layers of a block are contiguous, where it offers one: a
        block is then one long copy.
    copy_path: how bytes move between device and host.
    calibration: how fast copies are on this machine: `auto` measures it at the first start and remembers it, `off` uses
        built-in figures, anything else is a file that `kv-connector calibrate --json` wrote.
    layer_group_bytes: loads are cut into layer groups of about this many bytes, one event each; 0: as many as keep the
        link busy, by the calibration.
    staging_memory: bytes of device memory, on each rank, for the staging buffers of the staged path, both directions
        together.
    pin_memory: page-lock the host pool (in the background) where there is a GPU.
    host_form: how blocks lie on the host and in storage: see docs/lossless.md.
    numa_bind: put the host pool on the GPU's NUMA node; a page that ranks share is on the node of the rank that touches
        it first.
    trace_loads: time each layer group of a load with CUDA events and report the load stall (`load_stall_milliseconds`).
    record_trace: a file to append a line to for each request that ends, for `kv-connector simulate`: times, lengths,
        and ids of its prompt's blocks, which are hashed with a random key that is never written; at most 1 GiB.
    trace_requests: the share of requests that OpenTelemetry follows from lookup to copies, a span for each load and
        save: 0 for none, 0.01 for one in a hundred. See docs/observability.md.
    storage: an object: storage behind host memory. See the settings `storage.` below.
    peer: an object: KV transfer to and from other engines. See the settings `peer.` below.
    pinned_share: the share of the host, and of each tenant's part of it, that requests may pin in all: 0 to 1.
    tenants: who shares the host, by name: each keeps its share by weight, whatever the others do. A request belongs to
        the tenant whose name its `cache_salt` is, or begins with in front of a colon; all others belong to `default`.
        None by default: all requests share the host.
    admin: an object: the endpoint through which an operator sees and steers the running engine; none by default.
    """

    host_memory: int = 0
    write_policy: WritePolicy = WritePolicy.ADAPTIVE
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
    host_form: HostFormName = HostFormName.RAW
    numa_bind: bool = True
    trace_loads: bool = False
    record_trace: str = ""
    trace_requests: float = 0.0
    storage: StorageConfig | None = None
    peer: PeerConfig | None = None
    pinned_share: float = 0.5
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict, hash=False)
    admin: AdminConfig | None = None

    def __post_init__(self) -> None:
        for name in ("host_memory", "save_bandwidth", "layer_group_bytes", "staging_memory"):
            object.__setattr__(self, name, parse_size(getattr(self, name), name))
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, choice(kind, getattr(self, name), name))
        for name in ("block_major", "pin_memory", "numa_bind", "trace_loads"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shown(getattr(self, name))} is not a boolean: give true or false")
        share: object = self.trace_requests
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(
                f"trace_requests={shown(share)} is not a share of the requests: give a number from 0 (none) to 1 "
                "(all), such as 0.01"
            )
        for name, (config, example) in _OBJECTS.items():
            object.__setattr__(self, name, object_of(config, getattr(self, name), name, example))
        object.__setattr__(self, "tenants", tenants_of(self.tenants))
        check_share("pinned_share", self.pinned_share)
        if self.storage is not None and not self.host_memory:
            raise ConfigError(
                "host_memory is missing or 0: storage needs it for blocks to come and go through, give a size such as "
                '"16GiB"'
            )
        if not isinstance(self.calibration, str) or not self.calibration:
            raise ConfigError(f"calibration={shown(self.calibration)}: give 'auto', 'off' or the path of a file")
        check_text("calibration", self.calibration)
        check_text("record_trace", self.record_trace)
        for name, least in _LEAST.items():
            check_integer(name, getattr(self, name), least, *_MOST.get(name, ()))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        """A Config from a parsed JSON object; an unknown key is refused with the nearest known one."""
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f'settings={shown(settings)} is not an object: give one such as {{"host_memory": "16GiB"}}'
            )
        return from_mapping(cls, settings)
