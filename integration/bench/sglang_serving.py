"""SGLang under load: our linker beside its own hierarchical cache, and beside none (`serving`).

Needs SGLang, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import sys

from integration.bench.serving import serve
from integration.bench.sglang_engine import SglangOptions


def main() -> int:
    return serve(SglangOptions, argparse.ArgumentParser(description=__doc__.splitlines()[0]))


if __name__ == "__main__":
    sys.exit(main())
