"""vLLM with our connector beside its own and LMCache: host hits, and chats in all regimes."""

from __future__ import annotations

from collections.abc import Sequence

from integration.bench.peers import PEERS
from integration.figures.first_tokens import first_tokens
from integration.figures.markdown import head, line, marked, marked_beside_goal, wrapped
from integration.figures.results import Claims, Result, Row, held, held_and_missed, named, rows_of

_TITLES = {
    "ours": "ours",
    "ours:write_through": "ours, `write_through`",
    'ours:load_choice="async"': "ours, loads in the background",
} | PEERS
"""By engine, in the order of columns."""
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
    """A table of all regimes, worst first, and how many goals hold."""
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
    return [*wrapped(above), "", *_engines_by_regime(found, claims), "", *wrapped(below)]


def _engines_by_regime(found: Sequence[Row], claims: Claims) -> list[str]:
    """A line for each regime, in the order of `found`: what misses a goal is bold."""
    names = [name for name in _TITLES if any(name in regime["engines"] for regime in found)]
    titles = (_TITLES[name] for name in names)
    lines = head(line("host, answers", "over the best peer", "p50 over the soonest", *titles))
    for regime in found:
        of = f"over_best_of_{regime['num_peers']}_peers_host_{regime['host_share']:g}x_answers_{regime['answer']}_"
        told = [
            marked_beside_goal(next(claims[name] for name in claims if name.startswith(what + of))) for what in _RATIOS
        ]
        engines = [_engine(regime["engines"][name]) if name in regime["engines"] else "" for name in names]
        lines.append(line(f"{regime['host_share']:g}x, {regime['answer']}", *told, *engines))
    return lines


def _engine(row: Row) -> str:
    """Turns a second, p50 of the time to first token, share of the prompts' tokens that is cached."""
    bound = "at least " if row["p50_is_lower_bound"] else ""
    return f"{row['turns_per_second']:.2f}, {bound}{row['ttft_p50_ms']:,.0f} ms, {row['cached_share']:.0%}"
