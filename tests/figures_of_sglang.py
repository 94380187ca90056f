"""Phrases of docs/sglang.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from integration.figures.results import Row, rows_of
from tests.kept_results import (
    goal,
    over_none,
    result,
    sglang_host_hits,
    sglang_over_hicache,
    sglang_packed,
)


def sglang() -> Iterator[str]:
    over, ms = sglang_over_hicache(), sglang_host_hits()
    yield "**{:.3f}, {:.3f} and {:.3f}** times what it takes".format(*(over[n, "ours"] for n in (2048, 8192, 32768)))
    longer = [100 * (ms[n, "computed", "ours"] / ms[n, "computed", "none"] - 1) for n in (2048, 8192, 32768)]
    yield "takes {:.1f}, {:.1f} and {:.1f} % longer than without the linker".format(*longer)
    packed = 'ours:copy_path="staged"'
    yield f"are copied now, takes {over[32768, packed]:.3f} times it there"
    assert min(over[size, packed] for size in (2048, 8192)) > 1

    long, short = sglang_packed(32), sglang_packed(8)
    yield f"`staged` answers **{long:.2f}** times the turns of HiCache with answers of 32, and {short:.2f} with"
    long, short = (sglang_packed(answer, "ttft_p50_ms") for answer in (32, 8))
    yield f"its p50 is **{long:.2f}** and {short:.2f} times HiCache's"
    counted = [
        (row["connector"], row["counted"])
        for name in ("1x", "2x")
        for row in result(f"sglang_serving_{name}_h200")["rows"]
        if row.get("counted")
    ]
    rates = {name: [] for name, _ in counted}
    for name, of in counted:
        rates[name].append(round(of["loaded_bytes"] / of["load_milliseconds"] / 1e6))
    (rate,) = set(rates[packed])
    yield f"loads moved at {rate} GB/s, those of ours at {min(rates['ours'])} to {max(rates['ours'])} there"
    chats = [row for row in result("sglang_serving_05x_h200")["rows"] if row.get("connector") == "ours"]
    half = [row["counted"] for row in chats]
    slow = sorted(of["loaded_bytes"] / of["load_milliseconds"] / 1e6 for of in half)
    yield f"at {slow[0]:.0f} to {slow[1]:.0f} with half"
    yield "with half of them {:,.0f} and {:,.0f}".format(*(of["host_hit_tokens"] / of["sync_loads"] for of in half))
    names = [f"sglang_serving_{host}_h200" for host in ("05x", "1x", "2x")]
    seconds = [row["seconds"] for name in names for row in result(name)["rows"] if row["part"] == "chats"]
    yield f"Before copies yielded, windows of {min(seconds):.0f} to {max(seconds):.0f} s, and"
    later = [rows_of("chats", result(f"sglang_serving_later_{host}_h200")) for host in ("1x", "2x")]
    seconds = [row["seconds"] for found in later for row in found]
    yield f"in the second run of {min(seconds):.0f} to {max(seconds):.0f} s:"
    missed, asked = over_none("sglang_misses_h200"), float(goal("sglang_misses_h200", "miss_path"))
    assert missed["ours"] < asked <= missed["hicache"]
    yield "There HiCache meets it"
    held = over_none("sglang_serving_turns_2x_h200")
    assert min(held.values()) >= asked
    before, later = over_none(names[1]), over_none("sglang_serving_later_1x_h200")
    assert before["ours"] < asked <= before["hicache"]
    yield f"ours had **{before['ours']:.4f}** (HiCache {before['hicache']:.4f}) at e8175df, and"
    yield f"**{later['ours']:.4f}** (**{later['hicache']:.4f}**) at 1fbf2ab"
    tokens = [of["loaded_bytes"] / of["sync_loads"] / (128 << 10) for name, of in counted if name == "ours"]
    yield f"a load had {min(tokens):,.0f} to {max(tokens):,.0f} tokens on average"


def sglang_with_turns() -> Iterator[str]:
    slow = [rows_of("chats", result(f"sglang_serving_turns_{host}_h200")) for host in ("05x", "1x", "2x")]
    chats = {(row["host_share"], row["answer"], row["connector"]): row for rows in slow for row in rows}
    seconds = [row["seconds"] for row in chats.values()]
    yield f"windows of {max(seconds):.0f} s, and of {min(seconds):.1f} s where the host holds twice"
    answered = [chats[2.01, answer, name]["arrived"] for answer in (8, 32) for name in ("ours", "hicache")]
    yield "host memory**, {} turns against {} in a window, and {} against {}.".format(*answered)
    rates = [load_rate(row) for row in chats.values() if row["connector"] == "ours"]
    yield f"Its loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s in all three runs"
    rows = [row for row in result("sglang_ttft_turns_h200")["rows"] if "all_load_bytes_per_second" in row]
    alone = [rate / 1e9 for row in rows for rate in row["all_load_bytes_per_second"]]
    yield f"though at {min(alone):.0f} to {max(alone):.0f} without"
    before = rows_of("chats", *(result(f"sglang_serving_{host}_h200") for host in ("05x", "1x", "2x")))
    of_before = {(row["host_share"], row["answer"], row["connector"]): row["turns_per_second"] for row in before}
    shares = [row["turns_per_second"] / of_before[key] for key, row in chats.items() if key[2] == "hicache"]
    yield f"HiCache had {min(shares):.2f} to {max(shares):.2f} of the turns that it had at e8175df"
    claims = result("sglang_ttft_turns_h200")["claims"]
    late = (100 * (claims[f"ours_host_hit_over_hicache_{size}"]["value"] - 1) for size in (2048, 8192, 32768))
    yield "misses HiCache's time there, by {:.0f}, {:.0f} and {:.0f} %".format(*late)


def sglang_on_other_hosts() -> Iterator[str]:
    without = []
    for name, turns, rate, window in (
        (
            "15x",
            "a later p50**: {ours:.2f} and {hicache:.2f} a second with",
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
    yield "On the two other hosts ours had {:.2f} and {:.2f} of HiCache's turns with".format(*without)
    found = {row["connector"]: row for row in rows_of("chats", result("sglang_calibrations_15x_h200"))}
    turns = {name: row["turns_per_second"] for name, row in found.items()}
    bad = (turns[f'ours:calibration="/tmp/{name}.json"'] for name in ("bad1", "bad2"))
    yield "ours had {:.2f} and {:.2f} a second beside {:.2f} when".format(*bad, turns["ours"])
    yield f"on a host where loads move at {load_rate(found['ours']):.0f} GB/s"


def load_rate(row: Row) -> float:
    """GB/s of all loads of a window."""
    return float(row["counted"]["loaded_bytes"] / row["counted"]["load_milliseconds"] / 1e6)


TOLD = (sglang, sglang_with_turns, sglang_on_other_hosts)
