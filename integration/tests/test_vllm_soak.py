"""A short soak for every run of the tests; `python -m integration.soak_vllm` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        vllm.__version__.startswith("0.20."), reason="its workers on the CPU are always processes of their own"
    ),
]

ROOT = Path(__file__).parents[2]
Outcome = tuple[int, dict[str, Any], str]


def soak(report: Path, *options: str) -> Outcome:
    """Exit status, results by engine, and what was printed."""
    command = [sys.executable, "-m", "integration.soak_vllm", "--json", str(report), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    results = json.loads(report.read_text())["results"] if report.exists() else {}
    return done.returncode, results, done.stdout + done.stderr[-5000:]


CHOICES = {"adaptive": "auto", "write_through": "async", "write_through_selective": "auto", "write_back": "sync"}
PIPELINED = "write_through_selective"


@pytest.fixture(scope="module")
def spoilt_and_mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[Outcome]]]:
    """One that spoils what it loads, and one with all policies, each with another choice, and one of them pipelined.

    Side by side, because each works on one core; the policies share the start and the right answers.
    """
    folder = tmp_path_factory.mktemp("soak")
    spoil = ("--seconds", "3", "--policy", "write_through", "--choice", "sync", "--spoil")
    mixed = ("--seconds", "10", "--choice", *CHOICES.values(), "--pipelined", PIPELINED)
    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(soak, folder / "spoilt.json", *spoil), pool.submit(soak, folder / "mixed.json", *mixed)]


@pytest.fixture(scope="module")
def mixed(spoilt_and_mixed: list[Future[Outcome]]) -> tuple[dict[str, Any], str]:
    """Results by engine, and what was printed."""
    status, results, output = spoilt_and_mixed[1].result()
    assert set(results) == {"without connector", "without connector, pipelined", *CHOICES}, output
    assert status == int(any(result["problems"] for result in results.values())), output
    return results, output


@pytest.mark.parametrize("title", ["without connector", "without connector, pipelined"])
def test_the_same_users_find_nothing_wrong_in_plain_vllm(mixed: tuple[dict[str, Any], str], title: str) -> None:
    results, output = mixed
    assert not results[title]["problems"], output
    assert results[title]["seen"]["answers"] > 0 and results[title]["seen"]["rests"] > 0, output


@pytest.mark.parametrize("policy", CHOICES)
def test_users_come_and_go_and_every_answer_is_that_of_plain_vllm(
    mixed: tuple[dict[str, Any], str], policy: str
) -> None:
    results, output = mixed
    seen = results[policy]["seen"]
    assert not results[policy]["problems"], output
    assert seen["compared_bytes"] >= seen["loaded_bytes"] > 0, "loads went unseen"
    assert seen["rests"] > 0, "the engine never came to rest"
    kinds = {kind for kind in ("sync", "async") if seen.get(f"{kind}_loads")}
    assert kinds <= {CHOICES[policy]} or CHOICES[policy] == "auto", output


def test_the_soak_would_notice_wrong_bytes(spoilt_and_mixed: list[Future[Outcome]]) -> None:
    """Every load brings bytes of nobody and no error is told: only the answers can show it."""
    status, results, output = spoilt_and_mixed[0].result()
    assert status == 1, output
    assert results["write_through"]["seen"]["wrong_answers"] > 0, output
    assert not results["without connector"]["problems"], output
