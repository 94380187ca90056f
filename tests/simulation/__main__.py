"""`make simulate ARGS="--seed 1 --steps 20000 --json FILE"`: worlds of seed 1, 2, ... until so many steps are done.

Exits 1 where a world failed, after it has printed the shortest history that it found and a line that repeats it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from pathlib import Path

import torch

from . import report, shrink
from .world import Outcome, simulate

COMMAND = "python -m tests.simulation"


def prepare() -> None:
    """Of each process: worlds are small, and what the connector logs of their faults is not news."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def worlds(first: int, keep: frozenset[int] | None, at_once: int) -> Iterator[Outcome]:
    """Those of seed `first` and following, in their order, whatever runs beside what."""
    if at_once == 1:
        yield from (simulate(seed, keep) for seed in count(first))
    with ProcessPoolExecutor(at_once, initializer=prepare) as pool:
        ahead: deque[Future[Outcome]] = deque()
        try:
            for seed in count(first):
                ahead.append(pool.submit(simulate, seed, keep))
                if len(ahead) > 2 * at_once:
                    yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first world")
    parser.add_argument("--steps", type=int, default=20_000, help="engine steps in all")
    parser.add_argument("--worlds", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--at-once", type=int, default=1, help="worlds beside each other, in processes of their own")
    parser.add_argument("--keep", default="", help="numbers of the actions to do, of one world: 1,4,7")
    parser.add_argument("--most-failures", type=int, default=1, help="stop behind so many failed worlds")
    parser.add_argument("--shrink-seconds", type=float, default=shrink.MOST_SECONDS, help="for a shorter history")
    parser.add_argument("--trace", action="store_true", help="print where the failure was found")
    parser.add_argument("--json", type=Path, help="write the result there")
    arguments = parser.parse_args()
    prepare()
    outcomes: list[Outcome] = []
    met: Counter[str] = Counter()
    steps, began = 0, time.monotonic()
    failures = 0
    for outcome in worlds(arguments.seed, shrink.numbers_of(arguments.keep), arguments.at_once):
        outcomes.append(outcome)
        met.update(outcome.met)
        steps += outcome.num_steps
        if outcome.violation is not None:
            failures += 1
            is_shrunk = arguments.keep or not arguments.shrink_seconds
            shortest = outcome if is_shrunk else shrink.shrink(outcome, arguments.shrink_seconds)
            print("\n".join(shrink.describe(shortest, COMMAND)), flush=True)
            if arguments.trace:
                print(shortest.trace)
        if steps >= arguments.steps or len(outcomes) >= arguments.worlds or failures >= arguments.most_failures:
            break
    seconds = time.monotonic() - began
    print(f"{len(outcomes)} worlds, {steps} steps, {steps / seconds:.0f} a second; failed: {shrink.summary(outcomes)}")
    if arguments.json is not None:
        report.write(arguments.json, outcomes, arguments.steps, met)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
