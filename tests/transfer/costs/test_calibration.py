"""What is measured at a start. Without a GPU kernels are interpreted, and figures mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kv_connector.config import HostFormName
from kv_connector.transfer.costs import calibration
from kv_connector.transfer.costs.curves import BUILT_IN, decode
from kv_connector.transfer.memory.host_form import make_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.types import Direction

CPU = torch.device("cpu")
NUM_BYTES = 1 << 13


@contextmanager
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostPool]:
    monkeypatch.setattr(calibration, "NUM_BYTES", NUM_BYTES)
    monkeypatch.setattr(calibration, "_NUMBERS", 1 << 10)
    monkeypatch.setattr(calibration, "_REPEATS", 1)
    monkeypatch.setattr(calibration, "SEGMENT_LENGTHS", (1 << 10, 1 << 12))
    monkeypatch.setattr(calibration, "driver_copier", lambda: lambda *arguments: None)
    monkeypatch.setattr(calibration, "_names", lambda device: "a machine")
    host = HostPool(NUM_BYTES // 4096, 4096)
    yield host
    host.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: see test_curves")
def test_the_coder_is_measured_where_blocks_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    with _small(monkeypatch) as host:
        raw = calibration.measure(CPU, host, (1 << 10,))
        coded = calibration.measure(CPU, host, (1 << 10,), (1 << 10, 1 << 11))
    for direction in Direction:
        assert raw.of(direction).coding == BUILT_IN.of(direction).coding
        assert coded.of(direction).coding.lengths == (816, 1584)
    assert decode(coded.encode(), "x.json") == coded


def test_each_machine_and_cache_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the longest piece, and by the longest that is coded; what cannot be measured is tried again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_names", lambda device: "a machine")
    measured: list[tuple[tuple[int, ...], ...]] = []

    def now(device: torch.device, numa_bind: bool, *pieces: tuple[int, ...]) -> object:
        measured.append(pieces)
        return BUILT_IN if len(measured) == 1 else decode(BUILT_IN.encode(), "x")

    monkeypatch.setattr(calibration, "_measured_now", now)
    tensors = {"a": torch.zeros(4, 2048, dtype=torch.bfloat16), "b": torch.zeros(4, 8192, dtype=torch.uint8)}
    layout = CacheLayout.from_tensors(tensors, 4)
    for name in (HostFormName.LOSSLESS, HostFormName.RAW):
        for _ in range(3):
            calibration.remembered_costs(make_form(layout, name), numa_bind=False)
    assert measured == [((8192,), (4096,)), ((8192,), (4096,)), ((8192,), ())]
    for file in (tmp_path / "kv_connector").iterdir():
        file.write_text("{")
    calibration.remembered_costs(make_form(layout, HostFormName.RAW), numa_bind=False)
    assert measured[3:] == [((8192,), ())]
