"""SGLang with a host cache beside HiCache: host hits, chats, and throughput where nothing is hit."""

from __future__ import annotations

from statistics import median

from integration.bench.regimes import MEDIAN_OVER_BEST_PEER
from integration.figures.first_tokens import first_tokens
from integration.figures.markdown import bold_unless, head, line, marked, wrapped
from integration.figures.results import Result, Row, held_or_bold, named, rows_of


def host_hits(result: Result) -> list[str]:
    """Times to the first token, and what host hits take of HiCache's and of what they need."""
    over: dict[str, dict[str, list[str]]] = {}
    claims = result["claims"]
    loads: dict[str, list[Row]] = {}
    for name, claim in claims.items():
        if "_load_over_link_" in name:
            loads.setdefault(name.partition("_load_over_link_")[0], []).append(claim)
    for name in [name for name in claims if "_host_hit_over_" in name]:
        who, _, against = name.rpartition("_")[0].partition("_host_hit_over_")
        over.setdefault(who, {}).setdefault(against, []).append(marked(claims[name], 3))
    told = [
        f"`{who}`: {', '.join(of['hicache'])} of HiCache's, {', '.join(of['nones_device_hit_plus_link'])} of a device "
        f"hit without a host cache and the bytes at the link's rate"
        for who, of in over.items()
    ]
    text = f"A host hit over others (goal 1), by length. {'; '.join(told)}."
    if loads:
        rates = (f"{', '.join(marked(one, 3) for one in of)} (`{who}`)" for who, of in loads.items())
        (goal,) = {one["goal"] for of in loads.values() for one in of}
        text += f" Loads moved at {' and '.join(rates)} of the link (goal {goal})."
    return [*first_tokens(result), "", *wrapped(text)]


def chats(result: Result) -> list[str]:
    """A table of chats on hosts of several sizes, and the median of ours over HiCache."""
    claims = {name: claim for name, claim in result["claims"].items() if "_over_" in name}
    ratios = [claim["value"] for name, claim in claims.items() if name.startswith("turns_over_")]
    goal, value = MEDIAN_OVER_BEST_PEER["sglang"], median(ratios)
    above = (
        f"{named(result)}: turns answered a second, p50 (p99) of the time to first token, and the share of prompts "
        f"that is cached; the host's size is a multiple of what all chats hold."
    )
    below = (
        f"Of turns ours has {bold_unless(value >= goal, f'{value:.3f}')} times HiCache's in the median of the "
        f"{len(ratios)} lines (goal {goal}); besides that {held_or_bold(claims)}"
    )
    return [*wrapped(above), "", *_chats_by_host(result), "", *wrapped(below)]


def misses(result: Result) -> list[str]:
    """A table of throughput where nothing is hit, over that without a host cache."""
    sizes, found = result["rows"][0], rows_of("misses", result)
    num_rounds = len(found[0]["all_tokens_per_second"])  # fewer than were asked for, where the time was over
    (goal,) = (claim["goal"] for name, claim in result["claims"].items() if name.startswith("miss_path"))
    text = (
        f"{named(result)}: prompts of {sizes['miss_length']:,} tokens that nobody repeats, with answers of "
        f"{sizes['miss_answer']}, {num_rounds} rounds in rotating order; medians, goal {goal:g}."
    )
    titles = line("", "tokens a second", "of those without a host cache", "p10 to p90")
    lines = [*wrapped(text), "", *head(titles)]
    for row in found:
        over = spread = ""
        if "over_none" in row:
            holds = not row["connector"].startswith("ours") or row["over_none"] >= goal
            over = bold_unless(holds, f"{row['over_none']:.4f}")
            spread = f"{row['over_none_p10']:.4f} to {row['over_none_p90']:.4f}"
        lines.append(line(row["connector"], f"{row['tokens_per_second']:,.0f}", over, spread))
    return lines


def _chats_by_host(result: Result) -> list[str]:
    """A line for each size of the host and length of answers: turns a second, p50 and p99 of the time to first token,
    what is cached; and the first of ours over HiCache."""
    rows, claims = rows_of("chats", result), result["claims"]
    names = list(dict.fromkeys(row["connector"] for row in rows))
    found = {(row["host_share"], row["answer"], row["connector"]): row for row in rows}
    lines = head(line("host, answers", *names, "turns over hicache's", "p50 over hicache's"))
    for host, answer in dict.fromkeys((row["host_share"], row["answer"]) for row in rows):
        cells = [_window(found.get((host, answer, name))) for name in names]
        which = f"host_{host:g}x_answers_{answer}_"
        over = [marked(claim, 3) for name, claim in claims.items() if which in name]
        lines.append(line(f"{host:.2g}x, {answer} tokens", *cells, *over))
    return lines


def _window(row: Row | None) -> str:
    if row is None:
        return "not measured"
    first = f"{row['ttft_p50_ms']:,.0f} ({row['ttft_p99_ms']:,.0f}) ms"
    return f"{row['turns_per_second']:.2f}, {first}, {100 * row['cached_share']:.0f} %"
