"""The picture at the top of README.md, drawn from results: chats beside all peers, and what is slower than without us.

    python -m integration.overview            # exit with 1 where the picture is not of the results
    python -m integration.overview --write    # draw it anew

What it shows lies in the picture's own description, so that it can be compared without looking.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.bench.peers import PEERS
from integration.bench.regimes import regimes
from integration.figures.results import RESULTS, ROOT, read

PICTURE = RESULTS / "overview.png"
CHATS = {
    "": ("vllm_serving_0320_twelve_h200", "vllm_serving_0320_launch_h200"),
    "\nolder": tuple(f"vllm_serving_0320_choice_{size}_h200" for size in ("1x", "2x")),
}
MISSES = ("vllm_misses_0251_h200", "vllm_misses_0320_h200")
FIRST_TOKENS = {
    "": "sglang_ttft_h200",
    "\nolder": "sglang_ttft_beside_h200",
}
"""Chats and first tokens by what is written below their names."""
NAMES = {"ours": "kv_connector, default policy"} | PEERS
COLOURS = {"ours": "#3949ab", "offloading": "#ef6c00", "simple": "#8d6e63", "lmcache": "#78909c", "hicache": "#00897b"}


def chats() -> dict[str, dict[str, float]]:
    """Turns answered a second, by regime and engine, of the last result that has it; small hosts first, short answers
    first."""
    shown = {}
    for run, name_of_result in ((run, name) for run, names in CHATS.items() for name in names):
        found = regimes([row for row in read(name_of_result)["rows"] if "host_share" in row])
        for regime in sorted(found, key=lambda regime: (regime["host_share"], regime["answer"])):
            engines = regime["engines"]
            shown[f"host {regime['host_share']:g}x\nanswers {regime['answer']}{run}"] = {
                name: round(engines[name]["turns_per_second"], 4) for name in NAMES if name in engines
            }
    return shown


def misses() -> dict[str, dict[str, float]]:
    """Throughput of prompts that nobody repeats, over that without a connector, by version and engine."""
    shares = {}
    for measured in map(read, MISSES):
        rows = {row["connector"]: row for row in measured["rows"] if "over_none" in row}
        shares[f"vLLM {measured['software']['vllm']}"] = {
            name: round(rows[name]["over_none"], 4) for name in NAMES if name in rows
        }
    return shares


def host_hits() -> dict[str, dict[str, float]]:
    """Milliseconds to the first token of a host hit in SGLang, by tokens and engine."""
    found: dict[str, dict[str, float]] = {}
    for host, name_of_result in FIRST_TOKENS.items():
        rows = [row for row in read(name_of_result)["rows"] if row.get("kind") == "host_hit"]
        for name in NAMES:
            for row in rows:
                if row["connector"] == name:
                    found.setdefault(f"{row['tokens']:,}{host}", {})[name] = round(row["ms"], 3)
    return found


def shown() -> dict[str, Any]:
    """All that the picture says."""
    return {"chats": chats(), "misses": misses(), "host_hits": host_hits()}


def shown_by(picture: Path) -> Any:
    """What a picture says that was drawn earlier; None where there is none."""
    from PIL import Image

    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return json.loads(image.info.get("Description", "null"))


def draw(path: Path) -> None:
    """Write the picture. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    says = shown()
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(24, 4.4), width_ratios=(15, 3.2, 6.4), layout="constrained"
    )
    _bars(left, says["chats"], 1)
    left.set_title("Chats: turns answered a second (more is better)", fontsize=10)
    left.legend(fontsize=8, loc="upper left")
    _bars(middle, says["misses"], 3)
    middle.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    middle.set_ylim(0, 1.15)
    middle.set_title("Nothing is hit: throughput over that\nwithout a connector (1)", fontsize=10)
    ratios = {
        tokens: {name: ms / engines["hicache"] for name, ms in engines.items()}
        for tokens, engines in says["host_hits"].items()
    }
    _bars(right, ratios, 2)
    right.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    right.set_ylim(0, 1.9)
    right.set_title("SGLang, a host hit: time to first token\nover HiCache's, by tokens (less is better)", fontsize=10)
    right.legend(fontsize=8, loc="upper right")
    figure.suptitle(_caption(), fontsize=8.5, y=-0.02, va="top", color="#555555")
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Description": json.dumps(says), "Software": None})
    pyplot.close(figure)


def _caption() -> str:
    names = dict.fromkeys((*sum(CHATS.values(), ()), *MISSES))
    measured, tokens = [read(name) for name in names], read(FIRST_TOKENS[""])
    gpus = {one["hardware"]["gpu"] for one in (*measured, tokens)}
    assert len(gpus) == 1, f"one caption for results of {sorted(gpus)}"
    dates = sorted(one["date"][:10] for one in measured)
    lmcache = sorted({one["software"]["lmcache"] for one in measured if "lmcache" in one["software"]})
    vllm = f"vLLM, {dates[0]} to {dates[-1]}, write policy adaptive, LMCache {' and '.join(lmcache)}"
    sglang = f"SGLang {tokens['software']['sglang']}, {tokens['date'][:10]}"
    return (
        f"One {gpus.pop()}, Llama-3.1-8B's shape, dummy weights in bf16. Left and middle: {vllm}; left: vLLM 0.32, "
        "chats of 8,000 to 12,288 tokens, host memory for 0.5 to 2 times of them, one window for each bar, the newest "
        "run of each size, and older code on another host, without SimpleCPUOffloadConnector;\n"
        f"middle: prompts that nobody repeats. Right: {sglang}, and older code beside vLLM's chats on the other GPU. "
        "Other workloads and more that lost: docs/benchmarks.md and docs/sglang.md."
    )


def _bars(axes: Any, groups: Mapping[str, Mapping[str, float]], digits: int) -> None:
    names: Sequence[str] = [name for name in NAMES if any(name in engines for engines in groups.values())]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        bars = [(i + number * width, engines[name]) for i, engines in enumerate(groups.values()) if name in engines]
        places, heights = zip(*bars, strict=True)
        drawn = axes.bar(places, heights, width, label=NAMES[name], color=COLOURS[name])
        axes.bar_label(drawn, fmt=f"%.{digits}f", fontsize=7, padding=1)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], list(groups), fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.overview", description=__doc__)
    parser.add_argument("--write", action="store_true", help="draw it")
    if parser.parse_args().write:
        draw(PICTURE)
    if shown_by(PICTURE) == shown():
        return 0
    print(f"{PICTURE.relative_to(ROOT)} is not of the results: python -m integration.overview --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
