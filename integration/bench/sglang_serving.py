"""SGLang under load: our linker beside its own hierarchical cache, and beside none (`serving`).

Needs SGLang, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import sys

from integration.bench.options import add_arguments, unavailable
from integration.bench.serving import add_serving_arguments, made_tiny, serve
from integration.bench.sglang_engine import KINDS, SglangOptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, KINDS, host_memory="1x", device_tokens=24576)
    add_serving_arguments(parser)
    options = made_tiny(parser.parse_args())
    if reason := unavailable(options, "sglang"):
        print(reason)
        return 0
    serve(SglangOptions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
