"""What copies take: the path and the layer groups that follow from it, and results that come from a file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.config import Config, PathName
from kv_connector.errors import ConfigError
from kv_connector.transfer.costs.curves import BUILT_IN, Curve, LinkCosts, decode
from kv_connector.transfer.costs.known import link_costs
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.types import Direction


@pytest.mark.parametrize(
    ("segment", "row", "rows", "urgent", "name"),
    [
        (16 << 10, 1 << 20, 64, False, PathName.STAGED),
        (1 << 10, 64 << 10, 4096, False, PathName.STAGED),
        (2 << 20, 2 << 20, 32, False, PathName.RUNS),
        (64 << 10, 64 << 10, 4096, False, PathName.RUNS),  # packing would not make it longer
        (4 << 10, 128 << 10, 4, False, PathName.DIRECT),  # over before the model feels it
        (16 << 10, 128 << 10, 128, False, PathName.STAGED),
        (16 << 10, 128 << 10, 64, True, PathName.DIRECT),  # the model waits for it
        (16 << 10, 16 << 20, 64, True, PathName.DIRECT),  # one launch
        (128 << 10, 1 << 20, 64, True, PathName.DIRECT),
        (128 << 10, 1 << 20, 64, False, PathName.RUNS),
        (2 << 20, 2 << 20, 64, True, PathName.RUNS),  # as few copies of the driver's as it takes launches
        (1 << 10, 1 << 20, 64, True, PathName.STAGED),  # a kernel is slow over the link with short pieces
    ],
)
def test_choice_of_a_path(segment: int, row: int, rows: int, urgent: bool, name: PathName) -> None:
    for direction in Direction:
        assert BUILT_IN.choose(direction, segment, row, rows, urgent) is name


def test_a_save_takes_dma_where_packing_wins_little() -> None:
    """Nobody waits for a save, and packing takes what the model computes with."""
    segment, row, rows = 64 << 10, 2 << 20, 128
    assert BUILT_IN.choose(Direction.LOAD, segment, row, rows) is PathName.STAGED
    assert BUILT_IN.choose(Direction.SAVE, segment, row, rows) is PathName.RUNS


def test_another_machine_chooses_otherwise() -> None:
    """A link as fast as packing: there is nothing to win by it."""
    fast = replace(BUILT_IN.load, dma=Curve((4 << 10, 2 << 20), (400.0, 400.0), 10.0))
    costs = replace(BUILT_IN, load=fast)
    assert costs.choose(Direction.LOAD, 64 << 10, 2 << 20, 128) is PathName.RUNS
    assert costs.choose(Direction.LOAD, 16 << 10, 2 << 20, 128) is PathName.RUNS
    assert costs.choose(Direction.SAVE, 16 << 10, 2 << 20, 128) is PathName.STAGED
    assert costs.rows_at(0.9) == 4 << 10
    assert costs.group_bytes > BUILT_IN.group_bytes


def test_halfway_between_two_lengths_is_where_their_ratio_is_halved() -> None:
    curve = Curve((1 << 10, 16 << 10), (10.0, 30.0), 0.0)
    assert curve.rate(4 << 10) == pytest.approx(20.0)


@given(
    points=st.dictionaries(st.integers(1, 1 << 24), st.floats(0.01, 1000), min_size=1, max_size=8),
    start=st.floats(0, 1000),
    length=st.floats(1, 1 << 25),
)
def test_a_rate_lies_between_its_neighbours(points: dict[int, float], start: float, length: float) -> None:
    lengths = tuple(sorted(points))
    curve = Curve(lengths, tuple(points[known] for known in lengths), start)
    below = [points[known] for known in lengths if known <= length][-1:]
    above = [points[known] for known in lengths if known > length][:1]
    around = below + above
    assert min(around) * 0.999999 <= curve.rate(length) <= max(around) * 1.000001
    assert all(curve.rate(known) == pytest.approx(points[known]) for known in lengths)
    assert curve.microseconds(0, length) == start


def test_what_is_coded_is_packed_by_the_coder_in_the_bytes_that_are_moved() -> None:
    """Layer groups and loads follow from its rates: one that is slower than the link decides what a load takes."""
    slow = replace(BUILT_IN.load, coding=Curve((1 << 10,), (20.0,), 100.0))
    costs = replace(BUILT_IN, load=slow)
    assert costs.group_bytes == BUILT_IN.group_bytes
    assert costs.coded.group_bytes > BUILT_IN.coded.group_bytes
    moved, rows = 49 << 14, 512
    raw = costs.load.microseconds(PathName.STAGED, 64 << 10, moved, rows)
    coded = costs.coded.load.microseconds(PathName.STAGED, 49 << 10, moved, rows)
    assert coded > rows * moved / 20e3 > raw
    assert BUILT_IN.coded.load.microseconds(PathName.STAGED, 49 << 10, moved, rows) == pytest.approx(raw, rel=0.05)


def test_groups_are_worth_their_start() -> None:
    load = BUILT_IN.load
    start = load.dma.start_us + load.packing.start_us
    assert load.dma.microseconds(BUILT_IN.group_bytes, 2 << 20) > 20 * start
    assert BUILT_IN.rows_at(0.8) == 64 << 10
    assert BUILT_IN.rows_at(1.0) == 2 << 20


def test_a_result_survives_a_file() -> None:
    assert decode(BUILT_IN.encode(), BUILT_IN.source) == BUILT_IN


def spoiled(**changes: object) -> str:
    found = json.loads(BUILT_IN.encode())
    found["load"]["dma"] |= changes
    return json.dumps(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"load": 1, "save": 2}',
        BUILT_IN.encode()[:-40],
        spoiled(lengths=[]),
        spoiled(lengths=[1, 1, 1, 1, 1, 1]),
        spoiled(lengths=[0, 1, 2, 3, 4, 5]),
        spoiled(gigabytes_per_second=[1.0]),
        spoiled(gigabytes_per_second=[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        spoiled(gigabytes_per_second=[1.0, 1.0, 1.0, 1.0, 1.0, float("nan")]),
        spoiled(start_us=-1),
        spoiled(start_us="soon"),
        spoiled(start_us=1e10),
        spoiled(start_us=float("inf")),
        spoiled(gigabytes_per_second=[1.0, 1.0, 1.0, 1.0, 1.0, 1e7]),
        spoiled(gigabytes_per_second=[1.0, 1.0, 1.0, 1.0, 1.0, 10**400]),
        spoiled(gigabytes_per_second=[1.0, 1.0, 1.0, 1.0, 1.0, float("inf")]),
        spoiled(lengths=[1, 2, 3, 4, 5, float("inf")]),
        spoiled(lengths=[1, 2, 3, 4, 5, 10**400]),
        spoiled(lengths=[1, 2, 3, 4, 5, (1 << 40) + 1]),
        spoiled(lengths=[*range(1, 10_000)]),
        "[" * 100_000,
    ],
)
def test_a_spoiled_file_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(text, "x.json")
    assert len(str(caught.value)) < 500
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        costs_of(Config(host_memory=1, calibration=str(tmp_path / "x.json")))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"calibration='/nowhere\.json' cannot be read: .*; give a file that"):
        costs_of(Config(host_memory=1, calibration="/nowhere.json"))


@pytest.mark.parametrize("named", ["pipe", "weights", "device"])
def test_what_is_no_file_of_ours_is_refused_unread(named: str, tmp_path: Path) -> None:
    """A pipe that nobody writes holds no start up, and neither weights nor a device without an end fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "weights", "wb") as weights:
        weights.truncate(1 << 20 | 1)  # zeros, which are text
    (tmp_path / "device").symlink_to("/dev/null")
    fault = "is no file of at most 1048576 bytes: give one that `kv-connector calibrate --json` wrote, or leave it out"
    with pytest.raises(ConfigError, match=rf"calibration='.*{named}' {fault}"):
        costs_of(Config(host_memory=1, calibration=str(tmp_path / named)))


def test_a_file_may_be_in_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.json").write_text(BUILT_IN.encode())
    assert costs_of(Config(host_memory=1, calibration="~/x.json")).load == BUILT_IN.load
    with pytest.raises(ConfigError, match="calibration='~nobody-of-this-name/x' begins with the home of nobody here"):
        costs_of(Config(host_memory=1, calibration="~nobody-of-this-name/x"))


def test_without_a_gpu_built_in_figures_serve(tmp_path: Path) -> None:
    assert costs_of(Config(host_memory=1)) is BUILT_IN
    (tmp_path / "x.json").write_text(BUILT_IN.encode())
    assert costs_of(Config(host_memory=1, calibration=str(tmp_path / "x.json"))).load == BUILT_IN.load


def costs_of(config: Config) -> LinkCosts:
    layout = CacheLayout.from_tensors({"0": torch.zeros(4, 16)}, 4)
    return link_costs(raw_form(layout), config)


@pytest.mark.gpu
def test_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is plausible, the next start reads it, and a spoiled file is measured anew."""
    from kv_connector.transfer.costs import calibration

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    layout = CacheLayout.from_tensors({"0": torch.zeros(64, 16 << 10, dtype=torch.uint8, device=device)}, 64)
    form, config = raw_form(layout), Config(host_memory="64MiB")
    first = link_costs(form, config)
    assert first.source != BUILT_IN.source
    for direction in Direction:
        costs = first.of(direction)
        assert costs.dma.rate(2 << 20) > costs.dma.rate(4 << 10)
        assert costs.packing.rate(16 << 10) > costs.dma.rate(2 << 20)
    (file,) = (tmp_path / "kv_connector").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(calibration, "measure", lambda *_: pytest.fail("it was measured before"))
    assert link_costs(form, config).load == first.load
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file.write_text("{")
    assert link_costs(form, config).source == first.source
