"""The benchmark of serving, once, with a tiny model and windows of a second: what its result says can be relied on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.bench import engines, regimes, vllm_serving
from integration.bench.vllm_peers import unknown_settings
from integration.report import COMMIT
from integration.tests.forks import vllm_context


def test_a_small_run_names_who_is_missing_and_rotates_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "serving.json"
    sizes = ["--tiny", "--users", "12,6", "--host-memory", "1x", "--answers", "4,8", "--seconds", "1", "--lead", "0"]
    sizes += ["--rounds", "1"]
    files = ["--json", str(target), "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["vllm_serving", "--connectors", "none,lmcache,ours", *sizes, *files])
    monkeypatch.setenv(COMMIT, "c" * 40)
    monkeypatch.setattr(engines, "multiprocessing", SimpleNamespace(get_context=lambda _: vllm_context()))
    assert vllm_serving.main() == 0
    assert str(tmp_path) not in target.read_text()
    result = json.loads(target.read_text())
    assert result["commit"] == "c" * 40
    failed = [row for row in result["rows"] if row["part"] == "failed"]
    assert [(row["connector"], row["host_share"]) for row in failed] == [("lmcache", 1.0), ("lmcache", 2.0)]
    assert all(row["reason"] for row in failed), "it needs a GPU, and may not be installed"
    windows = [row for row in result["rows"] if row["part"] == "chats"]
    assert [(row["users"], row["host_share"], row["answer"], row["connector"], row["place"]) for row in windows] == [
        (12, 1.0, 4, "none", 0), (12, 1.0, 4, "ours", 1), (12, 1.0, 8, "ours", 0), (12, 1.0, 8, "none", 1),
        (6, 2.0, 4, "none", 0), (6, 2.0, 4, "ours", 1), (6, 2.0, 8, "ours", 0), (6, 2.0, 8, "none", 1),
    ]  # fmt: skip
    assert [row["number"] for row in windows] == [1, 1, 2, 2, 3, 3, 4, 4], "chats go on from window to window"
    for row in windows:
        assert row["arrived"] >= row["at_once"] == row["users"] // 2 and row["seconds"] == 1.0
        assert (row["phases"]["external_tokens"] > 0) == (row["connector"] == "ours")
        assert row["phases"]["launch_prompts_ms"] > 0 < row["phases"]["launch_decoding_ms"]
    assert {row["connector"]: "over_none" in row for row in result["rows"] if row["part"] == "misses"} == {
        "none": False,
        "ours": True,
    }
    assert all(row["missing"]["lmcache"] for row in regimes.regimes([*windows, *failed]))


def test_what_vllm_reads_of_its_own_connectors_settings_is_known() -> None:
    assert unknown_settings({"cpu_bytes_to_use": 1, "eviction_policy": "arc", "lazy_offload": True}) == ""
    assert "knows no cpu_bytes_to_us" in unknown_settings({"cpu_bytes_to_us": 1})
