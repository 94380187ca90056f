"""The demo's picture: time to first token per turn, one line for each way of caching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median


def plot_ttft(path: Path, title: str, points: Sequence[tuple[str, int, float]]) -> None:
    """Write a PNG of (way, turn, TTFT in ms): medians as lines, single users as dots. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for way in dict.fromkeys(way for way, _, _ in points):
        turns = sorted({turn for name, turn, _ in points if name == way})
        by_turn = [[ms for name, t, ms in points if name == way and t == turn] for turn in turns]
        (line,) = axes.plot([t + 1 for t in turns], [median(times) for times in by_turn], marker="o", label=way)
        for turn, times in zip(turns, by_turn, strict=True):
            axes.scatter([turn + 1] * len(times), times, s=9, color=line.get_color(), alpha=0.5)
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(ticker.FuncFormatter(lambda ms, _: f"{ms:g}"))
    axes.set_xticks(sorted({turn + 1 for _, turn, _ in points}))
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("time to first token, ms (median over users)")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
