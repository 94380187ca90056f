"""Whose requests are whose, and what became of them: tenants by their cache salts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...base import Request
from ...config import TenantConfig
from ...config.tenants import DEFAULT_TENANT, LONGEST_NAME
from ...errors import KVConnectorError
from ...index import CacheTier
from ...values import shown

_NO_QUOTA = 1 << 62


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    queries_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0


class Tenants:
    """Names tenants by index: "default" is 0. A request is that tenant's whose name its cache salt is, or begins with
    in front of a colon, the longest of such names, and the default one's where there is none."""

    def __init__(self, config: Mapping[str, TenantConfig]) -> None:
        named = {DEFAULT_TENANT: TenantConfig(), **config}
        self._configs = list(named.values())
        self._names = list(named)
        self._index = {name: index for index, name in enumerate(named)}
        self._counts = [_Counts() for _ in named]
        self.weights = [tenant.weight for tenant in self._configs] if config else []
        """Of a host that is shared; empty where it is not."""

    def of(self, request: Request) -> int:
        """The request's tenant."""
        salt = getattr(request, "cache_salt", None)
        return self.of_salt(salt) if len(self._index) > 1 and isinstance(salt, str) else 0

    def of_salt(self, salt: str) -> int:
        """The tenant of requests with this salt."""
        name = salt[: LONGEST_NAME + 1]  # which is no name where it is cut
        while name not in self._index and ":" in name:
            name = name.rpartition(":")[0]
        return self._index.get(name, 0)

    def named(self, name: str) -> int:
        """The tenant of this name. Raises KVConnectorError."""
        if name not in self._index:
            raise KVConnectorError(f"tenant {shown(name)} is not configured: give one of {', '.join(self._index)}")
        return self._index[name]

    def known(self, name: str) -> int:
        """The tenant of this name; the default one where it is not configured, as of requests."""
        return self._index.get(name, 0)

    def name_of(self, tenant: int) -> str:
        """The name that was configured for it."""
        return self._names[tenant]

    def fit(self, host: CacheTier, block_bytes: int) -> None:
        """Host blocks have so many bytes over all ranks: what quotas are in blocks."""
        if host.tenants is not None and block_bytes:
            quotas = (tenant.quota // block_bytes if tenant.quota else _NO_QUOTA for tenant in self._configs)
            host.tenants.limit(list(quotas))

    def count(self, tenant: int, num_tokens: int, num_device_tokens: int, num_host_tokens: int) -> None:
        """A request of the tenant's was admitted, with so many tokens on the device and on the host."""
        counts = self._counts[tenant]
        counts.requests += 1
        counts.queries_tokens += num_tokens
        counts.device_hit_tokens += num_device_tokens
        counts.host_hit_tokens += num_host_tokens

    def stats(self, host: CacheTier) -> dict[str, dict[str, float]]:
        """By name: settings in blocks, what each holds, and sums since the start."""
        stats: dict[str, dict[str, float]] = {}
        shared, capacity = host.tenants, host.pool.capacity
        for name, index in self._index.items():
            counts = self._counts[index]
            stats[name] = {
                "weight": self._configs[index].weight,
                "share_blocks": shared.shares[index] if shared else capacity,
                "quota_blocks": min(shared.quotas[index] if shared else _NO_QUOTA, capacity),
                "held_blocks": shared.held[index] if shared else host.pool.num_live,
                "requests": counts.requests,
                "queries_tokens": counts.queries_tokens,
                "device_hit_tokens": counts.device_hit_tokens,
                "host_hit_tokens": counts.host_hit_tokens,
            }
        return stats
