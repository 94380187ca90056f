"""Phrases of docs/sglang.md, and of SGLang in docs/benchmarks_older.md, with figures of results, for
`test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from integration.figures.results import rows_of
from tests.kept_results import (
    claim,
    goal,
    host_hits,
    load_rate,
    over_none,
    result,
    sglang_by_path,
    sglang_chats,
    sglang_over_hicache,
)

LENGTHS = (2048, 8192, 32768)
SLOW = tuple(f"sglang_serving_turns_{host}_h200" for host in ("05x", "1x", "2x"))
HERE = "sglang_serving_h200"


def chats() -> Iterator[str]:
    found = sglang_chats(HERE)
    (seconds,) = {round(row["seconds"]) for row in found.values()}
    yield f"one window of {seconds} s for each engine and length of answers"
    for answer, form in ((8, "by {} turns against {} in a window"), (32, "and {} against {}: nothing has")):
        yield form.format(*(found[2.01, answer, name]["arrived"] for name in ("ours", "hicache")))
        assert round(100 * claim(HERE, f"turns_over_best_of_1_peers_host_2.01x_answers_{answer}_sglang_0523")) == 99
    cached = [round(100 * row["cached_share"]) for (host, *_), row in found.items() if host > 2]
    yield f"both have {min(cached)} to {max(cached)} % cached"
    for host, answer in ((0.5, 8), (0.5, 32), (1, 8), (1, 32)):
        assert found[host, answer, "ours"]["cached_share"] > found[host, answer, "hicache"]["cached_share"] + 0.03
    late = [found[1, 8, name]["ttft_p99_ms"] for name in ("ours", "hicache")]
    yield "its p99 is later**, {:,.0f} ms against {:,.0f}".format(*late)
    rates = load_rates(HERE)
    yield f"Loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s in all six windows of ours"
    assert len(rates) == 6
    half = claim(SLOW[0], "turns_over_best_of_1_peers_host_0.5x_answers_8_sglang_0523")
    yield f"{half:.2f} at 7a5b5ac"
    assert over_none("sglang_misses_h200")["ours"] >= float(goal("sglang_misses_h200", "miss_path"))


def first_tokens() -> Iterator[str]:
    rows = {(row["tokens"], row["kind"], row["connector"]): row for row in rows_of("hits", result("sglang_ttft_h200"))}
    ms = {key: row["ms"] for key, row in rows.items()}
    late = (100 * (over - 1) for over in sglang_over_hicache())
    yield "misses HiCache's time, by {:.0f}, {:.0f} and {:.0f} %**".format(*late)
    longer = (100 * (ms[size, "computed", "ours"] / ms[size, "computed", "none"] - 1) for size in LENGTHS)
    yield "takes {:.1f}, {:.1f} and {:.1f} % longer than without the linker".format(*longer)
    device, *others = (ms[2048, "device_hit", name] for name in ("ours", "hicache", "none"))
    yield f"device took {device:.1f} ms, with HiCache {others[0]:.1f} and without a host cache {others[1]:.1f}"
    ours, peer = (rows[2048, "host_hit", name] for name in ("ours", "hicache"))
    on_device = rows[2048, "device_hit", "ours"]["all_ms"]
    quick = on_device.index(min(on_device))
    assert min(on_device) <= max(others) < sorted(on_device)[1]
    yield f"{min(ours['all_ms']):.1f} to {max(ours['all_ms']):.1f} ms, and {ours['all_ms'][quick]:.1f} for the one"
    first, last = peer["all_ms"][:2], peer["all_ms"][2:]
    yield f"took {first[0]:.1f} and {first[1]:.1f}, of the last four {min(last):.1f} to {max(last):.1f}"
    yield f"took {ours['ms'] - device:.1f} ms longer than its device hit, one of HiCache's {peer['ms'] - others[0]:.1f}"
    long = rows[32768, "host_hit", "ours"]
    rate = long["load_bytes_per_second"] / 1e9
    yield f"load itself moved at {rate:.0f} GB/s, and a host hit took {long['ms']:.1f} ms"


def paths() -> Iterator[str]:
    ms, staged = sglang_by_path(), 'ours:copy_path="staged"'
    packed, kernel, peer = ([ms[size, "host_hit", name] for size in LENGTHS] for name in (staged, "ours", "hicache"))
    yield f"took {packed[2]:.1f} packed and {kernel[2]:.1f} by the kernel, HiCache's {peer[2]:.1f}"
    over = "**{:.3f}** and **{:.3f}** of HiCache's".format(*sglang_over_hicache("ttft_paths", *LENGTHS[:2]))
    yield f"8,192 {kernel[0]:.1f} and {kernel[1]:.1f} by the kernel, which was {over}, and {packed[0]:.1f} and"
    yield f"and {packed[1]:.1f} packed"


def variants() -> Iterator[str]:
    ms, eager = (host_hits(f"sglang_ttft_variants{which}_h200") for which in ("", "_eager"))
    own = {
        name: [ms[size, "host_hit", name] for size in LENGTHS]
        for name in ("hicache", "ours", 'ours:variant="old"', 'ours:variant="noturn nolock"')
    }
    peer, now, old, without = own.values()
    yield "{:.1f}, {:.1f} and {:.1f} ms with HiCache".format(*peer)
    yield "{:.1f}, **{:.1f}** and **{:.1f}** with ours of 10fb6ee".format(*now)
    yield "{:.1f}, {:.1f} and {:.1f} with ours of e8175df".format(*old)
    yield "{:.1f}, {:.1f} and {:.1f} with a copy of 10fb6ee".format(*without)
    # A token has 128 KiB.
    (cost,) = {f"{(now[i] - without[i]) / (LENGTHS[i] * 128 / 65536):.1f}" for i in (1, 2)}
    yield f"cost {cost} ms for each 64 MiB of the longer loads"
    names = ("ours", *(f'ours:variant="{name}"' for name in ("noturn", "nolock", "noturn nolock")))
    both, turnless, lockless, neither = (eager[32768, "host_hit", name] for name in names)
    yield f"{both:.1f} ms with both, {turnless:.1f} without yielding, {lockless:.1f} with calls that release the GIL"
    yield f"and {neither:.1f} with neither"


def slow_host() -> Iterator[str]:
    found = sglang_chats(*SLOW)
    seconds = [row["seconds"] for row in found.values()]
    yield f"Windows of {max(seconds):.0f} s, and of {min(seconds):.1f} s where the host holds twice"
    answered = [found[2.01, answer, name]["arrived"] for answer in (8, 32) for name in ("ours", "hicache")]
    yield "host memory**, {} turns against {} in a window, and {} against {};".format(*answered)
    rates = load_rates(*SLOW)
    yield f"Its loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s beside the model"
    rows = [row for row in result("sglang_ttft_turns_h200")["rows"] if "all_load_bytes_per_second" in row]
    alone = [rate / 1e9 for row in rows for rate in row["all_load_bytes_per_second"]]
    yield f"though at {min(alone):.0f} to {max(alone):.0f} without"
    first = (host_hits("sglang_ttft_turns_h200")[size, "host_hit", "ours"] for size in LENGTHS)
    yield "took {:.1f}, {:.1f} and {:.1f} ms".format(*first)
    yield "**{:.3f}, {:.3f} and {:.3f}** times HiCache's".format(*sglang_over_hicache("ttft_turns"))
    of_link = (claim("sglang_ttft_turns_h200", f"ours_load_over_link_{size}") for size in LENGTHS)
    yield "**{:.3f}, {:.3f} and {:.3f}** of the link".format(*of_link)
    held = over_none(SLOW[2])
    yield f"it had {held['ours']:.4f} of the throughput without a host cache, HiCache {held['hicache']:.4f}"


def other_hosts() -> Iterator[str]:
    without = []
    for name, turns, rate, window in (
        (
            "15x",
            "a later p50: {ours:.2f} and {hicache:.2f} a second with",
            "at {:.0f} GB/s",
            "one window of {:.1f} s",
        ),
        ("2x", "{ours:.2f} and {hicache:.2f} with twice", "vLLM beside it, at {:.0f}", "one of {:.0f} s"),
    ):
        found = {row["connector"]: row for row in rows_of("chats", result(f"sglang_turns_off_{name}_h200"))}
        speeds = {who: row["turns_per_second"] for who, row in found.items()}
        yield turns.format_map(speeds)
        without.append(speeds['ours:variant="none"'] / speeds["hicache"])
        yield rate.format(load_rate(found["ours"]))
        p50 = found["ours"]["ttft_p50_ms"] / found["hicache"]["ttft_p50_ms"]
        yield f"(p50 **{p50:.3f}**"
        yield window.format(found["ours"]["seconds"])
    yield "do not yield ours had **{:.2f} and {:.2f}** of HiCache's turns".format(*without)
    found = {row["connector"]: row for row in rows_of("chats", result("sglang_calibrations_15x_h200"))}
    turns = {name: row["turns_per_second"] for name, row in found.items()}
    bad = (turns[f'ours:calibration="/tmp/{name}.json"'] for name in ("bad1", "bad2"))
    yield "ours had {:.2f} and {:.2f} a second beside {:.2f} when".format(*bad, turns["ours"])
    yield f"on a host where loads move at {load_rate(found['ours']):.0f} GB/s"


def load_rates(*names: str) -> list[float]:
    """GB/s of all loads of each window of the default."""
    return [load_rate(row) for (*_, name), row in sglang_chats(*names).items() if name == "ours"]


TOLD = (chats,)
EARLIER = (first_tokens, paths, variants, slow_host, other_hosts)
