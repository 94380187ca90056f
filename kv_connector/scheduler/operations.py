"""What an operator asks of the scheduler half; called from its thread, between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import KVConnectorError
from ..index import CacheTier, GroupedTree
from ..types import BlockHash, KeptPin
from .companions import Companions
from .control.control import Control
from .control.keeping import PinKeeper
from .ranks import RankStates
from .requests import RequestTable


class Operations:
    """An operator's calls, a part of `SchedulerHalf`. All are made from the scheduler's thread, between two steps, and
    none blocks."""

    host: CacheTier
    _companions: Companions
    _control: Control
    _grouped: GroupedTree
    _ranks: RankStates
    _requests: RequestTable

    def pin_prefix(
        self,
        block_hashes: Sequence[BlockHash],
        ttl_s: float | None = None,
        tenant: str = "default",
        are_given: bool = True,
    ) -> None:
        """Pin a prefix: its blocks are saved as soon as they are computed, and never evicted from the host. Blocks that
        were computed before are saved with the next request for them. With `ttl_s` the pin ends by itself after that
        many seconds. The hashes are those of all blocks of a prompt, from its first one on. `are_given`: somebody says
        so; not where the engine has just named the blocks of a prompt, which is believed. Raises KVConnectorError, and
        changes nothing, for a tenant that is not configured, and for given hashes that are not known as a prefix."""
        owner = self._control.tenants.named(tenant)
        self._check_known(block_hashes, are_given)
        self._control.pins.pin(block_hashes, ttl_s, owner)

    def unpin_prefix(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin_prefix` of the same hashes. Raises KVConnectorError, and changes nothing, for others."""
        self._control.pins.unpin(block_hashes)

    def pinned_prefixes(self) -> list[KeptPin]:
        """The prefixes that operators have pinned, since this start or before; each once, however often it was
        pinned."""
        return self._control.pins.of_operators()

    def keep_pins(self, keeper: PinKeeper) -> None:
        """Restore the pins that `keeper` has of the last start, and report later pins to it. Called once, before the
        first step."""
        self._control.keep_pins(keeper)

    def resize_host(self, num_blocks: int | None) -> None:
        """Use at most `num_blocks` host blocks from now on; None uses all that are ready. Raises InvalidBlockError, and
        changes nothing, for fewer than none."""
        self._ranks.limit_host(num_blocks)

    @property
    def host_block_bytes(self) -> int:
        """Bytes of a host block over all ranks; 0 as long as no rank has host memory ready."""
        return self._ranks.block_bytes

    def clear_tenant(self, tenant: str) -> int:
        """Drop a tenant's blocks from the host, with the pins of its requests; blocks that they have computed until now
        are not saved any more. Returns how many blocks were dropped. The device and storage keep their blocks, which
        only requests with the same salt hit. Raises KVConnectorError for a tenant that is not configured."""
        return self._control.clear_tenant(tenant, self._requests)

    def tenant_stats(self) -> dict[str, dict[str, float]]:
        """By tenant its share, quota and held blocks, and counters since the start; "default" is always included."""
        return self._control.tenant_stats()

    def warm(self, block_hashes: Sequence[BlockHash], tenant: str = "default", are_given: bool = True) -> bool:
        """Read what storage has of a prefix to the host, as one of the tenant's; whether that has begun. Not without
        storage, nor where many are under way. `are_given`, and what it raises: as `pin_prefix`."""
        owner = self._control.tenants.named(tenant)
        self._check_known(block_hashes, are_given)
        return self._companions.warm(block_hashes, owner)

    def tenant_of(self, cache_salt: str) -> str:
        """Name of the tenant that requests with this salt belong to."""
        return self._control.tenants.name_of(self._control.tenants.of_salt(cache_salt))

    def tenant_named(self, name: str) -> str:
        """The same name. Raises KVConnectorError for a tenant that is not configured."""
        return self._control.tenants.name_of(self._control.tenants.named(name))

    def drain(self) -> int:
        """Write all that the host has to storage, as in front of a restart, and return how many of its blocks are still
        to be looked at or written: call again until none are. Steps of the engine do it, and serving goes on. What is
        saved meanwhile goes to storage when `storage.backup` says so. Raises KVConnectorError without storage."""
        return self._companions.drain()

    def _check_known(self, block_hashes: Sequence[BlockHash], are_given: bool) -> None:
        """What lay elsewhere in the tree than where requests look for it would be in their way. What nobody has asked
        for lately is not known."""
        if are_given and not self._grouped.knows_prefix(block_hashes):
            raise KVConnectorError(
                f"these {len(block_hashes)} hashes are not known as those of a prompt's blocks from its first one on: "
                "give all of them in order, behind a request with that prompt, or have the engine name its blocks"
            )
