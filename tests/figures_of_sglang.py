"""Phrases of docs/sglang.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from integration.figures.results import rows_of
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
    yield (
        f"takes {ms[32768, 'host_hit', packed]:.1f} ms at 32,768, {over[32768, packed]:.3f} times HiCache's "
        f"{ms[32768, 'host_hit', 'hicache']:.1f}, and is later at both others"
    )
    assert min(over[size, packed] for size in (2048, 8192)) > 1
    long, short = sglang_packed(32), sglang_packed(8)
    yield f"**{long:.2f}** times the turns of HiCache there, with answers of 32, and {short:.2f} with"
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
    yield f"one window of {min(seconds):.0f} to {max(seconds):.0f} s for each engine"
    missed, asked = over_none("sglang_misses_h200"), float(goal("sglang_misses_h200", "miss_path"))
    assert missed["ours"] < asked <= missed["hicache"]
    yield "There HiCache meets it"
    held = over_none("sglang_serving_turns_2x_h200")
    assert min(held.values()) >= asked
    before, later = over_none(names[1]), over_none("sglang_serving_later_1x_h200")
    yield f"ours had {before['ours']:.4f} (HiCache {before['hicache']:.4f}) on the host with four GPUs"
    yield f"**{later['ours']:.4f}** (**{later['hicache']:.4f}**) on the one with two"
    tokens = [of["loaded_bytes"] / of["sync_loads"] / (128 << 10) for name, of in counted if name == "ours"]
    yield f"a load had {min(tokens):,.0f} to {max(tokens):,.0f} tokens on average"


def sglang_with_turns() -> Iterator[str]:
    for name, form in (
        ("turns_off_15x", "had HiCache's turns that day: {ours:.2f} and {hicache:.2f} a second with"),
        ("turns_off_2x", "{ours:.2f} and {hicache:.2f} with twice"),
        ("calibrations_15x", "{bad1:.2f} and {bad2:.2f} a second beside {ours:.2f}"),
    ):
        chats = rows_of("chats", result(f"sglang_{name}_h200"))
        turns = {row["connector"]: row["turns_per_second"] for row in chats}
        turns |= {bad: turns.get(f'ours:calibration="/tmp/{bad}.json"') for bad in ("bad1", "bad2")}
        yield form.format_map(turns)
    slow = [rows_of("chats", result(f"sglang_serving_turns_{host}_h200")) for host in ("05x", "1x", "2x")]
    rates = [
        row["counted"]["loaded_bytes"] / row["counted"]["load_milliseconds"] / 1e6
        for rows in slow
        for row in rows
        if row["connector"] == "ours"
    ]
    yield f"its loads moved at {min(rates):.0f} to {max(rates):.0f} GB/s in all three runs"
    rows = [row for row in result("sglang_ttft_turns_h200")["rows"] if "all_load_bytes_per_second" in row]
    alone = [rate / 1e9 for row in rows for rate in row["all_load_bytes_per_second"]]
    yield f"though at {min(alone):.0f} to {max(alone):.0f} without"
    claims = result("sglang_ttft_turns_h200")["claims"]
    late = (100 * (claims[f"ours_host_hit_over_hicache_{size}"]["value"] - 1) for size in (2048, 8192, 32768))
    yield "misses HiCache's time there, by {:.0f}, {:.0f} and {:.0f} %".format(*late)


TOLD = (sglang, sglang_with_turns)
