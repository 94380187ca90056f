"""vLLM under load: our connector beside others, and beside none (`serving`). Needs vLLM, and a GPU or `--tiny`."""

from __future__ import annotations

import argparse
import sys

from integration.bench.serving import serve
from integration.bench.vllm_engine import VllmOptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace-misses", action="store_true", help="at last, a batch of it under a profiler")
    parser.add_argument("--trace", type=float, default=0.0, help="at last, seconds of the last window under a profiler")
    return serve(VllmOptions, parser)


if __name__ == "__main__":
    sys.exit(main())
