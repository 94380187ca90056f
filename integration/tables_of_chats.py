"""Tables of chats beside other connectors, as `integration/figures.py` puts them into the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "ours": "ours",
    "ours:write_through": "ours, `write_through`",
    'ours:host_form="lossless"': "ours, `lossless`",
    "offloading": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
    "lmcache": "LMCache",
}
"""By engine, in the order of columns and lines."""
_COLUMNS = [name for name in TITLES if "lossless" not in name]
_RATIOS = ("turns_", "p50_")

Row = Mapping[str, Any]
Claims = Mapping[str, Row]


def regimes_table(found: Sequence[Row], claims: Claims) -> list[str]:
    """A line for each regime, in the order of `found`: what misses a goal is bold."""
    names = [name for name in _COLUMNS if any(name in regime["engines"] for regime in found)]
    head = ["host, answers", "over the best peer", "p50 over the soonest", *(TITLES[name] for name in names)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for regime in found:
        of = f"over_best_of_{regime['num_peers']}_peers_host_{regime['host_share']:g}x_answers_{regime['answer']}_"
        told = [marked(next(claims[name] for name in claims if name.startswith(what + of))) for what in _RATIOS]
        engines = [engine(regime["engines"][name]) if name in regime["engines"] else "" for name in names]
        lines.append(f"| {regime['host_share']:g}x, {regime['answer']} | {' | '.join([*told, *engines])} |")
    return lines


def marked(claim: Row, digits: int = 2) -> str:
    """The value, bold where the goal is missed."""
    text = f"{claim['value']:.{digits}f}"
    return text if claim["holds"] else f"**{text}**"


def engine(row: Row) -> str:
    """Turns a second, p50 of the time to first token, share of the prompts' tokens that is cached."""
    bound = "at least " if row["p50_is_lower_bound"] else ""
    return f"{row['turns_per_second']:.2f}, {bound}{row['ttft_p50_ms']:,.0f} ms, {row['cached_share']:.0%}"


def misses_table(rows: Sequence[Row]) -> list[str]:
    """Throughput where nothing is hit, over that without a connector: ours first, bold below 0.99."""
    lines = ["| nothing is hit | of the throughput without a connector | tenths below and above |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: list(TITLES).index(row["connector"])):
        share = f"{row['over_none']:.3f}"
        share = f"**{share}**" if row["over_none"] < 0.99 else share
        spread = f"{row['over_none_p10']:.3f} to {row['over_none_p90']:.3f}"
        lines.append(f"| {TITLES[row['connector']]} | {share} | {spread} |")
    return lines


def older_table(rows: Sequence[Row]) -> list[str]:
    """A line for each run, in the order of `rows`: what misses the goal of its time is bold."""
    head = ["2026", "vLLM", "answers", "windows", "host", "policy", "beside", "turns over theirs", "nothing is hit"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        over = TITLES.get(row["over"], row["over"])
        miss = marked(row["over_none"], 3) if "over_none" in row else ""
        cells = [row["date"][5:], row["vllm"], str(row["answer"]), f"{row['seconds']:g} s", row["host_memory"]]
        cells += [f"`{row['policy']}`", over, marked(row["turns_over"], 3), miss]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
