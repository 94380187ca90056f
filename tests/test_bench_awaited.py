"""The benchmark of loads that a step waits for, once, without a GPU: what its result says can be relied on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.bench import awaited
from integration.bench.copy_cases import make_case
from kv_connector.transfer.engine import TransferEngine


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


def test_a_load_is_submitted_and_waited_for_as_its_row_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    submit, wait_all, wait_layer = TransferEngine.submit_load, TransferEngine.wait_all, TransferEngine.wait_layer

    def note_submission(self: TransferEngine, jobs: Any, is_urgent: bool = False) -> Any:
        called.append("urgent" if is_urgent else "load")
        return submit(self, jobs, is_urgent)

    def note_all(self: TransferEngine) -> Any:
        called.append("all")
        return wait_all(self)

    def note_layer(self: TransferEngine, name: str) -> Any:
        called.append(name)
        return wait_layer(self, name)

    monkeypatch.setattr(TransferEngine, "submit_load", note_submission)
    monkeypatch.setattr(TransferEngine, "wait_all", note_all)
    monkeypatch.setattr(TransferEngine, "wait_layer", note_layer)
    monkeypatch.setattr(sys, "argv", ["awaited", "--tiny", "--json", str(tmp_path / "awaited.json")])
    assert awaited.main() == 0
    layers, loads = [f"layer {number}" for number in range(4)], 3
    expected = [*["load", *layers] * loads, *["urgent", *layers] * loads, *["urgent", "all"] * loads]
    assert called == expected * 2, "of pieces of two sizes"


@pytest.mark.parametrize("apart", [False, True])
def test_layers_apart_are_allocations_of_their_own(apart: bool) -> None:
    case = make_case(1024, 4, 64 << 10, apart=apart)
    try:
        assert len({piece.untyped_storage().data_ptr() for piece in case.pieces}) == (4 if apart else 1)
    finally:
        case.close()
