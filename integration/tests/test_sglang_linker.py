"""The linker between SGLang's own pools and classes, called as SGLang calls it: moments that engines rarely meet."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import integration.tests.sglang_engines  # noqa: F401  # what SGLang imports
from integration.faults import break_loads
from integration.tests.sglang_parts import Meeting, ThreadRanks
from kv_connector.engines.sglang import TieredKVLinker, fragments, identity, linker, pools, ranks, replica
from kv_connector.engines.sglang.pools import DevicePages
from kv_connector.errors import ConfigError, KVConnectorError
from kv_connector.index import CacheIdentity
from kv_connector.transfer.engine import TransferEngine
from kv_connector.types import BlockHash, CopyJob

PAGE, PAGES, LAYERS = 4, 32, 3


def make_pool(is_latent: bool = False) -> Any:
    """A pool of SGLang's, with pages 1 to 32."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if is_latent:
        return MLATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 16, 8, LAYERS, "cpu", False)
    return MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 2, 16, LAYERS, "cpu", False)


def buffers(pool: Any) -> list[torch.Tensor]:
    """All of its tensors."""
    return [*pool.kv_buffer] if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def keys(count: int, name: str = "chat", first: int = 0) -> list[str]:
    """SGLang's hashes of pages that follow one another."""
    return [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(first, first + count)]


class Driver:
    """One rank of SGLang: it calls the linker in the order that SGLang does."""

    def __init__(self, pool: Any, linker: TieredKVLinker) -> None:
        self.pool = pool
        self.linker = linker
        self.half = linker._half

    def transfer(self, names: Sequence[str], pages: Sequence[int] | None = None) -> list[Any]:
        """Of these pages, told by token slots."""
        slots = None
        if pages is not None:
            slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        return [SimpleNamespace(name="kv", keys=list(names), device_indices=slots)]

    def write(self, names: Sequence[str], pages: Sequence[int]) -> None:
        """What a forward pass computes for these pages."""
        for name, page in zip(names, pages, strict=True):
            for layer, buffer in enumerate(buffers(self.pool)):
                generator = torch.Generator().manual_seed(int(name[:8], 16) + layer)
                rows = buffer[page * PAGE : (page + 1) * PAGE]
                rows.copy_(torch.rand(rows.shape, generator=generator))

    def holds(self, names: Sequence[str], pages: Sequence[int]) -> bool:
        """Whether the pages hold what belongs there."""
        before = [buffer.clone() for buffer in buffers(self.pool)]
        self.write(names, pages)
        return all(torch.equal(old, new) for old, new in zip(before, buffers(self.pool), strict=True))

    def save(self, names: Sequence[str], pages: Sequence[int]) -> bool:
        """In a round, compute and offer them, and in the next what is wanted is saved; whether anything was."""
        self.round()
        self.write(names, pages)
        num_saved = self.linker.stats()["saves_on_compute_blocks"]
        self.linker.offload(self.transfer(names, pages))
        self.round()
        return self.linker.stats()["saves_on_compute_blocks"] > num_saved

    def round(self) -> int:
        """What SGLang's scheduler begins a round with; returns how many offers have ended."""
        ended = self.linker.num_completed_offloads()
        for _ in range(ended):
            assert self.linker.pop_completed_offload() is False
        return ended

    def lookup(self, request_id: str, names: Sequence[str]) -> int:
        """In a round, how many pages can be loaded."""
        self.round()
        return max(self.linker.lookup(request_id, self.transfer(names)), default=0)

    def load(self, request_id: str, names: Sequence[str], pages: Sequence[int]) -> bool:
        """From look-up to the end of the forward pass; whether all of it came."""
        assert self.lookup(request_id, names) == len(names)
        assert self.linker.load(request_id, self.transfer(names, pages))
        return self.forward()

    def forward(self) -> bool:
        """A batch: every layer waits."""
        index = self.linker.start_layer_wise_loading()
        counter: Any = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        return index < 0 or self.linker.finish_layer_wise_loading(index)

    def check(self) -> None:
        """Once SGLang has heard of all that ended: nothing is leased, and all invariants hold."""
        self.round()
        self.half.check()
        assert self.linker.stats()["host_leased_blocks"] == 0


Make = Callable[..., Driver]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Linkers without an engine around them, which says what it was started with."""
    monkeypatch.setattr(linker, "refuse_unserved", lambda params, components: None)
    monkeypatch.setattr(linker, "read_backend", lambda: "")
    monkeypatch.setattr(linker, "read_identity", lambda *_: CacheIdentity("model", "float32", "", PAGE))
    made: list[TieredKVLinker] = []

    def make(pool: Any = None, group: Any = None, enable_metrics: bool = False, **settings: Any) -> Driver:
        pool = pool if pool is not None else make_pool()
        params: Any = SimpleNamespace(
            page_size=PAGE,
            attn_tp_cache_group=None,
            tp_cache_group=group,
            enable_metrics=enable_metrics,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        )
        given = {"host_memory": "256KiB", "write_policy": "write_through"} | settings
        made.append(TieredKVLinker(None, params, components=(), extra_config=given))  # type: ignore[arg-type]
        return Driver(pool, made[-1])

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("is_latent", [False, True], ids=["keys and values", "latent"])
def test_pages_come_back_as_they_went(make: Make, is_latent: bool) -> None:
    driver = make(make_pool(is_latent))
    names = keys(6)
    assert driver.save(names, range(1, 7))
    driver.write(keys(6, "others"), range(1, 7))
    assert driver.load("request", names, [9, 3, 4, 20, 21, 22])
    assert driver.holds(names, [9, 3, 4, 20, 21, 22])
    driver.check()


def test_a_prefix_that_was_offered_in_parts_is_one_hit(make: Make) -> None:
    """SGLang offers node by node, and looks up what is behind the node that the device still has."""
    driver = make()
    driver.save(keys(2), [1, 2])
    driver.save(keys(3, first=4), [5, 6, 7])
    driver.save(keys(2, first=2), [3, 4])
    assert driver.load("all", keys(7), range(10, 17))
    assert driver.holds(keys(7), range(10, 17))
    assert driver.load("tail", keys(4, first=3), range(20, 24))
    assert driver.holds(keys(4, first=3), range(20, 24))
    driver.check()


def found_again(driver: Driver, num_pages: int, chunk: int) -> list[int]:
    """Two prompts are computed, in chunks, one behind the other; how many pages of each are found then."""
    for name in ("first", "second"):
        names = keys(num_pages, name)
        driver.lookup(name, names)
        for start in range(0, num_pages, chunk):
            end = min(start + chunk, num_pages)
            driver.save(names[start:end], range(1 + start, 1 + end))
    return [driver.lookup(f"{name} again", keys(num_pages, name)) for name in ("first", "second")]


@pytest.mark.parametrize("policy", ["write_through", "adaptive"])
@pytest.mark.parametrize("num_pages", [8, 14], ids=["more than half of the host", "more than the host"])
def test_a_prompt_that_was_computed_in_chunks_is_found_as_one_that_was_not(
    make: Make, policy: str, num_pages: int
) -> None:
    """SGLang offers each chunk alone. Tails go first all the same: nobody reaches them without their heads."""
    whole, chunks = (make(host_memory="48KiB", write_policy=policy) for _ in range(2))  # 12 blocks
    found = found_again(whole, num_pages, num_pages)
    assert sum(found) == 12
    assert found_again(chunks, num_pages, 3) == found


def test_what_was_looked_up_lately_is_known_by_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is looked up."""
    monkeypatch.setattr(fragments, "_LEAST_REMEMBERED", 10)
    order = fragments.PageOrder()
    chats = [[BlockHash(bytes.fromhex(key)) for key in keys(6, f"chat {i}")] for i in range(6)]
    for i, chat in enumerate(chats):
        order.show(chat)
        assert order.in_front_of(chat[0]) is None
        for shown in chats[max(0, i - 1) : i + 1]:
            assert [order.in_front_of(page) for page in shown[1:]] == shown[:-1]
    assert not any(map(order.in_front_of, chats[0])), "it is forgotten some day"


def test_what_is_promised_stays_until_it_is_loaded(make: Make) -> None:
    """Others save more than the host has room for in between."""
    driver = make(host_memory="32KiB")  # 8 blocks
    names = keys(5)
    driver.save(names, range(1, 6))
    assert driver.lookup("request", names) == 5
    for i in range(6):
        driver.save(keys(3, f"others {i}"), range(20, 23))
    assert driver.linker.load("request", driver.transfer(names, range(10, 15)))
    assert driver.forward()
    assert driver.holds(names, range(10, 15))
    driver.save(keys(8, "all"), range(20, 28))
    assert driver.lookup("again", names) == 0, "its lease is over"
    driver.check()


def test_a_promise_lapses_and_the_load_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gave up before it was admitted; SGLang tells nobody. One that comes after all is computed."""
    monkeypatch.setattr(fragments, "PROMISED_SECONDS", 0.0)
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("request", keys(3)) == 3
    driver.check()
    assert not driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    assert driver.linker.start_layer_wise_loading() == -1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which all linkers that are made go."""
    now = [1000.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_requests_that_are_looked_up_in_each_round_leave_room_to_others(make: Make, clock: list[float]) -> None:
    """A policy of SGLang's that orders by cached prefix does so with whoever waits, and for minutes."""
    driver = make(host_memory="48KiB")  # 12 blocks
    waiting = {f"request {i}": keys(4, f"chat {i}") for i in range(3)}
    for names in waiting.values():
        driver.save(names, range(1, 5))
    for _ in range(10):
        clock[0] += 5
        assert [driver.lookup(name, names) for name, names in waiting.items()] == [4, 4, 4]
        assert not driver.save(keys(2, "new"), [20, 21]), "all is promised"
    assert driver.linker.stats()["dropped_saves_blocks"] == 20
    for _ in range(3):
        clock[0] += 5
        for name, names in waiting.items():
            driver.lookup(name, names)
    assert driver.save(keys(2, "new"), [20, 21])
    found = [driver.lookup(name, names) for name, names in waiting.items()]
    assert sum(found) == 10, "what is left is theirs"
    assert driver.linker.load("request 2", driver.transfer(waiting["request 2"], range(10, 14)))
    for i in range(3):
        driver.save(keys(8, f"newer {i}"), range(20, 28))
    assert driver.forward()
    assert driver.holds(waiting["request 2"], range(10, 14))
    clock[0] += 100
    driver.check()


def test_a_promise_that_lapses_while_its_load_is_queued_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang begins a load in the round in which it queues it; if it ever does not, no block is read unleased."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("request", keys(3)) == 3
    assert driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    monkeypatch.setattr(fragments, "PROMISED_SECONDS", 0.0)
    driver.round()
    assert not driver.forward()
    driver.check()


def test_what_was_never_promised_is_not_loaded(make: Make) -> None:
    """Other pages, fewer slots than theirs, or the same request twice: all are computed."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert not driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    assert driver.lookup("request", keys(3)) == 3
    assert not driver.linker.load("request", driver.transfer(keys(3, "others"), [4, 5, 6]))
    odd = driver.transfer(keys(3), [4, 5, 6])
    odd[0].device_indices = odd[0].device_indices[:-1]
    assert not driver.linker.load("request", odd)
    assert driver.linker.load("request", driver.transfer(keys(2), [4, 5]))
    assert not driver.linker.load("request", driver.transfer(keys(2), [6, 7]))
    assert driver.forward()
    assert driver.holds(keys(2), [4, 5])
    driver.check()


def test_slots_that_are_no_pages_are_told_and_not_written(make: Make) -> None:
    """SGLang's allocator gives whole pages; where it does not, the request that they are of is aborted."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("request", keys(3)) == 3
    odd = driver.transfer(keys(3), [4, 5, 6])
    odd[0].device_indices += 1
    before = [buffer.clone() for buffer in buffers(driver.pool)]
    assert driver.linker.load("request", odd)
    assert not driver.forward()
    assert all(map(torch.equal, before, buffers(driver.pool)))
    driver.linker.offload(driver.transfer(keys(3, "others"), [7, 8, 9])[:1])
    odd = driver.transfer(keys(3, "odd"), [4, 5, 6])
    odd[0].device_indices += 1
    driver.linker.offload(odd)
    driver.round()
    driver.round()
    assert driver.lookup("next", keys(3, "others")) == 3
    assert driver.lookup("next", keys(3, "odd")) == 0
    driver.check()


def test_an_offer_of_other_than_its_pages_is_refused(make: Make) -> None:
    """SGLang would lock what is not saved."""
    driver = make()
    driver.round()
    for num_slots in (2 * PAGE, 3 * PAGE - 1):
        odd = driver.transfer(keys(3), [1, 2, 3])
        odd[0].device_indices = odd[0].device_indices[:num_slots]
        assert not driver.linker.offload(odd)
    assert driver.lookup("request", keys(3)) == 0


@pytest.mark.parametrize("page", [-1, PAGES + 1])
def test_slots_that_are_not_of_the_pool_are_no_pages(page: int) -> None:
    pages = DevicePages(make_pool(), PAGE)
    assert pages.ids_of(torch.arange(PAGE) + PAGES * PAGE).read() == [PAGES]
    assert pages.ids_of(torch.arange(PAGE) + page * PAGE).read() is None


def test_ids_of_pages_are_read_when_the_device_has_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: until then others lie where they come to."""

    class Slots(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    class Event:
        """As CUDA's: one that was never recorded is over."""

        stream: object = None
        waited = False

        def record(self, stream: object) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.stream is None

        def synchronize(self) -> None:
            self.waited = self.stream is not None

    event = Event()
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda device: "stream of the scheduler")
    host = SimpleNamespace(cuda=cuda, empty=lambda shape, dtype, pin_memory: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(pools, "torch", host)
    ids = DevicePages(make_pool(), PAGE).ids_of(torch.arange(PAGE, 3 * PAGE).as_subclass(Slots))
    assert event.stream == "stream of the scheduler" and not ids.have_come()
    assert ids.read() == [1, 2] and event.waited


def test_what_the_host_has_let_go_of_before_it_is_counted_as_used_is_not_saved(make: Make) -> None:
    """It had all of it when it was offered, so its pages were not asked for, and SGLang did not lock them."""
    driver = make(host_memory="48KiB", write_policy="write_through")  # 12 blocks
    driver.save(keys(4), range(1, 5))
    driver.save(keys(8, "newer"), range(5, 13))
    driver.round()
    assert not driver.linker.offload(driver.transfer(keys(4), range(1, 5)))
    driver.half.reset_cache()
    driver.round()
    driver.round()
    assert driver.lookup("request", keys(4)) == 0
    assert driver.linker.stats()["failed_save_jobs"] == 0
    driver.check()


def test_what_is_offered_in_a_round_is_saved_in_one_step(make: Make) -> None:
    """And what of it the host has is counted as used first: nobody's save makes room there."""
    driver = make(host_memory="48KiB", write_policy="write_through")  # 12 blocks
    driver.save(keys(4), range(1, 5))
    driver.save(keys(8, "newer"), range(5, 13))
    driver.round()
    driver.write(keys(3, "others"), range(13, 16))
    assert driver.linker.offload(driver.transfer(keys(2, "others"), range(13, 15)))
    assert driver.linker.offload(driver.transfer(keys(1, "others", first=2), [15]))
    assert not driver.linker.offload(driver.transfer(keys(4), range(1, 5)))
    num_jobs = driver.linker._replica._last_job
    assert driver.round() == 2, "both have ended, with their job"
    assert driver.linker._replica._last_job == num_jobs + 1
    assert driver.load("request", keys(4), range(20, 24))
    assert driver.holds(keys(4), range(20, 24))
    assert driver.load("next", keys(3, "others"), range(24, 27))
    assert driver.holds(keys(3, "others"), range(24, 27))
    assert driver.linker.stats()["failed_save_jobs"] == 0
    driver.check()


@pytest.mark.parametrize("num_missing", [0, 1], ids=["all loaded", "a page computed"])
def test_a_batch_that_computes_little_waits_for_all_of_its_load(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_missing: int
) -> None:
    """It computes what the host lacks of the prompt, as far as the linker is asked about it."""
    driver = make()
    names = keys(8)
    driver.save(names[: 8 - num_missing], range(1, 9 - num_missing))
    urgent = []
    submit = TransferEngine.submit_load

    def watch(engine: TransferEngine, jobs: Sequence[CopyJob], is_urgent: bool = False) -> frozenset[int]:
        urgent.append(is_urgent)
        return submit(engine, jobs, is_urgent)

    monkeypatch.setattr(TransferEngine, "submit_load", watch)
    num_found = driver.lookup("request", names)
    assert num_found == 8 - num_missing
    assert driver.linker.load("request", driver.transfer(names[:num_found], range(1, 1 + num_found)))
    assert driver.forward()
    assert urgent == [not num_missing]
    driver.check()


def test_a_queued_load_that_is_cancelled_writes_nothing(make: Make) -> None:
    """Its pages are somebody else's by then."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    driver.lookup("request", keys(3))
    assert driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    driver.write(keys(3, "others"), [4, 5, 6])
    assert driver.linker.cancel_queued_load("request")
    assert not driver.linker.cancel_queued_load("request")
    assert driver.forward()
    assert driver.holds(keys(3, "others"), [4, 5, 6])
    driver.check()


def test_a_load_that_fails_is_told_and_not_tried_again(make: Make) -> None:
    """SGLang aborts its request, and the next one computes."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    break_loads(driver.linker._replica.worker, True)
    assert not driver.load("request", keys(3), [4, 5, 6])
    break_loads(driver.linker._replica.worker, False)
    assert driver.lookup("next", keys(3)) == 0
    assert driver.save(keys(3), [1, 2, 3])
    assert driver.load("last", keys(3), [4, 5, 6])
    assert driver.holds(keys(3), [4, 5, 6])


def fail_for_one_of_two(driver: Driver) -> None:
    """Both were promised the same pages, and the load of one has failed."""
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("one", keys(3)) == driver.lookup("other", keys(3)) == 3
    break_loads(driver.linker._replica.worker, True)
    assert driver.linker.load("one", driver.transfer(keys(3), [4, 5, 6]))
    assert not driver.forward()
    break_loads(driver.linker._replica.worker, False)


def test_what_failed_for_one_is_refused_to_others_who_were_promised_it(make: Make) -> None:
    """The host's copy is not trusted any more: the others compute."""
    driver = make()
    fail_for_one_of_two(driver)
    driver.round()
    assert not driver.linker.load("other", driver.transfer(keys(3), [7, 8, 9]))
    assert driver.lookup("other", keys(3)) == 0
    driver.check()


def test_who_waits_for_storage_begins_no_load_of_others(make: Make) -> None:
    """Requests are admitted one by one, and what those in front have queued begins with the batch: it may be cancelled
    until then."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    driver.save(keys(3, "mine"), [4, 5, 6])
    for name, pages in (("chat", [7, 8, 9]), ("mine", [10, 11, 12])):
        assert driver.lookup(name, keys(3, name)) == 3
        assert driver.linker.load(name, driver.transfer(keys(3, name), pages))
    others = keys(6, "others")
    driver.write(others, range(7, 13))
    driver.linker._replica.advance()  # as a look-up does that waits for storage
    assert driver.holds(others, range(7, 13))
    assert driver.linker.cancel_queued_load("chat")
    assert driver.forward()
    assert driver.holds(others[:3], [7, 8, 9]) and driver.holds(keys(3, "mine"), [10, 11, 12])


def test_a_load_of_what_was_lost_while_it_was_queued_is_told(make: Make) -> None:
    """Another load of the same blocks has failed, and that became known after this one was accepted."""
    driver = make()
    fail_for_one_of_two(driver)
    assert driver.linker.load("other", driver.transfer(keys(3), [7, 8, 9]))
    driver.linker._replica.advance()  # as a look-up does that waits for storage
    assert not driver.forward()


def test_offers_from_before_a_flush_are_not_told_after_it(make: Make) -> None:
    """SGLang has unlocked them itself, and would unlock others in their place that are yet to be read."""
    driver = make()
    driver.round()
    assert driver.linker.offload(driver.transfer(keys(4), range(1, 5)))
    assert driver.linker.num_completed_offloads()
    driver.linker.reset()
    assert driver.linker.offload(driver.transfer(keys(4, "new"), range(5, 9)))
    assert [driver.round() for _ in range(3)] == [1, 0, 0]
    assert driver.lookup("request", keys(4, "new")) == 4


def test_a_flush_forgets_all(make: Make) -> None:
    """Also what was promised, and what is queued."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    driver.lookup("request", keys(3))
    assert driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    driver.lookup("other", keys(3))
    driver.linker.reset()
    assert driver.linker.start_layer_wise_loading() == -1
    assert driver.lookup("next", keys(3)) == 0
    driver.check()
    kept = make(keep_on_flush=True)
    kept.save(keys(3), [1, 2, 3])
    kept.linker.reset()
    assert kept.load("next", keys(3), [4, 5, 6])


def test_pages_are_saved_by_those_who_ask_again(make: Make) -> None:
    """SGLang offers a prompt's pages twice with its own request; the next request is a hit that counts."""
    driver = make(write_policy="write_through_selective")
    assert [driver.save(keys(3), [1, 2, 3]) for _ in range(4)] == [False, False, True, False]


def test_adapters_are_named_by_their_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang gives one of the launch line the same id in each start."""
    adapter = SimpleNamespace(lora_name="mine", lora_path=str(tmp_path))
    monkeypatch.setattr(identity, "get_lora", lambda: SimpleNamespace(lora_paths=[adapter]))
    found = []
    for text in ("first", "second"):
        (tmp_path / "adapter_model.safetensors").write_text(text)
        found.append(identity._adapters()["mine"])
    assert found[0] != found[1]


def test_a_setting_that_is_new_is_named() -> None:
    """Whatever a namespace has decides the bytes, but for what is known not to."""
    kernels = SimpleNamespace(_fields={"attention_backend": "triton"}, _subs={})
    fields = {"quantization": None, "new": 3, "download_dir": "/models"}
    bag = SimpleNamespace(_fields=fields, _subs={"kernels": kernels})
    assert identity._leaves(bag) == {"quantization": None, "new": 3, "kernels.attention_backend": "triton"}


def test_a_cache_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="the cache of this model \\(SimpleNamespace\\) is not served yet"):
        DevicePages(SimpleNamespace(), PAGE)


def run_ranks(make: Make, works: Sequence[Callable[[Driver], Any]], is_latent: bool) -> list[Any]:
    """Each rank's work on a thread of its own; what it came to, or the error that it ended with."""
    meeting, results = Meeting(len(works)), [None] * len(works)

    def run(rank: int, work: Callable[[Driver], Any]) -> None:
        try:
            results[rank] = work(make(make_pool(is_latent), group=(meeting, rank)))
        except (KVConnectorError, threading.BrokenBarrierError) as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank, work)) for rank, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("is_latent", [False, True], ids=["keys and values", "latent"])
def test_ranks_decide_alike(make: Make, monkeypatch: pytest.MonkeyPatch, is_latent: bool) -> None:
    """Of a latent cache, which is the same on each rank, they share one copy: each saves its half of the blocks."""
    monkeypatch.setattr(linker, "Ranks", ThreadRanks)

    def work(driver: Driver) -> Any:
        taken = [driver.save(keys(4, f"chat {i}"), range(1 + 4 * i, 5 + 4 * i)) for i in range(3)]
        came = [driver.load(f"request {i}", keys(4, f"chat {i}"), range(20, 24)) for i in range(3)]
        held = driver.holds(keys(4, "chat 2"), range(20, 24))
        driver.linker.reset()
        stats = driver.linker.stats()
        return taken, came, held, stats["saved_blocks"], stats["loaded_blocks"]

    first, second = run_ranks(make, [work, work], is_latent)
    assert first == second == ([True] * 3, [True] * 3, True, 12, 12)


def test_one_rank_shows_what_all_have_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang's metrics are on, else none does."""
    made = []

    class Shown:
        def __init__(self) -> None:
            made.append(self)

        def show(self, sums: Mapping[str, float], histograms: object) -> None:
            self.sums = sums

    def work(driver: Driver) -> Any:
        driver.save(keys(4), range(1, 5))
        driver.linker.reset()
        return driver.linker.stats()["saved_bytes"]

    monkeypatch.setattr(linker, "Ranks", ThreadRanks)
    monkeypatch.setattr(replica, "PromMetrics", Shown)
    run_ranks(make, [work, work], is_latent=False)
    assert made == []
    saved_bytes = run_ranks(partial(make, enable_metrics=True), [work, work], is_latent=False)
    (one,) = made
    assert saved_bytes == [one.sums["saved_bytes"]] * 2 and one.sums["saved_blocks"] == 4


def test_ranks_that_do_not_schedule_alike_say_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for one another, or load other pages."""
    monkeypatch.setattr(linker, "Ranks", ThreadRanks)

    def offers(driver: Driver) -> None:
        driver.save(keys(4), range(1, 5))
        driver.linker.reset()

    def offers_nothing(driver: Driver) -> None:
        driver.round()
        driver.round()
        driver.linker.reset()

    results = run_ranks(make, [offers, offers_nothing], is_latent=False)
    assert any("ranks have not scheduled alike" in str(error) for error in results)
