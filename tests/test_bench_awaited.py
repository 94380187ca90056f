"""The benchmark of loads that a step waits for, once, without a GPU: what its result says can be relied on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from integration.bench import awaited


def test_each_load_is_told_group_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "awaited.json"
    monkeypatch.setattr(sys, "argv", ["awaited", "--tiny", "--json", str(target)])
    assert awaited.main() == 0
    result = json.loads(target.read_text())
    rows = result["rows"]
    assert [(row["piece_bytes"], row["waits"]) for row in rows] == [
        (piece_bytes, waits) for piece_bytes in (1024, 4096) for waits in awaited.WAITS
    ]
    for row in rows:
        assert sum(group[0] for group in row["groups"]) == row["num_bytes"] == 256 << 10
        times = [moment for _, begin, end, _ in row["groups"] for moment in (begin, end)]
        assert times == sorted(times), "groups are submitted in the order of their layers"
        assert all(end <= there for _, _, end, there in row["groups"]), "without a GPU a copy is there on submission"
        assert len(row["all_ms"]) == 2
    assert len(result["claims"]) == len(rows), "of what is chosen"
