"""Under write_back: device blocks are saved just before the engine reuses them."""

from __future__ import annotations

from ...index import BlockState, Event, SavePolicy
from ..shared import Shared
from .lookahead import LookAhead
from .refusals import Refusals


class SavesBeforeReuse:
    """Finds host blocks for the device blocks that the engine will reuse first, as far ahead as its steps take them.

    They are within no budget and take nothing from it: a block that waited would be lost, and computed again. Under
    other policies it finds nothing.
    """

    def __init__(self, shared: Shared, policy: SavePolicy, refusals: Refusals) -> None:
        self._grouped = shared.grouped
        self._tree = shared.grouped.tree
        self._host = shared.host
        self._pool = shared.pool
        self._metrics = shared.metrics
        self._refusals = refusals
        self._is_on = policy.saves_before_reuse
        self._look_ahead = LookAhead(policy.lookahead)

    @property
    def may_find(self) -> bool:
        """Whether an idle engine's steps may have something to save."""
        return self._look_ahead.may_find and not self._refusals.are_too_many

    def admitted(self, num_hashes: int, num_hit_hashes: int) -> None:
        """A request was admitted that will take blocks of so many hashes, and has some that the device holds."""
        if self._is_on:
            self._look_ahead.admitted(self._num_blocks(num_hashes), self._num_blocks(num_hit_hashes))

    def begun(self, num_hashes: int, num_hashes_before: int) -> None:
        """With this step a request has begun blocks of so many hashes, and of fewer before."""
        if self._is_on:
            self._look_ahead.begun(self._num_blocks(num_hashes) - self._num_blocks(num_hashes_before))

    def changed(self) -> None:
        """Device blocks were freed: there may be something to save."""
        self._look_ahead.may_find = self._is_on

    def failed(self) -> None:
        """A save has failed: an idle engine does not try again and again."""
        self._look_ahead.may_find = False

    def plan(self) -> tuple[list[int], list[int]]:
        """Device blocks that the step saves, and the host blocks that become their copies."""
        device_ids: list[int] = []
        host_ids: list[int] = []
        if not self._is_on or self._refusals.are_too_many:
            return device_ids, host_ids
        watched = self._pool.next_reused(self._look_ahead.next_step())
        nodes = [(device_id, key, self._tree.get(key)) for device_id, key in watched if key not in self._refusals]
        known = [(device_id, key, node) for device_id, key, node in nodes if node is not None]
        for index in self._host.absent([node for _, _, node in known]):
            device_id, key, _ = known[index]
            node = self._tree.get(key)  # room was made for those in front of it, and one of them may be the same block
            if node is None or self._tree.terms.barred[node] or self._host.node_state(node) is not BlockState.ABSENT:
                continue
            room = self._host.allocate_up_to(1, self._tree.used[node], self._tree.terms.tenant[node])
            node = self._tree.get(key)
            if not room or node is None:
                self._host.release(room)
                continue
            self._host.attach(room, [node], Event.SWAP_OUT)
            device_ids.append(device_id)
            host_ids += room
        self._metrics.saves_on_reuse_blocks += len(host_ids)
        self._look_ahead.may_find = len(host_ids) > 0
        return device_ids, host_ids

    def _num_blocks(self, num_hashes: int) -> int:
        """That a prefix of so many hashes takes, of all groups."""
        return sum(-(-num_hashes // group.hashes_per_block) for group in self._grouped.groups)
