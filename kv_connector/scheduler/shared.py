"""What every planner of the scheduler half works on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..base import DeviceBlocks
from ..errors import KVConnectorError
from ..events import EventLog
from ..index import CacheTier, GroupedTree
from ..metrics import CacheMetrics
from ..types import BlockHash
from .control.tenants import Tenants
from .ledger import JobLedger


class DevicePool:
    """The engine's device blocks, bound late: see `DeviceBlocks` for the calls."""

    def __init__(self) -> None:
        self._blocks: DeviceBlocks | None = None

    def bind(self, blocks: DeviceBlocks) -> None:
        """Use these blocks from now on; called once, before the first request."""
        self._blocks = blocks

    def touch(self, block_ids: Sequence[int]) -> None:
        """As `DeviceBlocks.touch`."""
        self._bound.touch(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """As `DeviceBlocks.free_blocks`."""
        self._bound.free_blocks(block_ids)

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        """As `DeviceBlocks.next_reused`."""
        return self._bound.next_reused(limit)

    @property
    def num_available(self) -> int:
        """As `DeviceBlocks.num_available`."""
        return self._bound.num_available

    def forget(self, block_ids: Collection[int]) -> None:
        """As `DeviceBlocks.forget`."""
        self._bound.forget(block_ids)

    @property
    def _bound(self) -> DeviceBlocks:
        if self._blocks is None:
            raise KVConnectorError("bind_block_pool(...) must be called before the first request")
        return self._blocks


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that planners share. `clock` gives seconds that never go back; `block_size` is the tokens of a block
    hash, which are those of a block where all groups have blocks of one size."""

    grouped: GroupedTree
    host: CacheTier
    pool: DevicePool
    ledger: JobLedger
    metrics: CacheMetrics
    events: EventLog
    clock: Callable[[], float]
    block_size: int
    tenants: Tenants

    def num_useful(self, num_tokens: int) -> int:
        """How many hashes of a request of so many tokens a lookup may go by, so that a token is left to compute.

        Where a block is left to draft layers it may be the request's last one. As vLLM does it, that holds for several
        groups alone: it keeps the states in front of that block.
        """
        leaves_block = self.grouped.drops_last_block and len(self.grouped.groups) > 1
        return (num_tokens if leaves_block else num_tokens - 1) // self.block_size

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by group."""
        return tuple(self.block_size * group.hashes_per_block for group in self.grouped.groups)
