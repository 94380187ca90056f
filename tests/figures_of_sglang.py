"""Phrases of docs/sglang.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kept_results import claim, goal, host_hits, load_rate, over_none, sglang_chats

SLOW = "sglang_serving_turns_2x_h200"
HERE = "sglang_serving_h200"


def chats() -> Iterator[str]:
    found = sglang_chats(HERE)
    (seconds,) = {round(row["seconds"]) for row in found.values()}
    yield f"one window of {seconds} s for each engine and length of answers"
    for answer, form in ((8, "by {} turns against {} in a window"), (32, "and {} against {}: few blocks")):
        yield form.format(*(found[2.01, answer, name]["arrived"] for name in ("ours", "hicache")))
        assert round(100 * claim(HERE, f"turns_over_best_of_1_peers_host_2.01x_answers_{answer}_sglang_0523")) == 99
    cached = [round(100 * row["cached_share"]) for (host, *_), row in found.items() if host > 2]
    yield f"both have {min(cached)} to {max(cached)} % cached"
    for host, answer in ((0.5, 8), (0.5, 32), (1, 8), (1, 32)):
        assert found[host, answer, "ours"]["cached_share"] > found[host, answer, "hicache"]["cached_share"] + 0.03
    late = {
        (host, answer): pair
        for host, answer in dict.fromkeys((host, answer) for host, answer, _ in found)
        if (pair := [found[host, answer, name]["ttft_p99_ms"] for name in ("ours", "hicache")])[0] > pair[1]
    }
    forms = (
        "later at 1x with answers of 8 tokens**, {:,.0f} ms against {:,.0f}",
        "at 2x with 32**, {:,.0f} against {:,.0f}",
    )
    assert list(late) == [(1, 8), (2.01, 32)]
    for form, pair in zip(forms, late.values(), strict=True):
        yield form.format(*pair)
    rates = load_rates(HERE)
    yield f"Loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s in all six windows of ours"
    assert len(rates) == 6
    assert over_none("sglang_misses_h200")["ours"] >= float(goal("sglang_misses_h200", "miss_path"))


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
    ms = host_hits("sglang_ttft_variants_h200")
    ours, peer = ([ms[size, "host_hit", name] for size in (8192, 32768)] for name in ("ours", "hicache"))
    yield "took **{:.1f}** and **{:.1f} ms** at 8,192 and 32,768 tokens".format(*ours)
    yield "where HiCache took {:.1f} and {:.1f}".format(*peer)


def load_rates(name: str) -> list[float]:
    """GB/s of all loads of each window of the default."""
    return [load_rate(row) for (*_, connector), row in sglang_chats(name).items() if connector == "ours"]


TOLD = (chats, slow_host, first_tokens)
