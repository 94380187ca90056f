"""The operator's commands, each carried out on the engine's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .base import Answer, Owner, Prefix, Refusal, SteeredEngine

_TIERS: Mapping[str, tuple[str, ...]] = {
    "storage": ("storage_", "fetch", "backup", "backed_up"),
    "peer": ("peer_", "offered_", "receive", "expired_transfers"),
    "device": ("device_",),
    "engine": ("requests", "queries_tokens", "jobs_in_flight", "known_blocks", "ignored_hints"),
}
"""By which words of its name a statistic is known as one of a tier; all others are of the host."""


def tier_of(statistic: str) -> str:
    """The tier that a statistic is shown under; "engine" for what is of no tier."""
    found = (tier for tier, words in _TIERS.items() if any(word in statistic for word in words))
    return next(found, "host")


@dataclass(frozen=True, slots=True)
class ReadStats:
    """All statistics, as /metrics has them, by tier; capacity, jobs and tenants."""

    def run(self, engine: SteeredEngine) -> Answer:
        statistics = dict(engine.half.get_kv_connector_stats())
        tiers: dict[str, dict[str, float]] = {tier: {} for tier in ("engine", "device", "host", *_TIERS)}
        for name, value in statistics.items():
            tiers[tier_of(name)][name] = value
        return {
            "host_memory_bytes": engine.host_memory,
            "host_block_bytes": engine.half.host_block_bytes,
            "jobs_in_flight": statistics["jobs_in_flight"],
            "tiers": tiers,
            "tenants": engine.half.tenant_stats(),
        }


@dataclass(frozen=True, slots=True)
class ListPins:
    """Those of this endpoint."""

    def run(self, engine: SteeredEngine) -> Answer:
        return {"pins": engine.pins.listed()}


@dataclass(frozen=True, slots=True)
class Pin:
    """Pin a prefix, for `ttl_s` seconds if that is not None, for its owner."""

    prefix: Prefix
    ttl_s: float | None
    owner: Owner

    def run(self, engine: SteeredEngine) -> Answer:
        name = engine.pins.pin(self.prefix, self.ttl_s, self.owner.name(engine.half))
        return {"id": name, "num_blocks": len(self.prefix.block_hashes)}


@dataclass(frozen=True, slots=True)
class Unpin:
    """Undo a pin, by its id."""

    name: str

    def run(self, engine: SteeredEngine) -> Answer:
        return {"id": self.name, "num_blocks": engine.pins.unpin(self.name)}


@dataclass(frozen=True, slots=True)
class Resize:
    """Use this many bytes of host memory from now on, over all ranks; None uses all that the engine was started
    with."""

    num_bytes: int | None

    def run(self, engine: SteeredEngine) -> Answer:
        block_bytes = engine.half.host_block_bytes
        if self.num_bytes is not None and self.num_bytes > engine.host_memory:
            raise Refusal(
                409,
                f"host_memory={self.num_bytes} is more than the {engine.host_memory} bytes that the engine was started "
                "with: give at most so many, or start it with more",
            )
        if self.num_bytes is not None and not block_bytes:
            raise Refusal(503, "the engine has no host memory ready yet: ask again in a moment")
        engine.half.resize_host(None if self.num_bytes is None else self.num_bytes // block_bytes)
        capacity = int(engine.half.get_kv_connector_stats()["host_capacity_blocks"])
        return {"host_capacity_blocks": capacity, "host_memory_bytes": capacity * block_bytes}


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop all that is cached behind the device. Not done: old copies are still in flight; they are not matched."""

    def run(self, engine: SteeredEngine) -> Answer:
        return {"done": engine.half.reset_cache()}


@dataclass(frozen=True, slots=True)
class ClearTenant:
    """Drop a tenant's blocks from the host."""

    tenant: str

    def run(self, engine: SteeredEngine) -> Answer:
        name = Owner(self.tenant, "").name(engine.half)
        return {"tenant": name, "num_blocks": engine.half.clear_tenant(name)}


@dataclass(frozen=True, slots=True)
class Warm:
    """Read what storage has of a prefix to the host, for its owner."""

    prefix: Prefix
    owner: Owner

    def run(self, engine: SteeredEngine) -> Answer:
        prefix, owner = self.prefix, self.owner.name(engine.half)
        has_begun = engine.half.warm(prefix.block_hashes, owner, prefix.are_given)
        return {"started": has_begun, "num_blocks": len(prefix.block_hashes)}


@dataclass(frozen=True, slots=True)
class Drain:
    """Write all that the host holds to storage: call again until nothing is left to write."""

    def run(self, engine: SteeredEngine) -> Answer:
        remaining = engine.half.drain()
        return {"done": remaining == 0, "remaining_blocks": remaining}
