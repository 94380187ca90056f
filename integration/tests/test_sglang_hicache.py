"""SGLang's own host tier on our storage: its pools, cache controller and storage threads, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.tests.sglang_host_tiers import (
    BACKEND,
    PAGE,
    SLOTS,
    TOKENS,
    Make,
    fill,
    holds,
    host_tiers,
    launched,
    make_host_pool,
    page_hashes,
    slots_of,
)
from kv_connector.engines.sglang import host_storage, launch
from kv_connector.engines.sglang.host_pages import LentPages, Patience, StagedPages, open_pages
from kv_connector.engines.sglang.host_storage import read_storage_settings
from kv_connector.errors import ConfigError
from kv_connector.storage.base import address
from kv_connector.storage.objects.backend import ObjectStorage
from tests.storage.objects.stores import ImitatedStore, connected


@pytest.fixture
def make(models: Path, tmp_path: Path) -> Iterator[Make]:
    with host_tiers(models, tmp_path / "kv") as make:
        yield make


@pytest.mark.parametrize(
    ("layout", "is_latent", "width", "is_lent"),
    [
        ("layer_first", False, 32, False),
        ("page_first", False, 32, True),
        ("page_first_direct", False, 32, True),
        ("page_head", False, 32, True),
        ("page_first", False, 24, False),  # runs that are no whole pages of memory
        ("layer_first", True, 24, False),
        ("page_first", True, 32, True),
        ("page_first_direct", True, 32, True),
    ],
)
def test_pages_come_back_after_a_restart(make: Make, layout: str, is_latent: bool, width: int, is_lent: bool) -> None:
    """Of each layout, to other places of the host pool, byte for byte, and to these alone."""
    pools = [make_host_pool(layout, is_latent, width) for _ in range(2)]
    assert isinstance(open_pages(pools[0], Patience()), LentPages if is_lent else StagedPages)
    first = make(pools[0])
    assert first.back_up(TOKENS, range(1, 7)) == len(TOKENS)
    first.close()
    second = make(pools[1])
    pages = [9, 3, 12, 5, 1, 7]
    assert second.prefetch(TOKENS, pages) == (len(TOKENS), len(TOKENS))
    assert holds(pools[1], page_hashes(TOKENS), pages) == [True] * 6
    others = [page for page in range(pools[1].page_num) if page not in pages]
    assert all((pools[1].get_data_page(page * PAGE) == -1.0).all() for page in others)


def test_a_hit_is_the_prefix_that_is_stored(make: Make) -> None:
    """A page that is missing hides those behind it, and another prompt's are none of it."""
    tier = make()
    tier.back_up(TOKENS[: 2 * PAGE], [1, 2])
    fill(tier.pool, page_hashes(TOKENS)[3:], [4, 5, 6])
    assert tier.storage.batch_set_v1(page_hashes(TOKENS)[3:], slots_of([4, 5, 6])) == [True] * 3
    assert tier.prefetch(TOKENS, range(8, 14)) == (2 * PAGE, 2 * PAGE)
    assert tier.prefetch([5, *TOKENS[1:]], range(8, 14)) == (0, 0)


@pytest.mark.parametrize("names", [{"cache_salt": "mine"}, {"extra_key": "an adapter"}])
def test_who_has_another_salt_or_adapter_finds_nothing(make: Make, names: dict[str, str]) -> None:
    """SGLang's own hashes tell them apart."""
    tier = make()
    assert tier.back_up(TOKENS, range(1, 7), **names) == len(TOKENS)
    for others in ({}, dict.fromkeys(names, "another")):
        assert tier.prefetch(TOKENS, range(8, 14), **others) == (0, 0)
    assert tier.prefetch(TOKENS, range(8, 14), **names) == (len(TOKENS), len(TOKENS))
    assert holds(tier.pool, page_hashes(TOKENS, **names), range(8, 14)) == [True] * 6


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_host_pool("page_first", width=24),
        lambda: make_host_pool("page_first_direct"),
        lambda: make_host_pool("layer_first"),
        lambda: make_host_pool("page_first", is_latent=True),
    ],
    ids=["width", "page_first_direct", "layer_first", "latent"],
)
def test_what_lies_otherwise_is_not_found(make: Make, other: Callable[[], Any]) -> None:
    """Some of these pages have as many bytes."""
    make(make_host_pool("page_first")).back_up(TOKENS, range(1, 7))
    assert make(other()).prefetch(TOKENS, range(1, 7)) == (0, 0)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"attention_backend": "flex_attention"}, {"lora_backend": "triton"}]
)
def test_another_launch_line_finds_nothing(make: Make, models: Path, options: dict[str, Any]) -> None:
    make().back_up(TOKENS, range(1, 7))
    with launched(models, **options):
        assert make().prefetch(TOKENS, range(1, 7)) == (0, 0)
    assert make().prefetch(TOKENS, range(1, 7)) == (len(TOKENS), len(TOKENS))


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_damaged_page_is_a_miss(make: Make, tmp_path: Path, layout: str) -> None:
    """What lies in front of it is served. Nothing raises, and the damage is counted."""
    first = make(make_host_pool(layout))
    for page in range(6):  # a pack each
        hashes = page_hashes(TOKENS)[page : page + 1]
        fill(first.pool, hashes, [page])
        assert first.storage.batch_set_v1(hashes, slots_of([page])) == [True]
        if page == 3:
            known = set(packs(tmp_path))
            continue
        if page == 4:
            (damaged,) = set(packs(tmp_path)) - known
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    second = make(make_host_pool(layout))
    assert second.prefetch(TOKENS, range(8, 14)) == (len(TOKENS), 4 * PAGE)
    assert holds(second.pool, page_hashes(TOKENS)[:4], range(8, 12)) == [True] * 4
    assert second.storage.stats()["kv_corrupt_blocks"] == 1
    assert second.prefetch(TOKENS, range(8, 14)) == (4 * PAGE, 4 * PAGE), "it is not found again"


def packs(folder: Path) -> list[Path]:
    """The files that blocks are in."""
    return [file for file in (folder / "kv").rglob("*") if file.is_file() and file.stat().st_size > 2 * 4096]


def test_the_capacity_holds_over_engines_and_the_newest_stays(make: Make, tmp_path: Path) -> None:
    tiers = [make(make_host_pool("layer_first"), capacity="8MiB") for _ in range(2)]
    prompts = [list(range(100 * i, 100 * i + 6 * PAGE)) for i in range(130)]  # of 96 KiB
    for i, prompt in enumerate(prompts):
        assert tiers[i % 2].back_up(prompt, range(1, 7)) == len(prompt)
    assert sum(file.stat().st_size for file in (tmp_path / "kv").rglob("*") if file.is_file()) <= 8 << 20
    assert tiers[0].prefetch(prompts[0], range(8, 14)) == (0, 0)
    assert tiers[0].prefetch(prompts[-1], range(8, 14)) == (6 * PAGE, 6 * PAGE)
    assert holds(tiers[0].pool, page_hashes(prompts[-1]), range(8, 14)) == [True] * 6


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_store_of_objects_finds_pages_wherever_they_are_in_a_prefix(
    make: Make, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """It keeps small blocks in groups elsewhere, and SGLang does not say where a call's pages begin. It is told of the
    memory that it will use, to register it. When it goes away all is a miss."""
    store = ImitatedStore()
    lent: list[memoryview] = []

    def open_imitated(*about: Any, num_served: int) -> ObjectStorage:
        block_bytes, memory = about[3:5]
        lent.append(memory)
        return connected(ObjectStorage("imitated", store, bytes(32), block_bytes, memory))

    monkeypatch.setattr(host_storage, "open_storage", open_imitated)
    tier = make(make_host_pool(layout))
    own = tier.pool.kv_buffer
    assert (address(lent[0]) == own.data_ptr() and lent[0].nbytes == own.nbytes) is (layout == "page_first")
    hashes = page_hashes(TOKENS)
    fill(tier.pool, hashes, range(1, 7))
    for first, end in ((0, 1), (1, 4), (4, 6)):
        assert all(tier.storage.batch_set_v1(hashes[first:end], slots_of(range(first + 1, end + 1))))
    assert tier.storage.batch_exists(hashes) == 6
    assert tier.storage.batch_exists(hashes[3:]) == 3
    assert tier.storage.batch_get_v1(hashes[2:], slots_of(range(8, 12))) == [True] * 4
    assert holds(tier.pool, hashes[2:], range(8, 12)) == [True] * 4
    store.is_down = True
    assert tier.storage.batch_get_v1(hashes, slots_of(range(8, 14))) == [False] * 6
    assert tier.storage.batch_set_v1(hashes, slots_of(range(1, 7))) == [False] * 6
    assert tier.storage.batch_exists(hashes) == 0


class OwingStorage:
    """Answers when the test says, with pages of ones."""

    def __init__(self) -> None:
        self.owed: list[tuple[Future[list[bool]], list[memoryview]]] = []

    def read(self, keys: list[bytes], buffers: list[memoryview], singly: bool) -> Future[list[bool]]:
        future: Future[list[bool]] = Future()
        future.set_running_or_notify_cancel()
        self.owed.append((future, buffers))
        return future

    def answer(self) -> None:
        for future, buffers in self.owed:
            for buffer in buffers:
                buffer[:] = bytes([1]) * len(buffer)
            future.set_result([True] * len(buffers))
        self.owed.clear()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.answer()


def test_a_late_answer_reaches_no_page() -> None:
    """SGLang has given the page to others by then. Until it comes storage is asked for nothing."""
    pool, storage, patience = make_host_pool("layer_first"), OwingStorage(), Patience(seconds=0.0)
    pages: Any = StagedPages(pool, patience)
    asked: Any = storage
    before = pool.kv_buffer.clone()
    assert pages.read(asked, [bytes(32)], [PAGE]) == [False]
    assert patience.is_over
    assert pages.read(asked, [bytes(32)], [PAGE]) == [False]
    assert len(storage.owed) == 1
    assert len(pages._free) == 2 * pages._batch - 1, "its memory is nobody else's"
    storage.answer()
    assert not patience.is_over
    assert torch.equal(pool.kv_buffer, before)
    assert len(set(pages._free)) == len(pages._free) == 2 * pages._batch


def test_what_cannot_be_is_a_miss_and_not_an_error(make: Make) -> None:
    """A pool that nobody registered, a name that is none, slots of half a page or of no pool. No thread ends."""
    tier = make()
    storage = tier.storage
    hashes = page_hashes(TOKENS)
    tier.back_up(TOKENS, range(1, 7))
    before = tier.pool.kv_buffer.clone()
    assert storage.batch_exists(["no name"]) == 0
    assert storage.batch_get_v1(hashes[:2], slots_of([8])) == [False] * 2
    assert storage.batch_get_v1(hashes[:1], slots_of([8]) + 1) == [False]
    assert storage.batch_get_v1(hashes[:1], slots_of([8]).flip(0)) == [False]
    for page in (tier.pool.page_num, -1):
        assert storage.batch_get_v1(hashes[:1], slots_of([page])) == [False]
        assert storage.batch_set_v1(page_hashes([1] * PAGE), slots_of([page])) == [False]
    assert torch.equal(tier.pool.kv_buffer, before)
    transfer: Any = SimpleNamespace(name="swa", keys=hashes[:2], host_indices=None, hit_policy="all_pages")
    assert storage.batch_get_v2([transfer]) == {"swa": [False] * 2}
    assert storage.batch_set_v2([transfer]) == {"swa": [False] * 2}
    assert storage.batch_set_v1([], slots_of([])) == []
    assert storage.batch_exists([]) == 0
    storage.close()
    assert storage.batch_set_v1(hashes, slots_of(range(1, 7))) == [False] * 6


def test_what_is_cleared_is_never_found_again(make: Make) -> None:
    """Nor is what was stored between two clears, after the second one. What was stored before the first is found by an
    engine that starts later: its weights are those of then."""
    tier = make()
    tier.back_up(TOKENS, range(1, 7))
    for _ in range(3):
        assert tier.controller.clear_storage_backend()
        assert tier.prefetch(TOKENS, range(8, 14)) == (0, 0)
        assert tier.back_up(TOKENS[: 3 * PAGE], [1, 2, 3]) == 3 * PAGE
        assert tier.prefetch(TOKENS, range(8, 14)) == (3 * PAGE, 3 * PAGE)
    assert make().prefetch(TOKENS, range(8, 14)) == (6 * PAGE, 6 * PAGE)


def test_what_is_cleared_stays_so_when_storage_is_attached_again(make: Make) -> None:
    """The weights are still others than those of the launch line. What was stored since is found."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    first = make(others={"swa": make_host_pool("layer_first")})
    first.back_up(TOKENS, range(1, 7))
    window = [PoolTransfer("swa", slots_of([1]), keys=page_hashes(TOKENS)[:1])]
    assert first.storage.batch_set_v2(window) == {"swa": [True]}
    tier = make()
    for _ in range(2):
        tier.storage.clear()
    assert tier.back_up(TOKENS[: 3 * PAGE], [1, 2, 3]) == 3 * PAGE
    controller = tier.controller
    extra = dict(controller.storage_config.extra_config)
    controller.detach_storage_backend()
    controller.attach_storage_backend("dynamic", PAGE, "tiny", extra, host_pools=controller.mem_pool_host.entries)
    assert tier.prefetch(TOKENS, range(8, 14)) == (3 * PAGE, 3 * PAGE)
    controller.storage_backend.register_mem_host_pool_v2(make_host_pool("layer_first"), "swa")
    assert controller.storage_backend.batch_get_v2(window) == {"swa": [False]}, "a pool that comes later"
    controller.clear_storage_backend()
    assert tier.prefetch(TOKENS, range(8, 14)) == (0, 0)


def test_a_store_that_hangs_is_waited_for_once(make: Make) -> None:
    """Whatever number of pools there are: SGLang gives its storage threads 10 seconds to end when it is flushed, and
    its scheduler ends where they do not."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    assert Patience()._seconds < 10
    tier = make(make_host_pool("layer_first"), {"swa": make_host_pool("layer_first")})
    hashes, slots = page_hashes(TOKENS), slots_of(range(1, 7))
    pools, asked = tier.storage._pools, OwingStorage()
    pools["kv"]._patience._seconds = 0.0
    for pool in pools.values():
        pool._storage.close()
        pool._storage = asked
    assert tier.storage.batch_get_v1(hashes, slots) == [False] * 6
    assert tier.storage.batch_get_v2([PoolTransfer("swa", slots, keys=hashes)]) == {"swa": [False] * 6}
    assert tier.storage.batch_exists(hashes) == 0
    assert len(asked.owed) == 1
    asked.answer()
    assert tier.storage.batch_get_v2([PoolTransfer("swa", slots, keys=hashes)]) == {"swa": [False] * 6}
    assert len(asked.owed) == 1
    asked.answer()


def test_metrics_are_told_once(make: Make) -> None:
    tier = make()
    tier.back_up(TOKENS, range(1, 7))
    tier.prefetch(TOKENS, range(8, 14))
    metrics: Any = tier.storage.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([6], [6])
    assert len(metrics.backup_bandwidth) == len(metrics.prefetch_bandwidth) == 1
    again: Any = tier.storage.get_stats()
    assert again.prefetch_pgs == again.backup_bandwidth == []


PATH = {"path": "/kv", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, '"storage": {"path": "/data/kv", "capacity": "1TiB"}'),
        ({"storage": "/kv"}, "storage='/kv' is not an object"),
        ({"storage": PATH, "interface_v1": 0}, 'give "interface_v1": 1'),
        ({"storage": PATH, "host_memory": "1GiB"}, "unknown setting 'host_memory'"),
        ({"storage": PATH, "host_form": "lossless"}, "host_form='lossless': pages lie on the host .*: leave it out"),
        ({"storage": PATH | {"capasity": 1}}, "did you mean 'capacity'"),
        ({"storage": PATH | {"capacity": "1KiB"}}, "too small: give at least 8388608"),
        ({"storage": PATH | {"prefetch": "timeout"}}, "--hicache-storage-prefetch-policy: leave it out"),
        ({"storage": PATH | {"backup": "on_save"}}, "--hicache-write-policy: leave it out"),
    ],
)
def test_what_is_wrong_is_said_with_its_fix(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_storage_settings(BACKEND | given)
    assert re.search(message, str(refused.value)), str(refused.value)


def test_a_start_that_cannot_be_ends_with_one_line(make: Make, tmp_path: Path) -> None:
    """SGLang raises what is raised, and nothing is left behind."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="cannot be used"):
        make(path=str(tmp_path / "file"))
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    with pytest.raises(ConfigError, match="without --hicache-storage-backend"):
        open_pages(LogicalHostPool(SLOTS, PAGE), Patience())


def test_a_draft_model_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "get_spec", lambda: SimpleNamespace(speculative_algorithm="EAGLE"))
    with pytest.raises(ConfigError, match="--speculative-algorithm EAGLE"):
        make()
