"""Figures that documents have in sentences and tables of their own, outside of what `integration/figures.py` writes:
they are those of the results. A phrase that is worded anew is worded anew here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any

import pytest

from integration import figures, overview

OLDER_CHATS = (
    *("0251", "all", "short_answers", "8_tokens_8s"),
    *("32_tokens_12s", "8_tokens_10s"),
)
"""Runs in README.md and docs/benchmarks.md over OffloadingConnector, in the order of README.md."""
_OVER = "chat_throughput_over_offloading"


@cache
def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((figures.RESULTS / f"{name}.json").read_text())
    return found


def claim(name: str, which: str) -> float:
    return float(result(name)["claims"][which]["value"])


def rows(name: str, key: str) -> dict[Any, Any]:
    """Rows of a result by one of their fields, those that have it."""
    return {row[key]: row for row in result(name)["rows"] if key in row}


def host_hits(name: str) -> dict[tuple[int, str, str], float]:
    """Milliseconds to the first token by tokens, kind and connector."""
    hits = [row for row in result(name)["rows"] if row["part"] == "hits"]
    return {(row["tokens"], row["kind"], row["connector"]): row["ms"] for row in hits}


def over_none(name: str) -> dict[str, float]:
    """Throughput where nothing is hit, over that without a connector."""
    return {row["connector"]: row["over_none"] for row in result(name)["rows"] if "over_none" in row}


def older_chats() -> list[float]:
    return [claim(f"vllm_serving_{name}_h200", f"ours_{_OVER}") for name in OLDER_CHATS]


def chats_of_readme() -> Iterator[str]:
    engines = {regime: dict(turns) for regime, turns in overview.chats().items()}
    ours = {regime: turns.pop("ours") for regime, turns in engines.items()}
    ratios = {regime: ours[regime] / max(turns.values()) for regime, turns in engines.items()}
    least, *others = sorted(ratio for regime, ratio in ratios.items() if "0.25.1" in regime)
    assert len(others) == 6
    yield f"{others[0]:.2f} to {others[-1]:.2f} times the best peer in six of seven rows | **{least:.2f}** where all"
    lossless = {
        row["answer"]: row["turns_per_second"]
        for row in result("vllm_serving_0320_075x_h200")["rows"]
        if row.get("connector") == 'ours:host_form="lossless"' and "answer" in row
    }
    later = [regime for regime in ratios if "0.32" in regime]
    best = [lossless[answer] / max(engines[regime].values()) for answer, regime in zip((8, 32), later, strict=True)]
    plain = " and ".join(f"{ratios[regime]:.2f}" for regime in later)
    yield f"{plain} times; {best[0]:.2f} and {best[1]:.2f} with `host_form` `lossless`"
    first, second, third, fourth, fifth, sixth = older_chats()
    selective = claim("vllm_serving_8_tokens_10s_h200", f"ours:write_through_selective_{_OVER}")
    yield f"{first:.2f}, {second:.2f}, {third:.2f} and **{fourth:.2f}**, `write_through`"
    yield f"**{fifth:.2f}, {sixth:.2f}**, and **{selective:.2f}** with `write_through_selective`"


def first_tokens_of_readme() -> Iterator[str]:
    ms, sizes = host_hits("vllm_ttft_h200"), (2048, 8192, 32768)
    ours, peer = (", ".join(f"{ms[size, 'host_hit', name]:.1f}" for size in sizes) for name in ("ours", "offloading"))
    yield f"{ours} ms at 2,048, 8,192, 32,768 tokens; OffloadingConnector {peer}"
    longer = [f"{100 * (ms[size, 'cold', 'ours'] / ms[size, 'cold', 'none'] - 1):.1g}" for size in sizes]
    yield "what is computed takes {}, {} and {} % longer".format(*longer)


def sglang_of_readme() -> Iterator[str]:
    default_now = (2048, "ours"), (8192, "ours"), (32768, 'ours:copy_path="staged"')
    ms, over = sglang_host_hits(), sglang_over_hicache()
    first, second, third = (ms[size, "host_hit", name] for size, name in default_now)
    yield f"{first:.1f}, {second:.1f} and, packed as by default now, {third:.1f} ms at these lengths"
    first, second, third = (over[key] for key in default_now)
    yield f"first token **{first:.3f}, {second:.3f}** and {third:.3f} times"
    ratios = sorted(sglang_turns().values())
    yield f"{ratios[2]:.2f} to {ratios[-1]:.2f} times on hosts for half or all of them"
    assert ratios[:2] == sorted(sglang_turns()[2.01, answer] for answer in (8, 32))
    yield f"**{ratios[1]:.3f}, {ratios[0]:.3f}** on a host for twice as many, packed **{sglang_packed(32):.2f}** in one"
    missed = over_none("sglang_serving_1x_h200")
    yield f"**{missed['ours']:.4f}** of no host cache, HiCache {missed['hicache']:.4f}"


def misses_of_readme() -> Iterator[str]:
    older, later = over_none("vllm_misses_0251_h200"), over_none("vllm_serving_0320_075x_h200")
    lossless = later['ours:host_form="lossless"']
    yield (
        f"**{older['ours']:.3f}** and **{later['ours']:.4f}** of the throughput without a connector; "
        f"**{lossless:.3f}** with `lossless` in 0.32 | OffloadingConnector has {older['offloading']:.3f} and "
        f"{later['offloading']:.3f}"
    )


def benchmarks() -> Iterator[str]:
    for name, form in (
        ("vllm_misses_0251_h200", "have **{:.3f}** ({:.3f} to {:.3f}) of the throughput"),
        ("vllm_misses_later_0251_h200", "**{:.3f}** ({:.3f} to {:.3f}), OffloadingConnector"),
    ):
        ours = rows(name, "connector")["ours"]
        yield form.format(*(ours[f"over_none{part}"] for part in ("", "_p10", "_p90")))
    for name, ratio in zip(OLDER_CHATS, older_chats(), strict=True):
        missed = claim(f"vllm_serving_{name}_h200", "ours_miss_path_throughput")
        mark = "**" if ratio < 1 else ""
        yield f"`write_through` | {mark}{ratio:.3f}{mark} | {missed:.3f} | `vllm_serving_{name}_h200.json` |"


def transfers() -> Iterator[str]:
    ipc, nixl = (rows(f"pd_{name}h200", "case") for name in ("", "nixl_"))
    for case, digits in (("2 MiB blocks", 0), ("64 KiB pieces", 1)):
        one, other = (median(found[case]["push_gb_s"]) for found in (ipc, nixl))
        which = f"{case}: rate against one large copy"
        share, missed = claim("pd_h200", which), claim("pd_nixl_h200", which)
        yield f"| {one:.0f} GB/s, {share:.3f} | {other:.{digits}f} GB/s, **{missed:.{digits + 2}f}** |"
    again = [claim("pd_transfer_h200", f"{case}: rate against one large copy") for case in ipc]
    yield "CUDA IPC): {:.3f} and {:.3f}.".format(*again)
    for row in result("vllm_pd_h200")["rows"][:3]:
        ms = {name: median(values) for name, values in row["all_ms"].items()}
        alone, pair = (f"{ms[name]:.1f}" if ms[name] < 1000 else f"{ms[name]:,.0f}" for name in ("alone", "pair"))
        added = claim("vllm_pd_h200", f"added_to_the_first_token_at_{row['tokens']}_tokens")
        yield (
            f"| {row['tokens']:,} | {alone} | {pair} | {added:.1f} | {ms['behind']:.1f} | {ms['at_once']:.1f} | "
            f"{ms['held']:.1f} |"
        )
    tried = {name: row["tried"] for name, row in rows("attacks", "attack").items()}
    yield (
        f"{tried['fuzz']:,} fuzzed inputs, {tried['junk']:,} junk connections and {tried['relay']} relays: no thread"
    )
    late = {name: row["tried"] for name, row in rows("attacks_late_writes", "attack").items()}
    yield f"{late['late_writes_direct']} times direct and {late['late_writes_staged']} times staged, no late write"


def attacks_on_storage() -> Iterator[str]:
    tried = {name: row["tried"] for name, row in rows("attacks", "attack").items()}
    kills = rows("attacks_kills", "attack")["kills"]["kills"]
    stall = claim("attacks", "stall_ms_of_the_model_thread_on_a_hung_disk")
    yield (
        f"{kills} kills, {tried['flips']} flipped bits, {tried['damages']} damaged files, {tried['same_prefix']} "
        f"rounds of two writers, {tried['hangs']} hung and {tried['faults']} faulty disks: "
        f"no wrong byte, no good block lost, and {stall:.2f} ms."
    )


def lossless() -> Iterator[str]:
    sizes = {(row["what"], row["form"]): row["block_bytes"] for row in result("storage_lossless")["rows"]}
    small, large = (
        sizes[f"folder, blocks of {of}", "raw"] / sizes[f"folder, blocks of {of}", "lossless"]
        for of in ("SmolLM2", "8B")
    )
    yield f"SmolLM2's blocks of 32 tokens {small:.3f} times, those of an 8B model of 16 tokens {large:.3f}"
    coder = rows("lossless_h200", "kernel")["coded, 16 programs"]
    assert (round(coder["encode"]), round(coder["decode"])) == (338, 386), "docs/peers.md has them"
    turns = [
        claim("vllm_serving_0320_075x_h200", f"turns_lossless_over_raw_host_0.75x_answers_{n}_vllm_0320")
        for n in (8, 32)
    ]
    yield f"lossless answered {turns[0]:.2f} times the turns of raw"
    yield f"and {turns[1]:.2f} times with answers of 32"
    missed = over_none("vllm_serving_0320_075x_h200")
    share = missed['ours:host_form="lossless"']
    yield f"it had **{share:.3f}** of the throughput without a connector, raw **{missed['ours']:.4f}**"


def sglang_host_hits() -> dict[tuple[int, str, str], float]:
    return host_hits("sglang_ttft_h200") | host_hits("sglang_ttft_32k_h200")


def sglang_over_hicache() -> dict[tuple[int, str], float]:
    """What a host hit takes of HiCache's, by tokens and connector."""
    ms = sglang_host_hits()
    return {
        (size, name): value / ms[size, "host_hit", "hicache"]
        for (size, kind, name), value in ms.items()
        if kind == "host_hit"
    }


def sglang_turns() -> dict[tuple[float, int], float]:
    """Turns of the default over HiCache's, by size of the host and length of answers."""
    chats = [row for name in ("05x", "1x", "2x") for row in result(f"sglang_serving_{name}_h200")["rows"]]
    found = {(row["host_share"], row["answer"], row["connector"]): row for row in chats if row["part"] == "chats"}
    return {
        (host, answer): row["turns_per_second"] / found[host, answer, "hicache"]["turns_per_second"]
        for (host, answer, name), row in found.items()
        if name == "ours"
    }


def sglang_packed(answer: int) -> float:
    """Turns with loads that are packed over HiCache's, where the host holds all chats."""
    chats = [row for row in result("sglang_serving_1x_h200")["rows"] if row.get("answer") == answer]
    turns = {row["connector"]: row["turns_per_second"] for row in chats}
    return turns['ours:copy_path="staged"'] / turns["hicache"]


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
    tokens = [of["loaded_bytes"] / of["sync_loads"] / (128 << 10) for name, of in counted if name == "ours"]
    yield f"a load had {min(tokens):,.0f} to {max(tokens):,.0f} tokens on average"


def policies() -> Iterator[str]:
    found = result("policies")["rows"]
    margins = sorted(row["margin"] for row in found)
    yield f"worst of {len(found)} rows `adaptive` has **{-margins[0]:.2f} points less**"
    yield f"in the others {-margins[1]:.2f} less at most"
    ahead = claim("policies", "default_to_lru_on_average")
    yield f"In the best row it has {margins[-1]:.2f} points more, and {ahead:.2f} more than LRU on average"
    hits = [row["host_hits_percent"] for row in found]
    most = max(of["write_through"] - of["adaptive"] for of in hits)
    yield f"declines nothing, has {most:.2f} points more at most"


def changes() -> Iterator[str]:
    hits = [row["host_hits_percent"] for row in result("policies")["rows"] if row["trace"] == "phases"]
    yield f"{max(of['adaptive'] - of['LRU'] for of in hits):.1f} points more on the smallest (`policies.json`)"
    missed, over = over_none("sglang_serving_1x_h200"), sglang_over_hicache()
    ours, peer = (f"{missed[name]:.4f}" for name in ("ours", "hicache"))
    yield f"it has {ours} of the throughput without a host cache (goal 0.99), HiCache {peer}"
    chats = [row for row in result("sglang_serving_05x_h200")["rows"] if row["part"] == "chats"]
    cached = {(row["connector"], row["answer"]): f"{100 * row['cached_share']:.0f}" for row in chats}
    (half,) = {cached["ours", answer] for answer in (8, 32)}
    yield f"have {half} % cached, with HiCache {cached['hicache', 8]} and {cached['hicache', 32]}"
    yield f"after {over[2048, 'ours']:.3f} and {over[8192, 'ours']:.3f} times what it takes with HiCache"


TOLD: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "CHANGELOG.md": (changes,),
    "README.md": (chats_of_readme, first_tokens_of_readme, misses_of_readme, sglang_of_readme),
    "docs/benchmarks.md": (benchmarks, policies),
    "docs/lossless.md": (lossless,),
    "docs/peers.md": (transfers,),
    "docs/sglang.md": (sglang,),
    "docs/storage.md": (attacks_on_storage,),
}


@pytest.mark.parametrize("document", TOLD)
def test_figures_in_sentences_are_those_of_the_results(document: str) -> None:
    text = " ".join((figures.ROOT / document).read_text().split())
    phrases = [phrase for told in TOLD[document] for phrase in told()]
    assert phrases and [phrase for phrase in phrases if phrase not in text] == []
