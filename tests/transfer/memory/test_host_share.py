"""Host memory that ranks of a machine share: who maps it, who saves what, and who cannot have it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from kv_connector.errors import ConfigError
from kv_connector.transfer.memory import host_share
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.host_share import ALONE, Exchange, HostShare, share_host
from kv_connector.types import CopyJob, Direction

NUM_RANKS = 3


class Room:
    """Where ranks that are threads tell each other values."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._told: list[object] = [None] * num_ranks

    def exchange(self, rank: int, value: object) -> Sequence[object]:
        self._told[rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told


def share_among(exchanges: Sequence[Exchange]) -> list[HostShare]:
    """What each rank gets, all at the same time."""
    shares = [ALONE] * len(exchanges)

    def run(rank: int) -> None:
        shares[rank] = share_host(exchanges[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return shares


def in_a_room(num_ranks: int) -> list[Exchange]:
    """Of each rank."""
    room = Room(num_ranks)
    return [partial(room.exchange, rank) for rank in range(num_ranks)]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _rank(pipe: Connection) -> None:
    """A process: what it is told to write it writes, and says what it reads."""

    def exchange(value: object) -> Sequence[object]:
        pipe.send(value)
        told: Sequence[object] = pipe.recv()
        return told

    share = share_host(exchange)
    pool = HostPool.sized(4096, 64, share=share)
    pipe.send((share.index, share.count, pool.num_blocks))
    for block_id, content in iter(pipe.recv, None):
        pool.tensor[block_id] = content
        pipe.send("written")
    pipe.send(pool.tensor[:, 0].tolist())


def test_ranks_map_one_memory() -> None:
    """Processes, as an engine's ranks are: what one writes all read, and together they have as much as they would have
    had apart."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(theirs,), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for _ in range(2):
        told = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(told)
    num_blocks = NUM_RANKS * 4096 // 64
    assert [pipe.recv() for pipe in pipes] == [(rank, NUM_RANKS, num_blocks) for rank in range(NUM_RANKS)]
    for rank, pipe in enumerate(pipes):
        pipe.send((num_blocks - 1 - rank, 10 + rank))
        assert pipe.recv() == "written"
    for pipe in pipes:
        pipe.send(None)
    seen = [pipe.recv() for pipe in pipes]
    assert seen == [[0] * (num_blocks - 3) + [12, 11, 10]] * NUM_RANKS
    for process in processes:
        process.join()


def test_the_memory_is_there_until_the_slowest_has_opened_it() -> None:
    room, is_ahead = in_a_room(2), threading.Event()
    calls = []

    def first(value: object) -> Sequence[object]:
        calls.append(value)
        if len(calls) == 2:
            is_ahead.set()
        return room[0](value)

    def second(value: object) -> Sequence[object]:
        told = room[1](value)
        assert is_ahead.wait(60)
        return told

    shares = share_among([first, second])
    assert [share.count for share in shares] == [2, 2]
    for share in shares:
        share.map(8)


def test_where_one_rank_cannot_open_the_memory_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = iter(range(10))
    inner = host_share._open
    monkeypatch.setattr(host_share, "_open", lambda offer: inner(offer) if next(opened) else -1)
    before = num_files()
    assert share_among(in_a_room(NUM_RANKS)) == [ALONE] * NUM_RANKS
    assert num_files() == before


def test_a_file_that_is_not_the_one_offered_is_not_mapped() -> None:
    """Where a process has ended and another has its number, or has closed the file and opened one in its place."""
    room = in_a_room(2)

    def second(value: object) -> Sequence[object]:
        told = list(room[1](value))
        if isinstance(told[0], host_share._Offer):
            told[0] = told[0]._replace(mark=bytes(16))
        return told

    before = num_files()
    assert share_among([room[0], second]) == [ALONE] * 2
    assert num_files() == before


def test_what_is_no_file_by_now_is_not_mapped() -> None:
    """A process that has the number of one that ended may have a pipe under that descriptor."""
    room, (source, target) = in_a_room(2), os.pipe()

    def second(value: object) -> Sequence[object]:
        told = list(room[1](value))
        if isinstance(told[0], host_share._Offer):
            told[0] = told[0]._replace(file=source)
        return told

    before = num_files()
    assert share_among([room[0], second]) == [ALONE] * 2
    assert num_files() == before
    for file in (source, target):
        os.close(file)


def test_no_process_that_a_rank_starts_has_the_memory() -> None:
    offer = host_share._offer()
    assert offer is not None
    assert not os.get_inheritable(offer.file)
    os.close(offer.file)


def test_ranks_of_two_machines_share_what_each_machine_has() -> None:
    room = in_a_room(4)

    def of_machine(machine: int, rank: int) -> Exchange:
        def exchange(value: object) -> Sequence[object]:
            told = list(room[rank](value))
            for other, offer in enumerate(told):
                if isinstance(offer, host_share._Offer) and other // 2 != machine:
                    told[other] = offer._replace(machine=("another", "", 0))
            return told

        return exchange

    shares = share_among([of_machine(rank // 2, rank) for rank in range(4)])
    assert [(share.index, share.count) for share in shares] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    memory = [share.map(8) for share in shares]
    memory[0][0], memory[3][1] = 1, 2
    assert [mapping[:2] for mapping in memory] == [b"\1\0", b"\1\0", b"\0\2", b"\0\2"]


def test_a_rank_that_shares_with_nobody_has_its_own() -> None:
    before = num_files()
    assert share_among(in_a_room(1)) == [ALONE]
    assert num_files() == before


def test_every_block_is_saved_by_one_rank() -> None:
    rng = np.random.default_rng(1)
    jobs = [
        CopyJob(number, Direction.SAVE, rng.permutation(50)[:count], rng.permutation(90)[:count])
        for number, count in enumerate((0, 1, 7, 50))
    ]
    shares = [HostShare(index, NUM_RANKS) for index in range(NUM_RANKS)]
    for number, job in enumerate(jobs):
        own = [share.own_saves(jobs)[number] for share in shares]
        pairs = [pair for part in own for pair in zip(part.device_ids.tolist(), part.host_ids.tolist(), strict=True)]
        assert sorted(pairs) == sorted(zip(job.device_ids.tolist(), job.host_ids.tolist(), strict=True))
        assert all(part.job_id == number for part in own), "each rank reports each job"
    assert ALONE.own_saves(jobs) is jobs


def test_one_rank_uses_storage_for_all() -> None:
    assert [HostShare(index, NUM_RANKS).uses_storage for index in range(NUM_RANKS)] == [True, False, False]
    assert ALONE.uses_storage


@pytest.mark.parametrize("name", ["memfd_create", "pwrite", "readlink"])
def test_a_rank_that_has_nothing_to_offer_says_so_and_all_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nobody waits for it: it takes part in what the others tell each other."""
    calls, inner = iter(range(10)), getattr(os, name)

    def refuse(*args: object) -> object:
        if next(calls) == 0:
            raise PermissionError("not here")
        return inner(*args)

    monkeypatch.setattr(host_share.os, name, refuse)
    before = num_files()
    assert share_among(in_a_room(NUM_RANKS)) == [ALONE] * NUM_RANKS
    assert num_files() == before


def test_ranks_of_other_sizes_do_not_start() -> None:
    """What one of them would see beyond its end is nobody's memory."""
    first, second = share_among(in_a_room(2))
    first.map(8192)
    with pytest.raises(ConfigError, match="12288 bytes of host memory that ranks share cannot be had"):
        second.map(12288)


def test_shared_memory_is_zero_at_first() -> None:
    first, second = share_among(in_a_room(2))
    assert second.map(64)[:] == first.map(64)[:] == bytes(64)


def _rank_on_a_gpu(pipe: Connection) -> None:
    """A process that saves its share from the device and loads all of it."""

    def exchange(value: object) -> Sequence[object]:
        pipe.send(value)
        told: Sequence[object] = pipe.recv()
        return told

    share = share_host(exchange)
    pool = HostPool.sized(8 << 20, 1 << 16, device=torch.device("cuda"), share=share)
    pool.wait_ready()
    here = torch.arange(pool.num_blocks, device="cuda").view(-1, 1).expand(-1, 1 << 16).to(torch.uint8)
    own = slice(share.index, None, share.count)
    for block_id in range(pool.num_blocks)[own]:
        pool.tensor[block_id].copy_(here[block_id], non_blocking=True)
    torch.cuda.synchronize()
    pipe.send((pool.is_pinned, pool.num_ready_blocks))
    assert pipe.recv() == "all have saved"
    there = pool.tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pipe.send(torch.equal(there, here))
    pool.close()


@pytest.mark.gpu
def test_a_gpu_saves_to_and_loads_from_memory_that_two_processes_have_locked() -> None:
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=_rank_on_a_gpu, args=(theirs,), daemon=True).start()
        pipes.append(ours)
    for _ in range(2):
        told = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(told)
    assert [pipe.recv() for pipe in pipes] == [(True, 256)] * 2
    for pipe in pipes:
        pipe.send("all have saved")
    assert [pipe.recv() for pipe in pipes] == [True, True]
