"""What a call that ends too soon has measured is in its result."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration import report
from integration.bench import serving
from integration.bench.chats import ChatShape
from integration.bench.engines import EngineError, Engines
from integration.bench.regimes import misses_table
from integration.report import Report


class Killed(BaseException):
    """As a signal would end the program."""


class Scripted:
    """An engine whose answers `call` gives."""

    def __init__(self, name: str, call: Callable[[str, Any], Any]) -> None:
        self.name, self._call = name, call

    def call(self, function: Any, *args: Any) -> Any:
        return self._call(self.name, function)

    def close(self) -> None:
        """It is no process."""


def measure(tmp_path: Path, call: Callable[[str, Any], Any], limit: float = 1e6) -> tuple[Report, Path]:
    """Miss rounds of two engines that answer so."""
    engines, found = Engines(), Report("vllm_serving")
    engines.update({name: Scripted(name, call) for name in ("none", "ours")})  # type: ignore[misc]
    found.rows.append({"part": "options", "host_bytes": 1, "host_shares": [1.0], "versions": {"vllm": "0.32.0"}})
    path = tmp_path / "misses.json"
    options = argparse.Namespace(
        rounds=5, miss_prompts=1, miss_length=1, miss_answer=1, limit=limit, json=path, trace_misses=False
    )
    serving.measure_misses(options, found, engines, time.monotonic())
    return found, path


def misses(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many rounds are told of each engine."""
    return {row["connector"]: len(row["all_tokens_per_second"]) for row in rows if row["part"] == "misses"}


def test_rounds_before_a_kill_are_in_the_result_and_in_its_table(tmp_path: Path) -> None:
    calls: list[str] = []

    def call(name: str, function: Any) -> float:
        calls.append(name)
        if len(calls) > 8:  # both in four rounds, of which the first is to get warm
            raise Killed
        return 1.0

    with pytest.raises(Killed):
        measure(tmp_path, call)
    rows = json.loads((tmp_path / "misses.json").read_text())["rows"]
    assert misses(rows) == {"none": 3, "ours": 3}
    assert len(misses_table([row for row in rows if "over_none" in row])) == 3


def test_an_engine_that_fails_when_its_calls_are_timed_keeps_its_rounds(tmp_path: Path) -> None:
    def call(name: str, function: Any) -> Any:
        if function is not serving.follow_misses:
            return 1.0
        if name == "ours":
            raise EngineError("ours: it died")
        return {}

    found, _ = measure(tmp_path, call)
    assert misses(found.rows) == {"none": 5, "ours": 5}
    assert [name for name in found.claims if name.startswith("miss_path_throughput")]


def test_rounds_end_when_the_limit_is_near(tmp_path: Path) -> None:
    found, _ = measure(tmp_path, lambda name, function: 1.0 if function is serving.run_misses else {}, limit=0.0)
    assert misses(found.rows) == {}, "the result tells of none rather than that nothing is written at all"


def test_host_memory_is_ready_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    server = SimpleNamespace(wait_for_host=lambda: done.append("host"))

    def begin(function: Any, *args: Any) -> None:
        function(server, *args)

    engines = Engines()
    engines["ours"] = SimpleNamespace(begin=begin, finish=lambda: None, close=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(serving, "start_engines", lambda wanted, timeout: (engines, {}))
    monkeypatch.setattr(serving, "measure_misses", lambda *args: done.append("misses"))
    options = argparse.Namespace(rounds=1, answers="", start_timeout=1.0, json=None)
    found = Report("vllm_serving", rows=[{"part": "options", "host_bytes": 1, "host_shares": [1.0], "versions": {}}])
    serving.measure(options, found, [], [ChatShape(1, 1, 1, 1, 1)], time.monotonic())
    assert done == ["host", "misses"]


def test_an_engine_that_failed_is_missing_at_each_share_of_the_host() -> None:
    options = {"part": "options", "host_bytes": 1, "host_shares": [0.5, 1.0], "versions": {"vllm": "0.32.0"}}
    found, engines = Report("vllm_serving", rows=[options]), Engines()
    engines.failed["lmcache"] = "it needs a GPU"
    for _ in range(2):
        serving.add_failed(found, engines)
    assert [(row["connector"], row["host_share"]) for row in found.rows[1:]] == [("lmcache", 0.5), ("lmcache", 1.0)]


@pytest.mark.parametrize("wrong", ["", "0", "12,0", "12,6,12", "-1"])
def test_numbers_of_users_are_positive_and_differ(wrong: str) -> None:
    assert serving.numbers("24,12,6") == [24, 12, 6]
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        serving.numbers(wrong)


@pytest.mark.parametrize(
    ("limit", "wanted", "fits"),
    [
        ("max", 30, False),
        ("max", 26, True),
        ("20", 19, False),
        ("20", 18, True),
        ("256", 200, True),
        ("256", 240, False),
    ],
)
def test_memory_that_comes_as_it_is_used_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, wanted: int, fits: bool
) -> None:
    memory = SimpleNamespace(total=32, available=30)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    file = tmp_path / "memory.max"
    file.write_text(f"{limit}\n")
    if fits:
        serving.check_host(wanted, file)
    else:
        with pytest.raises(SystemExit, match="give fewer"):
            serving.check_host(wanted, file)


def test_a_result_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    Report("x").write(path)
    before = path.read_text()

    def killed(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise Killed

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(Killed):
        Report("y").write(path)
    assert path.read_text() == before


def test_a_copy_inside_of_another_repository_names_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(report.COMMIT, raising=False)
    monkeypatch.setattr(report, "__file__", str(Path(__file__).parents[1] / "build" / "integration" / "report.py"))
    assert report.commit() is None
