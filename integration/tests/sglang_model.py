"""SGLang's scheduler between its own pool and the linker, in virtual time.

A model of what SGLang 0.5.23 does around its slot: look-ups, admission, passes on a forward stream beside the
scheduler's own (or, without overlap, on it), offers, aborts, retraction and flushes. Several ranks are threads that
decide alike, each with a tree of pages, a device and a clock of its own.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from integration.tests.sglang_parts import Meeting, Node, Request, ThreadRanks, Wrong
from integration.tests.sglang_tree import LAYERS, PAGE, PageTree, make_pool
from kv_connector.engines.sglang import TieredKVLinker
from kv_connector.engines.sglang.pools import PageIds
from kv_connector.types import Direction
from tests.simulation.clock import VirtualTime
from tests.simulation.device import Device, SimulatedEvent

if TYPE_CHECKING:
    from integration.tests.sglang_world import World

_SECONDS = {"compute": 1e-4, "forward": 2e-3}
_here = threading.local()


class _Linker(TieredKVLinker):
    """Streams of the simulation stand for CUDA's."""

    def _behind_forward(self) -> AbstractContextManager[object]:
        return current_rank().on_forward()


class _LateIds(PageIds):
    """On each rank they come at a time of its own."""

    _have_come = False

    def have_come(self) -> bool:
        self._have_come = self._have_come or current_rank().own.random() < 0.7
        return self._have_come


_Batch = tuple[list[Request], bool]  # and whether it prefills


class Rank:
    """One scheduler process. All ranks draw the same from `chance`, and each its own from `own`."""

    def __init__(self, world: World, index: int, meeting: Meeting) -> None:
        _here.rank = self
        self.world = world
        self.chance, self.own = random.Random(world.seed), random.Random(f"{world.seed} {index}")
        self.time = VirtualTime(world.seed * 8 + index)
        self.device = Device(self.time, self.own, f"rank{index}", _SECONDS | world.seconds)
        self.loads_fail = False
        self.stored: dict[bytes, dict[bytes, bytes]] = {}
        self.ranks = ThreadRanks((meeting, index))
        pool = make_pool(world.num_pages, world.is_latent)
        self.tree = PageTree(pool, world.num_pages)
        params: Any = SimpleNamespace(
            page_size=PAGE,
            attn_tp_cache_group=None,
            tp_cache_group=(meeting, index),
            enable_metrics=False,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        )
        self.linker = _Linker(None, params, components=(), extra_config=world.settings)  # type: ignore[arg-type]
        self.linker._pages.ids_of = partial(_LateIds, page_size=PAGE)
        self.forward = self.device.stream("forward") if world.overlaps else self.device.compute
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.offered: list[Node] = []
        self.results: deque[tuple[_Batch, SimulatedEvent]] = deque()
        self.num_requests = 0
        self.counts = dict.fromkeys(("loads", "failed", "flushes", "retracted"), 0)
        self.chats = [[f"{chat} {i}" for i in range(12)] for chat in range(world.num_chats)]

    def run(self, num_rounds: int) -> dict[str, int]:
        """So many rounds; then nothing is held for anybody. Returns what happened how often."""
        for _ in range(num_rounds):
            self.round()
        self.stop_all()
        self.waiting.clear()
        for _ in range(150):
            self.events()
            self.spend(1.0)
        self.linker._half.check()
        stats = self.linker.stats()
        held = stats["host_leased_blocks"], stats["jobs_in_flight"], len(self.linker._promises), len(self.offered)
        if any(held):
            raise Wrong(f"left: leased host blocks, jobs, promises, locked nodes: {held}")
        self.tree.check()
        self.linker.close()
        return self.counts

    def round(self) -> None:
        """Of SGLang's scheduler."""
        self.events()
        if self.chance.random() < 0.3 and len(self.waiting) < 10:
            self.ask()
        if self.waiting and self.chance.random() < 0.05:
            self.waiting.remove(self.chance.choice(self.waiting))  # nobody is told
        if self.running and self.chance.random() < 0.03:
            self.retract(self.chance.choice(self.running))
        batch = self.prefill() if self.waiting and len(self.running) < 6 else None
        if batch is None and self.running:
            batch = list(self.running), False
        if batch is not None:
            self.results.append((batch, self.launch(batch)))
        if self.results and (len(self.results) > 1 or not self.world.overlaps or batch is None):
            self.take_result()
        if self.chance.random() < 0.5:
            self.spend(self.own.random() * 2e-3)
        if self.chance.random() < self.world.faults:
            self.fail()

    def events(self) -> None:
        """What has been saved is unlocked."""
        for _ in range(self.least(min(self.linker.num_completed_offloads(), len(self.offered)))):
            assert self.linker.pop_completed_offload() is False
            self.offered.pop(0).lock(-1)

    def ask(self) -> None:
        """A request for a prefix of a chat, and something of its own behind it."""
        chat = self.chance.choice(self.chats)
        keys = chat[: self.chance.choice([len(chat) - 1, self.chance.randrange(1, len(chat))])]
        for _ in range(self.chance.randrange(3)):
            keys = [*keys, f"{keys[-1]}/{self.chance.randrange(3)}"]
        self.num_requests += 1
        self.waiting.append(Request(f"request {self.num_requests}", keys, self.chance.randrange(1, 6)))

    def retract(self, request: Request) -> None:
        """Its pages are taken, also while a step that is under way writes to them; it comes again."""
        self.counts["retracted"] += 1
        self.running.remove(request)
        self.release(request)
        self.waiting.insert(0, Request(request.rid, request.keys, request.num_steps))

    # Admission.

    def prefill(self) -> _Batch | None:
        batch: list[Request] = []
        if self.world.orders_by_prefix:
            for request in self.waiting:
                self.look_up(request, self.tree.matched(request.keys))
        for request in self.waiting[: self.chance.choice([1, 2, 4])]:
            if not self.admit(request):
                break
            batch.append(request)
            self.waiting.remove(request)
            if self.chance.random() < 0.05:  # given up before it starts
                self.release(batch.pop())
        return (batch, True) if batch else None

    def admit(self, request: Request) -> bool:
        """As `init_next_round_input` and `add_one_req`; False where there is no room."""
        matched = self.tree.matched(request.keys)
        rest, found = request.keys[len(matched) :], self.look_up(request, matched)
        if matched:
            matched[-1].lock()
        request.locked = matched[-1] if matched else None
        request.pages = [node.page for node in matched]
        request.num_owned_by_tree = request.num_known = len(matched)
        pages = self.tree.allocate(len(rest) + 1) if self.chance.random() < 0.9 else None
        if pages is None:
            self.release(request)
            request.is_over = False  # it is asked about again
            return False
        if found and self.agree(self.linker.load(request.rid, self.transfer(rest[:found], pages[:found]))):
            self.counts["loads"] += 1
            self.loading.append(request)
            request.num_known += found
        request.pages += pages[:-1]
        request.tail = pages[-1]
        return True

    def look_up(self, request: Request, matched: Sequence[Node]) -> int:
        """How many pages behind those that the device has can be loaded."""
        rest = request.keys[len(matched) :]
        if not rest:
            return 0
        found = max(self.linker.lookup(request.rid, self.transfer(rest)), default=0)
        return int(self.agree("look-up", request.rid, found))

    def release(self, request: Request) -> None:
        """What it has is free at once, whatever is still under way."""
        if request in self.loading and self.linker.cancel_queued_load(request.rid):
            self.loading.remove(request)
        self.tree.free(request.pages[request.num_owned_by_tree :] + ([request.tail] if request.tail else []))
        if request.locked is not None:
            request.locked.lock(-1)
        request.pages, request.tail, request.locked, request.is_over = [], 0, None, True

    # The forward pass, and behind it.

    def launch(self, batch: _Batch) -> SimulatedEvent:
        """As `run_batch`: every layer waits for its load, reads what is cached, and writes the rest."""
        requests, prefills = batch
        index = self.linker.start_layer_wise_loading() if prefills else -1
        counter: Any = self.linker.layer_done_counter
        with self.on_forward():
            counter.set_consumer(index)
            for layer in range(LAYERS):
                counter.wait_until(layer)
                for request in requests:
                    self.forward.put(self.computing(request, layer, prefills))
            done = self.forward.record()
        if self.chance.random() < 0.3:
            self.spend(self.own.random() * 2e-3)
        if self.loading and prefills:
            loading, self.loading = self.loading, []
            if not self.least(int(self.linker.finish_layer_wise_loading(index))):
                self.counts["failed"] += 1
                for request in loading:
                    request.has_failed = True
        return done

    def computing(self, request: Request, layer: int, prefills: bool) -> Callable[[], None]:
        """What it does to the pages that the request has at this moment, when the stream comes to it."""
        pages, tail = list(request.pages), request.tail

        def compute() -> None:
            if prefills:
                for page, key in zip(pages[: request.num_known], request.keys, strict=False):
                    if not self.tree.holds(page, key, layer):
                        request.wrong = f"{request.rid}: layer {layer} of {key!r} in page {page}"
                for page, key in list(zip(pages, request.keys, strict=True))[request.num_known :]:
                    self.tree.write(page, key, layer)
            self.tree.write(tail, f"tail of {request.rid}", layer)

        return compute

    def take_result(self) -> None:
        """As `process_batch_result`: the host waits for the pass, while the one behind it may be under way."""
        (requests, prefills), done = self.results.popleft()
        self.device.run_until(done)
        for request in requests:
            if request.is_over:
                continue
            if request.has_failed:
                self.release(request)
            elif prefills:
                if request.wrong:
                    raise Wrong(f"a pass has read what does not belong there: {request.wrong}")
                self.running.append(request)
                self.insert(request)
            else:
                request.num_steps -= 1
                if not request.num_steps or self.chance.random() < 0.2:
                    self.running.remove(request)
                    if self.chance.random() < 0.7:
                        self.insert(request)
                    self.release(request)

    def insert(self, request: Request) -> None:
        """The tree takes its pages, and offers what is new and some of the rest."""
        path, new = self.tree.insert(request.keys, request.pages)
        path[-1].lock()
        if request.locked is not None:
            request.locked.lock(-1)
        request.locked, request.num_owned_by_tree = path[-1], len(path)
        start = 0
        while start < len(path):
            is_new, end = path[start] in new, start + 1
            while end < len(path) and (path[end] in new) is is_new and (is_new or self.chance.random() < 0.7):
                end += 1
            if is_new or self.chance.random() < 0.4:
                self.offer(path[start:end])
            start = end

    def offer(self, nodes: Sequence[Node]) -> None:
        transfer = self.transfer([node.key for node in nodes], [node.page for node in nodes])
        if self.agree(self.linker.offload(transfer)):
            nodes[-1].lock()
            self.offered.append(nodes[-1])

    # What goes wrong.

    def fail(self) -> None:
        kind = self.chance.choice(["links", "load", "save", "time", "host", "flush"])
        if kind == "links":
            self.loads_fail = not self.loads_fail and self.own.random() < 0.7
        elif kind == "load":
            self.device.faults[Direction.LOAD] = self.own.randrange(4)
        elif kind == "save":
            self.device.faults[Direction.SAVE] = self.own.randrange(3)
        elif kind == "time":
            self.spend(self.chance.choice([5.0, 30.0, 61.0, 130.0]))
        elif kind == "host":
            self.linker._half.resize_host(self.chance.choice([0, 1, 3, 10, None, None]))
        else:
            self.stop_all()
            self.flush()

    def flush(self) -> None:
        """Weights have changed as well, unless the user has said that they never do."""
        self.counts["flushes"] += 1
        self.linker.reset()
        while self.offered:
            self.offered.pop().lock(-1)
        self.tree.clear(weights_changed=not self.world.settings["keep_on_flush"])

    def stop_all(self) -> None:
        while self.results:
            self.take_result()
        for request in list(self.running):
            self.running.remove(request)
            self.release(request)

    # What it is made of.

    @contextmanager
    def on_forward(self) -> Iterator[None]:
        """The forward stream is the current one, and behind the scheduler's."""
        device, current = self.device, self.device.compute
        self.forward.put(None, current.record())
        device.compute = self.forward
        try:
            yield
        finally:
            device.compute = current

    def spend(self, seconds: float) -> None:
        self.time.run_until(self.time.now() + seconds)

    def least(self, value: int) -> int:
        """SGLang's reduction over ranks."""
        return int(min(self.ranks.exchange(value)))

    def agree(self, *said: Any) -> Any:
        """All ranks say the same."""
        others = self.ranks.exchange(said)
        if any(other != said for other in others):
            raise Wrong(f"ranks differ: {others}")
        return said[-1]

    def transfer(self, keys: Sequence[str], pages: Sequence[int] | None = None) -> list[Any]:
        slots = None
        if pages is not None:
            slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        names = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        return [SimpleNamespace(name="kv", keys=names, device_indices=slots)]


def current_rank() -> Rank:
    """Whose thread this is."""
    rank: Rank = _here.rank
    return rank
