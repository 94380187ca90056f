"""Phrases of documents with figures of the results of 3f6acac and 2ab0c9c, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from integration.figures.results import Row
from tests.kept_results import by_regime, claim, host_hits, load_rate, over_none, result

LENGTHS = (2048, 8192, 32768)
TTFT, LOSSLESS = "vllm_ttft_0320_latest_h200", "vllm_lossless_0320_latest_h200"
MISSES, RANKS = "vllm_misses_0320_h200", "vllm_replicas_h200"
SHORT, SYNC = ("vllm_serving_0320_short_1x_h200", "vllm_serving_0320_short_2x_h200"), "vllm_serving_0320_sync_1x_h200"
OURS = "ours", 'ours:host_form="lossless"'
CHOICE = ("vllm_serving_0320_choice_1x_h200", "vllm_serving_0320_choice_2x_h200")
IN_BACKGROUND = 'ours:load_choice="async"'
TURNS = {size: f"vllm_serving_0320_turn_{size}_2x_h200" for size in (16, 64, 1024)}
CHATS, ALONE = "sglang_ttft_beside_chats_h200", "sglang_ttft_alone_32k_h200"
NEWEST, CUT_OFF = "sglang_ttft_alone_h200", "sglang_ttft_short_h200"
FOUR, TWO = "sglang_ttft_beside_four_h200", "sglang_ttft_beside_two_h200"


def windows(name: str, connector: str) -> list[Row]:
    return [row for row in result(name)["rows"] if row["part"] == "chats" and row["connector"] == connector]


def turns(name: str, connector: str) -> list[str]:
    return [f"{row['turns_per_second']:.2f}" for row in windows(name, connector)]


def held(row: Row) -> float:
    """Milliseconds for which a request has its blocks."""
    spent = row["phases"]
    return sum(spent.get(f"{phase}_ms", 0.0) for phase in ("loading", "idle", "prefill", "decoding"))


def first_tokens() -> Iterator[str]:
    ms = host_hits(TTFT)
    for name, form in (
        ("ours", "host hits of ours took {:.1f}, {:.1f} and {:.1f} ms"),
        ("offloading", "OffloadingConnector's {:.1f}, {:.1f} and {:.1f}"),
        ("simple", "SimpleCPUOffloadConnector's {:.1f}, {:.1f} and {:.1f}"),
    ):
        yield form.format(*(ms[size, "host_hit", name] for size in LENGTHS))
    over, whole, share = (
        [claim(TTFT, f"ours_{what}_{size}") for size in LENGTHS]
        for what in ("host_hit_over_offloading", "host_hit_over_nones_device_hit_plus_link", "load_over_link")
    )
    yield "{:.2f}, {:.2f} and **{:.2f}** of OffloadingConnector's time".format(*over)
    yield "{:.2f}, {:.2f} and **{:.2f}** of a device hit without a connector and the link".format(*whole)
    yield "Loads moved at **{:.2f}**, **{:.2f}** and **{:.3f}** of the link".format(*share)
    device = (ms[32768, "device_hit", name] for name in ("ours", "none"))
    yield "our device hits of 32,768 tokens took {:.1f} ms and those without a connector {:.1f}".format(*device)
    raw, coded = ([host_hits(LOSSLESS)[size, "host_hit", name] for size in LENGTHS] for name in OURS)
    yield "{:.1f}, {:.1f} and {:.1f} ms raw".format(*raw)
    yield "{:.1f}, {:.1f} and {:.1f} lossless".format(*coded)


def short_answers() -> Iterator[str]:
    seconds = sorted({row["seconds"] for name in SHORT for row in windows(name, "ours")})
    yield f"Two windows of {seconds[0]:.1f} to {seconds[-1]:.1f} s for each of three engines"
    forms = "{} and {} turns a second against LMCache's {} and {}", "{} and {} against {} and {}"
    for name, form in zip(SHORT, forms, strict=True):
        yield form.format(*turns(name, "ours"), *turns(name, "lmcache"))
    in_step, default = windows(SYNC, 'ours:load_choice="sync"'), windows(SYNC, "ours")
    yield "{} and {} turns a second in the step".format(*turns(SYNC, 'ours:load_choice="sync"'))
    yield "{} and {} by default".format(*turns(SYNC, "ours"))
    yield "{} and {} with LMCache".format(*turns(SYNC, "lmcache"))
    assert windows(SYNC, "ours")[0]["seconds"] == in_step[0]["seconds"]
    yield f"windows of {in_step[0]['seconds']:.1f} s"
    more = [one["turns_per_second"] / other["turns_per_second"] for one, other in zip(in_step, default, strict=True)]
    yield "**{:.2f} and {:.2f} times the default's**".format(*more)
    loading, idle = (median(row["phases"][name] for row in default) for name in ("loading_ms", "idle_ms"))
    longer, less = (median(held(row) for row in rows) for rows in (default, in_step))
    yield f"had its blocks for {longer:.0f} ms by default, {loading:.0f} of them while its load ran"
    yield f"and {idle:.0f} until a step began"
    yield f"in the step {less:.0f}"


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


def by_turns() -> Iterator[str]:
    found = {size: windows(name, IN_BACKGROUND) for size, name in TURNS.items()}
    rates = {size: [f"{load_rate(row):.1f}" for row in rows] for size, rows in found.items()}
    yield "moved at {} and {} GB/s with answers of 8 and 32 tokens".format(*rates[16])
    yield "behind each 16 MiB, at {} and {} behind each 64".format(*rates[64])
    yield "and at {} and {} behind each 1,024".format(*rates[1024])
    yield "with {} and {}, {} and {}, and {} and {} turns a second".format(
        *(each for name in TURNS.values() for each in turns(name, IN_BACKGROUND))
    )
    seconds = [row["seconds"] for rows in found.values() for row in rows]
    yield f"windows of {min(seconds):.1f} to {max(seconds):.1f} s)"


def misses() -> Iterator[str]:
    yield f"in vLLM 0.32 it was {over_none('vllm_regimes_0320_h200')['ours']:.3f} before copies yielded"
    over, ours = over_none(MISSES), {row.get("connector"): row for row in result(MISSES)["rows"]}["ours"]
    yield f"**{over['ours']:.4f}** ({ours['over_none_p10']:.3f} to {ours['over_none_p90']:.3f})"
    yield (
        f"OffloadingConnector {over['offloading']:.3f}, SimpleCPUOffloadConnector {over['simple']:.3f} and LMCache "
        f"{over['lmcache']:.3f}"
    )


def ranks() -> Iterator[str]:
    rows = {row["ranks"]: row for row in result(RANKS)["rows"]}
    spread = (value for number in (1, 2) for value in (min(rows[number]["load_ms"]), max(rows[number]["load_ms"])))
    yield "took {:.1f} to {:.1f} ms on one rank and {:.1f} to {:.1f} on two".format(*spread)
    yield f"**{claim(RANKS, 'load_of_two_ranks_over_one'):.2f}** times as long in the median (goal 1.1)"
    (tokens,) = {row["host_tokens"] for row in rows.values()}
    yield f"the host holds {tokens:,} tokens of both"


def in_sglang() -> Iterator[str]:
    for name, form in (
        (FOUR, "{:.1f} and **{:.1f}** ms against HiCache's {:.1f} and {:.1f}"),
        (TWO, "{:.1f} and **{:.1f}** against {:.1f} and {:.1f}"),
    ):
        ms = host_hits(name)
        yield form.format(*(ms[size, "host_hit", who] for who in ("ours", "hicache") for size in LENGTHS[:2]))
    overs = [claim(name, f"ours_host_hit_over_hicache_{size}") for name in (FOUR, TWO) for size in LENGTHS[:2]]
    yield "{:.2f} and **{:.2f}**, and {:.2f} and **{:.2f}** of its".format(*overs)
    shares = [claim(name, f"ours_load_over_link_{size}") for name in (FOUR, TWO) for size in LENGTHS[:2]]
    yield f"Loads moved at **{min(shares):.2f}** to **{max(shares):.2f}** of the link"
    ms = host_hits(CHATS)
    yield "{:.1f}, {:.1f} and {:.1f} ms against {:.1f}, {:.1f} and {:.1f}, or".format(
        *(ms[size, "host_hit", who] for who in ("ours", "hicache") for size in LENGTHS)
    )
    yield "or **{:.2f}, {:.2f} and {:.2f}** of".format(
        *(claim(CHATS, f"ours_host_hit_over_hicache_{n}") for n in LENGTHS)
    )
    parts = {row["connector"]: row for row in result(CHATS)["rows"] if row["part"] == "75_percent"}
    yield "took {:.1f} ms against {:.1f}".format(*(parts[who]["ms"] for who in ("ours", "hicache")))
    yield f"waited {parts['ours']['load_stall_ms']:.1f} ms for layers"
    ms = host_hits(ALONE)
    pair = (ms[32768, "host_hit", who] for who in ("ours", "hicache"))
    yield "takes {:.1f} ms then, and HiCache's {:.1f}, or".format(*pair)
    yield f"or {claim(ALONE, 'ours_host_hit_over_hicache_32768'):.2f}**"
    yield f"its load moved at **{claim(ALONE, 'ours_load_over_link_32768'):.3f}** of the link"


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


def by_choice_in_short() -> Iterator[str]:
    rates = ([float(rate) for rate in turns(SYNC, name)] for name in ('ours:load_choice="sync"', "ours"))
    better = [one / other for one, other in zip(*rates, strict=True)]
    yield f"(`load_choice` `sync`) had {min(better):.2f} and {max(better):.2f} times the default's turns"
    better = [float(turns(name, IN_BACKGROUND)[0]) / float(turns(name, "ours")[0]) for name in CHOICE]
    yield "those in the background (`async`) had {:.2f} and {:.2f}".format(*better)


BEFORE = [f"vllm_serving_0320_{host}_h200" for host in ("1x", "2x")]
SINCE = [
    "vllm_serving_0320_later_1x_h200",
    SYNC,
    *SHORT,
    *CHOICE,
    TURNS[16],
    *(f"vllm_serving_0320_{what}_h200" for what in ("turns_1x", "turns_2x", "latest_1x", "latest_2x")),
]


def load_rates(names: Iterable[str], kind: str) -> list[float]:
    """GB/s of our loads in raw windows of which nine of ten are of this kind."""
    found = []
    for row in (row for name in names for row in result(name)["rows"] if row["part"] == "chats"):
        if row["connector"].startswith("ours") and "lossless" not in row["connector"]:
            counted = row["counted"]
            if counted[f"{kind}_loads"] > 0.9 * (counted["sync_loads"] + counted["async_loads"]):
                found.append(load_rate(row))
    return found


def in_the_background() -> Iterator[str]:
    before, since, in_step = load_rates(BEFORE, "async"), load_rates(SINCE, "async"), load_rates([SYNC], "sync")
    yield f"moved at {min(before):.0f} to {max(before):.0f} GB/s at e8175df"
    yield f"and at {min(since):.0f} to {max(since):.0f} in all windows since then"
    (rate,) = {f"{rate:.0f}" for rate in in_step}
    yield f"in the step it was {rate}"


TOLD = (in_the_background, by_choice, by_turns, misses, ranks)
OLDER = (first_tokens, short_answers)
