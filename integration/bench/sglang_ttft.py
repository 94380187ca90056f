"""Time to first token of SGLang, by where its prefix is: ours beside its own hierarchical cache (`first_tokens`).

Needs SGLang, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import sys

from integration.bench.first_tokens import add_ttft_arguments, first_tokens, made_tiny
from integration.bench.options import add_arguments, unavailable
from integration.bench.sglang_engine import SglangOptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(SglangOptions, parser, host_memory="16GB", device_tokens=49152)
    add_ttft_arguments(SglangOptions, parser)
    options = made_tiny(parser.parse_args())
    if reason := unavailable(SglangOptions, options):
        print(reason)
        return 0
    report, _ = first_tokens("sglang_ttft", SglangOptions, options)
    report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
