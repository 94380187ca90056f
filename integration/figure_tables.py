"""Tables of results whose rows are of several kinds, without a word of what was measured; `integration/figures.py` has
that. What misses its goal is bold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from integration.tables_of_chats import marked

Row = Mapping[str, Any]
Claims = Mapping[str, Row]

_WAYS = {"runs": "DMA alone", "staged": "packed", "direct": "kernel over the link", "loop": "`copy_` in a loop"}
"""Of copies, by their name in `copies_h200.json`."""
_BESIDE = {
    "runs": "DMA alone",
    "direct": "a kernel over the link",
    "batch8": "`cuMemcpyBatchAsync`, 8 pieces in a call",
    "batch64": "`cuMemcpyBatchAsync`, 64 pieces in a call",
}
"""Ways in our place beside large products, by their name in `interference_h200.json`."""


def regimes(results: Iterable[Mapping[str, Any]], peer: str) -> list[str]:
    """A line for each size of the host and length of answers: turns a second, p50 and p99 of the time to first token,
    what is cached; and the first of ours over the peer."""
    rows = [row for result in results for row in result["rows"] if row["part"] == "chats"]
    claims = {name: claim for result in results for name, claim in result["claims"].items()}
    names = list(dict.fromkeys(row["connector"] for row in rows))
    found = {(row["host_share"], row["answer"], row["connector"]): row for row in rows}
    lines = _head("host, answers", *names, f"turns over {peer}'s", f"p50 over {peer}'s")
    for host, answer in dict.fromkeys((row["host_share"], row["answer"]) for row in rows):
        cells = [_window(found.get((host, answer, name))) for name in names]
        which = f"host_{host:g}x_answers_{answer}_"
        over = [marked(claim, 3) for name, claim in claims.items() if which in name]
        lines.append(_line(f"{host:.2g}x, {answer} tokens", *cells, *over))
    return lines


def misses(rows: Sequence[Row], goal: float) -> list[str]:
    """Of each engine the throughput where nothing is hit, over that without a host cache."""
    lines = _head("", "tokens a second", "of those without a host cache", "tenths below and above")
    for row in rows:
        over = f"{row['over_none']:.4f}" if "over_none" in row else ""
        if over and row["connector"].startswith("ours") and row["over_none"] < goal:
            over = f"**{over}**"
        spread = f"{row['over_none_p10']:.4f} to {row['over_none_p90']:.4f}" if over else ""
        lines.append(_line(row["connector"], f"{row['tokens_per_second']:,.0f}", over, spread))
    return lines


def copies(rows: Sequence[Row], claims: Claims) -> list[str]:
    """By size of a piece: share of one large copy of each way, to the device and from it; the submitting thread's."""
    found = {(row["piece_bytes"], row["way"], row["direction"]): row for row in rows if "way" in row}
    lines = _head("pieces", "ours", "goal", "thread", "both at once", *_WAYS.values())
    for piece in dict.fromkeys(piece for piece, *_ in found):
        size = f"{piece >> 20} MiB" if piece >= 1 << 20 else f"{piece >> 10} KiB"
        label = size.replace(" ", "")
        ours = [claims[f"share_of_link_{way}_{label}"] for way in ("load", "save")]
        thread = []
        for way in ("load", "save"):
            claim = claims.get(f"submitting_thread_share_{way}_{label}")  # the shortest pieces have no goal
            thread.append(marked(claim, 3) if claim else f"{found[piece, 'ours', way]['cpu_share']:.3f}")
        ways = [
            ", ".join(f"{found[piece, name, way]['share_of_link']:.3f}" for way in ("load", "save")) for name in _WAYS
        ]
        both = marked(claims[f"share_of_duplex_{label}"], 3)
        cells = [", ".join(marked(claim, 3) for claim in ours), f"{ours[0]['goal']:g}", ", ".join(thread), both]
        lines.append(_line(size, *cells, *ways))
    return lines


def interference(rows: Sequence[Row], claims: Claims) -> list[str]:
    """By size of a piece: what copies cost large products and a model, and these the copies."""
    products = {(row["case"], row["way"]): row for row in rows if row["part"] == "products"}
    sizes = list(dict.fromkeys(case.rpartition("_")[0] for case, _ in products))
    lines = _head("", *(f"pieces of {size.replace('KiB', ' KiB')}" for size in sizes), "goal")

    def line(title: str, names: Sequence[str], is_share: bool) -> None:
        told = [[claims[name.format(size=size)] for name in names] for size in sizes]
        cells = [", ".join(marked(claim, 3) if is_share else _percent(claim) for claim in of) for of in told]
        goal = told[0][0]["goal"]
        lines.append(_line(title, *cells, f"{goal:g}" if is_share else f"{100 * goal:g} %"))

    ways = ("load", "save")
    line(
        "large bf16 products are slower, by loads and by saves",
        [f"products_slower_{{size}}_{way}" for way in ways],
        False,
    )
    for name, title in _BESIDE.items():
        cells = [", ".join(f"{_slower(products[f'{size}_{way}', name]):+.1%}" for way in ways) for size in sizes]
        lines.append(_line(f"the same by {title}, in our place", *(cell.replace("%", " %") for cell in cells), ""))
    shares = [f"share_of_link_beside_products_{{size}}_{way}" for way in ways]
    line("loads and saves beside the products, share of the link", shares, True)
    for model, title in (("decode", "an 8B model's decoding is slower"), ("prefill", "its prefill of 4,096 tokens")):
        names = [f"{model}_slower_by_{what}_{{size}}" for what in ("loads", "saves", "loads_and_saves")]
        line(f"{title}, by loads, saves, both at once", names, False)
    return lines


def _slower(row: Row) -> float:
    return median(row["beside_ms"]) / median(row["alone_ms"]) - 1


def _window(row: Row | None) -> str:
    if row is None:
        return "not measured"
    first = f"{row['ttft_p50_ms']:,.0f} ({row['ttft_p99_ms']:,.0f}) ms"
    return f"{row['turns_per_second']:.2f}, {first}, {100 * row['cached_share']:.0f} %"


def _percent(claim: Row) -> str:
    value = f"{100 * claim['value']:+.1f} %"
    return value if claim["holds"] else f"**{value}**"


def _head(*titles: str) -> list[str]:
    return [_line(*titles), "|---" * len(titles) + "|"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
