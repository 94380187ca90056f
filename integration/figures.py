"""Figures in the documents that are written from results, and tables that are written from the code
(`integration/reference.py`), so that they cannot say anything else.

    python -m integration.figures            # print what is not as they say, and exit with 1 if anything is
    python -m integration.figures --write    # put it into the documents

A document has `<!-- figures: NAME -->`, the lines of that name below, and `<!-- end of figures -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from integration import figure_tables
from integration.bench.regimes import MEDIAN_OVER_BEST_PEER
from integration.reference import TABLES
from integration.tables_of_chats import marked, misses_table, older_table, regimes_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "integration" / "bench" / "results"
WIDTH = 120
_BLOCK = re.compile(
    r"(?m)^(?P<begin>(?P<indent> *)<!-- figures: (?P<name>\w+) -->\n)(?P<body>.*?)(?=^ *<!-- end of figures -->)", re.S
)

Result = Mapping[str, Any]

STEPS = {
    "full_host_to_host_with_room": ("200 requests decode on a host without a free block", "full host", "full", "room"),
    "reset_of_a_full_host": ("reset of a full host, blocks in use", "reset", "no router listens", ""),
    "reset_of_a_full_host_with_routers_told": (
        "the same, with routers that are told of each block",
        "reset",
        "routers are told of each block",
        "",
    ),
    "pinned_host_to_host_with_room": (
        "64 requests decode, prompts unsaved: all of the host pinned",
        "no room",
        "pinned",
        "room",
    ),
    "leased_host_to_host_with_room": ("the same, all but one block leased", "no room", "leased", "room"),
    "write_back_64_steps_after_a_burst_to_before": (
        "`write_back`: 64 quiet steps after a burst of 12 prompts",
        "write_back",
        "the 64 steps after it",
        "before a burst",
    ),
    "write_back_later_to_before": ("`write_back`: the steps after those", "write_back", "later", "before a burst"),
    "a_hundred_waiting_requests_to_one": ("100 requests wait for one load", "riders", "100 waiting", "1 waiting"),
    "computed_block_of_two_groups_to_one": (
        "a block of a prompt that is computed and saved, of two block groups",
        "groups, computed",
        "two",
        "one",
    ),
    "hit_block_of_two_groups_to_one": ("the same, of a prompt that is hit", "groups, hit", "two", "one"),
    "storage_keys_to_one_sha256_a_block": (
        "storage keys of a prompt",
        "storage keys",
        "adopt_hashes",
        "one sha256 a block",
    ),
    "observed_step_to_one_that_is_not": (
        "a step with histograms, events and 1 % of the requests traced",
        "observed",
        "all on",
        "nothing on",
    ),
    "insert_to_flat_pool": ("index: insert a block", "insert", "kv_connector", "vllm"),
    "evict_to_flat_pool": ("index: evict a block", "evict", "kv_connector", "vllm"),
    "match_to_flat_pool": ("index: match a block", "match", "kv_connector", "vllm"),
}
"""By claim of `steps.json`: what is measured, its case, its side, and the side that it is compared with, if any."""
_AGAINST = {
    "nothing on": "with none of these",
    "room": "with room",
    "before a burst": "before it",
    "1 waiting": "one waits",
    "one": "of one group",
    "one sha256 a block": "one SHA-256 a block",
    "vllm": "vLLM's block pool",
    "flat_pool": "a model of vLLM's block pool",
    "": "",
}


def steps(result: Result) -> list[str]:
    """A table of all claims, those that are missed in bold."""
    rows = {(row["case"], row["side"]): row for row in result["rows"]}
    claims = result["claims"]
    num_held = sum(claim["holds"] for claim in claims.values())
    head = (
        f"`steps.json`, {_origin(result)}: CPU time of the scheduler's thread on {_machine(result)}, median and in "
        f"brackets the tenths below and above; of fewer than ten samples all, and the longest counts. {num_held} of "
        f"{len(claims)} goals hold, bold figures miss theirs."
    )
    lines = [*_wrapped(head), "", "| | takes | against | ratio or longest | goal |", "|---|---|---|---|---|"]
    for name, claim in claims.items():
        what, case, side, other = STEPS[name]
        other = other if not other or (case, other) in rows else "flat_pool"  # where vLLM is not installed
        value = f"{claim['value']:.1f} ms" if claim["unit"] == "ms" else f"{claim['value']:.2f}"
        value = value if claim["holds"] else f"**{value}**"
        compared = f"{_AGAINST[other]}: {_taken(rows[case, other])}" if other else ""
        lines.append(f"| {what} | {_taken(rows[case, side])} | {compared} | {value} | {claim['goal']:g} |")
        if noise := rows.get((case, f"{other}, again: more")):
            again = _taken(rows[case, f"{other}, again"])
            lines.append(
                f"| what of that is noise: two equal sides | {again} | {compared} | {1 + noise['median'] / 100:.2f} | |"
            )
    return lines


def index(result: Result) -> list[str]:
    """How much longer a block takes among a million than among a thousand; bold misses the goal."""
    claims = [
        result["claims"][f"{operation}_growth_from_1e3_to_1e6_blocks"] for operation in ("match", "insert", "evict")
    ]
    match, insert, evict = (
        f"{claim['value']:.2f}" if claim["holds"] else f"**{claim['value']:.2f}**" for claim in claims
    )
    times = (
        f"a match takes {match} times as long, an insertion {insert}, an eviction {evict} (goal {claims[0]['goal']})"
    )
    return _wrapped(f"`index.json`, {_origin(result)}: from 1,000 to 1,000,000 cached blocks {times}.")


def simulation(result: Result) -> list[str]:
    """What the long run has found, and which floors it has missed."""
    met = {name: claim for name, claim in result["claims"].items() if name.startswith("met: ")}
    missed = [
        f"`{name[5:]}` ({claim['value']} of {claim['goal']})" for name, claim in met.items() if not claim["holds"]
    ]
    floors = f"all {len(met)} floors are met" if not missed else f"of {len(met)} floors missed: {', '.join(missed)}"
    where = f"`integration/bench/results/simulation.json`, {_origin(result)}"
    return _wrapped(f"The last long run ({where}): {_found(result)}; {floors}.")


def simulation_short(result: Result) -> list[str]:
    """The same in a sentence, without floors."""
    return _wrapped(f"{_found(result)} (`simulation.json`, {_origin(result)}).")


def mutants(result: Result) -> list[str]:
    """How many are caught, and each that is not."""
    verdicts = Counter(row["verdict"] for row in result["rows"])
    others = [
        f"`{row['name']}` ({row['verdict']}: {row['title']})" for row in result["rows"] if row["verdict"] != "caught"
    ]
    rest = f"not: {'; '.join(others)}" if others else "none survived, none is unsound, none was skipped"
    where = f"`integration/bench/results/mutants.json`, {_origin(result)}"
    return _wrapped(f"The last run of all ({where}): {verdicts['caught']} of {len(result['rows'])} caught; {rest}.")


def first_tokens(*results: Result) -> list[str]:
    """A table of hits by tokens and engine, of runs of other lengths on one kind of GPU."""
    rows = [row for result in results for row in result["rows"] if row["part"] == "hits"]
    hits = {(row["tokens"], row["kind"], row["connector"]): row for row in rows}
    connectors = list(dict.fromkeys(connector for *_, connector in hits))
    lines = [
        *_wrapped(f"{_named(*results)}: milliseconds to the first token, median and in brackets least and most."),
        "",
        f"| tokens | | {' | '.join(connectors)} |",
        "|---" * (2 + len(connectors)) + "|",
    ]
    for tokens, kind in dict.fromkeys((tokens, kind) for tokens, kind, _ in hits):
        rows = [hits.get((tokens, kind, name)) for name in connectors]
        lines.append(f"| {tokens:,} | {kind.replace('_', ' ')} | {' | '.join(map(_first_token, rows))} |")
    return lines


def sglang_first_tokens(*results: Result) -> list[str]:
    """Those of `first_tokens`, and what host hits take of HiCache's and of what they need."""
    over: dict[str, dict[str, list[str]]] = {}
    for name, claim in _together(*results)["claims"].items():
        who, _, against = name.rpartition("_")[0].partition("_host_hit_over_")
        value = f"{claim['value']:.3f}" if claim["holds"] else f"**{claim['value']:.3f}**"
        over.setdefault(who, {}).setdefault(against, []).append(value)
    told = [
        f"`{who}`: {', '.join(of['hicache'])} of HiCache's, {', '.join(of['nones_device_hit_plus_link'])} of a device "
        f"hit without a host cache and the bytes at the link's rate"
        for who, of in over.items()
    ]
    return [*first_tokens(*results), "", *_wrapped(f"A host hit over others (goal 1), by length. {'; '.join(told)}.")]


def sglang_chats(*results: Result) -> list[str]:
    """A table of chats beside HiCache on hosts of several sizes, and the median of ours over it."""
    claims = {name: claim for name, claim in _together(*results)["claims"].items() if "_over_" in name}
    ratios = [claim["value"] for name, claim in claims.items() if name.startswith("turns_over_")]
    goal, value = MEDIAN_OVER_BEST_PEER["sglang"], median(ratios)
    told = f"{value:.3f}" if value >= goal else f"**{value:.3f}**"
    head = (
        f"{_named(*results)}: turns answered a second, p50 (p99) of the time to first token, and the share of prompts "
        f"that is cached; the host's size is a multiple of what all chats hold."
    )
    rest = (
        f"Of turns ours has {told} times HiCache's in the median of the {len(ratios)} lines (goal {goal}). "
        f"{_held(claims)}"
    )
    return [*_wrapped(head), "", *figure_tables.regimes(results, "hicache"), "", *_wrapped(rest)]


def sglang_misses(result: Result) -> list[str]:
    """A table of throughput where nothing is hit."""
    sizes = result["rows"][0]
    (claim,) = (claim for name, claim in result["claims"].items() if name.startswith("miss_path"))
    head = (
        f"{_named(result)}: prompts of {sizes['miss_length']:,} tokens that nobody repeats, with answers of "
        f"{sizes['miss_answer']}, {sizes['rounds']} rounds in rotating order; medians, goal {claim['goal']:g}."
    )
    rows = [row for row in result["rows"] if row["part"] == "misses"]
    return [*_wrapped(head), "", *figure_tables.misses(rows, claim["goal"])]


def copies(result: Result) -> list[str]:
    """A table of scattered copies, each way of them."""
    head = (
        f"{_named(result)}: 1 GiB of blocks at random places on both sides, 64 pieces each that lie apart, or one of "
        f"2 MiB; share of one large pinned copy to the GPU and from it, what both directions at once reach of two "
        f"large copies (goal 0.95), and of the copy's time that a thread submits (goal 0.05 from 16 KiB up)."
    )
    table = figure_tables.copies(result["rows"], result["claims"])
    return [*_wrapped(f"{head} {_held(result['claims'])}"), "", *table]


def interference(result: Result) -> list[str]:
    """A table of what copies cost a model."""
    head = (
        f"{_named(result)}: loads and saves of 2.25 GiB beside a model, with 256 MiB of staging; each round of "
        f"decoding and prefill alone, beside loads, beside saves and beside both, in rotating order."
    )
    table = figure_tables.interference(result["rows"], result["claims"])
    return [*_wrapped(f"{head} {_held(result['claims'])}"), "", *table]


def lossless(result: Result) -> list[str]:
    """A table of whole copies in both forms, alone and beside products, and which goals are missed."""
    whole = {row["direction"]: row["ms"] for row in result["rows"] if row["part"] == "whole"}
    lost = {
        (row["direction"], row["form"]): row["lost_ms_per_gb"] for row in result["rows"] if row["part"] == "products"
    }
    head = (
        f"`{result['file']}`, {_origin(result)}, {result['hardware']['gpu']}: whole loads and saves of SmolLM2's own "
        f"caches in pieces of 32 KiB, as multiples of one large copy of as many raw bytes, and milliseconds that large "
        f"products lose for each GB of raw bytes that moves beside them."
    )
    lines = [*_wrapped(head), "", "| | raw | lossless | products lose, raw | lossless |", "|---" * 5 + "|"]
    for way, ms in whole.items():
        shares = [median(ms["link"][1:]) / median(ms[form][1:]) for form in ("raw", "lossless")]
        cells = [f"{share:.3f}" for share in shares] + [f"{lost[way, form]:.2f}" for form in ("raw", "lossless")]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return [*lines, "", *_wrapped(_missed(result))]


def lossless_first_tokens(result: Result) -> list[str]:
    """Those of `first_tokens`, how exponents spread, and which goals are missed."""
    spreads = [row for row in result["rows"] if row["part"] == "exponents"]
    told = ", ".join(
        f"{row['entropy_bits']:.2f} bits in {row['of'] if row['of'] == 'SmolLM2' else 'the engine'}" for row in spreads
    )
    return [
        *first_tokens(result),
        "",
        *_wrapped(f"How far exponents lie below the largest near them has {told}. {_missed(result)}"),
    ]


def chats(result: Result) -> list[str]:
    """A table of turns a second, and throughput where nothing is hit."""
    rows = [row for row in result["rows"] if row["part"] == "chats"]
    misses = {row["connector"]: row for row in result["rows"] if row["part"] == "misses"}
    sizes = result["rows"][0]
    answers = list(dict.fromkeys(row["answer"] for row in rows))
    head = (
        f"`{result['file']}`, {_origin(result)}, {result['hardware']['gpu']}: chats whose "
        f"host memory holds {sizes['host_share']:g} of them, turns a second and share of prompts that is cached, "
        f"in windows of {rows[0]['seconds']:.1f} s; and tokens a second where nothing is hit, as a share of those "
        f"without a connector."
    )
    titles = [f"answers of {answer}" for answer in answers]
    lines = [*_wrapped(head), "", f"| | {' | '.join(titles)} | nothing is hit |", "|---" * (2 + len(titles)) + "|"]
    for name in dict.fromkeys(row["connector"] for row in rows):
        own = {row["answer"]: row for row in rows if row["connector"] == name}
        cells = [f"{own[a]['turns_per_second']:.1f}, {own[a]['cached_share']:.0%}" for a in answers]
        miss = f"{misses[name]['over_none']:.3f}" if "over_none" in misses.get(name, {}) else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {miss} |")
    return [*lines, "", *_wrapped(_missed(result))]


def first_tokens_beside_peers(result: Result) -> list[str]:
    """Those of `first_tokens`, whose are void and why, a prompt of which a part is on the host, and missed goals."""
    void = {row["connector"]: row["void"] for row in result["rows"] if "void" in row}
    parts = [row for row in result["rows"] if row["part"] == "75_percent" and row["connector"] not in void]
    told = ", ".join(f"{row['connector']} {row['ms']:.1f}" for row in parts)
    whose = "".join(f"Host hits of {name} are void: {why}. " for name, why in void.items())
    part = f"With {parts[0]['hit_tokens']:,} of {parts[0]['tokens']:,} tokens on the host: {told}. " if parts else ""
    return [*first_tokens(result), "", *_wrapped(f"{whose}{part}{_missed(result)}")]


def chats_by_regime(result: Result) -> list[str]:
    """A table of all regimes, worst first, one of throughput where nothing is hit, and which goals are missed."""
    found = [row for row in result["rows"] if row["part"] == "regime"]
    misses = [row for row in result["rows"] if row["part"] == "misses"]
    seconds, claims = sorted(row["seconds"] for row in found), result["claims"]
    versions = f"vLLM {result['software']['vllm']}, LMCache {result['software']['lmcache']}"
    head = (
        f"`{result['file']}`, {_origin(result)}, {result['hardware']['gpu']}, {versions}: {len(found)} regimes, the "
        f"worst first, one window of {seconds[0]:.1f} to {seconds[-1]:.1f} s for each engine. Turns a second of the "
        f"default policy over the best peer's (goal 1.05), p50 of the time to first token over the soonest peer's "
        f"(goal 1); of each engine turns a second, p50, and the share of the prompts' tokens that is cached."
    )
    middle = marked(claims[f"turns_over_best_peer_median_of_{len(found)}_regimes"])
    num_held = sum(claim["holds"] for claim in claims.values())
    tail = f"The median of the {len(found)} is {middle} (goal 1.2). {num_held} of {len(claims)} goals hold."
    tables = [*regimes_table(found, claims), "", *misses_table(misses)]
    return [*_wrapped(head), "", *tables, "", *_wrapped(tail)]


def older_chats(result: Result) -> list[str]:
    """A table of what runs of chats found whose results are no longer here: of those that missed a goal, in bold."""
    rows = result["rows"]
    missed = [row for row in rows if not all(row[what]["holds"] for what in ("turns_over", "over_none") if what in row)]
    most = max(row["turns_over"]["value"] for row in rows)
    return [
        *older_table(missed),
        "",
        *_wrapped(f"These are {len(missed)} of {len(rows)} rows; the highest ratio of all is {most:.2f}."),
    ]


WRITERS: dict[str, tuple[str | tuple[str, ...], Callable[..., list[str]]]] = {
    "steps": ("steps", steps),
    "index": ("index", index),
    "simulation": ("simulation", simulation),
    "simulation_short": ("simulation", simulation_short),
    "mutants": ("mutants", mutants),
    "sglang_ttft": (("sglang_ttft_h200", "sglang_ttft_32k_h200"), sglang_first_tokens),
    "sglang_chats": (tuple(f"sglang_serving_{host}_h200" for host in ("05x", "1x", "2x")), sglang_chats),
    "sglang_misses": ("sglang_serving_1x_h200", sglang_misses),
    "copies": ("copies_h200", copies),
    "interference": ("interference_h200", interference),
    "lossless": ("lossless_h200", lossless),
    "lossless_ttft": ("vllm_lossless_0320_h200", lossless_first_tokens),
    "lossless_chats": ("vllm_serving_0320_075x_h200", chats),
    "regimes_0320": ("vllm_regimes_0320_h200", chats_by_regime),
    "older_chats": ("vllm_serving_older_h200", older_chats),
    "ttft_0320": ("vllm_ttft_0320_h200", first_tokens_beside_peers),
}
"""By the name in a document: the result, or several, and what writes its lines."""


def renewed(text: str) -> str:
    """The text of a document, with its figures as the results say."""

    def fill(block: re.Match[str]) -> str:
        lines = TABLES[block["name"]]() if block["name"] in TABLES else _figures(block["name"])
        return block["begin"] + "".join(f"{block['indent']}{line}".rstrip() + "\n" for line in lines)

    return _BLOCK.sub(fill, text)


def _figures(name: str) -> list[str]:
    results, write = WRITERS[name]
    paths = [RESULTS / f"{result}.json" for result in ([results] if isinstance(results, str) else results)]
    return write(*(json.loads(path.read_text()) | {"file": path.name} for path in paths))


def documents() -> list[Path]:
    """Those that have figures which are written."""
    every = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    return [path for path in every if _BLOCK.search(path.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the figures of the results into the documents")
    arguments = parser.parse_args()
    stale = [(path, renewed(path.read_text())) for path in documents()]
    stale = [(path, text) for path, text in stale if text != path.read_text()]
    for path, text in stale:
        if arguments.write:
            path.write_text(text)
        else:
            print(f"{path.relative_to(ROOT)}: figures are not those of the results, which say:")
            print("".join(match["body"] for match in _BLOCK.finditer(text)))
    return 1 if stale and not arguments.write else 0


def _found(result: Result) -> str:
    ran = next(row for row in result["rows"] if "seeds" in row)
    claims = result["claims"]
    names = {
        "wrong_tokens": "wrong token",
        "leaks": "leak",
        "stuck_requests": "request that stands still",
        "broken_invariants": "broken invariant",
    }
    none = [what for name, what in names.items() if not claims[name]["value"]]
    violations = [row for row in result["rows"] if "violation" in row]
    seeds = [f"{row['seed']} ({row['violation'].split(':')[0]})" for row in violations]
    failed = [f"{len(seeds)} worlds failed, of seeds {', '.join(seeds)}"] if seeds else []
    worlds = f"{ran['steps']:,} engine steps of {ran['seeds']:,} worlds, {ran['requests']:,} requests"
    return f"{worlds}: " + "; ".join([", ".join(f"no {what}" for what in none), *failed])


def _held(claims: Mapping[str, Any]) -> str:
    return f"{sum(claim['holds'] for claim in claims.values())} of {len(claims)} goals hold, bold figures miss theirs."


def _missed(result: Result) -> str:
    missed = [
        f"`{name}` (**{claim['value']:.3g}**, goal {claim['goal']:g})"
        for name, claim in result["claims"].items()
        if not claim["holds"]
    ]
    return f"{len(result['claims']) - len(missed)} of {len(result['claims'])} goals hold" + (
        f"; missed: {', '.join(missed)}." if missed else "."
    )


def _first_token(row: Mapping[str, Any] | None) -> str:
    if row is None or "void" in row:
        return "void" if row else ""
    return f"{row['ms']:.1f} ({min(row['all_ms']):.1f} to {max(row['all_ms']):.1f})"


def _taken(row: Mapping[str, Any]) -> str:
    low, high = (row["p10"], row["p90"]) if "p10" in row else (row["min"], row["max"])
    digits = 1 if row["unit"] == "ms" else 0
    return f"{row['median']:,.{digits}f} {row['unit']} ({low:,.{digits}f} to {high:,.{digits}f})"


def _together(*results: Result) -> Result:
    return {"claims": {name: claim for result in results for name, claim in result["claims"].items()}}


def _named(*results: Result) -> str:
    """Files, and what they have in common: when, of which code, on what."""
    (common,) = {f"{_origin(result)}, {result['hardware']['gpu']}" for result in results}
    return f"{', '.join(f'`{file}`' for file in (result['file'] for result in results))}, {common}"


def _origin(result: Result) -> str:
    commit = result.get("commit")  # older results have none
    return f"{result['date'][:10]}, commit {commit[:7]}{'+' * commit.endswith('+')}" if commit else result["date"][:10]


def _machine(result: Result) -> str:
    return f"{result['hardware']['cores']} cores of an {result['hardware']['cpu']}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
