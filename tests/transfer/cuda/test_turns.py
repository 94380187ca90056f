"""Turns between long copies: how far it is from one to the next, and that others' copies come in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.config import Config
from kv_connector.transfer.cuda import turns
from kv_connector.transfer.cuda.turns import NoTurns, TurnTaking, TurnTakingCopier, cut, make_turn_taking
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import CopyPath
from kv_connector.transfer.paths.runs import RunsPath
from kv_connector.transfer.paths.staged import StagedPath
from kv_connector.types import CopyJob, Direction

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


def test_what_needs_no_cut_stays_where_it_is() -> None:
    columns = tuple(np.array([1, 2, 3]) for _ in range(3))
    assert all(a is b for a, b in zip(cut(*columns, most=3), columns, strict=True))


@pytest.mark.parametrize(
    ("direction", "in_step", "mebibytes"),
    [(Direction.LOAD, False, 16), (Direction.LOAD, True, 64), (Direction.SAVE, False, 32)],
)
def test_what_a_step_waits_for_gives_few_turns(direction: Direction, in_step: bool, mebibytes: int) -> None:
    assert make_turn_taking(torch.device("cpu"))[direction, in_step].turn_bytes == mebibytes << 20


def test_a_driver_that_cannot_gives_none_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "quick_libcuda", lambda: object())
    made = make_turn_taking(torch.device("cuda", 0))
    assert all(isinstance(each._turns, NoTurns) for each in made.values())
    (record,) = caplog.records
    assert "cuStreamBatchMemOp_v2" in record.getMessage()


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
    order = []
    for number in range(2):  # the first one compiles
        job = CopyJob(number, direction, blocks, blocks, "r" if direction is Direction.LOAD else None)
        if direction is Direction.LOAD:
            engine.submit_background_load([job], engine.mark())
        else:
            engine.submit_save([job])
        (submission,) = engine._in_flight
        while submission.start is None or not submission.start.query():
            """Until the thread has begun, and the device."""
        with torch.cuda.stream(other):
            to, by = (there, here) if direction is Direction.LOAD else (here, there)
            to.copy_(by, non_blocking=True)
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
        engine.drain()
        halfway = submission.events[(len(submission.events) - 1) // 2]
        order.append(ended.elapsed_time(halfway) > 0)
    assert order[-1]
    engine.close()
    pool.close()
