"""What is known of copies at a start: measured where somebody waits for them, and remembered whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kv_connector.config import Config
from kv_connector.transfer.costs import calibration, remembered
from kv_connector.transfer.costs.curves import BUILT_IN, NUM_BYTES
from kv_connector.transfer.costs.known import link_costs
from kv_connector.transfer.memory.host_form import HostForm, raw_form
from kv_connector.transfer.memory.layout import CacheLayout

MEASURED = object()


def form(device: str = "cuda") -> HostForm:
    layout = CacheLayout.from_tensors({"layer": torch.zeros(4, 4096)}, 4)
    layout.device = torch.device(device)
    return raw_form(layout)


@pytest.mark.parametrize(
    ("device", "settings", "is_measured"),
    [
        ("cuda", {"host_memory": NUM_BYTES}, True),
        ("cuda", {"host_memory": NUM_BYTES - 1}, False),
        ("cuda", {"host_memory": "1GiB", "pin_memory": False}, False),
        ("cuda", {"host_memory": "1GiB", "calibration": "off"}, False),
        ("cpu", {"host_memory": "1GiB"}, False),
    ],
)
def test_copies_are_measured_where_somebody_waits_for_them(
    device: str, settings: dict[str, Any], is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a host that has no more than what they are measured on, and none that DMA reaches by no other way."""
    monkeypatch.setattr(calibration, "remembered_costs", lambda form, numa_bind: MEASURED)
    assert link_costs(form(device), Config.from_mapping(settings)) is (MEASURED if is_measured else BUILT_IN)


@pytest.mark.parametrize("fails", ["write_text", "chmod", "replace"])
def test_what_is_remembered_is_whole_or_what_it_was(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remembered.remember("costs.json", "before") is not None
    write = Path.write_text

    def full(path: Path, *given: Any) -> int:
        if fails == "write_text":
            write(path, "bef")
        raise OSError("no space left")

    monkeypatch.setattr(Path, fails, full)
    assert remembered.remember("costs.json", "behind") is None
    assert remembered.recall("costs.json") == "before"
    assert [file.name for file in (tmp_path / "kv_connector").iterdir()] == ["costs.json"]
    assert not (tmp_path / "kv_connector" / "costs.json").stat().st_mode & 0o077
