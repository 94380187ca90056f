"""Phrases of documents with figures of the newest results of engines, and of what other hosts lost, for
`test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from integration.figures.results import Row
from tests.kept_results import by_regime, claim, goal, host_hits, least_over_none, load_rate, over_none, result

LENGTHS = (2048, 8192, 32768)
TTFT, LATEST = "vllm_ttft_0320_latest_h200", "vllm_regimes_latest_0320_h200"
MISSES, RANKS = "vllm_misses_0320_h200", "vllm_replicas_h200"
SYNC = "vllm_serving_0320_sync_1x_h200"
IN_STEP = 'ours:load_choice="sync"'
CHOICE = ("vllm_serving_0320_choice_1x_h200", "vllm_serving_0320_choice_2x_h200")
IN_BACKGROUND = 'ours:load_choice="async"'
NEWEST, CUT_OFF = "sglang_ttft_alone_h200", "sglang_ttft_short_h200"


def windows(name: str, connector: str) -> list[Row]:
    return [row for row in result(name)["rows"] if row["part"] == "chats" and row["connector"] == connector]


def turns(name: str, connector: str) -> list[str]:
    return [f"{row['turns_per_second']:.2f}" for row in windows(name, connector)]


def on_other_hosts() -> Iterator[str]:
    found = by_regime(LATEST)
    ratios = sorted(row["over_best_peer"] for row in found.values())
    assert len(ratios) == 6
    yield f"had **{ratios[0]:.2f}** to **{ratios[-1]:.2f}** times the best peer's turns on another host"
    yield f"**{median(ratios):.2f}** in the median"
    short = [found[size, 8]["engines"] for size in (1, 2)]
    (ahead,) = {f"{100 * (of['lmcache']['turns_per_second'] / of['ours']['turns_per_second'] - 1):.0f}" for of in short}
    yield f"with answers of 8 tokens LMCache was ahead by {ahead} %"
    for engines in (row["engines"] for row in found.values()):
        others = [engines[name]["turns_per_second"] for name in ("offloading", "lmcache")]
        assert engines["simple"]["turns_per_second"] <= max(others), "it is nowhere ahead of both others"
    which = "ours_host_hit_over_offloading_32768"
    yield f"took **{claim(TTFT, which):.2f}** of OffloadingConnector's time (goal {goal(TTFT, which)})"


def by_where_it_loads() -> Iterator[str]:
    in_step, default = windows(SYNC, IN_STEP), windows(SYNC, "ours")
    more = [one["turns_per_second"] / other["turns_per_second"] for one, other in zip(in_step, default, strict=True)]
    yield "loads in the step had {:.2f} and {:.2f} times the turns of those in the background".format(*more)
    (seconds,) = {f"{row['seconds']:.1f}" for row in (*in_step, *default)}
    yield f"two windows of {seconds} s with room for all"


def over_peers() -> tuple[list[float], list[float]]:
    """Turns of the default over the best peer's, and its p50 over the soonest's, by regime."""
    found = by_regime("vllm_regimes_choice_0320_h200").values()
    return [row["over_best_peer"] for row in found], [row["p50_over_soonest_peer"] for row in found]


def by_choice() -> Iterator[str]:
    pairs = zip(*(turns(name, IN_BACKGROUND) for name in CHOICE), strict=True)
    forms = "**more turns than the default, {} and {} a second**", "with 32 {} and {}", "and with 128 {} and {}."
    for form, pair in zip(forms, pairs, strict=True):
        yield form.format(*pair)
    for name in CHOICE:
        assert [row["counted"]["async_loads"] for row in windows(name, "ours")] == [1, 1, 1], "all but one in the step"
    ratios, late = over_peers()
    assert len(ratios) == 6 and min(ratios) > 1 > max(late) and sum(ratio < 1.05 for ratio in ratios) == 3
    yield "**Ours is ahead in all six lines, with a sooner p50 in each, and misses 1.05 in three**"


def misses() -> Iterator[str]:
    over, ours = over_none(MISSES), {row.get("connector"): row for row in result(MISSES)["rows"]}["ours"]
    yield f"**{over['ours']:.4f}** ({ours['over_none_p10']:.3f} to {ours['over_none_p90']:.3f})"
    yield (
        f"OffloadingConnector {over['offloading']:.3f}, SimpleCPUOffloadConnector {over['simple']:.3f} and LMCache "
        f"{over['lmcache']:.3f}"
    )
    yield f"Older code had **{least_over_none():.3f}** at worst"


def ranks() -> Iterator[str]:
    rows = {row["ranks"]: row for row in result(RANKS)["rows"]}
    spread = (value for number in (1, 2) for value in (min(rows[number]["load_ms"]), max(rows[number]["load_ms"])))
    yield "took {:.1f} to {:.1f} ms on one rank and {:.1f} to {:.1f} on two".format(*spread)
    yield f"**{claim(RANKS, 'load_of_two_ranks_over_one'):.2f}** times as long in the median (goal 1.1)"
    (tokens,) = {row["host_tokens"] for row in rows.values()}
    yield f"the host holds {tokens:,} tokens of both"


def newest_in_sglang() -> Iterator[str]:
    overs = [claim(NEWEST, f"ours_host_hit_over_hicache_{size}") for size in LENGTHS]
    assert max(overs[:2]) < 1 < overs[2]
    yield f"at 32,768 it was {100 * (overs[2] - 1):.0f} % later"
    later, ms = claim(CUT_OFF, "ours_host_hit_over_hicache_8192"), host_hits(CUT_OFF)
    yield f"at 8,192 {100 * (later - 1):.0f} % longer**"
    device = ms[8192, "device_hit", "ours"] / ms[8192, "device_hit", "none"]
    yield f"took {100 * (device - 1):.0f} % longer than those without a host cache"
    yield f"in the run below it was {100 * (1 - overs[1]):.0f} % sooner"
    assert all(claim(NEWEST, f"ours_load_over_link_{size}") < 0.95 for size in LENGTHS)
    (timed,) = [row for row in result(NEWEST)["rows"] if row.get("tokens") == 32768 and is_timed_hit(row)]
    yield f"moved at {timed['load_bytes_per_second'] / 1e9:.0f} GB/s, and a host hit took {timed['ms']:.1f} ms"


def is_timed_hit(row: Row) -> bool:
    return row.get("kind") == "host_hit" and row["connector"] == "ours:trace_loads=true"


WINDOWS = (SYNC, *CHOICE, "vllm_serving_0320_latest_1x_h200", "vllm_serving_0320_latest_2x_h200")


def load_rates(names: Iterable[str], kind: str) -> list[float]:
    """GB/s of our loads in windows of which nine of ten are of this kind."""
    found = []
    for row in (row for name in names for row in result(name)["rows"] if row["part"] == "chats"):
        if row["connector"].startswith("ours"):
            counted = row["counted"]
            if counted[f"{kind}_loads"] > 0.9 * (counted["sync_loads"] + counted["async_loads"]):
                found.append(load_rate(row))
    return found


def in_the_background() -> Iterator[str]:
    background, in_step = (load_rates(WINDOWS, kind) for kind in ("async", "sync"))
    yield f"moved at {min(background):.0f} to {max(background):.0f} GB/s"
    yield f"in the step at {min(in_step):.0f} to {max(in_step):.0f}, on all three hosts"


TOLD = (on_other_hosts, in_the_background, by_choice, by_where_it_loads, misses, ranks)
