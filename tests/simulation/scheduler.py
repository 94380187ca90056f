"""The scheduler of a simulated engine, after vLLM 0.32's `Scheduler`, `AsyncScheduler` and `KVCacheManager`.

What it owns: requests, their block tables and the pool. What it is told: outputs of steps, in order, possibly a step or
two late. Names follow vLLM's; comments say where an engine may choose otherwise (`EngineConfig`). It drives the
connector through `kv_connector.base` alone, with the calls in vLLM's order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import NO_BLOCK, PeerAction, StepPlan, StorageAction

from .blocks import RequestBlocks
from .checks import Violation
from .config import EngineConfig
from .model import Oracle
from .pool import NULL_BLOCK, BlockPool
from .requests import DeviceSequence, Item, RankResult, SimulatedRequest, Status, Step, slots_of
from .router import Router
from .sessions import Sessions


class SchedulerModel:
    """One engine's scheduler. `half` is the code under test; `met` counts compositions."""

    def __init__(self, config: EngineConfig, pool: BlockPool, half: SchedulerHalf, met: Counter[str]) -> None:
        self.config = config
        self.pool = pool
        self.half = half
        self.router = Router(half)
        self.met = met
        self.step = 0
        self.running: list[SimulatedRequest] = []
        self.waiting: deque[SimulatedRequest] = deque()
        self.holding: deque[SimulatedRequest] = deque()  # waiting, with blocks
        self.dying: dict[str, list[SimulatedRequest]] = {}  # aborted while an asynchronous load is under way
        self.is_paused = False
        self.on_finished: Callable[[SimulatedRequest], None] = lambda request: None
        self.epoch = 0
        self._received: set[str] = set()
        self._failed_receiving: set[str] = set()
        self._preempted: set[str] = set()
        self._prefilling: dict[SimulatedRequest, None] = {}
        self.blocks = RequestBlocks(config, pool)
        self.sessions = Sessions(config.block_size)

    # What users and operators do.

    def add(self, request: SimulatedRequest) -> None:
        request.progressed_in = self.step
        self.waiting.append(request)
        self.half.on_new_request(request)

    def abort(self, request: SimulatedRequest) -> None:
        """Drop it in whatever phase it is."""
        if request.is_finished:
            return
        is_loading = request.status is Status.LOADING and request.request_id not in self._received
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.IDLE:
            self.sessions.idle.remove(request)
        else:
            (self.holding if request in self.holding else self.waiting).remove(request)
        if request.status is Status.LOADING:
            self._received.discard(request.request_id)
            self._failed_receiving.discard(request.request_id)
        request.is_aborted = True
        self.half.abort_transfer(request.request_id)
        self._end(request, holds_on=is_loading)

    def go_on(self, request: SimulatedRequest, tokens: list[int], outputs: int) -> None:
        """More input for a session that waits for it."""
        request.progressed_in = self.step
        self.sessions.go_on(request, tokens, outputs)
        self.holding.append(request)

    def end_session(self, request: SimulatedRequest) -> None:
        """No more input comes."""
        request.is_session = False
        if request.status is Status.IDLE:
            self.sessions.idle.remove(request)
            self._end(request)

    def preempt_all(self) -> None:
        """As `reset_prefix_cache(reset_running_requests=True)` begins."""
        while self.running:
            self._preempt(self.running.pop(), drops_stale=True)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        admits = self.waiting and not self.is_paused
        return bool(self.running or admits or self.holding or self.dying) or self.half.has_pending_push_work()

    @property
    def requests(self) -> list[SimulatedRequest]:
        """All that are not over."""
        return [*self.running, *self.holding, *self.waiting, *self.sessions.idle]

    # A step.

    def schedule(self) -> tuple[StepPlan, list[Item]]:
        """What the next step computes, and the connector's plan for it."""
        self.step += 1
        self.blocks.step_begins()
        budget, items = self.config.max_step_tokens, {}
        new_blocks: dict[SimulatedRequest, list[list[int]]] = {}
        budget, has_preempted = self._schedule_running(budget, items, new_blocks)
        if not has_preempted:
            self._schedule_waiting(budget, items, new_blocks)
        scheduled = [
            ScheduledRequest(
                request.request_id,
                item.num_computed,
                item.num_scheduled,
                [told(blocks) for blocks in new_blocks[request]] if request in new_blocks else (),
            )
            for request, item in items.items()
        ]
        preempted, self._preempted = self._preempted, set()
        states = self.blocks.take_states()
        self.met["states told"] += len(states)
        self.met["ends within"] += sum(state.num_tokens % self.config.block_sizes[state.group] > 0 for state in states)
        plan = self.half.build_connector_meta(SchedulerOutput(scheduled, preempted, states))
        for request, item in items.items():
            self._advance(request, item)
        if items:
            self.blocks.num_planned += 1
        self._count(plan, items, preempted)
        return plan, list(items.values())

    def _schedule_running(
        self, budget: int, items: dict[SimulatedRequest, Item], new: dict[SimulatedRequest, list[list[int]]]
    ) -> tuple[int, bool]:
        index, has_preempted = 0, False
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            placeholders, computed = request.num_placeholders, request.num_computed_tokens
            most = request.num_prompt_tokens + request.max_tokens
            is_sure_to_end = placeholders > 0 and computed + 2 - placeholders >= most
            count = min(request.num_tokens + request.num_drafts + placeholders - computed, budget)
            count = self.blocks.split(request, computed, count)
            if is_sure_to_end or count <= 0:
                index += 1
                continue
            blocks = None
            while (blocks := self.blocks.allocate(request, count, self.config.num_drafts)) is None:
                if self.half.has_pending_block_frees():
                    self.met["waited for pinned blocks"] += 1
                    break
                victim = self.running[-1]
                if not self.blocks.can_free(victim):
                    break
                self.running.pop()
                self._preempt(victim, drops_stale=False)
                has_preempted = True
                if victim is request:
                    break
            if blocks is None:
                break
            new[request] = blocks
            items[request] = self._item(request, count)
            budget -= count
            index += 1
        return budget, has_preempted

    def _schedule_waiting(
        self, budget: int, items: dict[SimulatedRequest, Item], new: dict[SimulatedRequest, list[list[int]]]
    ) -> None:
        skipped: deque[SimulatedRequest] = deque()
        skipped_holding: deque[SimulatedRequest] = deque()

        def skip(queue: deque[SimulatedRequest]) -> None:
            request = queue.popleft()
            (skipped_holding if request.holds_blocks else skipped).append(request)

        while budget > 0:
            queue = self.holding if self.holding or self.is_paused else self.waiting
            if not queue or len(self.running) >= self.config.max_running:
                break
            request = queue[0]
            if request.status is Status.LOADING:
                if request.request_id not in self._received:
                    skip(queue)
                    continue
                self._promote(request)
            if request.num_stale and not request.drops_stale:
                skip(queue)
                continue
            hit: list[list[int]] | None = None
            num_local = num_external = 0
            is_async = False
            if request.num_computed_tokens == 0:
                self._renew(request)
                hit, num_local = self.blocks.find_hit(request)
                matched, is_async = self.half.get_num_new_matched_tokens(request, num_local)
                if matched is None:
                    self.met["asked to wait"] += 1
                    skip(queue)
                    continue
                num_external = matched
                self.met["loads that end within"] += any(matched % size for size in self.config.block_sizes)
                if is_async and not matched:
                    raise Violation("check", f"an asynchronous load of nothing for {request.request_id}")
            computed = (request.num_computed_tokens or num_local) + num_external
            count = 0 if is_async else min(request.num_tokens - computed, budget)
            if not is_async and count <= 0:
                raise Violation("check", f"{request.request_id}: {computed} of {request.num_tokens} tokens are cached")
            count = self.blocks.split(request, computed, count)
            if not is_async and not count:
                break
            reserved = self._reserved() if is_async else 0
            ahead = 0 if is_async else self.config.num_drafts
            if self.blocks.admit(request, count, ahead, hit, num_local, num_external, is_async, reserved) is None:
                # Where sessions hold blocks while they wait, vLLM may stand still, with a connector or without one:
                # behind one another, or behind a request whose load has failed, which begins anew with drafts.
                if queue is self.waiting or not any(r.is_session for r in (*self.holding, *skipped_holding)):
                    break
                skip(queue)
                if request.holds_blocks and not self.running and not items:
                    skipped_holding.pop()
                    self._preempt(request, drops_stale=True)  # others that hold blocks may wait for this one's
                continue
            num_before = num_local if hit is not None else request.num_computed_tokens
            self.half.update_state_after_alloc(request, [told(t) for t in request.tables], num_before, num_external)
            request.num_computed_tokens = computed
            request.progressed_in = self.step
            if is_async:
                request.status = Status.LOADING
                self._prefilling[request] = None
                skip(queue)
                continue
            queue.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            self._place(request)
            self.blocks.begin(request)
            items[request] = self._item(request, count)
            new[request] = [[] for _ in request.tables]  # the connector has been told the whole table
            budget -= count
            if computed + count < request.num_tokens:
                self._prefilling[request] = None
        self.holding.extendleft(reversed(skipped_holding))
        self.waiting.extendleft(reversed(skipped))

    def _renew(self, request: SimulatedRequest) -> None:
        """It starts from its first token, with the weights of today."""
        request.is_private = False
        if request.oracle.epoch != self.epoch:
            request.oracle = Oracle(request.oracle.shape, self.epoch, request.tokens)

    def _place(self, request: SimulatedRequest) -> None:
        """The device begins with what is known of it."""
        request.device = DeviceSequence(list(request.tokens), request.oracle, request.oracle.epoch)
        request.num_rejected = request.num_drafts = 0

    def _item(self, request: SimulatedRequest, count: int) -> Item:
        computed, device = request.num_computed_tokens, request.device
        assert device is not None
        num_drafts = 0
        if request.num_drafts:
            num_drafts = max(0, count + computed - request.num_tokens - request.num_placeholders)
        request.num_drafts = 0
        ranks = self.config.num_ranks
        tables = [list(table) for table in request.tables]
        sizes, words = self.config.block_sizes, max(self.config.block_sizes)
        slots = [slots_of(table, size, computed + count, words) for size, table in zip(sizes, tables, strict=True)]
        states = [
            (table[(computed - 1) // size] if computed else NULL_BLOCK, table[(computed + count - 1) // size])
            for size, table in zip(sizes, tables, strict=True)
        ]
        samples = computed + count >= request.num_tokens + request.num_placeholders
        known = request.num_rejected
        copies = self.blocks.take_copies(request)
        item = Item(request, device, computed, count, num_drafts, samples, known, tables, slots, states, copies)
        item.h, item.rows = [None] * ranks, [None] * ranks
        return item

    def _advance(self, request: SimulatedRequest, item: Item) -> None:
        """As `_update_after_schedule`."""
        request.num_computed_tokens += item.num_scheduled
        request.num_in_flight += item.num_scheduled
        request.last_sequence = self.blocks.num_planned
        request.progressed_in = self.step
        request.is_prefill_chunk = not item.samples
        if item.samples:
            self._prefilling.pop(request, None)
            if self.config.asynchronous:
                request.num_placeholders += 1 + item.num_drafts
                request.num_drafts = self.config.num_drafts

    # Outputs.

    def update(self, step: Step, results: Sequence[RankResult], received: set[str], failed: set[str]) -> None:
        """Take in what a step came to; steps come in order. `received`: loads that have ended on all ranks, `failed`
        those of them that failed on one."""
        if step.items:
            self.blocks.processed()
        for request in self.holding:
            if request.request_id in failed and request.status is Status.LOADING:
                self._fail_receiving(request)
        invalid = set().union(*(result.invalid for result in results))
        affected = self._handle_invalid(invalid) if invalid else set()
        affected |= self._overlooked(invalid, step.items, affected)
        for item in step.items:
            self._take_output(item, item.request in affected)
        reports = [result.report for result in results]
        for part in [[report] for report in reports] if self.config.reports_apart else [reports]:
            self.half.update_connector_output(part)
        for request_id in received:
            self._take_received(request_id)
        if self.config.takes_events:
            self.router.hear(self.half.take_events())

    def _take_output(self, item: Item, is_affected: bool) -> None:
        request, generated = item.request, item.generated
        request.num_in_flight -= item.num_scheduled
        is_stale = request.num_stale > 0
        if is_stale:
            request.num_stale -= item.num_scheduled
        if is_affected or request.is_finished or (is_stale and request.drops_stale):
            self.met["output dropped"] += 1
            return
        if item.num_drafts and generated:
            num_rejected = item.num_drafts - (len(generated) - 1)
            if not is_stale:
                request.num_computed_tokens -= num_rejected
                request.num_rejected += num_rejected
                if self.config.asynchronous:
                    request.num_placeholders -= num_rejected
        if not generated:
            return
        request.progressed_in = self.step
        num_taken, is_over = self._take_tokens(request, generated)
        if not is_stale and self.config.asynchronous:
            request.num_placeholders -= num_taken
        if request.status is Status.RUNNING:
            self.blocks.name(request, request.num_computed_tokens - request.num_placeholders)
            if not self.config.asynchronous:
                request.num_drafts = self.config.num_drafts
        if is_over:
            if request.status is Status.RUNNING:
                self.running.remove(request)
            else:
                (self.holding if request in self.holding else self.waiting).remove(request)
            if request.is_session and request.status is Status.RUNNING:
                self.sessions.stop(request)
            else:
                self._end(request)

    def _take_tokens(self, request: SimulatedRequest, generated: Sequence[int]) -> tuple[int, bool]:
        for count, token in enumerate(generated, start=1):
            expected = request.oracle.next()
            if token != expected:
                name = f"{request.request_id} (request {request.number})"
                raise Violation("token", f"{name}: token {request.num_tokens} is {token}, not {expected}")
            request.tokens.append(token)
            num_outputs = request.num_tokens - request.num_prompt_tokens
            if num_outputs >= request.max_tokens or token % 101 == 0:
                request.hasher.update(request.tokens)
                return count, True
        request.hasher.update(request.tokens)
        return len(generated), False

    def _end(self, request: SimulatedRequest, holds_on: bool = False) -> None:
        request.status = Status.FINISHED
        self._prefilling.pop(request, None)
        _, request.handed = self.half.request_finished(request)
        if holds_on:
            self.dying.setdefault(request.request_id, []).append(request)
        else:
            self.blocks.free(request)
        self.on_finished(request)

    # Loads of other engines' blocks, the host's and storage's.

    def _take_received(self, request_id: str) -> None:
        live = [r for r in self.holding if r.request_id == request_id and r.status is Status.LOADING]
        dying = self.dying.get(request_id, [])
        if live and (not dying or self.config.names_newest):
            self._received.add(request_id)
        elif dying:
            self.blocks.free(dying.pop(0))
            if not dying:
                del self.dying[request_id]
        else:
            raise Violation("job", f"request {request_id} is said to be received, and waits for nothing")

    def _fail_receiving(self, request: SimulatedRequest, num_valid_tokens: int = 0) -> None:
        request.num_computed_tokens = num_valid_tokens
        self._failed_receiving.add(request.request_id)

    def _promote(self, request: SimulatedRequest) -> None:
        """Its asynchronous load has ended."""
        request_id = request.request_id
        self._received.discard(request_id)
        if request_id in self._failed_receiving:
            self.met["asynchronous load failed"] += 1
            self._failed_receiving.discard(request_id)
            if request.num_computed_tokens:
                self.met["asynchronous load failed in part"] += 1
                self.blocks.name(request, request.num_computed_tokens)
            else:
                self.blocks.free(request)
        else:
            self.met["asynchronous load"] += 1
            self.blocks.name(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING

    def _handle_invalid(self, invalid: set[int]) -> set[SimulatedRequest]:
        """Blocks that a load has not filled: who holds them computes again, and no output of this step counts.

        What others may hit stays as it is, as in vLLM, for the connector to forget.
        """
        self.met["load of the step failed"] += 1
        affected = set()
        sizes = self.config.block_sizes
        for request in [*self.holding, *self.running]:
            tables = list(zip(sizes, request.tables, strict=False))
            first = min((size * t.index(b) for size, t in tables for b in invalid.intersection(t)), default=None)
            if first is None:
                continue
            if request.status is Status.LOADING:
                num_valid = min(request.num_computed_tokens, first)  # other ranks may have lost more before
                self._fail_receiving(request, num_valid if len(request.tables) == 1 else 0)
                continue
            affected.add(request)
            if request.status is not Status.RUNNING:
                # Received, and waiting for room (see `_promote`): vLLM overlooks those; our adapter has them computed.
                self.met["asynchronous load failed behind its announcement"] += 1
                self.holding.remove(request)
                self.blocks.free(request)
                request.num_computed_tokens = 0
                self.waiting.appendleft(request)
                continue
            is_alone = all(self.pool.refs[b] - self.pool.pins[b] == 1 for s, t in tables for b in t[first // s :] if b)
            if self.config.truncates and is_alone and len(request.tables) == 1 and self.config.depth == 1:
                self.met["truncated behind a failed load"] += 1
                request.num_computed_tokens = first
                self._place(request)
            else:
                self.running.remove(request)
                self._preempt(request, drops_stale=True)
        return affected

    def _overlooked(
        self, invalid: set[int], items: Sequence[Item], affected: Collection[SimulatedRequest]
    ) -> set[SimulatedRequest]:
        """Preempted by the plan of the next step: vLLM overlooks those, and our adapter, which asks the connector for
        them, ends it then."""
        overlooked = {i.request for i in items if any(not invalid.isdisjoint(table) for table in i.tables)}
        missed = {r.request_id for r in overlooked - set(affected) if not r.is_finished}
        missed -= set(self.half.holding(invalid)) if missed else set()
        if missed:
            raise Violation("check", f"nobody finds {sorted(missed)}, which computed on blocks that no load has filled")
        return overlooked

    def _reserved(self) -> int:
        """Blocks that prefills under way will still take."""
        return sum(
            max(0, -(-(request.num_tokens + self.config.num_drafts) // size) - len(table))
            for request in self._prefilling
            for size, table in zip(self.config.block_sizes, request.tables, strict=False)
        )

    def _preempt(self, request: SimulatedRequest, drops_stale: bool) -> None:
        self.met["preempted"] += 1
        if request.num_in_flight:
            self.met["preempted with a step under way"] += 1
        self.met["preempted while it is handed over"] += self.config.produces and request.is_for_others
        self.met["preempted behind a receive"] += request.is_from_others and request.num_preemptions == 0
        self.blocks.free(request)
        self._prefilling.pop(request, None)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_drafts = request.num_placeholders = 0
        request.drops_stale = drops_stale or (request.drops_stale and request.num_stale > 0)
        request.num_stale = request.num_in_flight
        request.num_preemptions += 1
        request.progressed_in = self.step
        self.waiting.appendleft(request)
        self._preempted.add(request.request_id)

    def _count(self, plan: StepPlan, items: dict[SimulatedRequest, Item], preempted: set[str]) -> None:
        """What this step's plan composes."""
        met = self.met
        met["sync loads"] += len(plan.loads)
        met["async loads"] += len(plan.background_loads)
        met["guarded loads"] += sum(job.num_guarded > 0 for job in plan.background_loads)
        met["announced loads"] += len(plan.announced_loads)
        met["awaited loads"] += len(plan.awaited_loads)
        met["saves"] += len(plan.saves)
        met["fences"] += plan.fence
        for job in plan.storage:
            if job.action is StorageAction.BACK_UP:
                met[f"backups {self.config.backup.value}"] += 1
            elif self.config.prefetch is not None:
                met[f"{job.action.value} {self.config.prefetch.value}"] += 1
        met["cancelled fetches"] += len(plan.cancelled_storage)
        met["withdrawn transfers"] += len(plan.suspended) + len(plan.withdrawn)
        met["cancelled receives"] += len(plan.cancelled_peer)
        for peer_job in plan.peer:
            if peer_job.action is PeerAction.RECEIVE and not peer_job.num_blocks:
                met["nothing wanted of a transfer"] += 1
            elif peer_job.action is PeerAction.SEND and not peer_job.names:
                met["sends step by step"] += 1
        if any(item.num_drafts for item in items.values()):
            met["drafts planned ahead" if self.config.asynchronous else "drafts"] += 1


def told(table: Sequence[int]) -> list[int]:
    """A block table in the connector's words."""
    return [NO_BLOCK if block == NULL_BLOCK else block for block in table]
