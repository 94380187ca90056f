"""vLLM with our connector beside its own and LMCache: host hits, and chats in all regimes, now and earlier."""

from __future__ import annotations

from collections.abc import Sequence

from integration.bench.peers import PEERS
from integration.bench.regimes import MISS_PATH
from integration.figures.first_tokens import first_tokens
from integration.figures.markdown import bold_unless, head, line, marked, wrapped
from integration.figures.results import Claims, Result, Row, held, held_and_missed, named, rows_of

_TITLES = {
    "ours": "ours",
    "ours:write_through": "ours, `write_through`",
    'ours:host_form="lossless"': "ours, `lossless`",
} | PEERS
"""By engine, in the order of columns and lines."""
_COLUMNS = [name for name in _TITLES if "lossless" not in name]
_RATIOS = ("turns_", "p50_")


def host_hits(result: Result) -> list[str]:
    """Times to the first token, whose are void and why, a prompt of which a part is on the host, and missed goals."""
    void = {row["connector"]: row["void"] for row in rows_of("hits", result) if "void" in row}
    parts = [row for row in rows_of("75_percent", result) if row["connector"] not in void and "void" not in row]
    told = ", ".join(f"{row['connector']} {row['ms']:.1f}" for row in parts)
    whose = "".join(f"Host hits of {name} are void: {why}. " for name, why in void.items())
    part = f"With {parts[0]['hit_tokens']:,} of {parts[0]['tokens']:,} tokens on the host: {told}. " if parts else ""
    return [*first_tokens(result), "", *wrapped(f"{whose}{part}{held_and_missed(result['claims'])}")]


def regimes(result: Result) -> list[str]:
    """A table of all regimes, worst first, one of throughput where nothing is hit, and how many goals hold."""
    found, claims = rows_of("regime", result), result["claims"]
    seconds = sorted(row["seconds"] for row in found)
    versions = f"vLLM {result['software']['vllm']}, LMCache {result['software']['lmcache']}"
    above = (
        f"{named(result)}, {versions}: {len(found)} regimes, the worst first, one window of {seconds[0]:.1f} to "
        f"{seconds[-1]:.1f} s for each engine. Turns a second of the default policy over the best peer's (goal 1.05), "
        f"p50 of the time to first token over the soonest peer's (goal 1); of each engine turns a second, p50, and the "
        f"share of the prompts' tokens that is cached."
    )
    middle = marked(claims[f"turns_over_best_peer_median_of_{len(found)}_regimes"])
    below = f"The median of the {len(found)} is {middle} (goal 1.2). {held(claims)}."
    misses = rows_of("misses", result)
    tables = [*_engines_by_regime(found, claims), *(["", *_misses(misses)] if misses else [])]
    return [*wrapped(above), "", *tables, "", *wrapped(below)]


def older_chats(result: Result) -> list[str]:
    """A table of what runs of chats found whose results are no longer here: of those that missed a goal, in bold."""
    rows = result["rows"]
    missed = [row for row in rows if not all(row[what]["holds"] for what in ("turns_over", "over_none") if what in row)]
    most = max(row["turns_over"]["value"] for row in rows)
    text = f"These are {len(missed)} of {len(rows)} rows; the highest ratio of all is {most:.2f}."
    titles = ("2026", "vLLM", "answers", "windows", "host", "policy", "beside", "turns over theirs", "nothing is hit")
    return [*head(line(*titles)), *map(_older_run, missed), "", *wrapped(text)]


def _engines_by_regime(found: Sequence[Row], claims: Claims) -> list[str]:
    """A line for each regime, in the order of `found`: what misses a goal is bold."""
    names = [name for name in _COLUMNS if any(name in regime["engines"] for regime in found)]
    titles = (_TITLES[name] for name in names)
    lines = head(line("host, answers", "over the best peer", "p50 over the soonest", *titles))
    for regime in found:
        of = f"over_best_of_{regime['num_peers']}_peers_host_{regime['host_share']:g}x_answers_{regime['answer']}_"
        told = [marked(next(claims[name] for name in claims if name.startswith(what + of))) for what in _RATIOS]
        engines = [_engine(regime["engines"][name]) if name in regime["engines"] else "" for name in names]
        lines.append(line(f"{regime['host_share']:g}x, {regime['answer']}", *told, *engines))
    return lines


def _engine(row: Row) -> str:
    """Turns a second, p50 of the time to first token, share of the prompts' tokens that is cached."""
    bound = "at least " if row["p50_is_lower_bound"] else ""
    return f"{row['turns_per_second']:.2f}, {bound}{row['ttft_p50_ms']:,.0f} ms, {row['cached_share']:.0%}"


def _misses(rows: Sequence[Row]) -> list[str]:
    """Throughput where nothing is hit, over that without a connector: ours first, bold where the goal is missed."""
    lines = head("| nothing is hit | of the throughput without a connector | p10 to p90 |")
    for row in sorted(rows, key=lambda row: list(_TITLES).index(row["connector"])):
        share = bold_unless(row["over_none"] >= MISS_PATH, f"{row['over_none']:.3f}")
        spread = f"{row['over_none_p10']:.3f} to {row['over_none_p90']:.3f}"
        lines.append(line(_TITLES[row["connector"]], share, spread))
    return lines


def _older_run(row: Row) -> str:
    """A line of a table: what misses the goal of its time is bold."""
    over = str(row["over"])
    miss = marked(row["over_none"], 3) if "over_none" in row else ""
    cells = [row["date"][5:], row["vllm"], str(row["answer"]), f"{row['seconds']:g} s", row["host_memory"]]
    return line(*cells, f"`{row['policy']}`", _TITLES.get(over, over), marked(row["turns_over"], 3), miss)
