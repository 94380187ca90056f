"""`kv-connector simulate`: what hit rate each size of host memory would have, by a trace of requests."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..values import parse_size
from .outputs import check_outputs
from .progress import progress
from .text import Parsers, columns, size_text

if TYPE_CHECKING:
    from ..replay import Replayed, Trace

_SHARES = (2.0, 10.0, 25.0)
"""Of a trace's distinct blocks, in per cent."""
_ALL = "all"
_POLICIES = ("adaptive", "write_through", "write_through_selective")


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "what hit rate each size of host memory would have, by a trace of requests"
    parser = parsers.add_parser(
        "simulate",
        help=text,
        description=f"{text[0].upper()}{text[1:]}: Mooncake's format, or what `record_trace` wrote. Requests are "
        "replayed through the connector's own index, one after the other, without an engine: a save has ended when the "
        "next request comes, every hit is loaded, and answers are not cached unless a later prompt has them.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument(
        "--sizes",
        type=float,
        nargs="+",
        metavar="PERCENT",
        help="sizes of host memory, in per cent of the distinct blocks",
    )
    parser.add_argument(
        "--host-memory",
        nargs="+",
        metavar="SIZE",
        help='sizes of host memory, such as "64GiB"; needs --bytes-per-token',
    )
    parser.add_argument(
        "--bytes-per-token", metavar="SIZE", help="bytes of a token over all ranks: see `kv-connector size`"
    )
    parser.add_argument("--policy", nargs="+", default=[_ALL], choices=[_ALL, *_POLICIES], help="write policies")
    parser.add_argument(
        "--device-share",
        type=float,
        metavar="PERCENT",
        help="size of the device cache, in per cent of the distinct blocks",
    )
    parser.add_argument(
        "--share", type=float, default=100.0, metavar="PERCENT", help="replay only this first part of the trace"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..replay import read_trace, sweep

    begin = time.perf_counter()
    _check(options)
    check_outputs(json=options.json, png=options.png)
    token_bytes = parse_size(options.bytes_per_token, "--bytes-per-token") if options.bytes_per_token else 0
    trace = read_trace(options.trace, options.share / 100)
    if options.device_share is not None:
        trace = trace.on_device(max(1, int(options.device_share * trace.num_distinct / 100)))
    sizes = _sizes(options, trace, token_bytes)
    policies = _POLICIES if _ALL in options.policy else list(dict.fromkeys(options.policy))
    cases = [(size, policy) for size in sizes for policy in policies]
    replays = sweep(trace, sizes, policies)
    found = [next(replays) for _ in progress(cases, "replay")]
    print(_head(trace))
    print(_table(trace, found, token_bytes))
    print(f"{len(found)} replays in {time.perf_counter() - begin:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(_figures(trace, found, token_bytes), indent=1) + "\n")
    if options.png is not None:
        _draw(trace, found, token_bytes, options.png)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.sizes and options.host_memory:
        raise ConfigError("give one of --sizes and --host-memory")
    if options.host_memory and not options.bytes_per_token:
        raise ConfigError("--host-memory needs --bytes-per-token, which `kv-connector size` tells of a model")
    for name, values in (
        ("--sizes", options.sizes or ()),
        ("--share", [options.share]),
        ("--device-share", [options.device_share] if options.device_share is not None else ()),
    ):
        if not all(0 < value <= 100 for value in values):
            raise ConfigError(f"{name}={' '.join(map(str, values))}: give per cent, above 0 and at most 100")


def _sizes(options: argparse.Namespace, trace: Trace, token_bytes: int) -> list[int]:
    """In blocks of the trace, ascending."""
    if options.host_memory:
        block_bytes = trace.block_tokens * token_bytes
        memory = [parse_size(text, "--host-memory") for text in options.host_memory]
        if not block_bytes or min(memory) < block_bytes:
            raise ConfigError(
                f"--host-memory={min(memory)} with --bytes-per-token={token_bytes}: give at least one token's byte, "
                f"and one block of {trace.block_tokens} tokens"
            )
        return sorted({num_bytes // block_bytes for num_bytes in memory})
    return sorted({max(1, int(share * trace.num_distinct / 100)) for share in options.sizes or _SHARES})


def _head(trace: Trace) -> str:
    device = sum(trace.device_hits)
    return (
        f"{trace.name}: {len(trace.requests):,} requests of {trace.num_tokens:,} tokens, {trace.num_blocks:,} blocks "
        f"of {trace.block_tokens}, {trace.num_distinct:,} of them distinct\n"
        f"a device cache of {trace.device_blocks:,} blocks hits {100 * device / max(1, trace.num_blocks):.1f} %; "
        "behind it a host would hit"
    )


def _table(trace: Trace, found: Sequence[Replayed], token_bytes: int) -> str:
    rows = [["policy", "host", "blocks", "of distinct", "host hits", "prefill saved", "tokens saved"]]
    for one in found:
        memory = size_text(one.host_blocks * trace.block_tokens * token_bytes) if token_bytes else "-"
        rows.append(
            [
                one.policy,
                memory,
                f"{one.host_blocks:,}",
                f"{100 * one.host_blocks / trace.num_distinct:.1f} %",
                f"{_hit_percent(trace, one):.1f} %",
                f"{_saved_percent(trace, one):.1f} %",
                f"{one.saved_tokens:,}",
            ]
        )
    return columns(rows)


def _hit_percent(trace: Trace, one: Replayed) -> float:
    """Of all blocks that are asked for."""
    return 100 * one.hit_blocks / max(1, trace.num_blocks)


def _saved_percent(trace: Trace, one: Replayed) -> float:
    """Of all tokens of prompts."""
    return 100 * one.saved_tokens / max(1, trace.num_tokens)


def _figures(trace: Trace, found: Sequence[Replayed], token_bytes: int) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "tokens": trace.num_tokens,
        "blocks": trace.num_blocks,
        "block_tokens": trace.block_tokens,
        "distinct_blocks": trace.num_distinct,
        "device_blocks": trace.device_blocks,
        "device_hit_blocks": sum(trace.device_hits),
        "bytes_per_token": token_bytes or None,
        "rows": [
            asdict(one)
            | {"host_hits_percent": _hit_percent(trace, one), "prefill_saved_percent": _saved_percent(trace, one)}
            for one in found
        ],
    }


def _draw(trace: Trace, found: Sequence[Replayed], token_bytes: int, path: Path) -> None:
    """Saved prefill over host size, a line for each policy. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale = trace.block_tokens * token_bytes / 2**30 if token_bytes else 100 / trace.num_distinct
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    # Dashes, since policies often lie on each other.
    for policy, style in zip(dict.fromkeys(one.policy for one in found), ("-", "--", ":"), strict=False):
        own = [one for one in found if one.policy == policy]
        sizes = [one.host_blocks * scale for one in own]
        axes.plot(
            sizes, [_saved_percent(trace, one) for one in own], linestyle=style, marker="o", markersize=4, label=policy
        )
    axes.set_xscale("log")
    ticks = sorted({one.host_blocks * scale for one in found})
    axes.set_xticks(ticks, [f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("host memory, GiB" if token_bytes else "host memory, % of the distinct blocks")
    axes.set_ylabel("prefill saved, % of prompt tokens")
    axes.set_title(f"{trace.name}, behind a device cache of {trace.device_blocks:,} blocks", fontsize="medium")
    axes.grid(True, alpha=0.2)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"wrote {path}")
