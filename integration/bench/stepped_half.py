"""A scheduler half that a benchmark steps by hand, with requests and device blocks of an engine that does nothing."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup, Event
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.observers import Observer
from kv_connector.types import BlockHash, StepPlan, StepReport

BLOCK_SIZE = 16

_rng = random.Random(15)
_device_ids = itertools.count()


def draw_from(name: str) -> None:
    """What is drawn from now on follows from this name."""
    _rng.seed(name)


def make_hashes(count: int) -> list[BlockHash]:
    """Hashes of a prefix that nobody has seen."""
    return [BlockHash(_rng.randbytes(32)) for _ in range(count)]


@dataclass(slots=True)
class Prompt:
    """A request that grows by a token a step."""

    request_id: str
    block_hashes: list[BlockHash]
    num_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.block_hashes) * BLOCK_SIZE + 1 + _rng.randrange(BLOCK_SIZE - 1)
        self.block_ids = [next(_device_ids) for _ in range(len(self.block_hashes) + 1)]


@dataclass(slots=True)
class DeviceBlock:
    """A free block of an engine, in vLLM's linked list."""

    block_id: int
    block_hash: BlockHash
    next: DeviceBlock | None = None


class Device:
    """The engine's blocks: pins cost nothing, and the reuse order is walked as `engines/vllm/blocks.py` does."""

    def __init__(self, hashes: Sequence[BlockHash] = ()) -> None:
        self.head: DeviceBlock | None = None
        for block_hash in reversed(hashes):
            self.head = DeviceBlock(next(_device_ids), block_hash, self.head)

    def touch(self, block_ids: Sequence[int]) -> None:
        pass

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        pass

    num_available = 1 << 30

    def forget(self, block_ids: Collection[int]) -> None:
        pass

    def next_reused(self, limit: int) -> list[tuple[int, BlockHash]]:
        block, found = self.head, []
        while block is not None and limit > 0:
            if block.block_hash is not None:
                found.append((block.block_id, BlockHash(bytes(block.block_hash))))
            block = block.next
            limit -= 1
        return found


class Side:
    """A scheduler half with its requests, stepped by hand."""

    def __init__(
        self,
        capacity: int,
        device: Device | None = None,
        publishes_events: bool = False,
        groups: Sequence[BlockGroup] = (BlockGroup(),),
        observers: Sequence[Observer] = (),
        **settings: Any,
    ) -> None:
        given = {"host_memory": 1 << 30, "write_policy": "write_through", "load_choice": "sync", **settings}
        config = Config.from_mapping(given)
        self.half = SchedulerHalf(
            config, BLOCK_SIZE, publishes_events=publishes_events, groups=groups, observers=observers
        )
        self.half.bind_block_pool(device or Device())
        self.capacity = capacity
        self.num_groups = len(groups)
        self.half.update_connector_output([self._report(0)])
        self.running: list[Prompt] = []

    def cache(self, hashes: Sequence[BlockHash]) -> None:
        """Put a prefix on the host, as a save would have."""
        host = self.half.host
        ids = host.allocate(len(hashes))
        assert ids is not None, "the host is too small"
        host.attach(ids, self.half.tree.insert_path(hashes, time.monotonic()), Event.SWAP_OUT)
        host.fill(ids)
        host.release(ids)

    def admit(self, prompt: Prompt) -> int:
        """Returns the tokens that are loaded."""
        num_tokens, _ = self.half.get_num_new_matched_tokens(prompt, 0)
        tables = [prompt.block_ids] * self.num_groups
        self.half.update_state_after_alloc(prompt, tables, 0, num_tokens or 0)
        self.running.append(prompt)
        return num_tokens or 0

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Admit each and compute what it does not load, one a step."""
        for prompt in prompts:
            computed = self.admit(prompt)
            item = ScheduledRequest(prompt.request_id, computed, prompt.num_tokens - computed)
            self.end(self.half.build_connector_meta(SchedulerOutput([item])))

    def end(self, plan: StepPlan) -> None:
        """All copies of the step end."""
        jobs = (*plan.loads, *plan.saves, *plan.background_loads)
        self.half.update_connector_output([self._report(plan.step, tuple(job.job_id for job in jobs))])

    def decode(self, before: Callable[[], object] = lambda: None) -> float:
        """One step in which all that run compute a token; CPU microseconds, what is asked `before` it included."""
        items = []
        for prompt in self.running:
            prompt.num_tokens += 1
            new: list[list[int]] = []
            if prompt.num_tokens % BLOCK_SIZE == 0:
                prompt.block_hashes += make_hashes(1)
                new = [[next(_device_ids)]]
            items.append(ScheduledRequest(prompt.request_id, prompt.num_tokens - 1, 1, new))
        start = time.thread_time_ns()
        before()
        self.end(self.half.build_connector_meta(SchedulerOutput(items)))
        return (time.thread_time_ns() - start) / 1e3

    def _report(self, step: int, jobs: tuple[int, ...] = ()) -> StepReport:
        return StepReport(step, 0, jobs, num_host_blocks=self.capacity, block_bytes=1 << 20)
