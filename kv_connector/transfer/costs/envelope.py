"""What `LinkCosts` amount to, for people: all three paths by the length of a piece, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...config import PathName
from ...errors import ConfigError
from ...types import Direction
from .curves import LEAST_PITCHED_BYTES, LinkCosts

PIECES = 64
"""Of a block: keys and values of 32 layers that lie apart."""
_LENGTHS = tuple(1 << power for power in range(10, 22))
_PATHS = (PathName.RUNS, PathName.DIRECT, PathName.STAGED)


@dataclass(frozen=True, slots=True)
class Point:
    """GB/s of each path for a copy of about `num_bytes` in pieces of `piece_bytes`, and the path that is taken."""

    direction: Direction
    piece_bytes: int
    rates: dict[PathName, float]
    chosen: PathName


def envelope(costs: LinkCosts, num_bytes: int) -> Iterator[Point]:
    """Both directions, by ascending pieces."""
    for direction in Direction:
        for piece in _LENGTHS:
            row = piece * PIECES
            num_rows = max(1, num_bytes // row)
            times = {path: costs.of(direction).microseconds(path, piece, row, num_rows) for path in _PATHS}
            rates = {path: num_rows * row / time / 1e3 for path, time in times.items()}
            yield Point(direction, piece, rates, costs.choose(direction, piece, row, num_rows))


def table(costs: LinkCosts, num_bytes: int) -> str:
    """Lines of text."""
    lines = [costs.source, f"GB/s of a copy of {num_bytes >> 20} MiB, blocks of {PIECES} pieces that lie apart:"]
    lines.append(f"{'':>8} {'piece':>9} " + " ".join(f"{path.value:>8}" for path in _PATHS) + "  taken")
    for point in envelope(costs, num_bytes):
        length = f"{point.piece_bytes >> 10} KiB" if point.piece_bytes < 1 << 20 else f"{point.piece_bytes >> 20} MiB"
        rates = " ".join(f"{point.rates[path]:8.1f}" for path in _PATHS)
        lines.append(f"{point.direction.value:>8} {length:>9} {rates}  {point.chosen.value}")
    rows = [costs.rows_at(share) >> 10 for share in (0.8, 0.92)]
    lines.append(f"layer groups of {costs.group_bytes >> 20} MiB, in rows from {rows[0]} to {rows[1]} KiB")
    coders = [max(costs.of(way).coding.gigabytes_per_second) for way in (Direction.SAVE, Direction.LOAD)]
    lines.append(f"pieces that are coded on the host: up to {coders[0]:.0f} to it and {coders[1]:.0f} from it")
    lines.append(
        f"from {LEAST_PITCHED_BYTES >> 10} KiB on pieces that lie evenly apart are runs as long as their block"
    )
    return "\n".join(lines)


def draw(costs: LinkCosts, num_bytes: int, path: Path) -> None:
    """Write a picture. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    points = list(envelope(costs, num_bytes))
    for axes, direction in zip(panels, Direction, strict=True):
        own = [point for point in points if point.direction is direction]
        pieces = [point.piece_bytes / 1024 for point in own]
        for name in _PATHS:
            axes.plot(pieces, [point.rates[name] for point in own], marker=".", label=name.value)
        axes.plot(
            pieces,
            [point.rates[point.chosen] for point in own],
            color="black",
            alpha=0.25,
            linewidth=7,
            label="taken",
        )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("piece, KiB")
        axes.set_title("to the device" if direction is Direction.LOAD else "to the host")
        axes.grid(True, alpha=0.2)
    panels[0].set_ylabel(f"GB/s of a copy of {num_bytes >> 20} MiB")
    panels[1].legend()
    figure.suptitle(costs.source, fontsize="small")
    figure.savefig(path, dpi=120)
