"""The benchmark of serving, once, with a tiny model and windows of a second: what its result says can be relied on."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest

from integration.bench import sglang_serving
from integration.bench.regimes import engine_of
from integration.tests.forks import forking_benchmarks
from integration.tests.sglang_engines import ON_GPU


def test_a_small_run_rotates_engines_and_tells_what_came_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "serving.json"
    sizes = ["--tiny", "--host-memory", "1x", "--answers", "4,8", "--seconds", "1", "--lead", "0", "--rounds", "1"]
    files = ["--json", str(target), "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["sglang_serving", "--connectors", "none,ours", *sizes, *files])
    with nullcontext() if ON_GPU else forking_benchmarks():
        assert sglang_serving.main() == 0
    result = json.loads(target.read_text())
    windows = [row for row in result["rows"] if row["part"] == "chats"]
    assert [(row["answer"], row["connector"], row["place"]) for row in windows] == [
        (4, "none", 0), (4, "ours", 1), (8, "ours", 0), (8, "none", 1),
    ]  # fmt: skip
    for row in windows:
        assert row["arrived"] >= row["at_once"]
        assert (row["phases"]["external_tokens"] > 0) == (row["connector"] == "ours")
    (misses,) = [row for row in result["rows"] if "over_none" in row]
    assert (misses["connector"], engine_of(misses)) == ("ours", f"sglang {version('sglang')}")
