"""A world: engines, what lies between them, and the time in which all of it happens. One seed decides everything."""

from __future__ import annotations

import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import config as configs
from . import workload
from .checks import Violation
from .clock import VirtualTime
from .device import seams
from .engine import Engine
from .requests import SimulatedRequest
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
    actions: list[Action] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)


class World:
    """Subclasses plug in what lies between engines: see `connector_parts`, `open_storage` and `open_peers`."""

    def __init__(self, seed: int, num_engines: int = 1) -> None:
        self.seed = seed
        self.time = VirtualTime(seed)
        self.met: Counter[str] = Counter()
        self.num_steps = 0
        self.num_finished = 0
        rng = random.Random(f"{seed}/world")
        self.configs = [configs.draw(rng) for _ in range(num_engines)]
        self.epochs = [1 for _ in self.configs]
        self.engines = [Engine(self, index, config) for index, config in enumerate(self.configs)]
        self.actions = workload.draw(rng, self.configs)
        self.users = workload.Users(self, random.Random(f"{seed}/users"))
        for engine in self.engines:
            self._count_config(engine)

    # What plugs in between engines.

    def connector_parts(self, engine: Engine) -> dict[str, Any]:
        """Settings of the connector that say what is outside of the engine: `storage`, `peer`."""
        return {}

    def open_storage(self, engine: Engine, rank: int) -> Callable[..., Any] | None:
        """What a worker half takes as `open_storage`."""
        return None

    def open_peers(self, engine: Engine, rank: int) -> Callable[..., Any] | None:
        """What a worker half takes as `open_peers`."""
        return None

    # What engines tell.

    def count_step(self, engine: Engine) -> None:
        self.num_steps += 1

    def finished(self, engine: Engine, request: SimulatedRequest) -> None:
        self.num_finished += 1

    def restart(self, engine: Engine) -> Engine:
        """An engine that was killed starts anew."""
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
        for engine in self.engines:
            engine.quieten()
        self._rest(end)
        for engine in self.engines:
            engine.check_at_rest()
        for engine in self.engines:
            engine.shutdown()

    def _rest(self, since: float) -> None:
        before = self.num_steps
        while not all(engine.is_at_rest for engine in self.engines):
            is_over = self.num_steps - before > MOST_STEPS_TO_REST and self.time.now() - since > MOST_SECONDS_TO_REST
            if is_over or not self.time.run_next():
                raise Violation("stuck", "; ".join(self._why_not_at_rest()))
        self.time.run_until(self.time.now() + 1.0)  # what was left behind may still do harm

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
        met["worlds"] += 1
        met["worlds asynchronous with drafts"] += config.asynchronous and config.num_drafts > 0
        met["worlds with ranks"] += config.num_ranks > 1
        met["worlds with pipelines"] += config.pipeline
        met["worlds with windows"] += len(config.windows) > 1
        met[f"worlds with {config.write_policy.value}"] += 1


def simulate(seed: int, keep: frozenset[int] | None = None) -> Outcome:
    """One world. `keep`: numbers of the actions that are done, all of them by default."""
    with seams(), quiet_logs():
        world = World(seed)
        actions = [action for action in world.actions if keep is None or action.number in keep]
        outcome = Outcome(seed, 0, 0, world.met, actions=actions, engines=[c.describe() for c in world.configs])
        try:
            world.run(actions)
        except Violation as violation:
            outcome.violation = violation
            outcome.trace = traceback.format_exc()
        except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a failure of the world
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__} in {last.name} ({last.filename.rsplit('/', 1)[-1]}): {error}"
            outcome.violation = Violation("crash", text)
            outcome.trace = traceback.format_exc()
        outcome.time = world.time.now()
        outcome.num_steps, outcome.num_requests = world.num_steps, world.num_finished
        return outcome


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
