"""Copies between host and GPU: scattered blocks by every way, and what copies cost a model beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from integration.figures.markdown import bold_unless, head, line, marked, wrapped
from integration.figures.results import Claims, Result, Row, held_or_bold, named, rows_of

_WAYS = {"runs": "DMA alone", "staged": "packed", "direct": "kernel over the link", "loop": "`copy_` in a loop"}
"""Of copies, by their name in `copies_h200.json`."""
_BESIDE = {
    "runs": "DMA alone",
    "direct": "a kernel over the link",
    "batch8": "`cuMemcpyBatchAsync`, 8 pieces in a call",
    "batch64": "`cuMemcpyBatchAsync`, 64 pieces in a call",
}
"""Ways in our place beside large products, by their name in `interference_h200.json`."""
_DIRECTIONS = ("load", "save")
_SUBMITTING = {
    "launching_thread_for_64_requests_{size}": "model-runner thread: a block of each of 64 requests saved, us",
    "launching_thread_for_64_requests_{size}_in_as_many_jobs": "the same in as many jobs, us",
    "launching_thread_for_a_long_load_{size}": "model-runner thread: 1 GiB put in the submission queue, loads, us",
    "launching_thread_for_a_long_save_{size}": "the same, saves, us",
    "launching_thread_for_a_load_beside_a_long_one_{size}": "model-runner thread: a short load beside a long one, us",
    "submitting_thread_share_of_a_long_load_{size}": "submitting thread's share of a copy's time, loads of 1 GiB",
    "submitting_thread_share_of_a_long_save_{size}": "the same, saves",
    "first_group_late_{size}": "first layer group of a load, later than its bytes at the link's rate, us",
}
"""Claims of `integration/bench/submitting.py`, by their names."""


def scattered(result: Result) -> list[str]:
    """A table of scattered copies, each way of them."""
    text = (
        f"{named(result)}: 1 GiB of blocks at random places on both sides, 64 pieces each that lie apart, or one of "
        f"2 MiB; share of one large pinned copy to the GPU and from it, what both directions at once reach of two "
        f"large copies (goal 0.95), and of the copy's time that a thread submits (goal 0.05 from 16 KiB up). "
        f"{held_or_bold(result['claims'])}"
    )
    found = {(row["piece_bytes"], row["way"], row["direction"]): row for row in result["rows"] if "way" in row}
    lines = head(line("pieces", "ours", "goal", "thread", "both at once", *_WAYS.values()))
    for piece in dict.fromkeys(piece for piece, *_ in found):
        ways = {(way, direction): row for (size, way, direction), row in found.items() if size == piece}
        lines.append(_pieces(piece, ways, result["claims"]))
    return [*wrapped(text), "", *lines]


def interference(result: Result) -> list[str]:
    """A table of what copies cost large products and a model, and these the copies, by size of a piece."""
    claims = result["claims"]
    text = (
        f"{named(result)}: loads and saves of 2.25 GiB beside a model, with 256 MiB of staging; each round of "
        f"decoding and prefill alone, beside loads, beside saves and beside both, in rotating order. "
        f"{held_or_bold(claims)}"
    )
    products = {(row["case"], row["way"]): row for row in rows_of("products", result)}
    sizes = list(dict.fromkeys(case.rpartition("_")[0] for case, _ in products))
    lines = head(line("", *(f"pieces of {size.replace('KiB', ' KiB')}" for size in sizes), "goal"))
    slower = [f"products_slower_{{size}}_{way}" for way in _DIRECTIONS]
    lines.append(_slower_line("large bf16 products are slower, by loads and by saves", slower, sizes, claims))
    for name, title in _BESIDE.items():
        cells = [", ".join(_slower(products[f"{size}_{way}", name]) for way in _DIRECTIONS) for size in sizes]
        lines.append(line(f"the same by {title}, in our place", *cells, ""))
    shares = [[claims[f"share_of_link_beside_products_{size}_{way}"] for way in _DIRECTIONS] for size in sizes]
    cells = [", ".join(marked(claim, 3) for claim in of) for of in shares]
    lines.append(line("loads and saves beside the products, share of the link", *cells, f"{shares[0][0]['goal']:g}"))
    for model, title in (("decode", "an 8B model's decoding is slower"), ("prefill", "its prefill of 4,096 tokens")):
        names = [f"{model}_slower_by_{what}_{{size}}" for what in ("loads", "saves", "loads_and_saves")]
        lines.append(_slower_line(f"{title}, by loads, saves, both at once", names, sizes, claims))
    return [*wrapped(text), "", *lines]


def small_copies(result: Result) -> list[str]:
    """A table of how long small copies take beside long ones."""
    text = (
        f"`{result['file']}`: microseconds of a small copy, p50, p90 and the longest, alone, "
        f"beside one large copy in the same direction, and beside 2.25 GiB of ours."
    )
    lines = head(line("beside", "alone", "one large copy", "ours"))
    for row in rows_of("small copies", result):
        size, _, direction = row["case"].rpartition("_")
        cells = [_spread(row["us"][side]) for side in ("alone", "large copy", "ours")]
        lines.append(line(f"{direction}s of {size.replace('KiB', ' KiB')}", *cells))
    return [*wrapped(text), "", *lines]


def awaited(result: Result) -> list[str]:
    """A table of loads that a step waits for, of each size, by way, and by how the step waits."""
    rows = result["rows"]
    text = (
        f"{named(result)}: loads that a step waits for, share of the link that they reach, median of "
        f"{len(rows[0]['all_ms'])}; layer by layer, while the model-runner thread is in Python for half of the time "
        f"that the load has at the link's rate, and up front. {held_or_bold(result['claims'])}"
    )
    ways = ("runs", "staged", "direct")
    lines = head(line("a load, pieces", "waited for", "ours", *(_WAYS[name] for name in ways)))
    shares = {
        (row["num_bytes"], row["piece_bytes"], row["waits"], row["path"]): row["link_ms"] / median(row["all_ms"])
        for row in rows
    }
    for num_bytes, piece, waits in dict.fromkeys(key[:3] for key in shares):
        load, pieces = f"{num_bytes >> 20} MiB", f"{piece >> 10} KiB"
        claim = f"share_of_link_{load} in pieces of {pieces} waited for {waits}".replace(" ", "_")
        cells = [f"{shares[num_bytes, piece, waits, name]:.3f}" for name in ways]
        lines.append(line(f"{load}, {pieces}", waits, marked(result["claims"][claim], 3), *cells))
    return [*wrapped(text), "", *lines]


def submitting(*results: Result) -> list[str]:
    """A table of what it takes to submit copies, a column for each result."""
    titles = [f"{result['hardware']['gpu'].split()[1]}, {result['commit'][:7]}" for result in results]
    lines = head(line("", *titles, "goal"))
    sizes = [row["case"] for row in rows_of("first_group", results[0])]
    for name, title in _SUBMITTING.items():
        found = [[result["claims"][name.format(size=size)] for size in sizes] for result in results]
        form = "{:,.0f}" if title.endswith("us") else "{:.3f}"
        cells = [
            ", ".join(bold_unless(claim["holds"], form.format(claim["value"])) for claim in claims) for claims in found
        ]
        lines.append(line(title, *cells, f"{found[0][0]['goal']:,g}"))
    for direction in _DIRECTIONS:
        cells = [", ".join(_in_python(result, f"{direction}_{size}") for size in sizes) for result in results]
        title = f"a {direction} of 1 GiB while the model-runner thread never leaves Python, and while it rests, ms"
        lines.append(line(title, *cells, "none"))
    files = ", ".join(f"`{result['file']}`" for result in results)
    missed = [sum(not claim["holds"] for claim in result["claims"].values()) for result in results]
    counts = ", ".join(f"{count} of {len(result['claims'])}" for count, result in zip(missed, results, strict=True))
    text = f"{files}: medians in pieces of {', '.join(sizes).replace('KiB', ' KiB')}. Goals missed, bold: {counts}."
    return [*wrapped(text), "", *lines]


def _in_python(result: Result, case: str) -> str:
    (row,) = [row for row in rows_of("long", result) if row["case"] == case]
    busy, resting = (median(row["all_ms"][name][1:]) for name in ("in_python", "resting"))
    return f"{busy:.1f} ({resting:.1f})"


def _spread(us: Sequence[float]) -> str:
    """p50, p90, the longest."""
    ordered = sorted(us)
    return ", ".join(f"{value:,.0f}" for value in (median(ordered), ordered[len(ordered) * 9 // 10], ordered[-1]))


def _pieces(piece: int, ways: Mapping[tuple[str, str], Row], claims: Claims) -> str:
    """A line of a table: share of one large copy of each way, to the device and from it; the submitting thread's."""
    size = f"{piece >> 20} MiB" if piece >= 1 << 20 else f"{piece >> 10} KiB"
    label = size.replace(" ", "")
    ours = [claims[f"share_of_link_{direction}_{label}"] for direction in _DIRECTIONS]
    thread = []
    for direction in _DIRECTIONS:
        claim = claims.get(f"submitting_thread_share_{direction}_{label}")  # the shortest pieces have no goal
        thread.append(marked(claim, 3) if claim else f"{ways['ours', direction]['cpu_share']:.3f}")
    both = marked(claims[f"share_of_duplex_{label}"], 3)
    cells = [", ".join(marked(claim, 3) for claim in ours), f"{ours[0]['goal']:g}", ", ".join(thread), both]
    others = [", ".join(f"{ways[name, way]['share_of_link']:.3f}" for way in _DIRECTIONS) for name in _WAYS]
    return line(size, *cells, *others)


def _slower_line(title: str, names: Sequence[str], sizes: Sequence[str], claims: Claims) -> str:
    """A line of a table: claims of percents, for each size those of all names."""
    found = [[claims[name.format(size=size)] for name in names] for size in sizes]
    cells = [", ".join(bold_unless(claim["holds"], _percent(claim["value"])) for claim in of) for of in found]
    return line(title, *cells, f"{100 * found[0][0]['goal']:g} %")


def _slower(row: Row) -> str:
    return _percent(median(row["beside_ms"]) / median(row["alone_ms"]) - 1)


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
