"""No step does work in proportion to all requests times their blocks: what short prompts cost, long ones cost too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup, CacheTier, Event, PrefixTree
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import BlockHash, StepReport, Tier
from tests.effort import count_instructions
from tests.scheduler.test_half import Clock

SIZE = 4
NUM_REQUESTS = 8


@dataclass
class Prompt:
    """A request whose hashes are made up."""

    request_id: str
    block_hashes: list[BlockHash]
    num_tokens: int


class Device:
    """As many device blocks as anybody wants; the test says which are reused next."""

    def __init__(self) -> None:
        self.order: list[tuple[int, BlockHash]] = []
        self.num_looked_at = 0

    def touch(self, block_ids: Sequence[int]) -> None: ...

    def free_blocks(self, block_ids: Sequence[int]) -> None: ...

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        self.num_looked_at = limit
        return self.order[:limit]

    num_available = 1 << 30

    def forget(self, block_ids: Collection[int]) -> None: ...


class Engine:
    """A scheduler half whose copies end at once, with requests of `length` blocks that decode."""

    def __init__(self, length: int, capacity: int, num_groups: int = 1, **settings: object) -> None:
        self.device, self.length, self.capacity, self.clock = Device(), length, capacity, Clock()
        given = {"host_memory": 1, "write_policy": "write_through", "load_choice": "sync", **settings}
        self.half = SchedulerHalf(
            Config.from_mapping(given), SIZE, clock=self.clock, groups=(BlockGroup(),) * num_groups
        )
        self.num_groups = num_groups
        self.half.bind_block_pool(self.device)
        self.half.update_connector_output([StepReport(0, 0, num_host_blocks=capacity)])
        self.running: list[Prompt] = []

    def prompt(self, name: str) -> Prompt:
        hashes = [BlockHash(f"{name}/{index:04}".encode()) for index in range(self.length)]
        return Prompt(name, hashes, self.length * SIZE + 1)

    def admit(self, name: str) -> Prompt:
        prompt = self.prompt(name)
        self.half.update_state_after_alloc(prompt, [list(range(self.length + 1))] * self.num_groups, 0, 0)
        return prompt

    def start(self, count: int = NUM_REQUESTS) -> None:
        for index in range(count):
            prompt = self.admit(str(index))
            self.step([ScheduledRequest(prompt.request_id, 0, prompt.num_tokens)])
            self.running.append(prompt)

    def decode(self) -> None:
        """Each request fills a block."""
        for prompt in self.running:
            prompt.block_hashes.append(BlockHash(f"{prompt.request_id}/{len(prompt.block_hashes):04}".encode()))
            prompt.num_tokens += SIZE
        self.step([ScheduledRequest(p.request_id, p.num_tokens - SIZE, SIZE, [[0]]) for p in self.running])

    def step(self, items: Sequence[ScheduledRequest] = ()) -> int:
        """Returns the blocks that it saved."""
        plan = self.half.build_connector_meta(SchedulerOutput(items))
        jobs = tuple(job.job_id for job in plan.saves)
        self.half.update_connector_output([StepReport(plan.step, 0, jobs, num_host_blocks=self.capacity)])
        self.half.check()
        return sum(job.num_blocks for job in plan.saves)


def full(length: int) -> Engine:
    """What decodes saves a block each, and an old one goes for it."""
    engine = Engine(length, capacity=NUM_REQUESTS * length + 64)
    store(engine.half.host, "old", 64)
    engine.start()
    assert engine.half.host.pool.num_free == 0
    return engine


def pinned(length: int) -> Engine:
    """No block can be saved: what the host holds is pinned."""
    engine = Engine(length, capacity=4)
    engine.half.pin_prefix(store(engine.half.host, "pinned", 4), are_given=False)
    engine.start()
    return engine


def leased(length: int) -> Engine:
    """Of a host that copies under way use but for a block, a block is saved in every step."""
    engine = Engine(length, capacity=4)
    assert engine.half.host.allocate(3)
    engine.start()
    return engine


def store(host: CacheTier, name: str, count: int) -> list[BlockHash]:
    hashes = [BlockHash(f"{name}/{index:04}".encode()) for index in range(count)]
    ids = host.allocate(count)
    assert ids is not None
    host.attach(ids, host.tree.insert_path(hashes, 0.0), Event.SWAP_OUT)
    host.fill(ids)
    host.release(ids)
    return hashes


@pytest.mark.parametrize("make", [full, pinned, leased])
def test_long_prompts_cost_a_decoding_step_no_more_than_short_ones(make: Callable[[int], Engine]) -> None:
    efforts = []
    for length in (20, 400):
        engine = make(length)
        engine.half.check = lambda: None  # type: ignore[method-assign]  # looks at everything, as no step may
        engine.decode()
        efforts.append(min(count_instructions(engine.decode) for _ in range(3)))
    assert efforts[1] < 1.3 * efforts[0]


def test_a_burst_under_write_back_is_looked_ahead_for_once_and_not_in_every_step_after_it() -> None:
    """What was saved stays so; what has been freed since may lie in front of that."""
    engine = Engine(400, capacity=100, write_policy="write_back", write_back_lookahead=20)
    engine.step()
    assert engine.device.num_looked_at == 20
    burst = engine.admit("burst")
    engine.step()
    assert engine.device.num_looked_at == 2 * 401
    for _ in range(3):
        engine.step()
        assert engine.device.num_looked_at == 20
    engine.half.request_finished(burst)
    engine.step()
    assert engine.device.num_looked_at >= 401, "steps that follow soon take as much again at most"


def behind_a_burst() -> Engine:
    """Its blocks were looked ahead for, and the step after it has looked at the least."""
    engine = Engine(400, capacity=100, write_policy="write_back", write_back_lookahead=20)
    engine.admit("burst")
    engine.step()
    engine.step()
    assert engine.device.num_looked_at == 20
    return engine


def test_what_was_preempted_is_looked_for_as_what_has_ended_is() -> None:
    engine = behind_a_burst()
    engine.half.build_connector_meta(SchedulerOutput((), preempted_req_ids={"burst"}))
    assert engine.device.num_looked_at >= 401


def test_after_a_while_a_burst_is_forgotten() -> None:
    engine = Engine(400, capacity=100, write_policy="write_back", write_back_lookahead=20)
    burst = engine.admit("burst")
    for _ in range(40):
        engine.step()
    engine.half.request_finished(burst)
    engine.step()
    assert engine.device.num_looked_at == 20


@pytest.mark.parametrize("num_groups", [1, 6])
def test_no_step_takes_blocks_that_were_not_looked_at(num_groups: int) -> None:
    """A prompt that is filled step by step takes of each group what the step before took, whatever a burst needed."""
    engine = Engine(4000, 100, num_groups, write_policy="write_back", write_back_lookahead=1)
    prompt, num_ahead = engine.admit("long"), 0
    for computed in range(0, 4000 * SIZE, 50 * SIZE):
        engine.step([ScheduledRequest(prompt.request_id, computed, 50 * SIZE)])
        num_ahead = max(num_ahead - 50 * num_groups, engine.device.num_looked_at)
        assert num_ahead >= 50 * num_groups


def test_what_was_looked_at_and_is_hit_on_the_device_is_looked_at_no_more() -> None:
    """It was next in line, and so are now blocks behind it that nobody has looked at."""
    engine = behind_a_burst()
    for name in ("a", "b"):
        engine.half.update_state_after_alloc(engine.prompt(name), [list(range(401))], 400 * SIZE, 0)
    engine.step([ScheduledRequest(name, 400 * SIZE, 1) for name in ("a", "b")])
    assert engine.device.num_looked_at >= 401


def test_a_block_that_the_device_has_twice_is_saved_before_reuse_once() -> None:
    engine = Engine(2, capacity=10, write_policy="write_back")
    prompt = engine.admit("a")
    engine.step([ScheduledRequest("a", 0, prompt.num_tokens)])
    engine.half.request_finished(prompt)
    engine.device.order = [(5, prompt.block_hashes[0]), (6, prompt.block_hashes[0]), (7, prompt.block_hashes[1])]
    assert engine.step() == 2


def test_write_back_evicts_nothing_that_was_used_after_the_block_that_is_saved() -> None:
    engine = Engine(2, capacity=2, write_policy="write_back")
    old, new = engine.admit("old"), engine.admit("new")
    for prompt in (old, new):
        engine.step([ScheduledRequest(prompt.request_id, 0, prompt.num_tokens)])
        engine.half.request_finished(prompt)
    engine.device.order = [(1, new.block_hashes[1]), (0, new.block_hashes[0])]
    assert engine.step() == 2
    engine.device.order = [(3, old.block_hashes[1]), (2, old.block_hashes[0])]
    assert engine.step() == 0, "the host keeps what was used last"
    assert engine.half.get_num_new_matched_tokens(Prompt("again", new.block_hashes, 9), 0) == (8, False)


def test_a_reset_costs_as_much_however_much_is_cached() -> None:
    """Where routers are told of every block that has gone, it takes a look at each."""
    efforts = []
    for count in (100, 5000):
        host = CacheTier(PrefixTree(max_remembered=10), Tier.HOST, count)
        store(host, "a", count)
        efforts.append(count_instructions(host.reset))
        host.check()
        host.tree.check()
    assert efforts[0] == efforts[1]


def test_a_request_that_waits_for_anothers_load_is_looked_up_once() -> None:
    """It is asked in every step until that load has ended, and is a device hit then."""
    efforts = []
    for length in (20, 400):
        engine = Engine(length, capacity=length, load_choice="async")
        hashes = store(engine.half.host, "shared", length)
        first, second = (Prompt(name, hashes, length * SIZE + 1) for name in ("first", "second"))
        assert engine.half.get_num_new_matched_tokens(first, 0) == (length * SIZE, True)
        engine.half.update_state_after_alloc(first, [list(range(length + 1))], 0, length * SIZE)
        plan = engine.half.build_connector_meta(SchedulerOutput(()))
        assert engine.half.get_num_new_matched_tokens(second, 0) == (None, False)

        def ask(engine: Engine = engine, second: Prompt = second) -> None:
            assert engine.half.get_num_new_matched_tokens(second, 0) == (None, False)

        efforts.append(count_instructions(ask))
        (job,) = plan.background_loads
        engine.half.update_connector_output([StepReport(plan.step, 0, (job.job_id,), num_host_blocks=length)])
        assert engine.half.get_num_new_matched_tokens(second, length * SIZE) == (0, False)
        assert engine.half.metrics.coalesced_loads == 1
    assert efforts[0] == efforts[1]


def test_requests_that_end_cost_no_more_where_many_loads_are_under_way() -> None:
    """Whether a load fills one of their blocks is not asked of each load."""
    efforts = []
    for num_loads in (4, 64):
        engine = Engine(400, capacity=num_loads, load_choice="async")
        for index in range(num_loads):
            prompt = Prompt(f"load {index}", store(engine.half.host, f"warm {index}", 1), SIZE + 1)
            assert engine.half.get_num_new_matched_tokens(prompt, 0) == (SIZE, True)
            engine.half.update_state_after_alloc(prompt, [[1000, 1001]], 0, SIZE)
            engine.half.build_connector_meta(SchedulerOutput(()))
            engine.clock.now = 0  # none of them hangs
        efforts.append(effort_of_ends(engine))
    assert efforts[1] < 1.3 * efforts[0]


def effort_of_ends(engine: Engine) -> int:
    """Of eight requests, in instructions."""
    prompts = [engine.admit(str(index)) for index in range(8)]
    engine.half.build_connector_meta(SchedulerOutput(()))
    return count_instructions(lambda: [engine.half.request_finished(prompt) for prompt in prompts])
