"""What strangers, hostile peers, damage and faulty disks may do: each so many times, with counts of what was achieved.

`--json FILE` writes the result as the benchmarks do, and the exit status is 1 where a claim does not hold. An attack is
a function of how often it tries and of a seed; it returns an `Outcome`, whose claims are counts that are to stay 0 and
are added up over all attacks. Each runs in a process of its own, so that one which is brought down by it is counted.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from integration.attack import Outcome
from integration.attacks_on_disks import DISK_ATTACKS
from integration.attacks_on_peers import PEER_ATTACKS
from integration.attacks_on_storage import STORAGE_ATTACKS
from integration.attacks_on_writes import WRITE_ATTACKS
from integration.report import Report

ATTACKS = (*PEER_ATTACKS, *WRITE_ATTACKS, *STORAGE_ATTACKS, *DISK_ATTACKS)


def main(arguments: list[str] | None = None) -> int:
    """Run the attacks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--only", nargs="+", choices=[attack.name for attack in ATTACKS], help="these, not all")
    parser.add_argument("--share", type=float, default=1.0, help="of how often each is to be tried")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    report, claims = Report("attacks"), Counter[str]()
    for attack in ATTACKS:
        if options.only and attack.name not in options.only:
            continue
        tries, start = max(1, int(attack.tries * options.share)), time.monotonic()
        outcome = run_apart(attack.name, tries, options.seed)
        seconds = round(time.monotonic() - start, 1)
        report.rows.append(
            {
                "attack": attack.name,
                "tried": tries - outcome.not_tried,
                "seconds": seconds,
                **outcome.claims,
                **outcome.milliseconds,
                **outcome.details,
            }
        )
        told = outcome.claims | outcome.milliseconds
        tried = f"tried {tries - outcome.not_tried} of {tries} times in {seconds} s"
        print(f"{attack.name}: {tried}: {told} {outcome.details}", flush=True)
        claims.update(outcome.claims | {"not_tried": outcome.not_tried})
        for name, longest in outcome.milliseconds.items():
            report.claim(name, longest, 1, "ms", "lower")
    for name, count in sorted(claims.items()):
        report.claim(name, count, 0, "times", "lower")
    report.write(options.json)
    return 0 if report.all_hold else 1


def run_apart(name: str, tries: int, seed: int) -> Outcome:
    """Run an attack in another process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run_here, args=(there, name, tries, seed))
    process.start()
    there.close()
    try:
        outcome: Outcome = here.recv()
    except EOFError:
        outcome = Outcome({"processes_brought_down": 1}, not_tried=tries)
    else:
        outcome.claims["processes_brought_down"] = 0
    process.join()  # NIXL's wheel ends with a segmentation fault, behind everything of ours
    return outcome


def _run_here(pipe: Connection, name: str, tries: int, seed: int) -> None:
    for part in ("peer", "storage"):
        logging.getLogger(f"kv_connector.{part}").setLevel(logging.CRITICAL)
    (attack,) = (attack for attack in ATTACKS if attack.name == name)
    pipe.send(attack.run(tries, seed))


if __name__ == "__main__":
    sys.exit(main())
