"""Phrases of docs/sglang.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from integration.figures.markdown import marked
from integration.figures.results import rows_of
from tests.kept_results import (
    LENGTHS,
    answered_otherwise,
    claim,
    goal,
    host_hit,
    host_hits,
    load_rate,
    over_none,
    result,
    sglang_chats,
)

SLOW = "sglang_serving_turns_2x_h200"
HERE = "sglang_serving_h200"
EARLIER = "sglang_serving_earlier_h200"
NEWEST, BESIDE = "sglang_ttft_h200", "sglang_ttft_beside_h200"
DMA, ALONE = "sglang_ttft_dma_h200", "sglang_ttft_alone_h200"


def chats() -> Iterator[str]:
    found = sglang_chats(HERE)
    (seconds,) = {round(row["seconds"]) for row in found.values()}
    yield f"one window of {seconds} s for each engine and length of answers"
    turns = [found[2.01, 8, name]["arrived"] for name in ("ours", "hicache")]
    yield "by {} turns against {} in a window".format(*turns)
    assert found[2.01, 32, "ours"]["arrived"] == found[2.01, 32, "hicache"]["arrived"]
    assert {round(100 * row["cached_share"]) for (host, *_), row in found.items() if host > 2} == {98}
    yield "both have 98 % cached"
    for host, answer in ((0.5, 8), (0.5, 32), (1, 8), (1, 32)):
        assert found[host, answer, "ours"]["cached_share"] > found[host, answer, "hicache"]["cached_share"] + 0.03
    late = {
        (host, answer): pair
        for host, answer in dict.fromkeys((host, answer) for host, answer, _ in found)
        if (pair := [found[host, answer, name]["ttft_p99_ms"] for name in ("ours", "hicache")])[0] > pair[1]
    }
    assert list(late) == [(1, 8), (2.01, 8), (2.01, 32)]
    yield "later at 1x with answers of 8 tokens**, {:,.0f} ms against {:,.0f}".format(*late[1, 8])
    little = [round(ours - peer) for (host, _), (ours, peer) in late.items() if host > 2]
    yield f"by {min(little)} to {max(little)} ms at 2x"
    rates = load_rates(HERE)
    yield f"Loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s in all six windows of ours"
    assert len(rates) == 6


def chats_before() -> Iterator[str]:
    claims = result(EARLIER)["claims"].items()
    over = [one for which, one in claims if which.startswith("turns_over_best_of_1")]
    marks = [marked(one, 3) for one in over]
    yield "the six ratios were {}, {}, {}, {}, {} and {}".format(*marks)
    yield f"**{median(one['value'] for one in over):.3f}** in the median"


def misses() -> Iterator[str]:
    now, before = over_none("sglang_misses_h200"), over_none("sglang_misses_earlier_h200")
    wanted = float(goal("sglang_misses_h200", "miss_path"))
    assert max(now["ours"], now["hicache"]) < wanted < min(before["ours"], before["hicache"])
    yield f"{before['ours']:.4f} for ours and {before['hicache']:.4f} for HiCache"


def slow_host() -> Iterator[str]:
    turns, late = (
        [claim(SLOW, f"{what}_over_best_of_1_peers_host_2.01x_answers_{n}_sglang_0523") for n in (8, 32)]
        for what in ("turns", "p50")
    )
    yield "ours had **{:.2f}** and **{:.2f}** of HiCache's turns with answers of 8 and 32 tokens".format(*turns)
    yield "a p50 **{:.2f}** and **{:.2f}** times as late".format(*late)
    (seconds,) = {f"{row['seconds']:.1f}" for row in sglang_chats(SLOW).values()}
    yield f"windows of {seconds} s)"
    rates = load_rates(SLOW)
    yield f"Its loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s beside the model"


def first_tokens() -> Iterator[str]:
    ms = host_hits(NEWEST)
    later = [ms[size, "host_hit", "ours"] - ms[size, "host_hit", "hicache"] for size in LENGTHS]
    assert later[0] < 0
    yield "sooner than HiCache's at 2,048 tokens, in a wide spread, and later at 8,192 and 32,768**"
    yield "by {:.1f} and {:.1f} ms. At 32,768 a hit".format(*later[1:])
    names = ("ours", "hicache", "none", "ours:trace_loads=true")
    ours, peer, none, timed = (ms[32768, "device_hit", name] for name in names)
    yield f"took ours {ours - peer:.1f} ms longer than HiCache and {ours - none:.1f} longer than the engine without"
    yield f"times layer groups {peer - timed:.1f} ms less than HiCache"
    link, load = (4 << 30) / result(NEWEST)["rows"][0]["link_bytes_per_second"], host_hit(NEWEST, 32768, "ours")
    yield f"took {1e3 * ((4 << 30) / load['load_bytes_per_second'] - link):.1f} ms longer than its bytes at the link's"
    part = {row["connector"]: row["ms"] for row in rows_of("75_percent", result(NEWEST))}
    yield f"took {part['hicache']:.1f} ms with HiCache and **{part['ours']:.1f}** with ours"
    yield f"waited for {100 * claim(NEWEST, 'ours_exposed_wait_over_load_at_75_percent'):.1f} % of the load"
    assert (answered_otherwise(NEWEST, 2048), len(host_hit(NEWEST, 2048, "ours")["all_ms"])) == (1, 16)
    yield "Of the 16 prompts of 2,048 tokens one was answered with another token"


def first_tokens_beside_chats() -> Iterator[str]:
    ms = host_hits(BESIDE)
    later = [ms[size, "host_hit", "ours"] - ms[size, "host_hit", "hicache"] for size in LENGTHS]
    yield "later than HiCache's at all lengths**, by {:.1f}, {:.1f} and {:.1f} ms".format(*later)
    device = [ms[size, "device_hit", "ours"] - ms[size, "device_hit", "hicache"] for size in LENGTHS]
    yield "took ours {:.1f}, {:.1f} and {:.1f} ms longer than with HiCache".format(*device)
    rates = [host_hit(BESIDE, size, "ours")["load_bytes_per_second"] / 1e9 for size in LENGTHS]
    yield f"Its load moved at {min(rates):.0f} to {max(rates):.0f} GB/s"
    longest, timed = (host_hit(BESIDE, 32768, name)["all_ms"] for name in ("ours", "ours:trace_loads=true"))
    assert len(longest) == 4
    yield f"took longer than {max(longest):.1f} ms, nor with `trace_loads` than {max(timed):.1f}"


def first_tokens_by_dma() -> Iterator[str]:
    ms = host_hits(DMA)
    ours, peer, dma = (
        [ms[size, "host_hit", name] for size in LENGTHS] for name in ("ours", "hicache", 'ours:copy_path="runs"')
    )
    yield "ours took {:.1f}, {:.1f} and {:.1f} ms and HiCache".format(*ours)
    yield "HiCache {:.1f}, {:.1f} and {:.1f}: ".format(*peer)
    over = [marked(result(DMA)["claims"][f"ours_host_hit_over_hicache_{size}"], 3) for size in LENGTHS]
    yield "{}, {} and {} of its time (`sglang_ttft_dma_h200.json`)".format(*over)
    yield "took {:.1f}, {:.1f} and {:.1f} there".format(*dma)
    yield f"it lost {dma[1] - ours[1]:.1f} ms at 8,192 tokens"
    yield f"and won {ours[2] - dma[2]:.1f} at 32,768"
    part = {row["connector"]: row for row in rows_of("75_percent", result(DMA))}
    yield f"took {part['hicache']['ms']:.1f} ms with HiCache, and **{part['ours']['ms']:.1f}** with ours"


def first_tokens_elsewhere() -> Iterator[str]:
    yield "{}, {} and {} of its time".format(*over_hicache(ALONE, 3))
    alone, varied = host_hits(ALONE), host_hits("sglang_ttft_variants_h200")
    yield "ours took {:.1f}, {:.1f} and {:.1f} ms".format(*(alone[size, "host_hit", "ours"] for size in LENGTHS))
    yield "HiCache {:.1f}, {:.1f} and {:.1f}:".format(*(alone[size, "host_hit", "hicache"] for size in LENGTHS))
    spread = host_hit(ALONE, 2048, "hicache")["all_ms"]
    yield f"HiCache's prompts took {min(spread):.1f} to {max(spread):.1f} ms there"
    timed = host_hit(ALONE, 32768, "ours:trace_loads=true")
    rate = timed["load_bytes_per_second"] / 1e9
    yield f"move at {rate:.0f} GB/s: with `trace_loads` ({timed['ms']:.1f} ms to the first token"
    ours, peer = ([varied[size, "host_hit", name] for size in (8192, 32768)] for name in ("ours", "hicache"))
    yield "took **{:.1f}** and **{:.1f} ms** at 8,192 and 32,768 tokens".format(*ours)
    yield "where HiCache took {:.1f} and {:.1f}".format(*peer)


def with_less_to_do() -> Iterator[str]:
    forms = (
        "took {} ms with it, {} before and {} with",
        "at 8,192 tokens **{}**, {} and {}",
        "on the other GPU, **{}**, {} and {}",
        "in the second run {}, {} and {}",
    )
    runs = *cost_by_engine("sglang_ttft_cost_h200"), *cost_by_engine("sglang_ttft_cost_8k_h200")
    for form, found in zip(forms, runs, strict=True):
        yield form.format(*(f"{found[who]:.1f}" for who in ('ours:variant="new"', "ours", "hicache")))


def cost_by_engine(name: str) -> list[dict[str, float]]:
    """Milliseconds of host hits by engine, for each length in the order that they were measured in."""
    lengths: list[dict[str, float]] = [{}]
    for row in rows_of("hits", result(name)):
        if row["kind"] == "host_hit":
            if row["connector"] in lengths[-1]:
                lengths.append({})
            lengths[-1][row["connector"]] = row["ms"]
            assert row["tokens_as_computed"] == row["prompts"]
    return lengths


def over_hicache(name: str, digits: int) -> list[str]:
    """What host hits took of HiCache's time, by length."""
    claims = result(name)["claims"]
    return [marked(claims[f"ours_host_hit_over_hicache_{size}"], digits) for size in LENGTHS]


def load_rates(name: str) -> list[float]:
    """GB/s of all loads of each window of the default."""
    return [load_rate(row) for (*_, connector), row in sglang_chats(name).items() if connector == "ours"]


TOLD = (
    chats,
    chats_before,
    misses,
    slow_host,
    first_tokens,
    first_tokens_beside_chats,
    first_tokens_by_dma,
    with_less_to_do,
    first_tokens_elsewhere,
)
