"""A world: engines, what lies between them, and the time in which all of it happens. One seed decides everything."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from kv_connector.index import tree
from kv_connector.types import BlockHash, StepPlan, StorageAction

from . import config as configs
from . import control, streams, workload
from .checks import Violation
from .clock import VirtualTime
from .coder import plain_coder
from .device import seams
from .engine import Engine
from .outside import SECONDS_TO_REST, Outside
from .requests import Item, SimulatedRequest
from .workload import Action

MOST_STEPS_TO_REST = 20_000
MOST_SECONDS_TO_REST = 60.0
"""Steps of all engines, and seconds, from when faults are off until nothing is under way any more."""


@dataclass
class Outcome:
    """What a world came to. `violation` is None where all held."""

    seed: int
    num_steps: int
    num_requests: int
    met: Counter[str]
    violation: Violation | None = None
    trace: str = ""
    time: float = 0.0  # virtual, of its end
    digest: str = ""  # of every step
    actions: list[Action] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)


class World:
    """Engines and `outside`, what lies between them; `users` and their `proxy` act on it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.time = VirtualTime(seed)
        self.met: Counter[str] = Counter()
        self.num_steps = 0
        self.num_finished = 0
        rng = random.Random(f"{seed}/world")
        self._digest = hashlib.sha256()
        self.salts: dict[BlockHash, str] = {}
        self.private_hashes: set[BlockHash] = set()
        """Of requests that were not to be cached, and of all others."""
        self.shown_hashes: set[BlockHash] = set()
        self.lasting_hashes: set[BlockHash] = set()
        """Of requests that set no time to live, and of what operators have pinned."""
        self.configs = configs.draw_remembered(random.Random(f"{seed}/most_remembered"), configs.draw_world(rng))
        self.configs = configs.draw_policies(random.Random(f"{seed}/policies"), self.configs)
        self.configs = configs.draw_groups(random.Random(f"{seed}/groups"), self.configs)
        self.configs = configs.draw_replicas(random.Random(f"{seed}/replicas"), self.configs)
        self.configs = configs.draw_ends(random.Random(f"{seed}/ends"), self.configs)
        self.configs = configs.draw_refusals(random.Random(f"{seed}/blocks_refused"), self.configs)
        self.configs = configs.draw_control(random.Random(f"{seed}/control"), self.configs)
        self.configs = configs.draw_wire_forms(random.Random(f"{seed}/wire_forms"), self.configs)
        self.epochs = [1 for _ in self.configs]
        """Of the weights that each engine is to have."""
        group_blocks = configs.draw_group_blocks(random.Random(f"{seed}/group_blocks"))
        secrets = configs.draw_secrets(random.Random(f"{seed}/secrets"), len(self.configs))
        self.outside = Outside(self.time, rng, self.configs, group_blocks, secrets)
        keeps_pins = random.Random(f"{seed}/keepers").random() < 0.5
        self.kept_pins: dict[tuple[int, int], control.KeptPins] | None = {} if keeps_pins else None
        """By engine and weights, as an engine's storage keeps them for its next start; None where it does not."""
        self.engines: list[Engine] = []
        self.actions = workload.draw(rng, self.configs)
        self.actions += streams.draw(random.Random(f"{seed}/sessions"), self.configs, self.actions)
        self.actions += control.draw(random.Random(f"{seed}/operators"), self.configs, self.actions)
        self.actions += control.draw_given(random.Random(f"{seed}/given"), self.configs, self.actions)
        self.actions.sort(key=lambda action: action.time)

    def start(self) -> None:
        """Start all engines."""
        self.engines += [Engine(self, index, config) for index, config in enumerate(self.configs)]
        self.users = workload.Users(self, random.Random(f"{self.seed}/users"))
        for engine in self.engines:
            self._count_config(engine)

    # What engines tell.

    def count_step(self, engine: Engine, plan: StepPlan, items: Sequence[Item]) -> None:
        self.num_steps += 1
        size = max(self.outside.group_blocks, default=1)
        for job in plan.storage:
            if job.action is StorageAction.BACK_UP:
                engine.watch.check_backup(job.host_ids.tolist())
            if job.action is StorageAction.FETCH:
                self.met["fetches that skip blocks of a group"] += bool(job.skipped)
                self.met["fetches of windows and states"] += job.singly
            elif job.action is StorageAction.LOOK_UP:
                self.met["look-ups of windows and states"] += job.singly
            elif job.singly:
                self.met["backups of windows and states"] += 1
            else:
                self.met["backups of a group where a request has ended"] += job.num_blocks % size > 0
        computed = [(item.request.number, item.num_computed, item.num_scheduled, item.tables) for item in items]
        jobs = [job.job_id for job in (*plan.loads, *plan.background_loads, *plan.saves, *plan.storage, *plan.peer)]
        self._digest.update(f"{engine.engine_id} {self.time.now():.9f} {computed} {jobs}".encode())

    @property
    def digest(self) -> str:
        """Of every step of the run."""
        return self._digest.hexdigest()

    def draw_hints(self, engine: Engine, number: int) -> tuple[str | None, Any]:
        """What the request of this number says of its blocks."""
        salt, hints = control.draw_hints(random.Random(f"{self.seed}/hints/{number}"), engine.config)
        self.met["requests with hints"] += hints is not None
        self.met["requests of tenants"] += salt is not None
        return salt, hints

    def note(self, request: SimulatedRequest) -> None:
        """Whose blocks these are, and whether anybody may have them saved."""
        hints = (request.kv_transfer_params or {}).get("cache")
        if control.is_lasting(hints):
            self.lasting_hashes.update(request.block_hashes)
        is_private = isinstance(hints, dict) and hints.get("do_not_cache") is True
        (self.private_hashes if is_private else self.shown_hashes).update(request.block_hashes)
        if request.cache_salt is not None:
            self.salts.update(dict.fromkeys(request.block_hashes, request.cache_salt))

    def note_live(self) -> None:
        """As `note`, of all that have not ended."""
        for engine in self.engines:
            for request in engine.scheduler.requests:
                self.note(request)

    def finished(self, engine: Engine, request: SimulatedRequest) -> None:
        self.num_finished += 1
        self.users.proxy.finished(request)

    def restart(self, engine: Engine) -> Engine:
        """An engine that was killed starts anew."""
        self._count_stats(engine)
        self.outside.kill(engine)
        if engine.config.prefetch is not None:
            self.outside.mend_disk()
        again = Engine(self, engine.index, engine.config, engine.incarnation + 1)
        self.engines[engine.index] = again
        self.met["engine killed"] += 1
        return again

    # A run.

    def run(self, actions: Sequence[Action]) -> None:
        """All actions, then faults off, until nothing is under way. Raises Violation."""
        for action in actions:
            self.time.call_at(action.time, lambda action=action: self.users.apply(action), str(action))
        end = (actions[-1].time if actions else 0.0) + 1e-3
        self.time.run_until(end)
        self.outside.quieten()
        for engine in self.engines:
            engine.quieten()
        self._rest(end)
        self.users.unpin_all()
        for engine in self.engines:
            engine.check_at_rest()
        self.outside.check_at_rest()
        for engine in self.engines:
            self._count_stats(engine)
            engine.shutdown()
        self.outside.check_at_rest()

    def _rest(self, since: float) -> None:
        before = self.num_steps
        while not all(engine.is_at_rest for engine in self.engines):
            seconds = self.time.now() - since
            is_over = self.num_steps - before > MOST_STEPS_TO_REST and seconds > MOST_SECONDS_TO_REST
            is_over |= seconds > 100 * MOST_SECONDS_TO_REST  # an engine that waits for something takes no steps
            if is_over or not self.time.run_next():
                raise Violation("stuck", "; ".join(self._why_not_at_rest()))
        # What was left behind may still do harm.
        self.time.run_until(self.time.now() + (SECONDS_TO_REST if self.outside.has_peers else 1.0))

    def _why_not_at_rest(self) -> Iterator[str]:
        for engine in self.engines:
            if engine.is_at_rest:
                continue
            left = engine.scheduler.requests + [r for rs in engine.scheduler.dying.values() for r in rs]
            yield f"{engine.engine_id} does not come to rest after {engine.num_steps} steps"
            for request in left[:3]:
                yield f"{request.request_id} is {request.status.value}, {engine.describe(request)}"
            if not left:
                yield f"no request is left; jobs under way {sorted(engine.book.open)}"

    def _count_config(self, engine: Engine) -> None:
        config, met = engine.config, self.met
        met["engines"] += 1
        met["engines asynchronous with drafts"] += config.asynchronous and config.num_drafts > 0
        met["engines with ranks"] += config.num_ranks > 1
        met["engines with replicas"] += config.replicas
        met["engines that remember little"] += config.most_remembered is not None
        met["engines with pipelines"] += config.pipeline
        met["engines that refuse blocks"] += config.refused_share > 0
        met["engines with windows"] += any(group.window is not None for group in config.layer_groups)
        met["engines with blocks of several sizes"] += len(set(config.block_sizes)) > 1
        met["engines with recurrent layers"] += config.is_recurrent
        met[f"engines with {config.write_policy.value}"] += 1
        if config.role is not None:
            met[f"engines that are {config.role.value}"] += 1
            met[f"worlds with {self.outside.carrier}"] += engine.index == 0
        met["engines with storage"] += config.prefetch is not None
        several = len(config.layer_groups) > 1 or config.is_recurrent
        met["engines with layers of several kinds in storage"] += config.prefetch is not None and several
        met["engines with groups in storage"] += config.prefetch is not None and bool(self.outside.group_blocks)
        has_secret = bool(self.outside.secrets[engine.index])
        met["engines with a secret of storage"] += config.prefetch is not None and has_secret
        met["engines with storage and peers"] += config.prefetch is not None and config.role is not None

    def _count_stats(self, engine: Engine) -> None:
        """What the connector says that it has done."""
        stats = engine.half.get_kv_connector_stats()
        for name in STATS:
            self.met[name] += int(stats[name])
        # A row of the plain coder is longer than its pieces.
        self.met["engines that sent coded blocks"] += stats.get("peer_slot_bytes", 0) > stats.get("peer_sent_bytes", 0)


STATS = (
    "storage_hit_tokens",
    "peer_hit_tokens",
    "host_hit_tokens",
    "expired_transfers",
    "failed_receive_jobs",
    "refused_blocks",
    "saves_are_off",
    "expired_blocks",
    "refused_pins",
    "ignored_hints",
)
"""Counters of the connector that say whether anything was gained."""


def simulate(seed: int, keep: frozenset[int] | None = None) -> Outcome:
    """One world. `keep`: numbers of the actions that are done, all of them by default."""
    with seams(), quiet_logs(), chance_of(seed), plain_coder(), few_rows():
        world = World(seed)
        actions = [action for action in world.actions if keep is None or action.number in keep]
        outcome = Outcome(seed, 0, 0, world.met, actions=actions, engines=[c.describe() for c in world.configs])
        try:
            with world.outside.disk.installed():
                world.start()
                world.run(actions)
        except Violation as violation:
            outcome.violation = violation
            outcome.trace = traceback.format_exc()
        except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a failure of the world
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__} in {last.name} ({last.filename.rsplit('/', 1)[-1]}): {error}"
            outcome.violation = Violation("crash", text)
            outcome.trace = traceback.format_exc()
        outcome.time, outcome.digest = world.time.now(), world.digest
        outcome.num_steps, outcome.num_requests = world.num_steps, world.num_finished
        return outcome


@contextmanager
def chance_of(seed: int) -> Iterator[None]:
    """Inside, what takes chance from the system takes it from the seed."""
    draws = itertools.count()
    make_rng = np.random.default_rng
    with patch.object(np.random, "default_rng", lambda: make_rng([seed, next(draws)])):
        yield


@contextmanager
def few_rows() -> Iterator[None]:
    """Inside, trees grow by few rows: a world knows few blocks, and looks at all rows after each step."""
    with patch.object(tree, "_ROWS", 64):
        yield


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Faults are injected by the thousand: what is logged of them helps nobody."""
    logger = logging.getLogger("kv_connector")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
