"""Figures that documents have in sentences and tables of their own, outside of what `integration/figures/` writes:
they are those of the results. A phrase that is worded anew is worded anew here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import pytest

from integration.bench.peers import LOSSLESS
from integration.figures.results import ROOT, rows_of
from tests import figures_of_latest, figures_of_machines, figures_of_readme, figures_of_sglang, figures_of_turns
from tests.kept_results import (
    by_regime,
    claim,
    coded_over_raw_by_dma,
    counted,
    goal,
    host_hits,
    longer,
    lossless_over_raw,
    num_loads,
    older_chats,
    over_none,
    result,
    rows,
    sglang_by_path,
    sglang_over_hicache,
    window,
)


def by_path() -> Iterator[str]:
    ms = sglang_by_path()
    packed, kernel = (ms[32768, "host_hit", name] for name in ('ours:copy_path="staged"', "ours"))
    yield f"came after {packed:.1f} ms with loads that are packed, and {kernel:.1f} by the kernel"


def benchmarks() -> Iterator[str]:
    demo = result("demo_1000_h200")["claims"]["ttft_speedup_of_1000_token_host_hit"]
    yield f"Sooner by {demo['goal']} times was the goal, and **the last line, {demo['value']:.1f}, misses it**"
    for name, form in (
        ("vllm_misses_0251_h200", "have **{:.3f}** ({:.3f} to {:.3f}) of the throughput"),
        ("vllm_misses_later_0251_h200", "**{:.3f}** ({:.3f} to {:.3f}), OffloadingConnector"),
    ):
        ours = rows(name, "connector")["ours"]
        yield form.format(*(ours[f"over_none{part}"] for part in ("", "_p10", "_p90")))
    missed = over_none("vllm_misses_0251_h200")
    yield f"{missed['simple']:.3f} with SimpleCPUOffloadConnector and {missed['lmcache']:.3f} with LMCache"
    missed = over_none("vllm_misses_later_0251_h200")
    yield (
        f"OffloadingConnector {missed['offloading']:.3f}, SimpleCPUOffloadConnector {missed['simple']:.3f}, LMCache "
        f"{missed['lmcache']:.3f}"
    )


def chats_0251() -> Iterator[str]:
    """Lines of the table of vLLM 0.25.1, bold aside."""
    for size, share in (("05x", 0.5), ("075x", 0.75), ("1x", 1)):
        found = [row for row in result(f"vllm_serving_0251_{size}_h200")["rows"] if row["part"] == "chats"]
        for answer in sorted({row["answer"] for row in found}):
            windows = {row["connector"]: row for row in found if row["answer"] == answer}
            names = ("ours", "ours:write_through", "offloading", "simple", "lmcache")
            cells = [window(windows[name]) if name in windows else "not measured" for name in names]
            yield f"| {share:g}x, {answer} tokens | {' | '.join(cells)} | "


def first_tokens() -> Iterator[str]:
    name, sizes = "vllm_ttft_0320_h200", (2048, 8192, 32768)
    for form, which in (
        ("takes {:.2f}, {:.2f} and **{:.2f}** of OffloadingConnector's", "offloading"),
        ("{:.2f}, {:.2f} and {:.2f} of SimpleCPUOffloadConnector's", "simple"),
        ("{:.2f}, {:.2f} and **{:.2f}** of a device hit without a connector", "nones_device_hit_plus_link"),
    ):
        yield form.format(*(claim(name, f"ours_host_hit_over_{which}_{size}") for size in sizes))
    yield "(goals: {}, {}, {})".format(*(goal(name, f"ours_host_hit_over_offloading_{size}") for size in sizes))
    rows, ms = result(name)["rows"], host_hits(name)
    link = rows[0]["link_bytes_per_second"]
    yield f"at the link's {link / 1e9:.1f} GB/s"
    same = {row["tokens_as_computed"] for row in rows if row.get("kind") == "device_hit" and row["tokens"] == 8192}
    yield "the tokens of computing for {} of 6 prompts, without a connector as well".format(*same)
    assert len(same) == 1
    older = host_hits("vllm_ttft_block_major_h200")
    pairs = [(older[n, "cold", "ours"], older[n, "cold", "ours:block_major=true"]) for n in sizes]
    yield "{:.1f} and {:.1f}, {:.1f} and {:.1f}, {:,.0f} and {:,.0f} ms".format(*(ms for pair in pairs for ms in pair))
    lmcache = (host_hits("vllm_ttft_0251_h200")[n, "host_hit", "lmcache"] for n in sizes)
    yield "LMCache 0.5.2 took {:.1f}, {:.1f} and {:.1f} ms".format(*lmcache)
    yield f"computed takes {longer()} % longer with ours"
    yield f"waited for {100 * claim(name, 'ours_exposed_wait_over_load_at_75_percent'):.1f} % of the load's duration"
    void = ms[32768, "host_hit", "lmcache"]
    yield f"after {void:.1f} ms, less than the {(4 << 30) / link * 1e3:.1f} that the bytes take on the link"
    yield f"a host hit took {host_hits('vllm_ttft_h200')[32768, 'host_hit', 'ours']:.1f} ms there"
    for older, form in (
        ("vllm_ttft_h200", "2026-11-21) | {}, {} | {}, {} | {}, {} |"),
        ("vllm_ttft_0251_h200", "222089b) | {}, {} | {}, {} | {}, {} |"),
        ("vllm_ttft_0251_eager_h200", "`vllm_ttft_0251_eager_h200.json`) | {}, {} | {}, {} | {}, {} |"),
    ):
        hits = host_hits(older)
        pairs = [(hits[size, "host_hit", "ours"], hits[size, "host_hit", "offloading"]) for size in sizes]
        yield form.format(*(text for ours, peer in pairs for text in (f"**{ours:.1f}**", f"{peer:.1f}")))


def start() -> Iterator[str]:
    name = "vllm_ttft_0320_h200"
    (row,) = [row for row in result(name)["rows"] if row["part"] == "startup"]
    ready = claim(name, "ours_host_memory_ready_at_first_token")
    yield f"came {row['first_token_seconds']:.0f} s after the start, when {ready:.2f} of that memory was page-locked"


def chats() -> Iterator[str]:
    tokens = [counted("1x", answer)["host_hit_tokens"] / counted("1x", answer)["sync_loads"] for answer in (8, 32, 128)]
    assert not any(counted("1x", answer)["async_loads"] for answer in (8, 32, 128))
    assert sum(counted("2x", answer)["sync_loads"] for answer in (8, 32, 128)) == 2
    yield "at 1x all loads were in the step, of {:,.0f}, {:,.0f} and {:,.0f} tokens on average".format(*tokens)
    for share, form in (
        ("075x", "{:.0f}, {:.0f} and {:.0f} % were, and all loads had {:,.0f}, {:,.0f} and {:,.0f} tokens"),
        ("05x", "{:.0f}, {:.0f} and {:.0f} %, {:,.0f}, {:,.0f} and {:,.0f} tokens"),
    ):
        windows = [(counted(share, answer), num_loads(share, answer)) for answer in (8, 32, 128)]
        in_the_step = [100 * window["sync_loads"] / loads for window, loads in windows]
        yield form.format(*in_the_step, *(window["host_hit_tokens"] / loads for window, loads in windows))
    again = (host_hits("vllm_lossless_0320_h200")[size, "host_hit", "ours"] for size in (2048, 8192, 32768))
    yield "later: **{:.1f}**, {:.1f} and **{:.1f}** ms".format(*again)
    found, name = by_regime(), "vllm_regimes_0320_h200"
    worst, twice = found[1.0, 128], found[2.0, 128]
    ours, peer = worst["engines"]["ours"], worst["engines"]["lmcache"]
    yield f"LMCache is ahead, **{worst['over_best_peer']:.2f}**: {peer['arrived']} turns in its"
    yield f"turns in its window against {ours['arrived']},"
    yield f"{peer['cached_share']:.0%} of its prompts cached against {ours['cached_share']:.0%}".replace("%", " %")
    yield f"p50 is {worst['p50_over_soonest_peer']:.2f} of its"
    spent = counted("1x", 128)
    share = spent["decoding_ms"] / (spent["idle_ms"] + spent["prefill_ms"] + spent["decoding_ms"])
    yield f"Decoding is {share:.2f} of the time for which a turn of ours runs"
    engines = twice["engines"]
    yield f"it is {engines['ours']['arrived']} against {engines[twice['best_peer']]['arrived']} turns the other way"
    middling = found[1.0, 32]["engines"]
    through = middling["ours:write_through"]["turns_per_second"] / middling["offloading"]["turns_per_second"]
    yield f"answers of 32, where `write_through` is at {through:.2f}"
    median_over, asked = "turns_over_best_peer_median_of_12_regimes", goal(name, "turns_over_best_peer_median")
    yield f"ahead by **{claim(name, median_over):.2f}**, and the goal was {asked}"
    small = [row["over_best_peer"] for (size, _), row in found.items() if size < 1]
    large = [row["over_best_peer"] for (size, _), row in found.items() if size >= 1]
    yield f"too small for all chats, {min(small):.2f} to {max(small):.2f}, and little"
    yield f"little where it is not, {min(large):.2f} to {max(large):.2f}."
    turns = [engine["arrived"] for row in found.values() for engine in row["engines"].values()]
    yield f"A window has {min(turns)} to {max(turns)} turns"
    older = "vllm_serving_0251_h200"
    turns, missed = claim(older, "ours_chat_throughput_over_offloading"), claim(older, "ours_miss_path_throughput")
    yield f"`{older}.json`: {turns:.2f}, and {missed:.3f} where nothing is hit"


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
    assert (round(coder["encode"]), round(coder["decode"])) == (336, 390), "docs/peers.md has them"
    yield "That is {:.2f}, {:.2f} and **{:.2f}** times the turns of raw".format(*lossless_over_raw())
    yield f"with answers of 8, 32 and 128 tokens (goal {goal('vllm_regimes_0320_h200', 'turns_lossless_over_raw')})"
    later, older = over_none("vllm_regimes_0320_h200"), over_none("vllm_serving_lossless_0251_075x_h200")
    yield f"it had **{later[LOSSLESS]:.3f}** of the throughput without a connector, raw {later['ours']:.3f} (goal 0.99)"
    yield f"in vLLM 0.25.1 **{older[LOSSLESS]:.3f}** and **{older['ours']:.3f}**"
    (short, long), (old_short, old_long) = (
        [claim(f"vllm_lossless_{version}_h200", f"lossless_host_hit_over_raw_{size}") for size in (8192, 32768)]
        for version in ("0320", "0251")
    )
    yield f"takes {short:.3f} of raw's time at 8,192 tokens and {long:.3f} at 32,768 (goal 0.85)"
    yield f"took **{old_short:.3f}** at 8,192 and {old_long:.3f} at 32,768"
    raw = host_hits("vllm_ttft_h200")[32768, "host_hit", "ours"]
    coded = host_hits("vllm_lossless_0320_h200")[32768, "host_hit", LOSSLESS]
    yield f"Against the {raw:.1f} ms by DMA of an older run, of another day and code (`vllm_ttft_h200.json`), the"
    yield f"the {coded:.1f} ms of lossless are"
    measured = result("vllm_lossless_0320_h200")["rows"]
    parts = {row["connector"]: row["ms"] for row in measured if row["part"] == "75_percent"}
    yield f"lossless is later than raw, {parts[LOSSLESS]:.1f} ms and {parts['ours']:.1f}; no goal"
    in_the_step = [100 * counted("075x", answer)["sync_loads"] / num_loads("075x", answer) for answer in (8, 32, 128)]
    yield f"Of the raw loads {min(in_the_step):.0f} to {max(in_the_step):.0f} % were in the step"
    yield f"lossless are **{coded_over_raw_by_dma():.2f}**, which misses the goal"


def choosing() -> Iterator[str]:
    engines = [row["engines"] for row in by_regime("vllm_regimes_choice_05x_0320_h200").values()]
    ours = [100 * one["ours"]["cached_share"] for one in engines]
    peers = [100 * engine["cached_share"] for one in engines for name, engine in one.items() if name != "ours"]
    yield f"{min(ours):.0f} to {max(ours):.0f} % of the prompts' tokens were cached under the default policy"
    yield f"and {min(peers):.0f} to {max(peers):.0f} % with others"
    turns = {
        key: {name: f"{one['turns_per_second']:.2f}" for name, one in row["engines"].items()}
        for key, row in by_regime().items()
    }
    fits, short = turns[1.0, 32], turns[0.5, 8]
    yield f"{fits['ours:write_through']} turns a second against {fits['ours']} in one of three such rows"
    later = [row["engines"] for row in by_regime("vllm_regimes_latest_0320_h200").values()]
    ahead = [of["ours:write_through"]["turns_per_second"] > of["ours"]["turns_per_second"] for of in later]
    assert (sum(ahead), len(ahead)) == (1, 6)
    yield "in a later run more in one of six"
    yield f"{short['ours:write_through']} turns against {short['ours']}"
    missed = [over_none(name)["ours"] for name in ("vllm_misses_paths_0251_h200", "vllm_regimes_0320_h200")]
    assert missed[0] < over_none("vllm_misses_0251_h200")["ours"]
    yield f"{missed[0]:.3f} to {missed[1]:.3f} of the throughput by run (goal 0.99)"
    yield f"{older_chats()['8_tokens_10s', 'write_through_selective']:.3f} of OffloadingConnector"
    older = [row["over_none"]["value"] for row in result("vllm_serving_older_h200")["rows"] if "over_none" in row]
    yield f"little ({min(older):.2f} to {missed[1]:.2f} of the throughput"
    added = [claim("vllm_pd_h200", f"added_to_the_first_token_at_{size}_tokens") for size in (2048, 8192, 32768)]
    yield f"It costs {min(added):.0f} to {max(added):.0f} ms of time to first token"


def vllm() -> Iterator[str]:
    older = [row["over_none"] for row in result("vllm_serving_older_h200")["rows"] if "over_none" in row]
    least, most = min(row["value"] for row in older), over_none("vllm_regimes_0320_h200")["ours"]
    yield f"cost {100 * (1 - most):.0f} to {100 * (1 - least):.0f} % of the throughput, by host and version"


def policies() -> Iterator[str]:
    found = result("policies")["rows"]
    margins = sorted(row["margin"] for row in found)
    yield f"worst of {len(found)} rows `adaptive` has **{-margins[0]:.2f} points less**"
    yield f"in the next ones {-margins[1]:.2f} and {-margins[2]:.2f} (`nightly` and `nightly_long`, 40 %)"
    yield f"in the others {-margins[3]:.2f} less at most"
    ahead = claim("policies", "default_to_lru_on_average")
    yield f"In the best row it has {margins[-1]:.2f} points more, and {ahead:.2f} more than LRU on average"
    hits = [row["host_hits_percent"] for row in found]
    most = max(of["write_through"] - of["adaptive"] for of in hits)
    yield f"declines nothing, has {most:.2f} points more at most (`phases`, a host of 2 %)"


def changes() -> Iterator[str]:
    hits = [row["host_hits_percent"] for row in result("policies")["rows"] if row["trace"] == "phases"]
    yield f"{max(of['adaptive'] - of['LRU'] for of in hits):.1f} points more on the smallest (`policies.json`)"
    missed = over_none("sglang_misses_h200")
    ours, peer = (f"{missed[name]:.4f}" for name in ("ours", "hicache"))
    yield f"it has {ours} of the throughput without a host cache (goal 0.99), HiCache {peer}"
    half = rows_of("chats", result("sglang_serving_turns_05x_h200"))
    cached = {row["connector"]: 100 * row["cached_share"] for row in half}
    yield "have {ours:.0f} % cached, with HiCache {hicache:.0f} (".format_map(cached)
    for name, form in (
        ("ttft_paths", "after {:.3f} and {:.3f} times what it took with HiCache"),
        ("ttft", "with copies that yield it comes after {:.2f} and {:.2f} times"),
        ("ttft_turns", "on a slow host came after {:.2f} and {:.2f} times"),
    ):
        yield form.format(*sglang_over_hicache(name, 2048, 8192))


TOLD: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "ARCHITECTURE.md": (figures_of_machines.memory_of_a_block,),
    "CHANGELOG.md": (changes,),
    "README.md": figures_of_readme.TOLD,
    "docs/benchmarks.md": (
        benchmarks,
        start,
        policies,
        *figures_of_turns.TOLD,
        *figures_of_latest.TOLD,
        *figures_of_machines.TOLD,
    ),
    "docs/benchmarks_older.md": (
        *figures_of_readme.SUMMARY,
        figures_of_latest.by_choice_in_short,
        chats_0251,
        by_path,
        first_tokens,
        chats,
        *figures_of_turns.EARLIER_CHATS,
        *figures_of_latest.OLDER,
        *figures_of_sglang.EARLIER,
        figures_of_latest.in_sglang,
    ),
    "docs/choosing.md": (choosing,),
    "docs/lossless.md": (lossless,),
    "docs/peers.md": (transfers,),
    "docs/sglang.md": (*figures_of_sglang.TOLD, figures_of_latest.newest_in_sglang),
    "docs/storage.md": (attacks_on_storage,),
    "docs/vllm.md": (vllm,),
}


@pytest.mark.parametrize("document", TOLD)
def test_figures_in_sentences_are_those_of_the_results(document: str) -> None:
    text = " ".join((ROOT / document).read_text().split())
    phrases = [phrase for told in TOLD[document] for phrase in told()]
    plain = text.replace("**", "")  # for lines of tables, whose best cell is bold
    assert phrases
    assert [phrase for phrase in phrases if phrase not in text and not (phrase[0] == "|" and phrase in plain)] == []
