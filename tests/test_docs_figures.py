"""Figures that documents have in sentences and tables of their own, outside of what `integration/figures/` writes:
they are those of the results. A phrase that is worded anew is worded anew here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import pytest

from integration.bench.peers import LOSSLESS
from integration.figures.results import ROOT, origin, rows_of
from tests import figures_of_latest, figures_of_machines, figures_of_readme, figures_of_sglang, figures_of_turns
from tests.kept_results import (
    by_regime,
    claim,
    goal,
    host_hits,
    least_over_none,
    lossless_over_raw,
    older_chats,
    over_none,
    result,
    rows,
    sglang_over_hicache,
)

LOSSLESS_CHATS = "vllm_serving_0320_075x_h200"


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


def start() -> Iterator[str]:
    name = "vllm_ttft_0320_graphs_h200"
    (row,) = [row for row in result(name)["rows"] if row["part"] == "startup"]
    ready = claim(name, "ours_host_memory_ready_at_first_token")
    yield f"came {row['first_token_seconds']:.0f} s after the start, when {ready:.2f} of that memory was page-locked"


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


def lossless_host_hits(name: str) -> tuple[list[float], ...]:
    """Milliseconds, by length: lossless, and raw."""
    ms = host_hits(name)
    return tuple([ms[size, "host_hit", one] for size in (2048, 8192, 32768)] for one in (LOSSLESS, "ours"))


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
    later, older = over_none(LOSSLESS_CHATS), over_none("vllm_serving_lossless_0251_075x_h200")
    yield f"with answers of 8, 32 and 128 tokens (goal {goal(LOSSLESS_CHATS, 'turns_lossless_over_raw')})"
    yield f"it had **{later[LOSSLESS]:.3f}** of the throughput without a connector, raw {later['ours']:.3f} (goal 0.99)"
    yield f"in vLLM 0.25.1 **{older[LOSSLESS]:.3f}** and **{older['ours']:.3f}**"
    newest, old = "vllm_lossless_0320_latest_h200", "vllm_lossless_0251_h200"
    coded, raw = lossless_host_hits(newest)
    shares = [one / other for one, other in zip(coded, raw, strict=True)]
    asked = goal(old, "lossless_host_hit_over_raw")
    yield "takes {:.3f} of raw's time at 8,192 tokens and {:.3f} at 32,768".format(*shares[1:]) + f" (goal {asked})"
    assert min(shares[1:]) > float(asked), "both miss it"
    busy = "vllm_lossless_0320_busy_h200"
    before = [one / other for one, other in zip(*lossless_host_hits(busy), strict=True)]
    yield "it took {:.3f} and {:.3f}: raw's".format(*before[1:])
    loads = (claim(name, "ours_load_over_link_32768") for name in (busy, newest))
    yield "loads of 32,768 tokens reached {:.3f} of the link there, and {:.3f} here".format(*loads)
    old_shares = (claim(old, f"lossless_host_hit_over_raw_{size}") for size in (8192, 32768))
    yield "took **{:.3f}** at 8,192 and {:.3f} at 32,768".format(*old_shares)
    yield f"At 2,048 it is sooner than raw, {coded[0]:.1f} ms and {raw[0]:.1f}"
    parts = {row["connector"]: row["ms"] for row in rows_of("75_percent", result(newest))}
    yield f"host it is later than raw, {parts[LOSSLESS]:.1f} ms and {parts['ours']:.1f}; no goal was set for these"
    windows = [row["counted"] for row in rows_of("chats", result(LOSSLESS_CHATS)) if row["connector"] == "ours"]
    in_the_step = [100 * row["sync_loads"] / (row["sync_loads"] + row["async_loads"]) for row in windows]
    yield f"Of the raw loads {min(in_the_step):.0f} to {max(in_the_step):.0f} % were in the step"


def choosing() -> Iterator[str]:
    regimes, newest = by_regime("vllm_regimes_0320_h200"), by_regime("vllm_regimes_0320_twelve_h200")
    engines = [[row["engines"] for (share, _), row in found.items() if share == 0.5] for found in (regimes, newest)]
    peers = [100 * one[name]["cached_share"] for one in engines[1] for name in ("offloading", "simple", "lmcache")]
    before, ours = ([100 * one["ours"]["cached_share"] for one in found] for found in engines)
    yield f"{min(ours):.0f} to {max(ours):.0f} % of the prompts' tokens were cached under the default policy"
    yield f"and {min(peers):.0f} to {max(peers):.0f} % with other connectors"
    eager = [100 * one["ours:write_through"]["cached_share"] for one in engines[0]]
    yield (
        f"(older code {min(before):.0f} to {max(before):.0f} %, and {min(eager):.0f} to {max(eager):.0f} % with "
        "`write_through`)"
    )
    policies = ("ours:write_through", "ours")
    turns = {
        regime: [f"{row['engines'][name]['turns_per_second']:.2f}" for name in policies]
        for regime, row in regimes.items()
    }
    ahead = [regime for regime, (eager, default) in turns.items() if regime[0] >= 1 and float(eager) > float(default)]
    assert sorted(ahead) == [(1, 8), (2, 32)]
    yield "{} turns a second against {} and {} against {}, the latter right after".format(*turns[2, 32], *turns[1, 8])
    fewer = {regime: pair for regime, pair in turns.items() if regime[0] < 1 and float(pair[0]) < float(pair[1])}
    worst = min(fewer, key=lambda regime: float(fewer[regime][0]) / float(fewer[regime][1]))
    assert (len(fewer), worst) == (5, (0.5, 8))
    yield "fewer turns in five of six such regimes ({} against {} at worst)".format(*turns[worst])
    yield "{} against {} in the sixth".format(*turns[0.5, 32])
    for found in (regimes, newest):
        long = [one["turns_per_second"] for one in found[2, 128]["engines"].values()]
        assert max(long) / min(long) < 1.07
    yield "with twice as much, and answers of 128 tokens, every policy and every connector is within 7 % of the others"
    missed = [over_none(name)["ours"] for name in ("vllm_misses_paths_0251_h200", LOSSLESS_CHATS)]
    assert missed[0] < over_none("vllm_misses_0251_h200")["ours"]
    worst = f"with older code {least_over_none():.2f} at worst"
    yield f"{missed[0]:.3f} to {missed[1]:.3f} of the throughput by run, {worst} (goal 0.99)"
    yield f"{older_chats()['8_tokens_10s', 'write_through_selective']:.3f} of OffloadingConnector's turns"
    yield f"little ({least_over_none():.2f} to {missed[1]:.2f} of the throughput"
    added = [claim("vllm_pd_h200", f"added_to_the_first_token_at_{size}_tokens") for size in (2048, 8192, 32768)]
    yield f"It costs {min(added):.0f} to {max(added):.0f} ms of time to first token"


def vllm() -> Iterator[str]:
    least, most = least_over_none(), over_none(LOSSLESS_CHATS)["ours"]
    yield f"cost {100 * (1 - most):.0f} to {100 * (1 - least):.0f} % of the throughput, by machine and version"


def policies() -> Iterator[str]:
    yield f"`policies.json`, {origin(result('policies'))}, `make bench"
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
    half = [row for row in rows_of("chats", result("sglang_serving_h200")) if row["host_share"] == 0.5]
    cached = {(row["connector"], row["answer"]): f"{100 * row['cached_share']:.0f}" for row in half}
    ours, peer = ([cached[name, answer] for answer in (8, 32)] for name in ("ours", "hicache"))
    yield "have {} % cached with answers of 8 tokens and {} with 32".format(*ours)
    yield "with HiCache {} and {} (".format(*peer)
    for name, form in (
        ("ttft_paths", "after {:.3f} and {:.3f} times what it took with HiCache"),
        ("ttft_dma", "with copies that yield it comes after {:.2f} and {:.2f} times beside other engines"),
        ("ttft_alone", "after {:.2f} and {:.2f} times with nothing beside"),
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
    "docs/choosing.md": (choosing,),
    "docs/lossless.md": (lossless,),
    "docs/peers.md": (transfers,),
    "docs/sglang.md": figures_of_sglang.TOLD,
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
