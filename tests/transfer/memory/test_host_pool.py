"""The host pool: exact size, readiness that only grows, page locking in the background and its failure."""

from __future__ import annotations

import gc
import logging
import os
import threading

import pytest
import torch

from kv_connector.errors import ConfigError
from kv_connector.transfer.memory import host_pool, numa, pinning
from kv_connector.transfer.memory.host_pool import HostPool

BLOCK = 4096
CUDA = torch.device("cuda", 0)


class FakeDriver:
    """Stands in for cudart: registers nothing, fails from piece `fail_at` on, and holds the thread until `gate`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.gate = threading.Event()
        self.pool: HostPool | None = None
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.ready_before: list[int] = []
        self.affinity: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert self.gate.wait(60)
        assert self.pool is not None
        self.ready_before.append(self.pool.num_ready_blocks)
        self.affinity = os.sched_getaffinity(0)
        if len(self.registered) == self.fail_at:
            return 2
        self.registered.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return 0


@pytest.fixture
def make_pinning(monkeypatch: pytest.MonkeyPatch):
    def make(driver: FakeDriver, num_blocks: int = 10, **settings: object) -> HostPool:
        monkeypatch.setattr(pinning, "_cudart", lambda: driver)
        monkeypatch.setattr(pinning, "prepare_thread", lambda index: None)
        monkeypatch.setattr(numa, "gpu_node", lambda device: settings.get("node"))
        driver.pool = HostPool(num_blocks, BLOCK, device=CUDA, pin_piece_bytes=3 * BLOCK + 100)
        return driver.pool

    return make


def test_without_a_gpu_every_block_is_ready_at_once() -> None:
    pool = HostPool(7, BLOCK)
    assert pool.tensor.shape == (7, BLOCK)
    assert pool.tensor.dtype == torch.uint8
    assert pool.tensor.is_contiguous()
    assert pool.tensor.data_ptr() % BLOCK == 0
    assert not pool.tensor.any()
    assert (pool.num_ready_blocks, pool.is_pinned) == (7, False)
    pool.tensor[6] = 255
    assert int(pool.tensor.sum(dtype=torch.int64)) == 255 * BLOCK


@pytest.mark.parametrize("device", [None, torch.device("cpu"), CUDA])
def test_pinning_can_be_turned_off(device: torch.device | None) -> None:
    pool = HostPool(3, BLOCK, device=device, pin_memory=False)
    assert (pool.num_ready_blocks, pool.is_pinned) == (3, False)


def test_sized_rounds_down_to_whole_blocks() -> None:
    assert HostPool.sized(5 * BLOCK + 17, BLOCK).num_blocks == 5


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_memory=4095 .*one block of 4096 bytes.*give at least 4096"):
        HostPool.sized(BLOCK - 1, BLOCK)
    with pytest.raises(ConfigError, match="0 blocks"):
        HostPool(0, BLOCK)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"{1 << 60} bytes are asked for and the machine has \d+: lower host_memory"):
        HostPool.sized(1 << 60, BLOCK)


def test_more_than_the_container_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be ended when the memory is used, with no word of why."""
    monkeypatch.setattr(host_pool, "cgroup_memory", lambda: (6 * BLOCK, 0))
    assert HostPool.sized(6 * BLOCK, BLOCK).num_blocks == 6
    with pytest.raises(ConfigError, match=rf"{7 * BLOCK} bytes .*container may have {6 * BLOCK}: raise .*or lower"):
        HostPool.sized(7 * BLOCK, BLOCK)


def test_more_than_is_free_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It may be free by the time that it is used."""
    monkeypatch.setattr(host_pool, "machine_memory", lambda: (9 * BLOCK, 6 * BLOCK))
    HostPool.sized(6 * BLOCK, BLOCK)
    assert not caplog.records
    HostPool.sized(7 * BLOCK, BLOCK)
    assert f"{7 * BLOCK} bytes are asked for and {6 * BLOCK} are free here" in caplog.text


def test_close_is_idempotent_and_leaves_views_alone() -> None:
    pool = HostPool(2, BLOCK)
    view = pool.tensor[1]
    view.fill_(3)
    pool.close()
    pool.close()
    assert int(view[0]) == 3
    with pytest.raises(ValueError, match="closed"):
        _ = pool.tensor


def test_blocks_become_ready_piece_by_piece(make_pinning) -> None:
    driver = FakeDriver()
    pool = make_pinning(driver)
    assert (pool.num_ready_blocks, pool.is_pinned, pool.blocks_per_piece) == (0, True, 3)
    driver.gate.set()
    pool.wait_ready()
    assert driver.ready_before == [0, 3, 6, 9]
    assert (pool.num_ready_blocks, pool.is_pinned) == (10, True)
    base = pool.tensor.data_ptr()
    assert driver.registered == [(base + i * BLOCK, n * BLOCK) for i, n in ((0, 3), (3, 3), (6, 3), (9, 1))]
    pool.close()
    pool.close()
    assert sorted(driver.unregistered) == [address for address, _ in driver.registered]


def test_a_failed_registration_leaves_the_pool_unpinned_and_ready(
    make_pinning,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver(fail_at=2)
    pool = make_pinning(driver)
    driver.gate.set()
    pool.wait_ready()
    assert (pool.num_ready_blocks, pool.is_pinned) == (10, False)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "CUDA error 2" in warnings[0].getMessage()
    pool.close()
    assert len(driver.unregistered) == 2


def test_close_stops_the_thread_between_pieces(make_pinning) -> None:
    driver = FakeDriver()
    pool = make_pinning(driver, num_blocks=3000)
    closer = threading.Thread(target=pool.close)
    closer.start()
    stop = pool._pinner
    assert stop is None or stop._stop.wait(60)
    driver.gate.set()
    closer.join()
    assert len(driver.registered) <= 1
    assert driver.unregistered == [address for address, _ in driver.registered]


def test_only_the_pinning_thread_is_bound(make_pinning, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    one = frozenset([max(before)])
    monkeypatch.setattr(host_pool.numa, "node_cpus", lambda node: one if node == 1 else frozenset())
    driver = FakeDriver()
    pool = make_pinning(driver, node=1)
    driver.gate.set()
    pool.wait_ready()
    assert driver.affinity == one
    assert os.sched_getaffinity(0) == before
    pool.close()


@pytest.mark.gpu
def test_real_memory_is_locked_in_the_background_and_blocks_copy() -> None:
    before = os.sched_getaffinity(0)
    pool = HostPool(1000, 16384, device=CUDA, pin_piece_bytes=1 << 20)
    pool.wait_ready()
    assert (pool.num_ready_blocks, pool.is_pinned) == (1000, True)
    assert os.sched_getaffinity(0) == before
    source = torch.randint(0, 256, (16384,), dtype=torch.uint8, device=CUDA)
    for block in (0, 63, 64, 999):
        assert pool.tensor[block].is_pinned()
        pool.tensor[block].copy_(source)
        assert torch.equal(pool.tensor[block], source.cpu())
    pool.close()


@pytest.mark.gpu
def test_a_pool_that_is_dropped_does_not_haunt_its_addresses() -> None:
    """CUDA kept the pages of a registered mapping that was unmapped: copies from its addresses, which the system gives
    to the next mapping, moved old bytes. So a pool unregisters itself when it is dropped without `close`."""
    device = torch.device("cuda")
    addresses = set()
    for fill in range(4):
        pool = HostPool(64, 1 << 20, device=device)
        pool.wait_ready()
        assert pool.is_pinned, "its addresses are registered already"
        addresses.add(pool.tensor.data_ptr())
        pool.tensor.fill_(fill + 1)
        there = pool.tensor.to(device, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((there == fill + 1).all())
        del pool
        gc.collect()
    assert len(addresses) < 4, "no address came back: the test shows nothing"


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_memory_is_being_locked() -> None:
    """Engines start to serve, and capture their graphs, before the pool is ready."""
    value = torch.zeros(8, device=CUDA)
    pool = HostPool(4096, 1 << 20, device=CUDA, pin_piece_bytes=16 << 20)
    for _ in range(3):
        assert pool.num_ready_blocks < pool.num_blocks, "locking was over before the capture began"
        graph = torch.cuda.CUDAGraph()
        ready = pool.num_ready_blocks
        with torch.cuda.graph(graph):
            value += 1
            while pool.num_ready_blocks == ready:  # at least one piece is locked during the capture
                assert pool.is_pinned
    graph.replay()
    torch.cuda.synchronize()
    assert value.tolist() == [1.0] * 8
    pool.wait_ready()
    assert pool.is_pinned
    pool.close()
