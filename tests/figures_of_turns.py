"""Phrases of the page of benchmarks with figures of copies and of what they yield to, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from integration.figures.results import rows_of
from tests.kept_results import claim, result, rows_of_copies


def copies() -> Iterator[str]:
    now, before = "copies_h200", "copies_before_h200"
    shares = {
        (piece, way): claim(before, f"share_of_link_{way}_{piece}")
        for piece in ("2MiB", "64KiB")
        for way in ("load", "save")
    }
    large = "loaded at {:.3f} and saved at {:.3f} of the link".format(shares["2MiB", "load"], shares["2MiB", "save"])
    yield f"2 MiB were {large}, pieces of 64 KiB at {shares['64KiB', 'load']:.3f} and **{shares['64KiB', 'save']:.3f}**"
    claims = result(before)["claims"].values()
    yield f"and {sum(one['holds'] for one in claims)} of {len(claims)} goals held"
    longer = []
    for way in ("load", "save"):
        loops = [
            median(next(row["all_ms"] for row in rows_of_copies(way, 64 << 10, name) if row["way"] == "loop"))
            for name in (now, before)
        ]
        longer.append(loops[0] / loops[1])
    yield "took {:.2f} and {:.2f} times as long as on that host".format(*longer)
    own, older, other = (claim(name, "submitting_thread_share_save_64KiB") for name in (now, before, "copies_h100"))
    yield f"for **{own:.2f}** of the copy's time, **{older:.2f}** before and **{other:.2f}** on the H100's host"


def submitting() -> Iterator[str]:
    spent: dict[str, list[float]] = {}
    slower = []
    for name in ("submitting_h200", "submitting_h100"):
        for row in rows_of("long", result(name)):
            busy, resting = (median(row["all_ms"][which][1:]) for which in ("in_python", "resting"))
            slower.append(busy / resting)
            if row["case"].startswith("load"):
                spent.setdefault(name, []).append(resting * median(row["submitting_share"]))
    *others, large = spent["submitting_h200"]
    yield f"a load of 1 GiB takes {large:.1f} ms of the submitting thread"
    yield f"in the other sizes {min(others):.1f} to {max(others):.1f}, and"
    yield "and {:.1f} to {:.1f} on the H100's host".format(min(spent["submitting_h100"]), max(spent["submitting_h100"]))
    yield f"copies take {min(slower):.1f} to {max(slower):.1f} times as long**"


def awaited() -> Iterator[str]:
    found = awaited_loads("awaited_h200")
    up_front, by_layer = ((256, "up front"), (1024, "up front")), ((256, "by layer"),)
    ours, dma = (shares_of_link(found, up_front, path) for path in ("auto", "runs"))
    yield "up front reaches {:.2f} to {:.2f} of the link, the goal is missed**: a kernel".format(*ours)
    yield "where DMA would reach {:.2f} to {:.2f}".format(*dma)
    dma, kernel, ours = (
        ends(
            sum(end - begin for _, begin, end, _ in row["groups"])
            for (size, waits, name, _), row in found.items()
            if (size, waits, name) == (1024, "up front", path)
        )
        for path in ("runs", "direct", "auto")
    )
    yield "{:.0f} to {:.0f} ms to submit 1 GiB".format(*dma)
    yield "where the kernel alone takes {:.1f} to {:.1f}".format(*kernel)
    yield "and ours, which chooses it, {:.1f} to {:.1f}".format(*ours)
    dma, ours, kernel = (shares_of_link(found, by_layer, path) for path in ("runs", "auto", "direct"))
    yield "DMA reaches {:.2f} to {:.2f} of the link with loads of 256 MiB".format(*dma)
    yield "there, {:.2f} to {:.2f}".format(*ours)
    yield "where the kernel alone reaches {:.2f} to {:.2f}".format(*kernel)


def awaited_in_other_ways() -> Iterator[str]:
    here, elsewhere = awaited_loads("awaited_h200"), awaited_loads("awaited_up_front_h200")
    light, gib = "by layer in a light step", ((1024, "up front"),)
    yield "the kernel is ours, and reached {:.2f} to {:.2f}".format(
        *shares_of_link(here, ((256, light), (1024, light)), "auto")
    )
    tried, kernel, dma = (shares_of_link(elsewhere, gib, path) for path in ("auto", "direct", "runs"))
    yield "1 GiB reached {:.3f} to {:.3f} of the link with that".format(*tried)
    yield "{:.3f} to {:.3f} by the kernel alone (the file".format(*kernel)
    yield "DMA took {:.3f} to {:.3f} of the link with 1 GiB up front".format(*dma)
    small = [found[1024, "up front", "runs", 64 << 10] for found in (here, elsewhere)]
    least = [row["link_ms"] / median(row["all_ms"]) for row in small]
    assert least[1] == dma[0]
    yield f"of which it takes {least[0]:.3f} here"
    ours, dma = (shares_of_link(here, ((4096, "up front"),), path) for path in ("auto", "runs"))
    yield "ours reached {:.2f} to {:.2f} of the link up front".format(*ours)
    yield "DMA alone {:.2f} to {:.2f}".format(*dma)


def awaited_loads(name: str) -> dict[Any, Any]:
    """By MiB, way to wait, path and bytes of a piece."""
    return {
        (row["num_bytes"] >> 20, row["waits"], row["path"], row["piece_bytes"]): row for row in result(name)["rows"]
    }


def shares_of_link(found: dict[Any, Any], cases: Iterable[tuple[int, str]], path: str) -> tuple[float, float]:
    """The least and the most of these sizes of loads and ways to wait for them, by this path, over all pieces."""
    return ends(
        row["link_ms"] / median(row["all_ms"])
        for (size, waits, name, _), row in found.items()
        if (size, waits) in cases and name == path
    )


def ends(values: Iterable[float]) -> tuple[float, float]:
    kept = list(values)
    return min(kept), max(kept)


def beside_a_model() -> Iterator[str]:
    claims = result("interference_h200")["claims"]
    assert all(one["holds"] for name, one in claims.items() if "2048KiB" in name)
    most = max(100 * one["value"] for name, one in claims.items() if name.startswith("prefill_slower"))
    yield f"prefill up to **{most:.1f} %** with loads and saves at once"


def small_copies() -> Iterator[str]:
    found = {row["case"]: row["us"]["ours"] for row in rows_of("small copies", result("interference_h200"))}
    ms = {
        way: [[us / 1e3 for us in times] for case, times in found.items() if case.endswith(way)]
        for way in ("load", "save")
    }
    middle = {way: [median(times) for times in of] for way, of in ms.items()}
    longest = {way: max(max(times) for times in of) for way, of in ms.items()}
    yield f"takes {min(middle['load']):.2f} to {max(middle['load']):.2f} ms beside loads and"
    (beside_saves,) = {f"{ms:.1f}" for ms in middle["save"]}
    yield f"loads and {beside_saves} beside saves, medians, and"
    yield f"medians, and {longest['load']:.1f} and {longest['save']:.1f} ms at most"


def worth_in_sglang() -> Iterator[str]:
    more = []
    for name, form in (
        ("15x", "in one of {seconds:.1f} s {ours} were answered, as many as with HiCache, and {none} by a copy of"),
        ("2x", "in one of {seconds:.0f} s, {ours}, as many as with HiCache, and {none} without"),
    ):
        chats = rows_of("chats", result(f"sglang_turns_off_{name}_h200"))
        answered = {row["connector"].partition("variant=")[2].strip('"') or row["connector"]: row for row in chats}
        counts = {who: row["arrived"] for who, row in answered.items()}
        assert counts["ours"] == counts["hicache"] and counts.get("nostep", counts["none"]) == counts["none"]
        more.append(100 * (counts["ours"] / counts["none"] - 1))
        yield form.format(seconds=chats[0]["seconds"], **counts)
    yield f"yielding is worth {min(more):.0f} to {max(more):.0f} % more"


TOLD = (copies, submitting, awaited, awaited_in_other_ways, beside_a_model, small_copies, worth_in_sglang)
