"""What a benchmark writes can be found again: one small run of one of them. And results that are kept say of each goal
what follows from their own rows, with the goal that is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from integration.bench import copies, steps, vllm_lossless, vllm_replicas
from integration.bench.first_tokens import claim_length, claim_loads
from integration.bench.regimes import merged
from integration.figures import scheduler
from integration.figures.results import RESULTS as FOLDER
from integration.figures.results import read
from integration.report import Report

RESULTS = sorted(path.stem for path in FOLDER.glob("*.json"))
CHATS = [f"vllm_serving_0320_{users}_h200" for users in ("24_12", "16_6")]
CHATS_CHOICE = [f"vllm_serving_0320_choice_{host}_h200" for host in ("1x", "2x")]


def measured_by(*names: str) -> list[str]:
    """Results of these benchmarks."""
    kept_ones = {path.stem: json.loads(path.read_text()).get("name") for path in FOLDER.glob("*.json")}
    return sorted(result for result, name in kept_ones.items() if name in names)


def kept(name: str) -> dict[str, Any]:
    found = read(name)
    del found["file"]
    return found


def close(claims: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**claim, "value": pytest.approx(claim["value"])} for name, claim in claims.items()}


@pytest.mark.parametrize("name", RESULTS)
def test_a_goal_holds_where_its_value_reaches_it(name: str) -> None:
    for what, claim in kept(name).get("claims", {}).items():
        value, goal = claim["value"], claim["goal"]
        assert claim["holds"] == (value <= goal if claim["better"] == "lower" else value >= goal), what


@pytest.mark.parametrize("name", measured_by("vllm_serving", "sglang_serving"))
def test_goals_of_chats_and_of_misses_are_of_their_rows(name: str) -> None:
    found = kept(name)
    report = merged([found])
    later = {"miss_path_throughput_lossless_vllm_0251"} - set(found["claims"])  # a goal since 2026-11-26
    claims = {what: claim for what, claim in report.claims.items() if "median_of" not in what and what not in later}
    assert found["claims"] == close(claims)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("vllm_regimes_0320_h200", CHATS),
        ("vllm_regimes_0320_twelve_h200", ["vllm_serving_0320_twelve_h200"]),
        ("vllm_regimes_0320_launch_h200", ["vllm_serving_0320_launch_h200"]),
        ("vllm_regimes_choice_0320_h200", CHATS_CHOICE),
    ],
)
def test_a_table_of_regimes_is_of_its_results(name: str, parts: list[str]) -> None:
    found, report = kept(name), merged([kept(part) for part in parts])
    assert found["rows"] == [*report.rows[: len(found["rows"])]]
    assert found["claims"] == close(report.claims)


@pytest.mark.parametrize("name", measured_by("vllm_ttft", "sglang_ttft", "vllm_lossless"))
def test_goals_of_first_tokens_are_of_their_rows(name: str) -> None:
    found, report = kept(name), Report("first_tokens")
    report.rows = found["rows"]
    rate = found["rows"][0]["link_bytes_per_second"]
    for length in dict.fromkeys(row["tokens"] for row in found["rows"] if "kind" in row):
        claim_length(report, length, length * (128 << 10) / rate)
        claim_loads(report, length, rate)
    vllm_lossless.claim_over_raw(report)
    told = {what: claim for what, claim in found["claims"].items() if what in report.claims}
    assert told == close({what: claim for what, claim in report.claims.items() if what in told})
    assert not [what for what in found["claims"] if "_over_" in what and what not in told and "exposed" not in what]


def test_goals_of_ranks_that_share_one_copy_are_of_their_rows() -> None:
    found, report = kept("vllm_replicas_h200"), Report("vllm_replicas")
    report.rows = found["rows"]
    vllm_replicas.claim(report)
    assert found["claims"] == close(report.claims)


@pytest.mark.parametrize("gpu", ["h100", "h200", "before_h200"])
def test_goals_of_copies_are_those_that_are_asked_for(gpu: str) -> None:
    claims = kept(f"copies_{gpu}")["claims"]
    sizes = {f"{size >> 20}MiB" if size >= 1 << 20 else f"{size >> 10}KiB": goal for size, goal in copies.GOALS.items()}
    goals = {f"share_of_link_{way}_{size}": goal for size, goal in sizes.items() for way in ("load", "save")}
    goals |= {f"share_of_duplex_{size}": 0.95 for size in sizes}
    assert {what: claim["goal"] for what, claim in claims.items() if what in goals} == goals
    assert {claim["goal"] for what, claim in claims.items() if what not in goals} == {0.05}


def test_a_result_says_what_was_run_on_what(tmp_path: Path) -> None:
    target = tmp_path / "steps.json"
    sizes = ["--blocks", "1300", "--prompt-blocks", "8", "--requests", "4", "--waiting-requests", "3"]
    arguments = [*sizes, "--steps", "20", "--json", str(target)]
    assert steps.main(arguments) == 0
    result = json.loads(target.read_text())
    assert set(result) == {"name", "date", "commit", "arguments", "hardware", "software", "rows", "claims"}
    assert (result["name"], result["arguments"]) == ("steps", [*arguments[:-1], "steps.json"]), (
        "no folder of this machine"
    )
    assert result["commit"] is None or len(result["commit"].rstrip("+")) == 40
    assert set(result["hardware"]) == {"cpu", "cores", "memory_gib", "gpu", "driver", "link"}
    assert {row["case"] for row in result["rows"]} >= {"full host", "no room", "write_back", "riders", "reset", "evict"}
    for row in result["rows"]:
        names = ("p10", "p90") if row["count"] >= 10 else ("min", "max")  # few samples have no tenths
        assert [name for name in row if name in ("p10", "p90", "min", "max")] == list(names)
        assert row[names[0]] <= row["median"] <= row[names[1]]
    assert set(result["claims"]) == set(scheduler.STEPS), "each claim has a line in docs/benchmarks.md"
    lines = scheduler.steps(result)
    assert len(lines) > len(scheduler.STEPS)
    (noise,) = [row for row in result["rows"] if row["side"] == "nothing on, again: more"]
    (line,) = [line for line in lines if "two equal sides" in line]
    assert line.endswith(f" | {1 + noise['median'] / 100:.2f} | |"), "beside what is told from it"
    for claim in result["claims"].values():
        assert set(claim) == {"value", "goal", "unit", "better", "holds"}
