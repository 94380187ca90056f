"""vLLM under load: our connector beside others, and beside none (`serving`). Needs vLLM, and a GPU or `--tiny`."""

from __future__ import annotations

import argparse
import sys

from integration.bench.options import add_arguments, unavailable
from integration.bench.serving import add_serving_arguments, made_tiny, serve
from integration.bench.vllm_engine import KINDS, VllmOptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, KINDS, host_memory="1x", device_tokens=24576)
    add_serving_arguments(parser)
    parser.add_argument("--trace-misses", action="store_true", help="at last, a batch of it under a profiler")
    parser.add_argument("--trace", type=float, default=0.0, help="at last, seconds of the last window under a profiler")
    options = made_tiny(parser.parse_args())
    if reason := unavailable(options, "vllm"):
        print(reason)
        return 0
    serve(VllmOptions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
