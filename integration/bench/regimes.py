"""Regimes of chats: sizes of the host, lengths of answers, rates; and in which of them who is ahead.

    python -m integration.bench.regimes RESULT.json ... [--json MERGED.json] [--png PICTURE.png]

`vllm_serving` and `sglang_serving` measure some regimes in one call; this puts the results of several calls into one
table, worst first, with one claim for each regime and one for their median. What is void or did not start is named in
its regime, and the name of a claim says how many peers it is over.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from integration.bench.peers import LOSSLESS, is_default, is_peer
from integration.report import Report
from kv_connector.values import parse_size

OVER_BEST_PEER = {"vllm": 1.05, "sglang": 1.0}
MEDIAN_OVER_BEST_PEER = {"vllm": 1.2, "sglang": 1.1}
MISS_PATH = 0.99
LOSSLESS_OVER_RAW = 1.1
"""Goals: the default policy's turns a second over the best peer's, in each regime and in the median of all, by engine;
throughput where nothing is hit over that without a connector; turns with lossless host blocks over those with raw
ones."""
_FIGURES = ("turns_per_second", "ttft_p50_ms", "ttft_p99_ms", "cached_share", "waiting", "arrived")
_SERVING = {f"{engine}_serving" for engine in OVER_BEST_PEER}
_KEY = ("engine", "host_share", "answer", "rate")
_SETTLING = 2.0  # seconds between windows: unfinished turns are aborted, saves arrive

Row = dict[str, Any]


def host_bytes(text: str, chats_bytes: float) -> int:
    """Of one engine: a size, or a multiple of the chats' mean bytes such as `0.5x`. Raises ConfigError."""
    multiple = re.fullmatch(r"(\d+(\.\d+)?)x", text)
    return int(float(multiple[1]) * chats_bytes) if multiple else parse_size(text, "--host-memory")


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order in a window or round: each of them is first, and at every other place, equally often."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def window_seconds(wanted: float, left: float, num_windows: int, lead: float) -> float:
    """What is counted of each window, so that all of them fit into the seconds that are left; at most as wanted."""
    return min(wanted, left / max(1, num_windows) - lead - _SETTLING)


def regimes(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row for each regime, worst first; of each engine the medians over its windows that are not void.

    `rows`: of kind `chats`, with `host_share` and the engine's version, and of kind `failed`, by the same two.
    """
    rows = list(rows)
    keys = dict.fromkeys(_key(row) for row in rows if row["part"] == "chats")
    found = []
    for key in keys:
        windows = [row for row in rows if row["part"] == "chats" and _key(row) == key]
        absent = {r["connector"]: r["reason"] for r in rows if r["part"] == "failed" and _key(r)[:2] == key[:2]}
        found.append(_regime(key, windows, absent))
    return sorted(found, key=lambda regime: regime.get("over_best_peer", 0.0))


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return engine_of(row), row["host_share"], row.get("answer"), row.get("rate")


def engine_of(row: Mapping[str, Any]) -> str:
    """Such as "vllm 0.25.1"."""
    return next(f"{engine} {row[engine]}" for engine in OVER_BEST_PEER if engine in row)


def _regime(key: tuple[Any, ...], windows: Sequence[Mapping[str, Any]], absent: Mapping[str, str]) -> Row:
    """One row; without `over_best_peer` where the default or every peer is missing."""
    valid: dict[str, list[Mapping[str, Any]]] = {}
    for row in windows:
        if "void" not in row:
            valid.setdefault(row["connector"], []).append(row)
    engines = {name: {figure: median(row[figure] for row in of) for figure in _FIGURES} for name, of in valid.items()}
    for name, of in valid.items():
        engines[name]["all_turns_per_second"] = [row["turns_per_second"] for row in of]
        engines[name]["p50_is_lower_bound"] = any("ttft_p50_ms" in row.get("lower_bounds", ()) for row in of)
    void = {row["connector"]: row["void"] for row in windows if row["connector"] not in valid}
    missing = {name: reason for name, reason in (absent | void).items() if name not in engines}
    regime: Row = dict(zip(_KEY, key, strict=True))
    regime |= {"part": "regime", "seconds": min(row["seconds"] for row in windows)}  # of its shortest window
    regime |= {"engines": engines, "missing": missing}
    peers = [name for name in engines if is_peer(name)]
    default = next((name for name in engines if is_default(name)), None)
    if not peers or default is None:
        return regime
    best = max(peers, key=lambda name: engines[name]["turns_per_second"])
    soonest = min(engines[name]["ttft_p50_ms"] for name in peers)
    ours = engines[default]
    regime |= {"default": default, "best_peer": best, "num_peers": len(peers)}
    regime["over_best_peer"] = ours["turns_per_second"] / max(1e-9, engines[best]["turns_per_second"])
    p50 = ours["ttft_p50_ms"] / max(1e-9, soonest)
    if not ours["p50_is_lower_bound"] or p50 > 1.0:  # else it could be anything from there on
        regime["p50_over_soonest_peer"] = p50
    return regime


def label(regime: Mapping[str, Any]) -> str:
    """For names of claims."""
    rate = "" if regime["rate"] is None else f"_at_{regime['rate']:g}_a_second"
    return f"host_{regime['host_share']:g}x_answers_{regime['answer']}{rate}_{_in_names(regime['engine'])}"


def _in_names(engine: str) -> str:
    return engine.replace(".", "").replace(" ", "_")


def claim_regime(report: Report, regime: Mapping[str, Any]) -> None:
    """The claims on one regime; none where there is nothing to compare, which the table shows."""
    over = f"best_of_{regime.get('num_peers')}_peers_{label(regime)}"
    if "over_best_peer" in regime:
        report.claim(f"turns_over_{over}", regime["over_best_peer"], _goal(regime), "x", "higher")
    if "p50_over_soonest_peer" in regime:
        report.claim(f"p50_over_{over}", regime["p50_over_soonest_peer"], 1.0, "of 1", "lower")
    turns = {name: engine["turns_per_second"] for name, engine in regime["engines"].items()}
    if LOSSLESS in turns and (raw := next((turns[name] for name in turns if is_default(name)), None)):
        report.claim(
            f"turns_lossless_over_raw_{label(regime)}", turns[LOSSLESS] / raw, LOSSLESS_OVER_RAW, "x", "higher"
        )


def _goal(regime: Mapping[str, Any]) -> float:
    return OVER_BEST_PEER[regime["engine"].split()[0]]


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown, in the order of `found`. Of each engine turns a second, and p50 of the first token in ms."""
    names = list(dict.fromkeys(name for regime in found for name in (*regime["engines"], *regime["missing"])))
    head = ["engine's version", "host", "answer", "window", "turns / best peer", "p50 / soonest peer", *names]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for regime in found:
        cells = [regime["engine"], f"{regime['host_share']:g}x", _load(regime), f"{regime['seconds']:.0f} s"]
        for figure, goal, sign in (("over_best_peer", _goal(regime), 1), ("p50_over_soonest_peer", 1.0, -1)):
            value = regime.get(figure)
            missed = value is not None and sign * value < sign * goal
            cells.append("**none**" if value is None else f"**{value:.2f}**" if missed else f"{value:.2f}")
        for name in names:
            engine = regime["engines"].get(name)
            reason = regime["missing"].get(name, "not asked for")
            cells.append(_cell(engine) if engine else reason)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _load(regime: Mapping[str, Any]) -> str:
    return f"{regime['answer']} tokens" + ("" if regime["rate"] is None else f", {regime['rate']:g} a second")


def _cell(engine: Mapping[str, Any]) -> str:
    bound = "at least " if engine["p50_is_lower_bound"] else ""
    return f"{engine['turns_per_second']:.1f}, {bound}{engine['ttft_p50_ms']:.0f} ms"


def misses_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown, in the order of `rows`: throughput where nothing is hit, and what the connector's calls take."""
    head = [
        "engine's version",
        "connector",
        "throughput / no connector",
        "10th to 90th percentile",
        "rounds",
        "calls a step",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        ratio = f"{row['over_none']:.3f}"
        ratio = f"**{ratio}**" if row["over_none"] < MISS_PATH else ratio
        spread = f"{row['over_none_p10']:.3f} to {row['over_none_p90']:.3f}"
        cells = [
            engine_of(row),
            row["connector"],
            ratio,
            spread,
            str(len(row["all_over_none"])),
            milliseconds(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def milliseconds(row: Mapping[str, Any]) -> str:
    """Of the connector's calls in a step, where they are in sight."""
    return "?" if row.get("calls_ms") is None else f"{row['calls_ms']:.3f} ms"


def merged(results: Sequence[Mapping[str, Any]]) -> Report:
    """All regimes of some results of one engine, worst first. Its commit is theirs, if they are of one."""
    rows = [row for result in results for row in result["rows"]]
    report = Report("regimes")
    report.rows = regimes([row for row in rows if row["part"] in ("chats", "failed")])
    misses = [row for row in rows if row["part"] == "misses" and "over_none" in row]
    report.rows += sorted(misses, key=lambda row: row["over_none"])
    sources = ("date", "commit", "arguments", "hardware", "software")
    report.rows += [{"part": "source", **{name: result.get(name) for name in sources}} for result in results]
    commits = {result.get("commit") for result in results}
    report.commit = commits.pop() if len(commits) == 1 else None
    report.hardware, report.software = results[0]["hardware"], results[0]["software"]
    ratios = [row["over_best_peer"] for row in report.rows if "over_best_peer" in row]
    for row in report.rows:
        if row["part"] == "regime":
            claim_regime(report, row)
    if ratios:
        name = f"turns_over_best_peer_median_of_{len(ratios)}_regimes"
        engine = next(row["engine"] for row in report.rows if "over_best_peer" in row).split()[0]
        report.claim(name, median(ratios), MEDIAN_OVER_BEST_PEER[engine], "x", "higher")
    for row in misses:
        claim_misses(report, row)
    return report


def compared(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is the same in all results of a comparison."""
    names = ("device_tokens", "document", "question", "max_length", "tiny", "eager")
    return result["name"], result["hardware"]["gpu"], *(result["rows"][0].get(name) for name in names)


def mixed_regimes(windows: Sequence[Mapping[str, Any]]) -> str:
    """The label of a regime whose windows are not of the same users; empty where there is none."""
    users: dict[tuple[Any, ...], Any] = {}
    for row in windows:
        key, chats = _key(row), (row["users"], row["at_once"])
        if users.setdefault(key, chats) != chats:
            return label(dict(zip(_KEY, key, strict=True)))
    return ""


def claim_misses(report: Report, row: Mapping[str, Any]) -> None:
    """The claim on an engine of ours with the default policy, where nothing is hit, and on one with lossless blocks."""
    form = {LOSSLESS: "lossless_"}.get(row["connector"], "")
    if form or is_default(row["connector"]):
        name = f"miss_path_throughput_{form}{_in_names(engine_of(row))}"
        report.claim(name, row["over_none"], MISS_PATH, "of 1", "higher")


def draw(path: Path | None, found: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG: turns a second of each engine over the best peer's, by regime that has one. Needs matplotlib."""
    found = [regime for regime in found if "best_peer" in regime]
    if path is None or not found:
        return
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for regime in found for name in regime["engines"]))
    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.2 * len(found)), 4.5), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        bars = [
            (place + number * width, regime["engines"][name]["turns_per_second"] / best)
            for place, regime in enumerate(found)
            if name in regime["engines"] and (best := regime["engines"][regime["best_peer"]]["turns_per_second"])
        ]
        axes.bar([place for place, _ in bars], [height for _, height in bars], width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    ticks = [f"{regime['engine']}\nhost {regime['host_share']:g}x\n{_load(regime)}" for regime in found]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(found))], ticks, fontsize=8)
    axes.set_ylabel("turns answered a second / the best peer's")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"wrote {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.bench.regimes", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="of vllm_serving, or of sglang_serving")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args(arguments)
    if not options.results:
        print("no results were given: nothing to compare")
        return 0
    results = [json.loads(path.read_text()) for path in options.results]
    for path, result in zip(options.results, results, strict=True):
        if result.get("name") not in _SERVING or not {"host_share", "host_shares"} & result["rows"][0].keys():
            parser.error(f"{path} is no result of serving with regimes: measure it again, or leave it out")
    if len({compared(result) for result in results}) > 1:
        parser.error("these results are of several engines, GPUs or sets of options: give those of one")
    if mixed := mixed_regimes([row for result in results for row in result["rows"] if row["part"] == "chats"]):
        parser.error(f"these results have chats of several numbers of users in {mixed}: give those of one")
    report = merged(results)
    found = [row for row in report.rows if row["part"] == "regime"]
    print("\n".join(table(found)))
    if misses := [row for row in report.rows if row["part"] == "misses"]:
        print("\n".join(misses_table(misses)))
    if report.commit is None:
        print("these results are of several commits, or of unknown ones")
    report.write(options.json)
    draw(options.png, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
