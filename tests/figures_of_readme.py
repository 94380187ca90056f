"""Phrases of README.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kept_results import by_regime, least_over_none, over_none, result, sglang_over_hicache

LATEST, ELSEWHERE = "vllm_regimes_0320_h200", "vllm_regimes_choice_0320_h200"


def policies() -> Iterator[str]:
    """Of regimes whose host holds all chats."""
    engines = [row["engines"] for (share, _), row in by_regime(LATEST).items() if share >= 1]
    ahead = sum(of["ours"]["turns_per_second"] >= of["ours:write_through"]["turns_per_second"] for of in engines)
    assert (ahead, len(engines)) == (4, 6)
    yield "the default had as many turns or more in four of six such regimes"


def losses() -> Iterator[str]:
    others = sorted(row["over_best_peer"] for row in by_regime(ELSEWHERE).values())
    yield f"had **{others[0]:.2f}** to **{others[-1]:.2f}** times the best peer's turns on another host"
    yield f"where nothing is hit was **{over_none('vllm_misses_0251_h200')['ours']:.3f}** in vLLM 0.25.1"
    slow = result("sglang_serving_turns_2x_h200")["claims"].items()
    worst = min(one["value"] for which, one in slow if which.startswith("turns_over"))
    yield f"chats had **{worst:.2f}** of HiCache's turns at worst"
    alone = sglang_over_hicache("ttft_alone")
    yield "took {:.2f}, {:.2f} and **{:.2f}** of HiCache's time with nothing beside".format(*alone)
    yield f"saving costs up to {100 * (1 - least_over_none()):.0f} % of the throughput"


TOLD = (policies, losses)
