"""Turns between long copies: how far it is from one to the next, and that others' copies come in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.config import Config
from kv_connector.errors import TransferError
from kv_connector.transfer.cuda import turns
from kv_connector.transfer.cuda.driver import check, libcuda
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.cuda.turns import (
    TURN_BYTES,
    DriverTurns,
    Pace,
    TurnTaking,
    TurnTakingCopier,
    make_turn_taking,
)
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths import runs, staged
from kv_connector.transfer.paths.base import CopyPath
from kv_connector.transfer.paths.runs import RunsPath
from kv_connector.transfer.paths.staged import StagedPath, min_staging_memory
from kv_connector.transfer.paths.torch import TorchPath
from kv_connector.types import CopyJob, Direction
from tests.copies import NUM_DEVICE, bf16_apart, copy_now, expected_after, filled, job, make_pool
from tests.waiting import until

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


class Log:
    """Of copies, as (target, source, size), and of turns, as None."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int] | None] = []

    def copy(self, targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
        columns = (turns._array(address, count).tolist() for address in (targets, sources, sizes))
        self.entries += zip(*columns, strict=True)

    def give(self, stream: int | None) -> None:
        self.entries.append(None)


@settings(deadline=None)
@given(calls=st.lists(LENGTHS, min_size=1, max_size=5), turn_bytes=st.integers(1, 40))
def test_every_byte_is_copied_once_and_no_way_to_a_turn_is_long(calls: list[list[int]], turn_bytes: int) -> None:
    log, wanted, start = Log(), list[tuple[int, int]](), 0
    copier = TurnTakingCopier(log.copy, TurnTaking(log, turn_bytes))
    for lengths in calls:
        sizes = np.array(lengths)
        targets = start + np.cumsum(sizes) - sizes
        sources = 10_000 - 100 * targets
        copier(*(a.ctypes.data for a in (targets, sources, sizes)), len(sizes), True, 1)
        wanted += [(t + i, s + i) for t, s, n in zip(targets, sources, lengths, strict=True) for i in range(n)]
        start += int(sizes.sum())
    copies = [entry for entry in log.entries if entry is not None]
    assert [(t + i, s + i) for t, s, n in copies for i in range(n)] == wanted
    ways, way = list[int](), 0
    for entry in log.entries:
        if entry is None:
            ways, way = [*ways, way], 0
        else:
            way += entry[2]
    assert max([*ways, way]) < 2 * turn_bytes
    assert len(ways) == len(wanted) // turn_bytes or max(n for _, _, n in copies) > 1
    assert all(n <= turn_bytes for _, _, n in copies)


def test_a_turn_is_behind_the_copy_that_fills_the_way_to_it() -> None:
    log = Log()
    copier = TurnTakingCopier(log.copy, TurnTaking(log, 8))
    for lengths in ([4, 4, 4], [3, 2, 8]):
        columns = [np.array(lengths) for _ in range(3)]
        copier(*(a.ctypes.data for a in columns), 3, True, 1)
    assert [entry and entry[2] for entry in log.entries] == [4, 4, None, 4, 3, 2, None, 8, None]


@pytest.mark.parametrize(
    ("direction", "in_step", "mebibytes"),
    [(Direction.LOAD, False, 16), (Direction.LOAD, True, 64), (Direction.SAVE, False, 32)],
)
def test_what_a_step_waits_for_gives_few_turns(direction: Direction, in_step: bool, mebibytes: int) -> None:
    assert make_turn_taking(torch.device("cpu"))[direction, in_step].turn_bytes == mebibytes << 20


class RefusedTurns:
    """All are given but the one of this number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def give(self, stream: int | None) -> None:
        self.left -= 1
        if self.left == 0:
            raise TransferError("fault injected")


@pytest.mark.parametrize("number", [1, 2, 11])
@pytest.mark.parametrize("direction", Direction)
def test_a_copy_whose_turn_is_refused_fails_or_goes_another_way(
    direction: Direction, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load has a fallback; a save fails, and the next one has every byte."""
    refused = RefusedTurns(number)
    monkeypatch.setattr(runs, "make_turn_taking", lambda _: {pace: TurnTaking(refused, 100) for pace in TURN_BYTES})
    layout = filled(bf16_apart, torch.device("cpu"))
    pool = make_pool(layout)
    form = raw_form(layout)
    engine = TransferEngine(form, pool, Config(), RunsPath(form, pool, copy_now), TorchPath(form, pool))
    blocks = [3, 0, 8]
    views, host = expected_after(layout, pool, direction, range(len(layout.regions)), blocks, blocks)

    def move(job_id: int) -> bool:
        submit = engine.submit_save if direction is Direction.SAVE else engine.submit_load
        submit([job(job_id, direction, blocks, blocks)])
        (ended,) = engine.drain()
        assert engine.pending_bytes(direction) == 0
        return ended.ok

    assert move(1) is (direction is Direction.LOAD)
    assert direction is Direction.LOAD or move(2)
    assert refused.left < 1
    assert torch.equal(pool.tensor, host)
    assert all(torch.equal(region.view, view) for region, view in zip(layout.regions, views, strict=True))
    engine.close()
    pool.close()


class NotedTurns:
    """Says whose it gave."""

    def __init__(self, pace: Pace, given: list[Pace]) -> None:
        self.pace = pace
        self.given = given

    def give(self, stream: int | None) -> None:
        self.given.append(self.pace)


@pytest.mark.parametrize("name", ["runs", "pitched", "packed"])
def test_turns_are_those_of_the_copies_direction_and_of_who_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Pace] = []
    for module in (runs, staged):
        made = {pace: TurnTaking(NotedTurns(pace, given), 100) for pace in TURN_BYTES}
        monkeypatch.setattr(module, "make_turn_taking", lambda _, made=made: made)
    layers = {f"{i}": view for i, view in enumerate(torch.zeros(4, NUM_DEVICE, 48, dtype=torch.uint8).unbind(0))}
    layout = CacheLayout.from_tensors(layers, NUM_DEVICE, dict.fromkeys(layers, 0))
    pool = make_pool(layout)
    form = raw_form(layout)
    path: CopyPath = StagedPath(form, pool, min_staging_memory(form), copy_now)
    if name != "packed":
        path = RunsPath(form, pool, copy_now, lambda *_: None, least_pitched=1 if name == "pitched" else 1 << 20)
        assert path.is_pitched(range(len(layout.regions))) is (name == "pitched")
    engine = TransferEngine(form, pool, Config(), path)

    def given_by(submit: Callable[..., Any], direction: Direction, *more: Any) -> set[Pace]:
        given.clear()
        submit([job(1, direction, [3, 0, 8], [4, 1, 2])], *more)
        (ended,) = engine.drain()
        assert ended.ok
        return set(given)

    assert given_by(engine.submit_load, Direction.LOAD) == {(Direction.LOAD, True)}
    assert given_by(engine.submit_background_load, Direction.LOAD, engine.mark()) == {(Direction.LOAD, False)}
    assert given_by(engine.submit_save, Direction.SAVE) == {(Direction.SAVE, False)}
    engine.close()
    pool.close()


SIZES = {"packed": 128 << 10, "pitched": 128 << 10, "whole blocks": 2 << 20}


def make_path(name: str, form: Any, pool: HostPool) -> CopyPath:
    return StagedPath(form, pool, 384 << 20) if name == "packed" else RunsPath(form, pool)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("direction", Direction)
def test_a_small_copy_of_another_stream_comes_in_between(direction: Direction, name: str) -> None:
    """It ends long before ours do; without turns, behind them."""
    device, piece = torch.device("cuda", torch.cuda.current_device()), SIZES[name]
    num_layers = 1 if name == "whole blocks" else 16
    num_blocks = (1 << 30) // (num_layers * piece)
    cache = torch.zeros((num_layers, num_blocks, piece), dtype=torch.uint8, device=device)
    layers = {f"{i}": view for i, view in enumerate(cache.unbind(0))}
    form = raw_form(CacheLayout.from_tensors(layers, num_blocks, dict.fromkeys(layers, 0)))
    pool = HostPool(num_blocks, form.block_bytes, device=device)
    pool.wait_ready()
    engine = TransferEngine(form, pool, Config(), path=make_path(name, form, pool))
    blocks = np.random.default_rng(0).permutation(num_blocks)
    blocks.setflags(write=False)
    there, here = torch.zeros(16, device=device), torch.zeros(16, pin_memory=True)
    other = torch.cuda.Stream(device)
    for number in range(2):  # the first one compiles
        job = CopyJob(number, direction, blocks, blocks, "r" if direction is Direction.LOAD else None)
        if direction is Direction.LOAD:
            engine.submit_background_load([job], engine.mark())
        else:
            engine.submit_save([job])
        (submission,) = engine._in_flight
        while submission.start is None or not submission.start.query():
            pass  # until the thread has begun, and the device
        with torch.cuda.stream(other):
            to, by = (there, here) if direction is Direction.LOAD else (here, there)
            to.copy_(by, non_blocking=True)
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
        engine.drain()
        halfway = submission.events[(len(submission.events) - 1) // 2]
        is_early = ended.elapsed_time(halfway) > 0
    assert is_early
    engine.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("priority", [0, -1])
def test_a_load_and_its_turns_wait_for_nothing_that_streams_of_an_engine_wait_for(priority: int) -> None:
    """Streams share the driver's queues of kernels: one that waits holds up others behind it. Here more of the engine's
    wait than there are queues, until the host lets them."""
    device = torch.device("cuda", torch.cuda.current_device())
    gate = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    word, there = torch.zeros(1, device=device), torch.zeros(1 << 20, device=device)
    here = torch.zeros(1 << 20, pin_memory=True)
    streams = [torch.cuda.Stream(device, priority=priority) for _ in range(32)]
    load, given = make_lane(device, Priority.LOAD, timing=False), DriverTurns(device, Direction.LOAD)
    given.give(load.handle)  # what the first use makes
    torch.cuda.synchronize(device)
    held = ctypes.c_void_p(gate.data_ptr())
    try:
        for stream in streams:
            with torch.cuda.stream(stream):
                word.add_(0)
                code = libcuda().cuStreamWaitValue32_v2(ctypes.c_void_p(stream.cuda_stream), held, 1, 0)
                check(code, "cuStreamWaitValue32")
                word.add_(0)
        with torch.cuda.stream(load.stream):
            there.copy_(here, non_blocking=True)
        given.give(load.handle)
        with torch.cuda.stream(load.stream):
            there.copy_(here, non_blocking=True)
        until(load.end().query, told=lambda: "the load waits for what the engine's streams wait for")
    finally:
        gate[0] = 1
        torch.cuda.synchronize(device)
