"""`kv-connector calibrate`: what copies take on a machine, and what follows from that."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..values import check_integer, parse_size, shown
from .outputs import check_outputs
from .text import Parsers

if TYPE_CHECKING:
    from ..transfer.costs.curves import LinkCosts

_MOST_BYTES = 1 << 40
"""Of a copy that is shown."""


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "measure how long copies take on this machine, and show which path is chosen"
    calibrate = parsers.add_parser("calibrate", help=text, description=text)
    calibrate.add_argument("--json", type=Path, metavar="FILE", help="write the result, for the setting `calibration`")
    calibrate.add_argument("--png", type=Path, metavar="FILE", help="write a picture; needs matplotlib")
    calibrate.add_argument("--show", metavar="FILE", help='measure nothing: show such a file, or "built-in"')
    calibrate.add_argument("--device", type=int, default=0, help="index of the GPU")
    calibrate.add_argument("--bytes", default="64MiB", help="size of the example copy in bytes")
    calibrate.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..transfer.costs.curves import BUILT_IN, costs_of_file
    from ..transfer.costs.envelope import draw, table

    num_bytes = parse_size(options.bytes, "--bytes")
    check_integer("--bytes", num_bytes, 1, _MOST_BYTES)
    check_outputs(json=options.json, png=options.png)
    if options.show is None:
        costs = _measured(options.device)
    elif options.show == "built-in":
        costs = BUILT_IN
    else:
        costs = costs_of_file("--show", options.show)
    print(table(costs, num_bytes))
    if options.json is not None:
        options.json.write_text(costs.encode())
    if options.png is not None:
        draw(costs, num_bytes, options.png)
    return 0


def _measured(number: int) -> LinkCosts:
    """Of the GPU of this number, on host memory of its own."""
    import torch

    check_integer("--device", number, 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"GPU {shown(number)}: there are {torch.cuda.device_count()} here; --show shows an earlier result"
        )
    from ..transfer.costs.calibration import measure
    from ..transfer.memory.host_pool import HostPool

    device = torch.device("cuda", number)
    with torch.cuda.device(device):
        host = HostPool(32, 1 << 20, device=device)
        host.wait_ready()
        try:
            lengths = [1 << power for power in (10, 12, 14, 16, 18)]
            return measure(device, host, lengths, lengths)
        finally:
            host.close()
