"""What copies own is theirs alone, whatever the engine does on its threads: pools that sleep, captures, other links."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from kv_connector.triton_kernels import copy_pieces

from kv_connector.build import _open_peers
from kv_connector.config import Config, PathName, PeerConfig
from kv_connector.index import CacheIdentity, RankIdentity
from kv_connector.peer.carriers.cuda_ipc import CudaIpcTransport
from kv_connector.transfer.costs import calibration
from kv_connector.transfer.costs.curves import BUILT_IN
from kv_connector.transfer.cuda.driver import prepare_thread
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.choice import make_path
from kv_connector.transfer.paths.peer_writes import RemoteWriters
from kv_connector.types import Direction
from tests.copies import (
    LOAD,
    PAIRS,
    PATHS,
    SAVE,
    bf16_apart,
    check_copy,
    filled,
    ids,
    job,
    make_named_path,
    make_pool,
    side_stream,
)
from tests.engines import ends, make_engine
from tests.peer.peer_process import DevicePool, FarSide
from tests.peer.peers import SECRET, STAGING, Connected, until

CUDA = torch.device("cuda", 0)
EVERYTHING = range(6)  # regions of `bf16_apart`


def num_allocations() -> int:
    """Of device memory by torch in this process, so far."""
    return int(torch.cuda.memory_stats(CUDA)["allocation.all.allocated"])


def peer_of(layout: CacheLayout) -> tuple[Any, Any]:
    """The layout as another engine's pool."""
    bases = np.array([region.data_ptr for region in layout.regions], dtype=np.int64)
    return bases, np.array([region.block_stride for region in layout.regions], dtype=np.int64)


@pytest.mark.parametrize("registers_in_it", [True, False])
def test_inference_mode_may_end_or_begin_after_registration(registers_in_it: bool, device: torch.device) -> None:
    with torch.inference_mode(registers_in_it):
        engine, layout, pool = make_engine(device)
    before = [region.view.clone() for region in layout.regions]
    with torch.inference_mode(not registers_in_it):
        engine.submit_save([job(1, SAVE, [3, 5], [1, 0])])
        assert ends(engine.drain()) == [(1, True)]
        engine.submit_load([job(2, LOAD, [7, 9], [1, 0])])
        assert ends(engine.drain()) == [(2, True)]
    for region, old in zip(layout.regions, before, strict=True):
        assert torch.equal(region.view[[7, 9]].cpu(), old[[3, 5]].cpu())
    engine.close()
    pool.close()


@pytest.mark.parametrize("name", PATHS)
def test_what_torch_makes_tensors_on_by_default_does_not_matter(name: str, device: torch.device) -> None:
    """Engines load their models within such a context, and on threads of their own without it."""
    layout = filled(bf16_apart, device)
    with torch.device("meta"):
        pool = make_pool(layout)
        path = make_named_path(name, layout, pool)
        with side_stream(device) as stream:
            path.copy(BlockCopy(SAVE, EVERYTHING, ids(1, 2), ids(3, 4), stream))
    for region, column in zip(layout.regions, raw_form(layout).columns(pool.tensor), strict=True):
        assert torch.equal(column[[3, 4]], region.view[[1, 2]].cpu())
    check_copy(path, layout, pool, LOAD, EVERYTHING, PAIRS[3])
    path.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(PathName))
def test_paths_take_no_memory_that_the_engine_may_discard(name: PathName) -> None:
    """An engine registers its caches within a memory pool that it discards when it sleeps (vLLM's level 1): what is in
    there comes back undefined. The pool is torch's, so nothing may come from torch."""
    layout = filled(bf16_apart, CUDA)
    pool = make_pool(layout)
    before = num_allocations()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        engine = TransferEngine(raw_form(layout), pool, Config(copy_path=name, layer_group_bytes=4096))
    for turn in range(3):
        engine.submit_save([job(2 * turn, SAVE, [turn, 5], [1, 0])])
        assert ends(engine.drain()) == [(2 * turn, True)]
        engine.submit_load([job(2 * turn + 1, LOAD, [7, 9], [1, 0])])
        engine.wait_all()
        assert ends(engine.drain()) == [(2 * turn + 1, True)]
    assert num_allocations() == before
    assert all(torch.equal(region.view[[2, 5]], region.view[[7, 9]]) for region in layout.regions)
    engine.close()
    pool.close()


@pytest.mark.gpu
def test_links_and_measurements_take_no_memory_that_the_engine_may_discard() -> None:
    layout, other = filled(bf16_apart, CUDA), filled(bf16_apart, CUDA)
    host = HostPool(2 * calibration.NUM_BYTES // 4096, 4096, device=CUDA)
    host.wait_ready()
    lane = make_lane(CUDA, Priority.PEER, timing=False)
    before = num_allocations()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        calibration.measure(CUDA, host, (4096,), (4096,))
        writer = RemoteWriters(layout, lane).writer(*peer_of(other))
        writer.write(ids(1, 2), ids(5, 3), EVERYTHING)
    lane.wait_idle()
    assert num_allocations() == before
    assert all(
        torch.equal(there.view[[5, 3]], here.view[[1, 2]])
        for here, there in zip(layout.regions, other.regions, strict=True)
    )
    host.close()


@pytest.mark.gpu
def test_memory_of_the_drivers_goes_with_its_last_view() -> None:
    layout = filled(bf16_apart, CUDA)
    pool = make_pool(layout)
    free: list[int] = []
    for _ in range(6):
        path = make_path(raw_form(layout), pool, Config(copy_path=PathName.STAGED, staging_memory=1 << 30))
        free.append(torch.cuda.mem_get_info(CUDA)[0])
        path.close()
        del path
        gc.collect()
    assert min(free[1:]) >= free[0] - (256 << 20), "each path has kept a gigabyte"
    pool.close()


@pytest.mark.gpu
def test_streams_are_nobody_elses() -> None:
    lanes = [make_lane(CUDA, priority, timing=False) for priority in Priority for _ in range(40)]
    ours = {lane.handle for lane in lanes}
    torchs = {torch.cuda.Stream(CUDA, priority=priority).cuda_stream for priority in (0, -1, -2) for _ in range(40)}
    assert len(ours) == len(lanes)
    assert not ours & torchs


@pytest.fixture
def direct() -> Iterator[tuple[Any, CacheLayout, HostPool]]:
    layout = filled(bf16_apart, CUDA)
    pool = make_pool(layout)
    path = make_path(raw_form(layout), pool, Config(copy_path=PathName.DIRECT))
    yield path, layout, pool
    torch.cuda.synchronize()
    path.close()
    pool.close()


@pytest.mark.gpu
def test_ids_do_not_lie_where_a_model_still_reads(direct: tuple[Any, CacheLayout, HostPool]) -> None:
    """Temporaries of the model are freed while their kernels are queued; torch gives their bytes to the next who asks
    on the same stream. Many copies are under way meanwhile, and each has ids of its own."""
    path, layout, pool = direct
    side = torch.cuda.Stream()
    temporaries = [torch.full((8192,), 7, dtype=torch.int64, device=CUDA) for _ in range(32)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
    torch.cuda._sleep(800_000_000)
    totals = [temporary.sum() for temporary in temporaries]
    temporaries.clear()
    for number in range(12):
        path.copy(BlockCopy(SAVE, EVERYTHING, ids(number), ids(number), side))
    torch.cuda.synchronize()
    assert {int(total) for total in totals} == {7 * 8192}
    for region, column in zip(layout.regions, raw_form(layout).columns(pool.tensor), strict=True):
        assert torch.equal(column[:12], region.view[:12].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", [PathName.DIRECT, PathName.STAGED, PathName.AUTO])
def test_no_kernel_is_compiled_in_service(name: PathName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where copies were measured at an earlier start, or never: nothing has launched the kernels then."""
    monkeypatch.setattr(copy_pieces, "_launches", {})
    layout = filled(bf16_apart, CUDA)
    pool = make_pool(layout)
    path = make_path(raw_form(layout), pool, Config(copy_path=name), BUILT_IN)
    known = set(copy_pieces._launches)
    assert len(known) >= 2
    for direction in Direction:
        for pairs in PAIRS:
            check_copy(path, layout, pool, direction, EVERYTHING, pairs)
    assert set(copy_pieces._launches) == known
    path.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(PathName))
def test_an_engine_that_is_dropped_leaves_nothing_running(name: PathName) -> None:
    engine, layout, pool = make_engine(CUDA, copy_path=name)
    torch.cuda._sleep(200_000_000)
    engine.submit_save([job(1, SAVE, [3, 4], [1, 0])])
    engine.fence()  # submitted, and not begun
    del engine
    gc.collect()
    for region, column in zip(layout.regions, raw_form(layout).columns(pool.tensor), strict=True):
        assert torch.equal(column[:2], region.view[[4, 3]].cpu())
    pool.close()


def captured(work: Any) -> torch.Tensor:
    """What a graph computes that was captured, as engines do it, while `work` was done on another thread."""
    value = torch.zeros(8, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as thread:
        with torch.cuda.graph(graph):
            value += 1
            thread.submit(work).result()
            value += 1
        value.zero_()
        graph.replay()
        torch.cuda.synchronize()
    return value


@pytest.mark.gpu
@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_graph_can_be_captured_while_links_come_and_go(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_connector.transfer.paths import peer_writes as remote

    monkeypatch.setattr(remote, "LEAST_DMA_BYTES", 1 << 40 if by_kernel else 0)
    layout, other = filled(bf16_apart, CUDA), filled(bf16_apart, CUDA)

    def link() -> None:
        prepare_thread(0)
        for turn in range(3):
            lane = make_lane(CUDA, Priority.PEER, timing=False)
            writer = RemoteWriters(layout, lane).writer(*peer_of(other))
            writer.write(ids(turn, 8), ids(5 + turn, 3), EVERYTHING)
            end = lane.mark(lane.stream)
            while not end.query():
                pass
            del writer

    assert captured(link).tolist() == [2.0] * 8
    for here, there in zip(layout.regions, other.regions, strict=True):
        assert torch.equal(there.view[[5, 6, 7, 3]], here.view[[0, 1, 2, 8]])


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_another_process_connects_and_goes() -> None:
    pool = DevicePool()
    config = PeerConfig(kind="shared_memory", secret=SECRET.decode(), staging_memory=STAGING, timeout_ms=20_000)
    jobs = _open_peers(config, RankIdentity(CacheIdentity("model", "float32", "NHD", 16), 0, 1), "a", pool.pool)
    transport = jobs._transport
    assert isinstance(transport, CudaIpcTransport), "only this one opens the other's memory"
    far = FarSide("cuda", 30, 2, "b", device=0)

    def come_and_go() -> None:
        for turn in range(3):
            link = far.connect("127.0.0.1", jobs.port)
            until(lambda turn=turn: len(far.of(Connected)) > turn)  # type: ignore[misc]
            until(lambda: bool(transport._remotes))
            far.drop(link, "enough")
            until(lambda: not transport._remotes)

    assert captured(come_and_go).tolist() == [2.0] * 8
    far.close()
    jobs.close()


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_an_engine_is_dropped() -> None:
    """Whichever thread the garbage collector runs on."""
    engine, _, pool = make_engine(CUDA, copy_path=PathName.STAGED)
    engine.submit_save([job(1, SAVE, [3, 4], [1, 0])])
    engine.drain()
    held = [engine]
    del engine

    def drop() -> None:
        held.clear()
        gc.collect()

    assert captured(drop).tolist() == [2.0] * 8
    pool.close()
