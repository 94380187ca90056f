"""Phrases of README.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kept_results import by_regime, claim, goal, least_over_none, over_none, result, sglang_over_hicache

LATEST = "vllm_regimes_latest_0320_h200"


def policies() -> Iterator[str]:
    """Of regimes whose host holds all chats, where both policies ran."""
    engines = [row["engines"] for row in by_regime(LATEST).values()]
    ahead = sum(of["ours"]["turns_per_second"] >= of["ours:write_through"]["turns_per_second"] for of in engines)
    assert (ahead, len(engines)) == (5, 6)
    yield "the default had as many turns or more in five of six such regimes"


def losses() -> Iterator[str]:
    latest = sorted(row["over_best_peer"] for row in by_regime(LATEST).values())
    yield f"had **{latest[0]:.2f}** to **{latest[-1]:.2f}** times the best peer's turns on another host"
    name, which = "vllm_ttft_0320_latest_h200", "ours_host_hit_over_offloading_32768"
    yield f"took **{claim(name, which):.2f}** of OffloadingConnector's time (goal {goal(name, which)})"
    yield f"where nothing is hit was **{over_none('vllm_misses_0251_h200')['ours']:.3f}** in vLLM 0.25.1"
    slow = result("sglang_serving_turns_2x_h200")["claims"].items()
    worst = min(one["value"] for which, one in slow if which.startswith("turns_over"))
    yield f"chats had **{worst:.2f}** of HiCache's turns at worst"
    yield "came **{:.2f}, {:.2f}, {:.2f}** times as late".format(*sglang_over_hicache())
    yield f"saving costs up to {100 * (1 - least_over_none()):.0f} % of the throughput"


TOLD = (policies, losses)
