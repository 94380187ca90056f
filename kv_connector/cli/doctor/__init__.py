"""`kv-connector doctor`: whether this machine serves, and what to do where it does not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ...values import check_integer, parse_size
from ..text import Parsers
from .finding import Finding, Status

_MARKS = {Status.OK: "ok      ", Status.WARNING: "warning ", Status.PROBLEM: "PROBLEM "}


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "check this machine, time copies for a few seconds, and say what to fix"
    parser = parsers.add_parser("doctor", help=text, description=f"{text}. Exits 1 where there is a problem.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--path", type=Path, metavar="STORAGE", help="a storage folder to check as well")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--host-memory", default="0", metavar="SIZE", help="host_memory that the engine will have")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_integer("--device", options.device, 0)
    host_memory = parse_size(options.host_memory, "--host-memory")
    findings = []
    for finding in _look(options.device, options.path, host_memory):
        findings.append(finding)
        if not options.json:
            print(_text(finding), flush=True)
    num_problems = sum(finding.status is Status.PROBLEM for finding in findings)
    if options.json:
        told = [asdict(finding) | {"status": finding.status.value} for finding in findings]
        print(json.dumps({"problems": num_problems, "findings": told}, indent=1))
    else:
        num_warnings = sum(finding.status is Status.WARNING for finding in findings)
        print(f"{len(findings)} findings: {num_problems} problems, {num_warnings} warnings")
    return 1 if num_problems else 0


def _look(device: int, folder: Path | None, host_memory: int) -> Iterator[Finding]:
    from . import copies, folders, gpu, memory, software

    yield from software.look()
    found = gpu.look(device)
    yield from found.findings
    copied = copies.measure(found)
    yield from copied.findings
    yield from memory.look(host_memory, copied.is_pinned)
    if folder is not None:
        yield from folders.look(folder)


def _text(finding: Finding) -> str:
    line = f"{_MARKS[finding.status]}{finding.name}: {finding.value}"
    if finding.status is Status.OK:
        return line
    return f"{line}\n        should be: {finding.limit}\n        fix: {finding.fix}"
