"""How long a copy takes on each path on this machine, and from that the fastest path and layer groups.

Four things are known of each direction, measured at start-up (`calibration.py`) or built in: DMA by the length of a
segment, and the kernels that pack, that code and that go over the link, by the length of a piece. All else is sums of
these. Bytes are those that are moved: of a coded piece what is stored of it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...config import PathName
from ...errors import ConfigError
from ...types import Direction
from ...values import open_at_once, path_of, shortened, shown

NUM_BYTES = 32 << 20
"""Of host memory, and of scratch memory on the device, that copies are measured on."""
EDGE_BYTES = 8 << 20
"""Of the chunk of a staged copy beside which no other chunk moves: the first of a save, the last of a load."""
LEAST_PITCHED_BYTES = 128 << 10
"""Of a piece. Loads and saves of 2.25 GiB, as shares of the link (H200, 2026-11-23): in pieces of 256 KiB pitched 0.986
and 0.986, beside large products 0.985 and 0.956, and packed 0.963 and 0.975, beside them 0.917 and 0.905; of 128 KiB
0.980 and 0.975, beside them 0.975 and 0.914, and packed 0.962 and 0.974, beside them 0.918 and 0.910. Packing is the
faster one for saves of 64 KiB beside products, and for all copies in pieces of 16 KiB, by a quarter."""
DISTURBING_US = 35.0
"""A kernel over the link slows the model by 15 to 57 % (H200, 2026-11-21) while it runs: longer than this it runs only
for a copy that the model waits for."""
_LONGEST_LAUNCHED_BYTES = 256 << 10
_WORTH_LAUNCHING = 1.1
"""A copy that the model waits for goes over the link by a kernel, if that takes up to so much longer and its segments
are no longer than that: it is one launch, and whoever submits many segments or chunks loses more than that. First
tokens of host hits of 2,048 and 8,192 tokens in segments of 128 KiB: 17.4 and 33.2 ms so, 18.4 and 33.9 packed
(SGLang, H200, 2026-11-26, `sglang_ttft_paths_h200.json`); in other runs, which were not kept, later by DMA, and 21.5
and 36.0, and packed 19.9 and 39.3 (2026-11-25)."""
MOST_LAUNCHED_BYTES = 1 << 30
"""Of a load that is copied so as a whole: it moves at 0.92 of the link, DMA and packing at 0.97 to 0.99, and of a long
load that is more than what a launch saves. First tokens of host hits of 4 GiB: 98.8 ms so and 95.5 packed in SGLang
(`sglang_ttft_paths_32k_h200.json`), 101.9 so in vLLM (`vllm_ttft_0320_h200.json`), where DMA took 95.5 on another
day."""
_WORTH_PACKING = {Direction.LOAD: 0.97, Direction.SAVE: 0.9}
"""Packing is chosen where it takes less than this share of DMA's time: it takes multiprocessors and memory bandwidth,
which DMA does not."""
LONG_SAVED_BYTES = 64 << 10
"""Of a segment that is saved. Nobody waits for a save, so what counts is the model: with saves of 64 KiB pieces, of
which packing moves 0.96 of the link and DMA 0.75 to 0.92, vLLM computes 0.974 to 0.976, and 0.985 to 0.988, of what it
does without a connector (H200, vLLM 0.25.1, four hosts, 2026-11-23). Of shorter ones DMA takes the driver's time."""
_WORTH_PACKING_LONG_SAVES = 0.5
_GROUP_STARTS = 20
"""A layer group takes as long as so many starts of a copy, so that starting costs it a twentieth."""
_LIMIT = 1 << 16  # characters of a file
_MOST_BYTES = 1 << 20  # of a file: what is larger was named by mistake
_MOST_LENGTH = 1 << 40
_LEAST_RATE, _MOST_RATE = 1e-6, 1e6
_MOST_START_US = 1e9


@dataclass(frozen=True, slots=True)
class Curve:
    """GB/s at some lengths, in bytes and ascending, and the microseconds that a copy of no bytes takes."""

    lengths: tuple[int, ...]
    gigabytes_per_second: tuple[float, ...]
    start_us: float

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        if not (self.lengths and ascending and self.lengths[0] > 0 and self.lengths[-1] <= _MOST_LENGTH):
            raise ConfigError(f"lengths {shown(self.lengths)}: give them ascending, from 1 to {_MOST_LENGTH}")
        if not all(_LEAST_RATE <= rate <= _MOST_RATE for rate in self.gigabytes_per_second):
            given = shown(self.gigabytes_per_second)
            raise ConfigError(f"rates {given}: give them from {_LEAST_RATE:g} to {_MOST_RATE:g}")
        if len(self.lengths) != len(self.gigabytes_per_second):
            raise ConfigError(f"{len(self.lengths)} lengths, {len(self.gigabytes_per_second)} rates: give one for each")
        if not 0 <= self.start_us <= _MOST_START_US:
            raise ConfigError(f"start_us {self.start_us}: give it from 0 to {_MOST_START_US:g}")

    def rate(self, length: float) -> float:
        """GB/s at this length: between those known by its logarithm, and beyond them as at the last."""
        lengths, rates = self.lengths, self.gigabytes_per_second
        i = bisect_right(lengths, length)
        if i == 0 or i == len(lengths):
            return rates[max(0, i - 1)]
        share = math.log(length / lengths[i - 1]) / math.log(lengths[i] / lengths[i - 1])
        return rates[i - 1] + share * (rates[i] - rates[i - 1])

    def microseconds(self, num_bytes: int, length: float) -> float:
        """Of a copy of `num_bytes` in parts of `length`."""
        return self.start_us + num_bytes / self.rate(length) / 1e3


@dataclass(frozen=True, slots=True)
class DirectionCosts:
    """`dma` by segment; `packing` and `coding` on the device and `direct` over the link by piece."""

    dma: Curve
    packing: Curve
    direct: Curve
    coding: Curve

    def microseconds(self, path: PathName, segment_bytes: int, row_bytes: int, num_rows: int) -> float:
        """Of a copy of `num_rows` rows of host memory in segments of `segment_bytes` on average, by one path."""
        num_bytes = num_rows * row_bytes
        if path is PathName.RUNS:
            return self.dma.microseconds(num_bytes, segment_bytes)
        if path is PathName.DIRECT:
            return self.direct.microseconds(num_bytes, segment_bytes)
        edge = self.packing.microseconds(min(num_bytes, EDGE_BYTES), segment_bytes)
        # A chunk is packed while another is copied: whichever takes longer.
        packing = num_bytes / self.packing.rate(segment_bytes) / 1e3
        return edge + max(packing, self.dma.microseconds(num_bytes, row_bytes))


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Costs of copies of one GPU. `source` says where they were measured."""

    load: DirectionCosts
    save: DirectionCosts
    source: str

    def of(self, direction: Direction) -> DirectionCosts:
        """Those of a direction."""
        return self.load if direction is Direction.LOAD else self.save

    @property
    def coded(self) -> LinkCosts:
        """Of blocks that are coded on the host, which the coder packs."""
        load, save = (replace(costs, packing=costs.coding) for costs in (self.load, self.save))
        return replace(self, load=load, save=save)

    def choose(
        self, direction: Direction, segment_bytes: int, row_bytes: int, num_rows: int, urgent: bool = False
    ) -> PathName:
        """The path for a copy to or from page-locked memory; `urgent`: the model waits for it."""
        costs = self.of(direction)
        runs, staged, direct = (
            costs.microseconds(path, segment_bytes, row_bytes, num_rows)
            for path in (PathName.RUNS, PathName.STAGED, PathName.DIRECT)
        )
        others = min(runs, staged)
        is_short = segment_bytes <= _LONGEST_LAUNCHED_BYTES
        if urgent and direct < (_WORTH_LAUNCHING * others if is_short else others):
            return PathName.DIRECT
        if direct < others and direct <= DISTURBING_US:
            return PathName.DIRECT
        is_long_save = direction is Direction.SAVE and segment_bytes >= LONG_SAVED_BYTES
        worth = _WORTH_PACKING_LONG_SAVES if is_long_save else _WORTH_PACKING[direction]
        return PathName.STAGED if staged < worth * runs else PathName.RUNS

    def rows_at(self, share: float) -> int:
        """Bytes of the shortest row, a power of two, that DMA loads at this share of its best rate."""
        dma = self.load.dma
        length = dma.lengths[0]
        while length < dma.lengths[-1] and dma.rate(length) < share * max(dma.gigabytes_per_second):
            length *= 2
        return length

    @property
    def group_bytes(self) -> int:
        """Bytes of a layer group: large enough to keep the link busy and no larger, so that the first layers arrive
        early."""
        start_us = self.load.dma.start_us + self.load.packing.start_us
        return int(_GROUP_STARTS * start_us * max(self.load.dma.gigabytes_per_second) * 1e3)

    def encode(self) -> str:
        """As JSON; see `decode`."""
        return json.dumps(asdict(self), indent=1)


def decode(text: str, name: str) -> LinkCosts:
    """What `encode` wrote. Raises ConfigError, with the name of the file that it comes from."""
    try:
        found: Any = json.loads(text[:_LIMIT])
        return LinkCosts(_direction(found["load"]), _direction(found["save"]), str(found["source"])[:200])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        given, reason = shortened(name), shown(error)
        raise ConfigError(f"{given} is no result of `kv-connector calibrate`: {reason}; measure anew") from error


def costs_of_file(setting: str, file: str) -> LinkCosts:
    """What `encode` wrote into the file that a setting, or an option, names. Waits for no pipe, and reads nothing
    without an end. Raises ConfigError."""
    fix = "that `kv-connector calibrate --json` wrote, or leave it out"
    try:
        with open(path_of(setting, file), opener=open_at_once) as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                raise ConfigError(f"{setting}={shown(file)} is no file of at most {_MOST_BYTES} bytes: give one {fix}")
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = shortened(str(error))
        raise ConfigError(f"{setting}={shown(file)} cannot be read: {reason}; give a file {fix}") from error
    return decode(text, file)


def _direction(found: Mapping[str, Any]) -> DirectionCosts:
    return DirectionCosts(*(_curve(found[name]) for name in ("dma", "packing", "direct", "coding")))


def _curve(found: Mapping[str, Any]) -> Curve:
    lengths = tuple(int(length) for length in found["lengths"])
    return Curve(lengths, tuple(float(rate) for rate in found["gigabytes_per_second"]), float(found["start_us"]))


_LENGTHS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
# Packing: half of what twice as many programs reached, not measured itself. Coding: 49/64 of what
# `integration/bench/lossless.py` has in raw bytes, of pieces of 8, 32 and 64 KiB with the programs that copies use
# (64, 16 and 16); shorter ones have one warp in each of 128 programs, and are no slower.
BUILT_IN = LinkCosts(
    load=DirectionCosts(
        dma=Curve(_LENGTHS, (2.1, 8.0, 26.0, 49.6, 50.0, 54.3), 10.0),
        packing=Curve((1 << 10, 16 << 10), (200.0, 400.0), 25.0),
        direct=Curve((1 << 10, 4 << 10, 16 << 10), (40.0, 44.9, 50.0), 12.0),
        coding=Curve((6272, 25088, 50176), (323.0, 295.0, 236.0), 25.0),
    ),
    save=DirectionCosts(
        dma=Curve(_LENGTHS, (2.3, 8.9, 38.0, 49.8, 50.1, 54.2), 10.0),
        packing=Curve((1 << 10, 16 << 10), (200.0, 400.0), 25.0),
        direct=Curve((1 << 10, 4 << 10, 16 << 10), (40.0, 45.5, 51.2), 12.0),
        coding=Curve((6272, 25088, 50176), (271.0, 258.0, 201.0), 25.0),
    ),
    source="built in: one H200 on PCIe 5, driver 580, 2026-11-21",
)
"""What serves where nothing was measured. Their order is the same on other GPUs, and that is what counts."""
