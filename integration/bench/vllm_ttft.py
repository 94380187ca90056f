"""Time to first token of vLLM, by where its prefix is: ours beside other connectors (`first_tokens`).

A last part starts engines with a large host memory and tells when the first token is served and how much of that memory
was ready then; eager, as capturing graphs takes longer than pinning. Needs vLLM, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from integration.bench.engines import EngineError, start_engines, wait_for_host
from integration.bench.first_tokens import add_ttft_arguments, first_tokens, made_tiny
from integration.bench.options import EngineOptions, add_arguments, unavailable
from integration.bench.vllm_engine import VllmOptions
from integration.report import Report
from kv_connector.values import parse_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(VllmOptions, parser, host_memory="16GiB", device_tokens=49152)
    add_ttft_arguments(VllmOptions, parser)
    parser.add_argument("--startup-connectors", default="ours", help="for the last part, such as ours,offloading")
    parser.add_argument("--startup-host-memory", default="48GiB", help="for the last part; 0 leaves it out")
    options = made_tiny(parser.parse_args())
    if reason := unavailable(VllmOptions, options):
        print(reason)
        return 0
    report, wanted = first_tokens("vllm_ttft", VllmOptions, options)
    if large := 0 if options.tiny else parse_size(options.startup_host_memory):
        for connector in options.startup_connectors.split(","):
            started = replace(wanted[0], connector=connector, host_bytes=large, eager=True)
            measure_startup(report, started, options.start_timeout)
    report.write(options.json)
    return 0


def measure_startup(report: Report, wanted: EngineOptions, timeout: float) -> None:
    """Part three: when the first token is served, with a host memory that takes long to pin."""
    engines, ready = start_engines([wanted], timeout)
    for name, engine in list(engines.items()):
        begin = ready[name]
        row = {"part": "startup", "connector": name, "host_bytes": wanted.host_bytes}
        row |= {"engine_seconds": begin.engine_seconds, "first_token_seconds": begin.first_token_seconds}
        try:
            last = engine.call(wait_for_host).get("host_capacity_blocks", 0)
        except EngineError as error:
            engines.drop(name, error)
            continue
        first = begin.stats.get("host_capacity_blocks", 0)
        report.rows.append(row | {"first_capacity_blocks": first, "last_capacity_blocks": last})
        if last:
            print(f"{name}: {first:.0f} blocks of host memory were ready at the first token, {last:.0f} are at last")
            report.claim(f"{name}_host_memory_ready_at_first_token", first / last, 0.99, "of 1", "lower")
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
