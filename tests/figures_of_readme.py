"""Phrases of README.md, and of the summary of earlier runs, with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from integration.bench.peers import LOSSLESS
from integration.figures.results import rows_of
from tests.kept_results import (
    by_regime,
    claim,
    coded_over_raw_by_dma,
    goal,
    longer,
    lossless_over_raw,
    older_chats,
    over_none,
    result,
    sglang_over_hicache,
)


def chats_in_short() -> Iterator[str]:
    latest = sorted(row["over_best_peer"] for row in by_regime("vllm_regimes_latest_0320_h200").values())
    assert len(latest) == 6
    yield f"had **{latest[0]:.2f}** to **{latest[-1]:.2f}** times the best peer's turns on another host"
    name = "vllm_regimes_turns_0320_h200"
    ratios = sorted(row["over_best_peer"] for row in by_regime(name).values())
    assert [ratio < 1.05 for ratio in ratios] == [True] * 3 + [False] * 6
    middle = claim(name, f"turns_over_best_peer_median_of_{len(ratios)}_regimes")
    lost, whole = ", ".join(f"{ratio:.2f}" for ratio in ratios[:3]), goal(name, "turns_over_best_peer_median")
    yield (
        f"**{median(latest):.2f}** in the median; of nine regimes at 7a5b5ac three had **{lost}**, and the median was "
        f"**{middle:.2f}** (goal {whole})"
    )
    short, middling, long = lossless_over_raw()
    over_raw = goal("vllm_regimes_0320_h200", "turns_lossless_over_raw")
    yield f"{short:.2f}, {middling:.2f} and **{long:.2f}** times the turns (goal {over_raw})"
    asked = goal("vllm_lossless_0320_h200", "lossless_host_hit_over_raw")
    share = f"**{coded_over_raw_by_dma():.2f}**"
    yield f"first token at 32,768 tokens {share} of raw's by DMA on another day (goal {asked})"
    before = [row for row in result("vllm_serving_older_h200")["rows"] if row["over"] == "offloading"]
    (asked,) = {row["turns_over"]["goal"] for row in before}
    old = older_chats()
    names = ("0251", "all", "short_answers"), ("8_tokens_8s", "32_tokens_12s", "8_tokens_10s")
    better, worse = (", ".join(f"{old[name, 'write_through']:.2f}" for name in some) for some in names)
    yield f"(goal {asked:g}): {better}, **{worse}**"


def first_tokens_in_short() -> Iterator[str]:
    overs = (
        claim(name, "ours_host_hit_over_offloading_32768")
        for name in ("vllm_ttft_0320_h200", "vllm_ttft_0320_latest_h200")
    )
    yield "**{:.2f}** and **{:.2f}** of OffloadingConnector's at 32,768 tokens on two hosts".format(*overs)
    yield f"what is computed takes {longer()} % longer"


def sglang_in_short() -> Iterator[str]:
    slow = [result(f"sglang_serving_turns_{host}_h200")["claims"].items() for host in ("05x", "1x", "2x")]
    worst = min(one["value"] for claims in slow for which, one in claims if which.startswith("turns_over"))
    latest = max(one["value"] for claims in slow for which, one in claims if which.startswith("p50_over"))
    seconds = min(row["seconds"] for row in rows_of("chats", result("sglang_serving_turns_2x_h200")))
    yield f"**{worst:.2f}** of HiCache's turns at worst"
    yield f"in windows of {seconds:.1f} s, p50 **{latest:.2f}** times as late"
    yield "first tokens **{:.2f}, {:.2f}, {:.2f}** times as late".format(*sglang_over_hicache())


def misses_in_short() -> Iterator[str]:
    older, before = over_none("vllm_misses_0251_h200"), over_none("vllm_regimes_0320_h200")
    rows = result("vllm_serving_older_h200")["rows"]
    (two_days,) = {row["over_none"]["value"] for row in rows if row["date"] == "2026-11-24"}
    yield f"**{older['ours']:.3f}** in vLLM 0.25.1, **{two_days:.3f}** in 0.32 two days before"
    yield f"**{before[LOSSLESS]:.3f}** with `lossless` host blocks"


def policies_of_readme() -> Iterator[str]:
    """Of regimes whose host holds all chats, where both policies ran."""
    names = "vllm_regimes_0320_h200", "vllm_regimes_latest_0320_h200"
    engines = [row["engines"] for name in names for (host, _), row in by_regime(name).items() if host >= 1]
    pairs = [(of["ours"], of["ours:write_through"]) for of in engines if "ours:write_through" in of]
    ahead = sum(default["turns_per_second"] >= other["turns_per_second"] for default, other in pairs)
    assert (ahead, len(pairs)) == (7, 9)
    yield "the default had as many turns or more in seven of nine such regimes"


def losses_of_readme() -> Iterator[str]:
    latest = sorted(row["over_best_peer"] for row in by_regime("vllm_regimes_latest_0320_h200").values())
    yield f"had **{latest[0]:.2f}** to **{latest[-1]:.2f}** times the best peer's turns on another host"
    names = "vllm_ttft_0320_h200", "vllm_ttft_0320_latest_h200"
    overs = (claim(name, "ours_host_hit_over_offloading_32768") for name in names)
    yield "at 32,768 tokens **{:.2f}** and **{:.2f}** of OffloadingConnector's on two hosts".format(*overs)
    yield f"where nothing is hit **{over_none('vllm_misses_0251_h200')['ours']:.3f}** in vLLM 0.25.1"
    slow = [result(f"sglang_serving_turns_{host}_h200")["claims"].items() for host in ("05x", "1x", "2x")]
    worst = min(one["value"] for claims in slow for which, one in claims if which.startswith("turns_over"))
    yield f"in SGLang **{worst:.2f}** of HiCache's turns at worst"
    yield "first tokens **{:.2f}, {:.2f}, {:.2f}** times as late".format(*sglang_over_hicache())
    older = [row["over_none"]["value"] for row in result("vllm_serving_older_h200")["rows"] if "over_none" in row]
    yield f"saving costs up to {100 * (1 - min(older)):.0f} % of the throughput"


TOLD = (losses_of_readme, policies_of_readme)
SUMMARY = (chats_in_short, first_tokens_in_short, misses_in_short, sglang_in_short)
