"""Which blocks are saved in a step: the write policy applied to what the engine computes and reuses."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...base import ScheduledRequest, StateBlock
from ...index import BlockState, Event, GroupKeys, ReuseModel, SavePolicy, Terms
from ...types import NO_BLOCK, BlockHash
from ..requests import RequestState
from ..shared import Shared
from .before_reuse import SavesBeforeReuse
from .budget import SaveBudget
from .jobs import SaveJobs
from .reachable import Reachable
from .refusals import Refusals

_WAITING_AT_ONCE = 64
"""Of a request's blocks that wait so many are looked at before room is made for them: there may be little."""


@dataclass(slots=True)
class _Progress:
    """How far a request will have come after the step. `paths`: its blocks in each group of full attention."""

    state: RequestState
    paths: Sequence[Sequence[BlockHash]]
    num_computed_tokens: int  # before the step, as the engine counts them
    num_hashes: int
    now: float


@dataclass(slots=True)
class _Taken:
    """Host blocks for some blocks of a group, copies of nothing yet. `shown` were shown to the policy: a range of a
    path of full attention. Blocks are places in `keys`: of ends that the engine has told of there is a key each hash.
    """

    group: int
    keys: Sequence[BlockHash]
    size: int  # hashes for each key
    shown: Sequence[int]
    saved: list[int]
    device_ids: Mapping[int, int] | Sequence[int]
    host_ids: list[int]


class SavePlanner:
    """Chooses what a step saves, and finds host blocks for it, by the write policy, room, and what can be reached.

    What the engine computes and hits is saved within `budget`; what is beyond it waits for later steps. Nothing is
    saved while `refusals` are too many. `on_saved` is told the host blocks that saves have filled. `is_in_storage`:
    they go on to storage, and come back from there. Its parts `before_reuse` and `jobs` are told and asked by whoever
    plans the step.
    """

    def __init__(
        self,
        shared: Shared,
        policy: SavePolicy,
        reuse: ReuseModel,
        refusals: Refusals,
        budget: SaveBudget,
        on_saved: Callable[[Sequence[int]], None],
        is_in_storage: bool,
    ) -> None:
        self.before_reuse = SavesBeforeReuse(shared, policy, refusals)
        self.jobs = SaveJobs(shared, refusals, self.before_reuse, on_saved)
        self._on_saved = on_saved
        self._block_size = shared.block_size
        self._grouped = grouped = shared.grouped
        self._tree = grouped.tree
        self._host = shared.host
        self._policy = policy
        self._reuse = reuse
        self._budget = budget
        # What is in storage, too, comes back from it; and what a policy does not want at once may not be there yet.
        absent_is_lost = policy.wants(hits=0, pinned=False) and not is_in_storage
        self._reachable = Reachable(shared, refusals, absent_is_lost)
        self._refusals = refusals
        self._tells = shared.events.is_read
        self._declines = policy.declines and not grouped.has_windows
        self._metrics = shared.metrics
        self._windows = tuple(g for g in grouped.windows if not grouped.groups[g].states_are_told)
        self._in_order = *self._windows, *grouped.full  # what windows cannot save in a step is lost, the others' waits
        self._hashes_per_block = [group.hashes_per_block for group in grouped.groups]

    def asked(self, nodes: Iterable[int], terms: Terms) -> None:
        """A request makes use of these nodes on these terms. What was to be dropped some time, and is not any more, may
        go on to where saves go."""
        if kept := self._tree.terms.use(nodes, terms):
            on_host = [node for node in kept if self._host.node_state(node) is BlockState.RESIDENT]
            self._on_saved(self._host.blocks_of(on_host))

    def plan(self, state: RequestState, item: ScheduledRequest, told: Sequence[StateBlock], now: float) -> None:
        """The step saves what the policy wants of blocks that are, or will be after it, full and valid on the device,
        among them those that the engine has `told` of.

        A hit needs the blocks of every group: room is found for all of them before any is saved, so that what one of
        them declines is given back of the others.
        """
        size, hashes, tables = self._block_size, state.request.block_hashes, state.tables
        num_before, num_tokens = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
        self.before_reuse.begun(-(-num_tokens // size), -(-num_before // size))
        if state.is_stale or not state.is_saved or not tables or self._refusals.are_too_many:
            return
        num_hashes, per_block = min(num_tokens // size, len(hashes)), self._hashes_per_block
        groups = [group for group in self._in_order if tables[group].has_new(num_hashes // per_block[group])]
        if not (groups or told):
            return
        paths = [self._grouped.keys(hashes, group) for group in self._grouped.full]
        progress = _Progress(state, paths, num_before, num_hashes, now)
        if has_room := self._host.has_room_behind(paths, now, tenant=state.terms.tenant):
            self._reachable.look_for_holes(state.reach, hashes, tables, num_hashes)
        taken = self._take_told(progress, told)
        for group in groups:
            if group in self._windows:
                taken += self._take_window(progress, group)
            elif has_room or state.is_held:  # with no room at all those are looked at when there is some
                taken += self._take_full(progress, group)
        for part in taken:
            self._save(state, part, now)

    def plan_before_reuse(self) -> None:
        """The step saves what the engine will reuse first, too: see `SavesBeforeReuse`."""
        self.jobs.add(*self.before_reuse.plan())

    def reset(self) -> None:
        """Nothing that was computed until now may be used any more."""
        self._refusals.reset()

    def _take_full(self, progress: _Progress, group: int) -> list[_Taken]:
        """Of a group of full attention, what the policy wants, as far as there is room for it."""
        state, size = progress.state, self._hashes_per_block[group]
        table, keys = state.tables[group], self._grouped.keys(state.request.block_hashes, group)
        full = progress.num_hashes // size
        most = self._budget.num_blocks
        if not most and full <= table.next_block:
            return []
        first = min(table.next_block, full)  # an engine may take back what it has counted as computed
        table.next_block = max(table.next_block, full)
        saved, host_ids = self._take_waiting(progress, group, keys, most) if table.unsaved else ([], [])
        shown = keys[first:full]
        new, most = self._wanted(shown, first), most - len(saved)
        self._reachable.lose_unfit(state.reach, size, shown, first)
        if progress.num_hashes > state.reach.first_unreachable:
            new = self._reachable.of(state.reach, size, keys, new)
            if not saved and not new:
                return []
        num_deferred = len(new[most:])
        if new and not table.unsaved:
            num_looked_at = min(len(new), most)
            room = self._room(progress, keys, new[:num_looked_at])
            saved, host_ids, new = saved + new[: len(room)], host_ids + room, new[len(room) :]
            if len(room) < num_looked_at and self._has_room(progress):  # but not for these
                new = self._reachable.declined(state.reach, size, keys, new)
        self._metrics.deferred_saves_blocks += min(num_deferred, len(new))
        table.unsaved += new
        self._budget.spend(len(host_ids))
        return [_Taken(group, keys, size, range(first, full), saved, table.block_ids, host_ids)]

    def _take_waiting(
        self, progress: _Progress, group: int, keys: Sequence[BlockHash], most: int
    ) -> tuple[list[int], list[int]]:
        """Up to `most` blocks that waited and are still wanted, as far as there is room, and host blocks for them."""
        reach, table, size = progress.state.reach, progress.state.tables[group], self._hashes_per_block[group]
        full = progress.num_hashes // size
        table.unsaved = deque(self._reachable.of(reach, size, keys, table.unsaved))
        saved: list[int] = []
        host_ids: list[int] = []
        while num_looked_at := min(most - len(saved), _WAITING_AT_ONCE):
            wanted: list[int] = []
            while len(wanted) < num_looked_at and table.unsaved and table.unsaved[0] < full:
                index = table.unsaved.popleft()
                if self._is_wanted(keys[index]):
                    wanted.append(index)
            room = self._room(progress, keys, wanted)
            saved += wanted[: len(room)]
            host_ids += room
            table.unsaved.extendleft(reversed(wanted[len(room) :]))
            if len(room) < len(wanted) and self._has_room(progress):  # but not for these
                table.unsaved = deque(self._reachable.declined(reach, size, keys, table.unsaved))
            if len(room) < num_looked_at:
                break
        return saved, host_ids

    def _find_or_insert(self, keys: Sequence[BlockHash], index: int, now: float, terms: Terms) -> int:
        node = self._tree.get(keys[index])
        return node if node is not None else self._tree.insert_path(keys, now, index, index + 1, terms)[0]

    def _wanted(self, keys: Sequence[BlockHash], first: int) -> list[int]:
        """Which blocks the policy wants, of those from `first` on: a hit shows it thousands that are saved already."""
        known = self._tree.match(keys)
        absent, wants = self._host.absent(known), self._policy.wants
        if wants(hits=0, pinned=False):  # and so whatever was hit or is pinned
            return [*(first + i for i in absent), *range(first + len(known), first + len(keys))]
        hits, pins = self._tree.hits, self._tree.pins
        return [first + i for i in absent if wants(hits[known[i]], pins[known[i]] > 0)]

    def _take_window(self, progress: _Progress, group: int) -> list[_Taken]:
        """Blocks slide out of the window and are gone: what finds no room or budget in this step is not saved later."""
        table, size = progress.state.tables[group], self._hashes_per_block[group]
        full = progress.num_hashes // size
        # What has left the window by the tokens that the engine counts as computed, drafts of steps in flight among
        # them, it may have given to others in this very step.
        held = self._grouped.groups[group].first_held(progress.num_computed_tokens, size * self._block_size)
        first = max(table.next_block, held)
        table.next_block = max(table.next_block, full)
        ids, may_need = table.block_ids, self._grouped.may_need
        shown = {i: ids[i] for i in range(first, full) if ids[i] != NO_BLOCK and may_need(group, i)}
        return self._take_held(progress, group, size, shown)

    def _take_told(self, progress: _Progress, told: Sequence[StateBlock]) -> list[_Taken]:
        """Of recurrent states, and ends inside of blocks: the engine goes on with them, and what is not saved in this
        step is told of again only when a request begins with it. What has no name is not saved: an end that no hit may
        have, or behind tokens that are not hashed yet."""
        held: dict[int, dict[int, int]] = {}
        for block in sorted(told, key=lambda block: block.num_tokens):
            end, rest = divmod(block.num_tokens, self._block_size)
            inside = rest or (not self._grouped.ends_within and end % self._hashes_per_block[block.group])
            if not inside and end <= progress.num_hashes:
                held.setdefault(block.group, {})[end - 1] = block.block_id
        return [part for group, blocks in held.items() for part in self._take_held(progress, group, 1, blocks)]

    def _take_held(self, progress: _Progress, group: int, size: int, held: Mapping[int, int]) -> list[_Taken]:
        """What the policy wants of these blocks, which are in order; of ends `size` is 1."""
        state, terms = progress.state, progress.state.terms
        keys = GroupKeys(state.request.block_hashes, group, size)
        wanted = self._reachable.of(state.reach, size, keys, [index for index in held if self._is_wanted(keys[index])])
        most = min(len(wanted), self._budget.num_blocks)
        host_ids = self._host.allocate_behind(most, progress.paths, progress.now, *terms.claim) if most else []
        self._budget.spend(len(host_ids))
        # The window's end is what a later prefix needs, so its blocks go first where there is no room for all.
        saved = wanted[len(wanted) - len(host_ids) :]
        self._metrics.dropped_saves_blocks += len(wanted) - len(saved)
        return [_Taken(group, keys, size, list(held), saved, held, host_ids)]

    def _save(self, state: RequestState, taken: _Taken, now: float) -> None:
        """Make host blocks the copies of what they were taken for, but for what another group has declined since."""
        saved = self._reachable.of(state.reach, taken.size, taken.keys, taken.saved)
        self._host.release(taken.host_ids[len(saved) :])
        host_ids = taken.host_ids[: len(saved)]
        # Rows of the tree may be recycled while room is made, so nodes are looked up only from here on.
        if isinstance(taken.shown, range):
            targets, nodes = self._nodes(taken, saved, now, state.terms)
        else:
            nodes = self._tree.insert_apart([taken.keys[index] for index in taken.shown], now, state.terms)
            node_of = dict(zip(taken.shown, nodes, strict=True))
            targets = [node_of[index] for index in saved]
            self.asked(nodes, state.terms)
            self._tree.touch(nodes, now)
            for index, node in node_of.items():
                self._tree.inside[node] = (index + 1) * taken.size % self._hashes_per_block[taken.group] > 0
        self._host.attach(host_ids, targets, Event.SWAP_OUT)
        self._tree.settle(nodes)
        names = [taken.keys[index] for index in saved] if self._tells else []
        device_ids = [*map(taken.device_ids.__getitem__, saved)]
        self.jobs.add(device_ids, host_ids, (state.request.request_id,), names)
        num_pinned = self._reachable.num_pinned(taken.keys, saved)
        num_hit = max(0, bisect_left(saved, state.num_hit_hashes // taken.size) - num_pinned)
        self._metrics.saves_pinned_blocks += num_pinned
        self._metrics.saves_on_hit_blocks += num_hit
        self._metrics.saves_on_compute_blocks += len(saved) - num_pinned - num_hit

    def _nodes(self, taken: _Taken, saved: Sequence[int], now: float, terms: Terms) -> tuple[list[int], list[int]]:
        """Of full attention, the nodes of what is saved, and those that are new: every block has one from now on."""
        keys, shown = taken.keys, taken.shown
        assert isinstance(shown, range)
        first, full = shown.start, shown.stop
        shown_before = self._tree.match(keys[first:full])
        self.asked(shown_before, terms)
        nodes = self._tree.insert_path(keys, now, first + len(shown_before), full, terms)
        # In order, so those that waited come first.
        waited = [self._find_or_insert(keys, index, now, terms) for index in saved[: bisect_left(saved, first)]]
        shown_now = shown_before + nodes
        targets = waited + [shown_now[index - first] for index in saved[len(waited) :]]
        self._tree.touch(targets, now)
        return targets, nodes

    def _has_room(self, progress: _Progress) -> bool:
        return self._host.has_room_behind(progress.paths, progress.now, tenant=progress.state.terms.tenant)

    def _room(self, progress: _Progress, keys: Sequence[BlockHash], indices: Sequence[int]) -> list[int]:
        """Host blocks for as many of these blocks as there is room for. For what an operator has pinned whatever is not
        goes; for the others what is worth no more than they are."""
        paths, now, terms = progress.paths, progress.now, progress.state.terms
        num_pinned = self._reachable.num_pinned(keys, indices)
        room = self._host.allocate_behind(num_pinned, paths, now, tenant=terms.tenant) if num_pinned else []
        if num_pinned < len(indices) and len(room) == num_pinned:
            first = keys, indices[num_pinned], terms.priority
            worth = self._reuse.worth_of(*first) if self._declines else terms.most_worth
            room += self._host.allocate_behind(len(indices) - num_pinned, paths, now, worth, terms.tenant)
        return room

    def _is_wanted(self, key: BlockHash) -> bool:
        if key in self._refusals:
            return False
        node = self._tree.get(key)
        if node is None:
            return self._policy.wants(hits=0, pinned=False)
        if self._host.node_state(node) is not BlockState.ABSENT:
            return False
        return self._policy.wants(self._tree.hits[node], self._tree.pins[node] > 0)
