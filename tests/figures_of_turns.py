"""Phrases of pages of benchmarks with figures of results with copies that yield, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from integration.figures.results import rows_of
from tests.kept_results import by_regime, claim, goal, result, rows_of_copies

REGIMES = "vllm_regimes_turns_0320_h200"
EARLIER = "vllm_serving_0320_later_1x_h200"
LATEST = "vllm_regimes_latest_0320_h200"


def chats() -> Iterator[str]:
    found = by_regime(REGIMES)
    over = {regime: row["over_best_peer"] for regime, row in found.items()}
    small = [ratio for (size, _), ratio in over.items() if size < 1]
    yield f"too small for all chats the default is ahead by {min(small):.2f} to {max(small):.2f}. Where it is not"
    yield f"by {over[2, 8]:.2f} and {over[1, 8]:.2f} with answers of 8 tokens and by {over[1, 32]:.2f} and **"
    yield f"**{over[2, 32]:.2f}** with answers of 32. **With answers of 128 it is behind, {over[2, 128]:.2f} and"
    yield f"{over[2, 128]:.2f} and {over[1, 128]:.2f}**: by "
    counts = []
    for size in (2, 1):
        engines = found[size, 128]["engines"]
        counts.append((engines["ours"]["arrived"], engines[found[size, 128]["best_peer"]]["arrived"]))
    yield "by {} turns in a window against {}, and by {} against {}".format(*counts[0], *counts[1])
    yield "there, and {:.2f} and {:.2f} of the time for which a turn".format(*(decoding(size) for size in ("1x", "2x")))
    before, later = by_regime()[2, 8]["engines"], found[2, 8]["engines"]
    shares = {name: later[name]["turns_per_second"] / before[name]["turns_per_second"] for name in later}
    peers = [share for name, share in shares.items() if name != "ours"]
    yield f"ours had {shares['ours']:.2f} of the turns that it has in the next table"
    yield f"and the others {min(peers):.2f} to {max(peers):.2f} of theirs"
    late = [found[1, answer]["p50_over_soonest_peer"] for answer in (128, 32)]
    yield f"In the table these are {over[1, 128]:.2f}, {late[0]:.2f}, {over[1, 32]:.2f} and {late[1]:.2f}"


def latest_chats() -> Iterator[str]:
    before, latest = ([of[size, 8]["engines"] for size in (1, 2)] for of in (by_regime(REGIMES), by_regime(LATEST)))
    ahead = [
        [100 * (engines[one]["turns_per_second"] / engines[other]["turns_per_second"] - 1) for engines in of]
        for of, one, other in ((latest, "lmcache", "ours"), (before, "ours", "lmcache"))
    ]
    (lost,) = {f"{share:.0f}" for share in ahead[0]}
    yield f"LMCache was ahead there, by {lost} % in both sizes**"
    assert all(row["over_best_peer"] < float(goal(LATEST, "turns_over_best_of")) for row in by_regime(LATEST).values())
    yield "ahead of LMCache in these two, by {:.0f} and {:.0f} %".format(*ahead[1])


def decoding(size: str) -> float:
    """Its share of the time for which a turn of ours with answers of 128 tokens runs."""
    (row,) = [row for row in rows_of("chats", result(f"vllm_serving_0320_turns_{size}_h200")) if long_of_ours(row)]
    spent = row["phases"]
    return float(spent["decoding_ms"] / (spent["idle_ms"] + spent["prefill_ms"] + spent["decoding_ms"]))


def long_of_ours(row: dict[str, object]) -> bool:
    return row["connector"] == "ours" and row["answer"] == 128


def earlier_chats() -> Iterator[str]:
    chats = rows_of("chats", result(EARLIER))
    for answer, form in (
        (128, "128 ours had {ours:.2f} turns a second, OffloadingConnector {offloading:.2f} and LMCache {lmcache:.2f}"),
        (32, "32 ours had {ours:.2f}, OffloadingConnector {offloading:.2f} and LMCache {lmcache:.2f}"),
    ):
        yield form.format(**{row["connector"]: row["turns_per_second"] for row in chats if row["answer"] == answer})
    over = {
        (what, answer): claim(EARLIER, f"{what}_over_best_of_2_peers_host_1x_answers_{answer}_vllm_0320")
        for what in ("turns", "p50")
        for answer in (32, 128)
    }
    yield f"**{over['turns', 128]:.2f}** of the best, and {over['p50', 128]:.2f} of the soonest p50"
    yield f"**{over['turns', 32]:.2f}** of it, and **{over['p50', 32]:.2f}** of its p50"
    (seconds,) = {round(row["seconds"], 1) for row in chats}
    yield f"one window of {seconds} s for each engine"


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
    awaited = [
        one["value"]
        for name, one in result("submitting_h200")["claims"].items()
        if name.startswith("share_of_link_of_an_awaited_load")
    ]
    yield "reaches {:.3f}, {:.3f}, **{:.3f}** and {:.3f} of the link".format(*awaited)


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


EARLIER_CHATS = (chats, latest_chats, earlier_chats)
TOLD = (copies, submitting, beside_a_model, small_copies, worth_in_sglang)
