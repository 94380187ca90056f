"""Prefixes that are kept on the host, each named by its length and its last hash: an operator's, and requests'.

A pin ends when it is undone, or at its deadline. Those of requests may hold a share of the host between them, and of
each tenant's share; an operator knows what he does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import KVConnectorError
from ...index import CacheTier, Terms
from ...types import BlockHash, KeptPin
from ..shared import Shared
from .keeping import NoKeeper, PinKeeper

_Name = tuple[int, BlockHash, bool]
"""Length of the prefix, its last hash, and whether requests have pinned it."""
_MOST_PINS = 1 << 14
"""Of requests."""
_LEAST_PASSED_OVER = 64
"""Deadlines that are no pin's own any more, before they are thrown out."""
_NEVER = float("inf")


@dataclass(slots=True)
class _Pin:
    block_hashes: tuple[BlockHash, ...]
    terms: Terms
    deadline: float = 0.0
    count: int = 1  # an operator may pin a prefix several times


class PinnedPrefixes:
    """Owns the pins of tree nodes: whoever pins or unpins one does it here. `share`: of the host, for requests."""

    def __init__(self, shared: Shared, share: float) -> None:
        self.keeper: PinKeeper = NoKeeper()
        """Is told of all that are made and end."""
        self._tenants = shared.tenants
        self._grouped = shared.grouped
        self._host: CacheTier = shared.host
        self._clock = shared.clock
        self._share = share
        self._pins: dict[_Name, _Pin] = {}
        self._deadlines: list[tuple[float, _Name]] = []  # a heap; what is not the pin's own by now is passed over
        self._num_blocks: dict[int, int] = {}  # pinned nodes, by tenant

    def __contains__(self, name: _Name) -> bool:
        return name in self._pins

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned, on the host or not."""
        return sum(self._num_blocks.values())

    def num_blocks_of(self, tenant: int) -> int:
        """Those of them that are the tenant's."""
        return self._num_blocks.get(tenant, 0)

    def of_operators(self) -> list[KeptPin]:
        """What operators have pinned."""
        now, name_of = self._clock(), self._tenants.name_of
        return [
            KeptPin(pin.block_hashes, name_of(pin.terms.tenant), _seconds(pin.deadline - now), False)
            for name, pin in self._pins.items()
            if not name[2] and pin.block_hashes
        ]

    def pin(self, block_hashes: Sequence[BlockHash], ttl_s: float | None = None, tenant: int = 0) -> None:
        """For an operator: keep the blocks of a prefix, one time more. `ttl_s`: they are all let go of when so many
        seconds have passed, and as many as were given in other calls. Whoever calls knows that it is a prefix. Raises
        KVConnectorError, and changes nothing, for what is no time."""
        if ttl_s is not None and not ttl_s > 0:
            raise KVConnectorError(f"ttl_s={ttl_s} is no time to keep a prefix for: give seconds over 0, or None")
        name = _name(block_hashes, False)
        pin = self._pins.get(name)
        if pin is not None:
            pin.count += 1
            self._grouped.tree.pin(self._nodes(pin))
        else:
            # Of what is new no request is known, and one that is not to be cached may be the first to compute it.
            pin = self._pins[name] = self._made(block_hashes, Terms(tenant, is_barred=True))
        self._extend(name, pin, _NEVER if ttl_s is None else ttl_s)

    def unpin(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin` of the same prefix. Raises KVConnectorError, and changes nothing, for others."""
        name = _name(block_hashes, False)
        if name not in self._pins:
            raise KVConnectorError(
                f"this prefix of {len(block_hashes)} blocks is not pinned: give all the hashes of one pin_prefix"
            )
        self._remove(name, 1)

    def pin_for_request(self, block_hashes: Sequence[BlockHash], terms: Terms, ttl_s: float) -> bool:
        """Keep a prompt for so long from now on, or longer where that was asked for before; False, and nothing is
        changed, where requests would hold more than they may."""
        name = _name(block_hashes, True)
        pin = self._pins.get(name)
        if pin is None:
            if len(self._pins) >= _MOST_PINS or not self._has_room(block_hashes, terms.tenant):
                return False
            pin = self._pins[name] = self._made(block_hashes, terms)
        self._extend(name, pin, ttl_s)
        return True

    def unpin_for_request(self, block_hashes: Sequence[BlockHash]) -> None:
        """Let go of what requests have pinned of this prompt: the longest of its prefixes first, up to one that is in
        front of what somebody else has pinned."""
        count = len(block_hashes)
        own = [name for name in self._pins if name[2] and name[0] <= count and block_hashes[name[0] - 1] == name[1]]
        per_block = self._grouped.groups[0].hashes_per_block
        while own:
            longest = max(own)
            own.remove(longest)
            num_blocks = longest[0] // per_block
            num_own = 1 + sum(name[0] // per_block == num_blocks for name in own)  # with which it shares its last block
            last = self._grouped.find(self._grouped.keys(block_hashes[: longest[0]], 0)[-1:])
            if any(self._grouped.tree.pins[node] > num_own for node in last):
                return
            self._remove(longest, 1)

    def unpin_tenant(self, tenant: int) -> None:
        """Let go of all that requests of the tenant's have pinned."""
        for name in [name for name, pin in self._pins.items() if name[2] and pin.terms.tenant == tenant]:
            self._remove(name, 1)

    def expire(self, now: float) -> None:
        """Let go of those whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, name = heapq.heappop(self._deadlines)
            pin = self._pins.get(name)
            if pin is not None and pin.deadline == deadline:
                self._remove(name, pin.count)

    def _made(self, block_hashes: Sequence[BlockHash], terms: Terms) -> _Pin:
        pin = _Pin(tuple(block_hashes), terms)
        for group in range(len(self._grouped.groups)):
            nodes = self._grouped.insert(pin.block_hashes, group, self._clock(), terms=terms)
            self._count([node for node in nodes if not self._grouped.tree.pins[node]], 1)
            self._grouped.tree.pin(nodes)
        return pin

    def _nodes(self, pin: _Pin) -> list[int]:
        """Of all groups; as long as it is pinned the tree forgets none."""
        grouped = self._grouped
        return [node for g in range(len(grouped.groups)) for node in grouped.find(grouped.keys(pin.block_hashes, g))]

    def _remove(self, name: _Name, count: int) -> None:
        pin = self._pins[name]
        pin.count -= count
        if not pin.count:
            del self._pins[name]
            self.keeper.ended(name)
        nodes = self._nodes(pin)
        self._count([node for node in nodes if self._grouped.tree.pins[node] == count], -1)
        for _ in range(count):
            self._host.unpin(nodes)

    def _extend(self, name: _Name, pin: _Pin, ttl_s: float) -> None:
        if (deadline := self._clock() + ttl_s) > pin.deadline:
            pin.deadline = deadline
            if deadline < _NEVER:
                self._note_deadline(deadline, name)
            if pin.block_hashes:
                tenant = self._tenants.name_of(pin.terms.tenant)
                self.keeper.kept(KeptPin(pin.block_hashes, tenant, _seconds(ttl_s), name[2]))

    def _note_deadline(self, deadline: float, name: _Name) -> None:
        """Who pins the same again and again leaves no more behind than there are pins."""
        heapq.heappush(self._deadlines, (deadline, name))
        if len(self._deadlines) > 2 * len(self._pins) + _LEAST_PASSED_OVER:
            self._deadlines = [(pin.deadline, name) for name, pin in self._pins.items() if pin.deadline < _NEVER]
            heapq.heapify(self._deadlines)

    def _has_room(self, block_hashes: Sequence[BlockHash], tenant: int) -> bool:
        """Whether the blocks of this prefix that are not pinned yet may be."""
        num_new, pins = 0, self._grouped.tree.pins
        for group in range(len(self._grouped.groups)):
            keys = self._grouped.keys(block_hashes, group)
            num_new += len(keys) - sum(pins[node] > 0 for node in self._grouped.find(keys))
        capacity, tenants = self._host.pool.capacity, self._host.tenants
        has_room = self.num_blocks + num_new <= int(self._share * capacity)
        if tenants is not None:
            has_room &= self.num_blocks_of(tenant) + num_new <= int(self._share * tenants.shares[tenant])
        return has_room

    def _count(self, nodes: Sequence[int], sign: int) -> None:
        for node in nodes:
            tenant = self._grouped.tree.terms.tenant[node]
            self._num_blocks[tenant] = self._num_blocks.get(tenant, 0) + sign


def _name(block_hashes: Sequence[BlockHash], is_of_request: bool) -> _Name:
    """The last hash stands for all in front of it, as far as the prefix goes back to its first block."""
    return len(block_hashes), block_hashes[-1] if block_hashes else BlockHash(b""), is_of_request


def _seconds(left: float) -> float | None:
    return left if left < _NEVER else None
