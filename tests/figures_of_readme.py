"""Phrases of README.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from integration.bench.peers import LOSSLESS
from integration.bench.regimes import MEDIAN_OVER_BEST_PEER
from integration.figures.results import rows_of
from tests.kept_results import (
    by_regime,
    claim,
    coded_over_raw_by_dma,
    goal,
    host_hits,
    longer,
    lossless_over_raw,
    older_chats,
    over_best_0251,
    over_none,
    result,
    sglang_over_hicache,
    sglang_turns,
)


def chats_of_readme() -> Iterator[str]:
    name = "vllm_regimes_turns_0320_h200"
    ratios = sorted(row["over_best_peer"] for row in by_regime(name).values())
    middle = claim(name, f"turns_over_best_peer_median_of_{len(ratios)}_regimes")
    assert [ratio < 1.05 for ratio in ratios] == [True] * 3 + [False] * 6
    won, lost = f"{ratios[3]:.2f} to {ratios[-1]:.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios[:3])
    each, whole = (goal(name, f"turns_over_best_{part}") for part in ("of", "peer_median"))
    regimes = f"{len(ratios)} regimes of host memory and length of answers, goal {each} in each, {whole} in the median"
    yield f"{regimes} | {won} times the best peer in six, **{middle:.2f}** in the median;"
    yield f"| **{lost}** in three"
    late = [row["p50_over_soonest_peer"] for row in by_regime(name).values() if row["p50_over_soonest_peer"] > 1]
    yield "p50 of the first token **{:.2f}** times the soonest's in one (goal {})".format(*late, goal(name, "p50_over"))
    before = sorted(row["over_best_peer"] for row in by_regime().values())
    middle = claim("vllm_regimes_0320_h200", f"turns_over_best_peer_median_of_{len(before)}_regimes")
    yield f"{len(before)} regimes before †, **{before[0]:.2f}** to {before[-1]:.2f}, **{middle:.2f}** in the median"
    latest = sorted(row["over_best_peer"] for row in by_regime("vllm_regimes_latest_0320_h200").values())
    assert len(latest) == 6
    spread = f"**{latest[0]:.2f}** to **{latest[-1]:.2f}**, **{median(latest):.2f}** in the median"
    yield f"with room for all, on another host, {spread}"
    short, middling, long = lossless_over_raw()
    over_raw = goal("vllm_regimes_0320_h200", "turns_lossless_over_raw")
    yield f"over raw, goal {over_raw} | {short:.2f} and {middling:.2f} times the turns | **{long:.2f}** with long"
    asked = goal("vllm_lossless_0320_h200", "lossless_host_hit_over_raw")
    share = f"**{coded_over_raw_by_dma():.2f}**"
    yield f"first token at 32,768 tokens {share} of raw's by DMA on another day (goal {asked})"
    before = [row for row in result("vllm_serving_older_h200")["rows"] if row["over"] == "offloading"]
    (asked,) = {row["turns_over"]["goal"] for row in before}
    each = goal("vllm_serving_0251_1x_h200", "turns_over_best")
    yield f"in vLLM 0.25.1, goal {each}; other policies over OffloadingConnector, goal {asked:g} |"
    least, *others = over_best_0251()
    old, selective = older_chats(), "write_through_selective"
    names = ("0251", "all", "short_answers"), ("8_tokens_8s", "32_tokens_12s", "8_tokens_10s")
    better, worse = (", ".join(f"{old[name, 'write_through']:.2f}" for name in some) for some in names)
    yield f"{others[0]:.2f} to {others[-1]:.2f} times the best peer in six of seven rows; {better} | **{least:.2f}**;"
    yield f"**{worse}** and **{old['8_tokens_10s', selective]:.2f}** with `{selective}`"


def first_tokens_of_readme() -> Iterator[str]:
    ms, sizes = host_hits("vllm_ttft_0320_h200"), (2048, 8192, 32768)
    ours, peer = (", ".join(f"{ms[size, 'host_hit', name]:.1f}" for size in sizes) for name in ("ours", "offloading"))
    yield f"{ours} ms at 2,048, 8,192, 32,768 tokens; OffloadingConnector {peer}"
    over = claim("vllm_ttft_0320_h200", "ours_host_hit_over_offloading_32768")
    again = (host_hits("vllm_lossless_0320_h200")[size, "host_hit", "ours"] for size in sizes)
    asked = goal("vllm_ttft_0320_h200", "ours_host_hit_over_offloading_32768")
    yield f"**{over:.2f}** of its at 32,768 (goal {asked});"
    yield "(goal 0.9); {:.1f}, {:.1f}, {:.1f} ms in another run;".format(*again)
    yield f"what is computed takes {longer()} % longer"


def sglang_of_readme() -> Iterator[str]:
    turns, names = sglang_turns(), [f"sglang_serving_{host}_h200" for host in ("1x", "2x")]
    assert [ratio >= 1 for ratio in turns.values()] == [True] * 3 + [False]
    yield f"{turns[1, 8]:.2f} and {turns[1, 32]:.2f} times the turns on a host for all chats, {turns[2.01, 8]:.2f} with"
    late = [one["value"] for name in names for which, one in result(name)["claims"].items() if which[:3] == "p50"]
    assert max(late[:3]) <= 1 < late[3]
    yield f"**{turns[2.01, 32]:.3f}** times with longer answers there, p50 **{late[3]:.3f}**"
    yield f"**{median(turns.values()):.3f}** in the median of the four (goal {MEDIAN_OVER_BEST_PEER['sglang']})"
    share = over_none("sglang_misses_h200")
    yield f"nothing hit {share['ours']:.4f} of no host cache, HiCache {share['hicache']:.4f} |"
    (equal,) = {goal(name, over) for name in names for over in ("turns_over", "p50_over")}
    assert {equal} == {goal("sglang_ttft_h200", "host_hit_over_hicache")}
    yield f"host hit, both goal {equal}, and nothing is hit, goal {goal('sglang_misses_h200', 'miss_path')} |"
    ms = host_hits("sglang_ttft_h200")
    first, second, third = (ms[size, "host_hit", "ours"] for size in (2048, 8192, 32768))
    over = "**{:.2f}, {:.2f}, {:.2f}** times".format(*sglang_over_hicache())
    yield f"first token {over}: {first:.1f}, {second:.1f}, {third:.1f} ms at these lengths"
    slow = [result(f"sglang_serving_turns_{host}_h200")["claims"].items() for host in ("05x", "1x", "2x")]
    worst = min(one["value"] for claims in slow for which, one in claims if which.startswith("turns_over"))
    latest = max(one["value"] for claims in slow for which, one in claims if which.startswith("p50_over"))
    seconds = min(row["seconds"] for row in rows_of("chats", result("sglang_serving_turns_2x_h200")))
    over = "**{:.2f}, {:.2f}, {:.2f}** times".format(*sglang_over_hicache("ttft_turns"))
    yield f"chats **{worst:.2f}** at worst (p50 **{latest:.2f}**, in {seconds:.1f} s), first tokens {over} |"


def misses_of_readme() -> Iterator[str]:
    older, now = over_none("vllm_misses_0251_h200"), over_none("vllm_misses_0320_h200")
    before = over_none("vllm_regimes_0320_h200")
    rows = result("vllm_serving_older_h200")["rows"]
    least = min(row["over_none"]["value"] for row in rows if "over_none" in row)
    (two_days,) = {row["over_none"]["value"] for row in rows if row["date"] == "2026-11-24"}
    yield f"saving costs up to {100 * (1 - least):.0f} % of the throughput"
    (asked,) = {goal(name, "miss_path") for name in ("vllm_misses_0251_h200", "vllm_misses_0320_h200")}
    yield (
        f"0.25.1 and 0.32, goal {asked} | **{older['ours']:.3f}** (older code) and **{now['ours']:.4f}** of the "
        f"throughput without a connector, OffloadingConnector {older['offloading']:.3f} and {now['offloading']:.3f} | "
        f"in 0.32 before copies yielded {before['ours']:.3f} and, two days before that, **{two_days:.3f}**; "
        f"**{before[LOSSLESS]:.3f}** with `lossless`"
    )


def policies_of_readme() -> Iterator[str]:
    """Of regimes whose host holds all chats, where both policies ran."""
    names = "vllm_regimes_0320_h200", "vllm_regimes_latest_0320_h200"
    engines = [row["engines"] for name in names for (host, _), row in by_regime(name).items() if host >= 1]
    pairs = [(of["ours"], of["ours:write_through"]) for of in engines if "ours:write_through" in of]
    ahead = sum(default["turns_per_second"] >= other["turns_per_second"] for default, other in pairs)
    assert (ahead, len(pairs)) == (7, 9)
    yield "the default had as many turns or more in seven of nine such regimes"


TOLD = (chats_of_readme, first_tokens_of_readme, misses_of_readme, policies_of_readme, sglang_of_readme)
