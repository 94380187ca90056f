"""Figures in the documents that are written from results, and tables that are written from the code
(`integration/figures/reference.py`), so that they cannot say anything else.

    python -m integration.figures            # print what is not as they say, and exit with 1 if anything is
    python -m integration.figures --write    # put it into the documents

A document has `<!-- figures: NAME -->`, the lines of that name below, and `<!-- end of figures -->`.
"""

from __future__ import annotations

import argparse
import sys

from integration.figures import documents
from integration.figures.results import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the figures of the results into the documents")
    arguments = parser.parse_args()
    stale = documents.stale()
    for path, text in stale.items():
        if arguments.write:
            path.write_text(text)
        else:
            print(f"{path.relative_to(ROOT)}: figures are not those of the results, which say:")
            print(documents.written_lines(text))
    return 1 if stale and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
