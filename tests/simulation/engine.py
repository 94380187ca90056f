"""One simulated engine: its core loop, the halves of the connector, its ranks, and what operators do to it.

The loop is vLLM's `step_with_batch_queue`: it plans as long as fewer steps are under way than its depth, else it waits
for the oldest one's outputs. A step without requests goes the same way, so that what runs beside it can be reported.
All else (arrivals, aborts, resets) comes between two turns of the loop, with steps under way.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_connector.index import BlockHasher, CacheIdentity, PrefixTree, root_hash
from kv_connector.scheduler import SchedulerHalf
from kv_connector.transfer.memory.host_share import ALONE, HostShare
from kv_connector.types import PeerAction

from .checks import JobBook, Violation
from .config import STATE_BLOCKS, EngineConfig
from .control import ControlWatch, SimulatedKeeper
from .device import SimulatedEvent
from .model import Oracle
from .pool import BlockPool, ConnectorView
from .rank import Rank
from .requests import RankResult, Sampler, SimulatedRequest, Status, Step, shape_of
from .scheduler import SchedulerModel

if TYPE_CHECKING:
    from .world import World

MOST_STEPS_WITHOUT_PROGRESS = 1000
MOST_SECONDS_WITHOUT_PROGRESS = 30.0
"""Where no request is scheduled, admitted or given a token in so many steps of its engine, and so long, they are stuck;
so is one that waits twenty times as long while others go on."""


class ForgetfulTree(PrefixTree):
    """Remembers no more than it was made with, however large the host becomes."""

    @property
    def max_remembered(self) -> int:
        return self._most

    @max_remembered.setter
    def max_remembered(self, most: int) -> None:
        self._most = min(most, getattr(self, "_most", most))


def _host_shares(config: EngineConfig) -> list[HostShare]:
    """Of each rank."""
    if not config.replicas:
        return [ALONE] * config.num_ranks
    file = os.memfd_create("simulated", os.MFD_ALLOW_SEALING)
    shares = [HostShare(rank, config.num_ranks, os.dup(file)) for rank in range(config.num_ranks)]
    os.close(file)
    return shares


class Engine:
    """`incarnation` counts its starts: a killed engine is another object."""

    def __init__(self, world: World, index: int, config: EngineConfig, incarnation: int = 0) -> None:
        self.world = world
        self.index = index
        self.config = config
        self.incarnation = incarnation
        self.is_dead = False
        self.is_asleep = False
        self.met = world.met
        self.shape = shape_of(config)
        split = ", the same on all ranks" if config.replicas else ""
        name, layout = f"simulated, weights {world.epochs[index]}", f"rows of {config.num_layers} layers{split}"
        shared_out = f"{config.num_parts} parts by {config.interleave}" if config.num_parts > 1 else ""
        self.identity = CacheIdentity(
            name, "uint8", layout, config.block_size, tp_size=config.num_ranks, settings=shared_out
        )
        self.engine_id = f"engine{index}.{incarnation}"
        self.connector_config = config.connector()
        self.pool = BlockPool(config.num_device_blocks)
        self.book = JobBook(config.num_ranks, self.pool)
        self.book.met = world.met
        self.half = SchedulerHalf(
            self.connector_config,
            config.block_size,
            config.num_ranks,
            tree=PrefixTree() if config.most_remembered is None else ForgetfulTree(config.most_remembered),
            clock=world.time.now,
            groups=config.groups,
            fails_by_block=config.takes_invalid_blocks,
            ends_within=config.ends_within,
            unpins_when_idle=not config.is_recurrent,
            identity=self.identity,
            engine_id=self.engine_id,
        )
        self.half.reuse.least_part = 8  # a world asks for few blocks
        self.half.refusals.judged_blocks = config.judged_blocks
        self.watch = ControlWatch(world, config, self.half)
        self.kept_as = index, world.epochs[index]
        if world.kept_pins is not None and config.prefetch is not None:
            self.half.keep_pins(SimulatedKeeper(world.kept_pins.setdefault(self.kept_as, {}), world.time.now))
        self.half.bind_block_pool(ConnectorView(self.pool, self.book.freed))
        self.scheduler = SchedulerModel(config, self.pool, self.half, self.met)
        self.scheduler.epoch = world.epochs[index]
        self.scheduler.on_finished = self._finished
        self.sampler = Sampler(world.time.stream(f"{self.engine_id}/drafts"), config.num_drafts, config.acceptance)
        self.host_shares = _host_shares(config)
        self.ranks = [Rank(self, rank) for rank in range(config.num_ranks)]
        # As engines do: which model, layout and weights it is their hashes do not say.
        self._any_identity = CacheIdentity("any", "any", "any", config.block_size)
        self.root = root_hash(self._any_identity)
        self._in_flight: deque[Step] = deque()
        self._last_sampled: list[SimulatedEvent] | None = None  # of the last step with a forward pass
        self._is_due = False
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._wants: list[Callable[[], bool]] = []  # what operators try until it is done
        self._progressed_in = 0  # step in which any request went on or ended
        self.num_resets = 0
        self._step_times = [world.time.now()]  # by step
        self.num_steps = 0

    # The core loop.

    def wake(self) -> None:
        """There may be something to do."""
        if not self._is_due and not self.is_dead:
            self._is_due = True
            delay = self.ranks[0].device.delay(self.config.host_seconds / 4)
            self.world.time.call_after(delay, self._turn, f"{self.engine_id}/core")

    def _turn(self) -> None:
        self._is_due = False
        if self.is_dead:
            return
        self._wants = [want for want in self._wants if not want()]
        oldest_done = bool(self._in_flight) and self._in_flight[0].is_done
        if len(self._in_flight) < self.config.depth and not self.is_asleep and self.scheduler.has_work:
            self._dispatch()
            if len(self._in_flight) < self.config.depth and not oldest_done:
                self.wake()
                return
        if self._in_flight and self._in_flight[0].is_done:
            self._update(self._in_flight.popleft())
            self.wake()
        elif self._wants and not self._in_flight and not self.scheduler.has_work:
            self.world.time.call_after(5e-3, self.wake, f"{self.engine_id}/idle")

    def _dispatch(self) -> None:
        num_preempted, num_declined = self.met["preempted"], self.half.metrics.declined_saves_blocks
        plan, items = self.scheduler.schedule()
        self.met["blocks declined"] += self.half.metrics.declined_saves_blocks - num_declined
        self.num_steps += 1
        self._step_times.append(self.world.time.now())
        self.world.count_step(self, plan, items)
        self.book.planned(plan, self.scheduler.blocks.num_rows)
        ranks = self.config.num_ranks
        sampled = [SimulatedEvent(rank.device) for rank in self.ranks]
        stages = [SimulatedEvent(rank.device) for rank in self.ranks]
        step = Step(plan.step, plan, items, sampled, stages, ranks, [None] * ranks, self._last_sampled)
        for item in items:
            if self.config.pipeline:
                item.sampled_before = item.device.last_sampled
            if item.samples:
                item.device.last_sampled = sampled
        if items:
            self._last_sampled = sampled
        self._in_flight.append(step)
        has_drafts = any(item.num_drafts for item in items)
        self.world.users.planned(self, plan, self.met["preempted"] > num_preempted, has_drafts)
        for rank in self.ranks:
            rank.receive(step)
        self.check(has_changed=not plan.is_empty)

    def rank_done(self, step: Step, rank: int, result: RankResult) -> None:
        """A rank's outputs of a step have come."""
        if self.is_dead:
            return
        step.results[rank] = result
        if step.is_done and self._in_flight and step is self._in_flight[0]:
            self.wake()

    def _update(self, step: Step) -> None:
        results = [result for result in step.results if result is not None]
        for result in results:
            self._received.update(result.received)
            self._failed |= result.failed
            self.book.taken_in(result.report)
        received = {name for name, count in self._received.items() if count == self.config.num_ranks}
        for name in received:
            del self._received[name]
        failed = received & self._failed
        self._failed -= received
        if failed or any(result.invalid for result in results):
            sends = (job.action is PeerAction.SEND for s in (step, *self._in_flight) for job in s.plan.peer)
            self.met["failed load in front of a planned send"] += any(sends)
        self.scheduler.update(step, results, received, failed)
        self.check(has_changed=any(result.report.done or result.report.failed for result in results))

    # What users do.

    def make_request(
        self,
        request_id: str,
        number: int,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> SimulatedRequest:
        oracle = Oracle(self.shape, self.scheduler.epoch, prompt)
        root = self.root if salt is None else root_hash(self._any_identity, salt=salt)
        hasher = BlockHasher(self.config.block_size, root)
        return SimulatedRequest(request_id, number, list(prompt), max_tokens, hasher, oracle, params, salt)

    def most_tokens(self) -> int:
        """Of a request that surely fits."""
        num_recurrent = sum(self.shape.recurrent)
        blocks = self.config.num_device_blocks - 1 - STATE_BLOCKS * num_recurrent
        blocks //= max(1, len(self.shape.recurrent) - num_recurrent)
        return blocks * self.config.block_size - 3 * self.config.num_drafts - 2

    def _finished(self, request: SimulatedRequest) -> None:
        self._progressed_in = self.scheduler.step
        self.world.note(request)
        self.world.finished(self, request)

    def add(self, request: SimulatedRequest) -> None:
        self.world.note(request)
        self.scheduler.add(request)
        self.wake()

    def abort(self, request: SimulatedRequest) -> None:
        self.scheduler.abort(request)
        self.wake()

    # What operators do.

    def reset_connector(self) -> None:
        """As `reset_prefix_cache(reset_connector=True)` while requests run: the engine refuses, the connector is
        asked all the same. Nothing else changes."""
        self._count_reset()
        self.half.reset_cache()
        self.wake()

    def update_weights(self) -> None:
        """Reset every cache, then go on with other weights. Tried as it stands, then with admissions paused, until the
        caches say that they are reset."""
        if not self._try_update_weights():
            self._wants.append(self._try_update_weights)
        self.wake()

    def _try_update_weights(self) -> bool:
        scheduler = self.scheduler
        self._count_reset()
        if not self.config.keeps_running_on_reset:
            if not scheduler.holding and not scheduler.dying:
                scheduler.preempt_all()
            is_reset = self.pool.reset()
            self.met["reset refused by the engine"] += not is_reset
        else:
            is_reset = True
        if is_reset and self.half.reset_cache() is False:
            self.met["reset refused by the connector"] += 1
            is_reset = False
        scheduler.is_paused = not is_reset
        if not is_reset:
            return False
        if self.config.keeps_running_on_reset:
            self.pool.reset(even_if_held=True)
            for request in scheduler.requests:
                request.is_private = request.has_started
        self.met["weights updated"] += 1
        scheduler.epoch = self.world.epochs[self.index]
        for request in scheduler.requests:
            request.progressed_in = scheduler.step
        return True

    def _count_reset(self) -> None:
        met = self.met
        self.num_resets += 1
        met["resets"] += 1
        met["reset while a session waits for input"] += bool(self.scheduler.sessions.idle)
        met["reset with loads under way"] += self.book.has_loads()
        met["reset with saves under way"] += self.book.has_saves()
        met["reset with steps under way"] += bool(self._in_flight)
        met["reset with sends under way"] += self.book.has_sends()
        met["reset with receives under way"] += self.book.has_receives()
        met["reset with storage jobs under way"] += self.book.has_storage_jobs()

    def sleep(self, seconds: float) -> None:
        """Finish what is there, reset, lose the device's memory, and wake some time later."""

        def try_to_sleep() -> bool:
            if self.is_asleep:
                return False
            self.scheduler.is_paused = True
            scheduler = self.scheduler
            if scheduler.running or scheduler.holding or scheduler.dying or scheduler.sessions.idle or self._in_flight:
                return False
            if self.half.has_pending_push_work():
                return False
            self._count_reset()
            if not self.pool.reset() or self.half.reset_cache() is False:
                return False
            self.is_asleep = True
            self.met["slept"] += 1
            self.world.time.call_after(seconds, self._wake_up, f"{self.engine_id}/wake-up")
            return True

        self._wants.append(try_to_sleep)
        self.wake()

    def _wake_up(self) -> None:
        for rank in self.ranks:
            rank.device.compute.put(lambda rank=rank: rank.kv.fill(np.uint64(0xEEEEEEEEEEEEEEEE)))
        self.is_asleep = self.scheduler.is_paused = False
        for request in self.scheduler.requests:
            request.progressed_in = self.scheduler.step
        self.wake()

    def kill(self) -> list[SimulatedRequest]:
        """The engine's processes end at once; returns what was not finished."""
        self.is_dead = True
        met = self.met
        met["engine killed with sends under way"] += self.book.has_sends()
        met["engine killed with receives under way"] += self.book.has_receives()
        met["engine killed with storage jobs under way"] += self.book.has_storage_jobs()
        for rank in self.ranks:
            rank.device.is_dead = True
        return self.scheduler.requests

    def quieten(self) -> None:
        """Faults off, and no more input for sessions."""
        for request in self.scheduler.requests:
            self.scheduler.end_session(request)
        for rank in self.ranks:
            rank.device.stalls = 0.0
            rank.device.faults.clear()
            rank.thaw()
        self.wake()

    # Checks.

    def check(self, has_changed: bool = True) -> None:
        """What must hold after every step; the tree is looked through where a job began or ended."""
        self.pool.check()
        if has_changed:
            self.half.check()
        requests = [request for request in self.scheduler.requests if request.status is not Status.IDLE]
        if not requests or self.scheduler.is_paused:
            return
        now = self.world.time.now()
        self._progressed_in = max(self._progressed_in, *(request.progressed_in for request in requests))
        oldest = min(request.progressed_in for request in requests)
        for since, most in ((self._progressed_in, 1), (oldest, 20)):
            is_long = now - self._step_times[since] > most * MOST_SECONDS_WITHOUT_PROGRESS
            if is_long and self.scheduler.step - since > most * MOST_STEPS_WITHOUT_PROGRESS:
                request = next(request for request in requests if request.progressed_in == oldest)
                raise Violation("stuck", f"{request.request_id} is {request.status.value}: {self.describe(request)}")

    @property
    def is_at_rest(self) -> bool:
        return self.is_dead or not (self._in_flight or self._wants or self.is_asleep or self.scheduler.has_work)

    def check_at_rest(self) -> None:
        """Nothing is under way: nothing is held."""
        if self.is_dead:
            return
        self.watch.check_at_rest()
        stats = self.half.get_kv_connector_stats()
        names = "jobs_in_flight", "host_leased_blocks", "loading_bytes", "saving_bytes", "pinned_blocks"
        leaks = {name: stats[name] for name in names}
        leaks["pinned blocks of the tree"] = sum(map(bool, self.half.tree.pins))
        leaks["pinned device blocks"] = sum(map(bool, self.pool.pins))
        leaks["held device blocks"] = self.pool.num_blocks - 1 - self.pool.num_free
        leaks["open jobs"] = len(self.book.open)
        if any(leaks.values()):
            raise Violation("leak", f"{self.engine_id} at rest holds { ({k: v for k, v in leaks.items() if v}) }")

    def describe(self, request: SimulatedRequest) -> str:
        """Where it stands, for the message of a failure."""
        return (
            f"step {self.scheduler.step}, {request.num_tokens} tokens, {request.num_computed_tokens} computed, "
            f"{request.num_in_flight} in flight, {request.num_preemptions} preemptions; {self.pool.num_free} blocks "
            f"free, {sum(map(bool, self.pool.pins))} pinned; jobs under way {sorted(self.book.open)}"
        )

    def shutdown(self) -> None:
        """As an engine that ends in order."""
        if self.is_dead:
            return
        self.world.outside.close(self)
        for rank in self.ranks:
            rank.worker.shutdown()
        self.half.shutdown()
