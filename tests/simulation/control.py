"""What requests and operators of a simulated world say of the cache: tenants, hints, warming, draining, clearing. And
what must hold of it, found out apart from the code that is looked at.

All of it is drawn from streams of its own, so that a seed's other choices do not depend on it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kv_connector.index import group_key, split_key
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.control.keeping import NoKeeper
from kv_connector.types import BlockHash, KeptPin, Tier

from .checks import Violation
from .config import EngineConfig
from .workload import Action

if TYPE_CHECKING:
    from .world import World

FIRST_NUMBER, FIRST_GIVEN = 20_000, 30_000
"""Of an action that is added; those of the history before have lower ones."""
LONG_AFTER = 1e6
"""Seconds behind which no time of a request's is still running."""
_UNLISTED = ("nobody:1", "nobody:2")
_NONSENSE: tuple[Any, ...] = (
    "all",
    {"pin": 1},
    {"ttl_s": -3},
    {"priority": 9},
    {"pins": True},
    {"ttl_s": float("nan")},
)


def draw(rng: random.Random, configs: Sequence[EngineConfig], actions: Sequence[Action]) -> list[Action]:
    """What operators do beside the history."""
    if rng.random() < 0.5:
        return []
    drawn: list[Action] = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(["warm", "warm", "drain", "clear"])
        engine = rng.randrange(len(configs))
        what: dict[str, Any] = {}
        if kind == "warm":
            what = {"document": rng.randrange(4), "share": rng.choice([0.5, 1.0])}
        elif kind == "clear":
            what = {"tenant": rng.randrange(3)}
        time = rng.choice(actions).time
        drawn.append(Action(FIRST_NUMBER + len(drawn), time, kind, engine, what))
    return drawn


def draw_given(rng: random.Random, configs: Sequence[EngineConfig], actions: Sequence[Action]) -> list[Action]:
    """Hashes that somebody gives, to pin or to warm: of a prompt's blocks, or by mistake others."""
    if rng.random() < 0.5:
        return []
    drawn: list[Action] = []
    for number in range(rng.randint(1, 8)):
        what = {
            "document": rng.choice([0, 0, 0, 1, 2]),
            "first": rng.choice([0.0, 0.0, 0.1, 0.3]),
            "end": rng.choice([0.4, 0.7, 1.0]),
            "mistake": rng.choice(["", "", "gap", "turned", "twice"]),
            "warms": rng.random() < 0.5,
        }
        time = rng.choice(actions).time
        drawn.append(Action(FIRST_GIVEN + number, time, "give", rng.randrange(len(configs)), what))
    return drawn


def draw_hints(rng: random.Random, config: EngineConfig) -> tuple[str | None, Any]:
    """Of one request: its salt, and its hints or nothing."""
    salt = None
    if config.tenants and rng.random() < 0.8:
        name = rng.choice([name for name, _, _ in config.tenants])
        salt = rng.choice([name, f"{name}:user", *_UNLISTED])
    if rng.random() >= config.hinted_share:
        return salt, None
    if rng.random() < 0.1:
        return salt, rng.choice(_NONSENSE)
    hints: dict[str, Any] = {}
    if rng.random() < 0.4:
        hints["pin"] = rng.random() < 0.7
    if rng.random() < 0.4:
        hints["ttl_s"] = rng.choice([1, 1.0, 2.5, 30])
    if rng.random() < 0.3:
        hints["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.2:
        hints["do_not_cache"] = True
    if rng.random() < 0.2:
        hints["prefetch"] = True
    return salt, hints


def is_lasting(hints: object) -> bool:
    """Whether a request with these hints may have its blocks kept until they are evicted, and stored."""
    if not isinstance(hints, dict):
        return True
    is_private, seconds = hints.get("do_not_cache") is True, hints.get("ttl_s")
    has_time = isinstance(seconds, int | float) and 1 <= seconds <= 604_800
    return not is_private and (hints.get("pin") is True or not has_time)


KeptPins = dict[tuple[int, BlockHash, bool], tuple[KeptPin, float]]
"""By their names, and when they end."""


class SimulatedKeeper(NoKeeper):
    """Keeps an engine's pins for its next start, up to the last one."""

    def __init__(self, pins: KeptPins, clock: Callable[[], float]) -> None:
        self._pins = pins
        self._clock = clock

    def take(self) -> list[KeptPin]:
        now = self._clock()
        live = [(pin, ends) for pin, ends in self._pins.values() if ends > now]
        return [pin._replace(seconds=None if ends == math.inf else ends - now) for pin, ends in live]

    def kept(self, pin: KeptPin) -> None:
        self._pins[pin.name] = pin, math.inf if pin.seconds is None else self._clock() + pin.seconds

    def ended(self, name: tuple[int, BlockHash, bool]) -> None:
        self._pins.pop(name, None)


class ControlWatch:
    """Looks at every block that one engine's host gives away, and whose copies it takes."""

    def __init__(self, world: World, config: EngineConfig, half: SchedulerHalf) -> None:
        self._config = config
        self._half = half
        self._world = world
        self._names = ["default", *(name for name, _, _ in config.tenants if name != "default")]
        self._pinned: Counter[BlockHash] = Counter()  # by operators, by the names of whole blocks
        self._watch_pins()
        if config.tenants:
            self._wrap()

    def pinned(self, hashes: Sequence[BlockHash], sign: int) -> None:
        """An operator has pinned a prefix, or undone that."""
        for group, size in enumerate(part.hashes_per_block for part in self._config.layer_groups):
            for block_hash in hashes[size - 1 :: size]:
                self._pinned[group_key(block_hash, group)] += sign

    def check_taken(self, hashes: Sequence[BlockHash], prompt: Sequence[BlockHash]) -> None:
        """Somebody has given these as a prefix, of this prompt if of any. Of windows no block follows another, and
        where prompts end inside of blocks one such end is known like a prompt's first block."""
        for group in self._config.layer_groups:
            is_full = (group.window, group.chunk_blocks, group.is_recurrent) == (None, None, False)
            ends = slice(group.hashes_per_block - 1, len(hashes), group.hashes_per_block)
            is_end = self._config.ends_within and len(hashes[ends]) == 1
            if is_full and not is_end and hashes[ends] != prompt[ends]:
                raise Violation("check", f"{len(hashes)} hashes are taken as a prefix, which they are not")

    def _watch_pins(self) -> None:
        host = self._half.host
        evict = host._evict

        def watched(victims: list[int]) -> list[int]:
            for key in self._half.tree.hashes_of(victims):
                if self._pinned[key] > 0:
                    raise Violation("check", f"block {key.hex()} is evicted, which an operator has pinned")
            block_ids: list[int] = evict(victims)
            return block_ids

        host._evict = watched  # type: ignore[method-assign]

    def check_cleared(self, name: str) -> None:
        """An operator has just cleared this tenant."""
        host = self._half.host
        for key in host.hashes_of(host.copies()):
            if self._tenant(key) == name:
                raise Violation("check", f"block {key.hex()} is on the host, of tenant {name}, which was cleared")

    def check_backup(self, host_ids: Sequence[int]) -> None:
        """These host blocks are about to be written to storage."""
        lasting = self._world.lasting_hashes
        names = {split_key(key)[0] for key in self._half.host.hashes_of(host_ids)}
        if not names <= lasting:
            self._world.note_live()
        if left := names - lasting:
            raise Violation("check", f"block {left.pop().hex()} goes to storage, of requests that set a time to live")

    def _wrap(self) -> None:
        host = self._half.host
        hand_out, attached = host._hand_out, host._queue.attached

        def watched(num_free: int, victims: list[int], tenant: int) -> list[int]:
            self._check_victims(victims, tenant)
            block_ids: list[int] = hand_out(num_free, victims, tenant)
            self._check_quota(tenant)
            return block_ids

        def watched_attached(block_ids: Sequence[int], nodes: Sequence[int]) -> None:
            for block_id, node in zip(block_ids, nodes, strict=True):
                expected = self._names.index(self._tenant(self._half.tree.hash_of(node)))
                if self._held_for(block_id) != expected:
                    text = f"block {block_id} of tenant {expected} was taken for {self._held_for(block_id)}"
                    raise Violation("check", text)
            attached(block_ids, nodes)

        host._hand_out = watched  # type: ignore[method-assign]
        host._queue.attached = watched_attached  # type: ignore[method-assign]

    def _held_for(self, block_id: int) -> int:
        tenants = self._half.host.tenants
        assert tenants is not None
        return tenants._owner[block_id]

    def _tenant(self, key: BlockHash) -> str:
        block_hash, salts = BlockHash(key[: len(key) - len(key) % 2]), self._world.salts
        if block_hash not in salts:
            self._world.note_live()  # it may have been computed since
        salt = salts.get(block_hash, "default")
        return next((name for name in (salt, salt.split(":")[0]) if name in self._names), "default")

    def _check_victims(self, victims: list[int], tenant: int) -> None:
        tenants = self._half.host.tenants
        assert tenants is not None
        met = self._world.met
        for giver, count in Counter(
            self._names.index(self._tenant(self._half.tree.hash_of(n))) for n in victims
        ).items():
            if giver != tenant:
                met["evictions for another tenant"] += 1
                left = tenants.held[giver] - count
                if left < self._share(giver):
                    raise Violation("check", f"tenant {tenant} pushes {giver} to {left} of {self._share(giver)} blocks")

    def _check_quota(self, tenant: int) -> None:
        tenants = self._half.host.tenants
        assert tenants is not None
        quota = {name: quota for name, _, quota in self._config.tenants}.get(self._names[tenant], 0)
        if quota and tenants.held[tenant] > quota:
            raise Violation("check", f"tenant {tenant} holds {tenants.held[tenant]} blocks over its quota of {quota}")

    def _share(self, tenant: int) -> int:
        settings = {name: (weight, quota) for name, weight, quota in self._config.tenants}
        weights = [settings.get(name, (1, 0))[0] for name in self._names]
        share = self._half.host.pool.capacity * weights[tenant] // sum(weights)
        quota = settings.get(self._names[tenant], (1, 0))[1]
        return min(share, quota) if quota else share

    def check_at_rest(self) -> None:
        """Once all times are over no request keeps anything pinned, and nothing of a private one is on the host."""
        half = self._half
        half._control.step(self._world.time.now() + LONG_AFTER)
        half.check()
        private = self._world.private_hashes - self._world.shown_hashes
        blocks = half.tree.block[Tier.HOST]
        for node in half.tree.nodes():
            key = half.tree.hash_of(node)
            if blocks[node] >= 0 and BlockHash(key[: len(key) - len(key) % 2]) in private:
                raise Violation("check", f"block {key.hex()} is on the host, of a request that was not to be cached")
