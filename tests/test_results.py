"""What a benchmark writes can be found again: one small run of one of them."""

from __future__ import annotations

import json
from pathlib import Path

from integration.bench import steps
from integration.figures import scheduler


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
