"""`kv-connector top`: show what a running engine's cache does, from its /metrics."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..text import Parsers, columns, size_text

if TYPE_CHECKING:
    from .metrics import Sample

_LEAST_INTERVAL = 0.1


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "show what a running engine's cache does, from its /metrics"
    parser = parsers.add_parser(
        "top", help=text, description=f"{text}; with rich it is drawn in place. Ctrl-C ends it."
    )
    parser.add_argument("url", metavar="URL", help="URL of the server, such as http://localhost:8000")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="seconds between two refreshes (2)"
    )
    parser.add_argument("--once", action="store_true", help="print one table, since the engine's start")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from .metrics import fetch, metrics_url

    if not math.isfinite(options.interval) or options.interval < _LEAST_INTERVAL:
        raise ConfigError(f"--interval={options.interval}: give seconds, at least {_LEAST_INTERVAL}")
    url = metrics_url(options.url)
    first = fetch(url, time.monotonic())
    if options.once:
        print(columns(rows(first, None)))
        return 0
    with suppress(KeyboardInterrupt):
        _show(_looks(url, first, options.interval), url)
    return 0


def _looks(url: str, first: Sample, interval: float) -> Iterator[Sequence[Sequence[str]]]:
    """Tables, each for the time since the last one."""
    from .metrics import fetch

    last = first
    yield rows(first, None)
    while True:
        time.sleep(interval)
        now = fetch(url, time.monotonic())
        yield rows(now, last)
        last = now


def _show(tables: Iterator[Sequence[Sequence[str]]], url: str) -> None:
    try:
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        for table in tables:
            print(f"{columns(table)}\n", flush=True)
        return

    def drawn(table: Sequence[Sequence[str]]) -> Any:
        head, *body = table
        picture = Table(*head, title=url)
        for column in picture.columns[1:]:
            column.justify = "right"
        for row in body:
            picture.add_row(*row)
        return picture

    with Live(drawn(next(tables)), auto_refresh=False) as live:
        for table in tables:
            live.update(drawn(table), refresh=True)


def rows(now: Sample, last: Sample | None) -> list[list[str]]:
    """A table, its head first: sums since the engine's start, and a second since the last look."""
    return [
        ["", "since start", "share", "now, a second", "share"],
        *_hits(now, last),
        *_copies(now, last),
        *_tiers(now),
    ]


def _rate(name: str, now: Sample, last: Sample | None) -> float | None:
    """A second; None without a look before. An engine that was started anew counts from 0."""
    if last is None or now.seconds <= last.seconds:
        return None
    return max(0.0, now[name] - last[name]) / (now.seconds - last.seconds)


def _hits(now: Sample, last: Sample | None) -> Iterator[list[str]]:
    """Where the tokens of prompts came from."""
    yield ["requests", f"{now['requests']:,.0f}", "", _count(_rate("requests", now, last)), ""]
    total, rate = now["queries_tokens"], _rate("queries_tokens", now, last)
    yield ["prompt tokens", f"{total:,.0f}", "", _count(rate), ""]
    parts = {
        "  from the device": {"device_hit_tokens": 1},
        "  from the host": {"host_hit_tokens": 1, "storage_hit_tokens": -1},
        "  from storage": {"storage_hit_tokens": 1},
        "  from other engines": {"peer_hit_tokens": 1},
    }
    found, found_rate = 0.0, 0.0
    for title, signs in parts.items():
        value = sum(sign * now[name] for name, sign in signs.items())
        rates = [sign * (_rate(name, now, last) or 0.0) for name, sign in signs.items()]
        own = sum(rates) if rate is not None else None
        found, found_rate = found + value, found_rate + sum(rates)
        yield [title, f"{value:,.0f}", _share(value, total), _count(own), _share(own, rate)]
    left = None if rate is None else rate - found_rate
    yield ["  computed", f"{total - found:,.0f}", _share(total - found, total), _count(left), _share(left, rate)]


def _copies(now: Sample, last: Sample | None) -> Iterator[list[str]]:
    for title, name in (
        ("loaded from the host", "loaded_bytes"),
        ("saved to the host", "saved_bytes"),
        ("read from storage", "storage_read_bytes"),
        ("written to storage", "storage_written_bytes"),
        ("sent to engines", "peer_sent_bytes"),
        ("received from engines", "peer_received_bytes"),
    ):
        rate = _rate(name, now, last)
        yield [title, size_text(now[name]), "", "-" if rate is None else size_text(rate), ""]
    milliseconds = now["load_milliseconds"]
    speed = f"{now['loaded_bytes'] / milliseconds / 1e6:.1f} GB/s" if milliseconds else "-"
    yield ["speed of loads", speed, "", "", ""]
    stall = _rate("load_stall_milliseconds", now, last)
    told = "-" if stall is None else f"{stall:.1f} ms"
    yield ["load stall", f"{now['load_stall_milliseconds'] / 1e3:,.1f} s", "", told, ""]


def _tiers(now: Sample) -> Iterator[list[str]]:
    """Gauges, and what has gone wrong."""
    capacity, cached = now["host_capacity_blocks"], now["host_cached_blocks"]
    yield ["host blocks cached", f"{cached:,.0f} of {capacity:,.0f}", _share(cached, capacity), "", ""]
    yield ["host blocks evicted", f"{now['host_evicted_blocks']:,.0f}", "", "", ""]
    stored = f"{now['storage_stored_blocks']:,.0f} blocks"
    yield ["in storage", stored, "", size_text(now["storage_stored_bytes"]), ""]
    breaker = "open: left alone" if now["storage_breaker_is_open"] else "closed"
    yield ["storage breaker", breaker, "", f"opened {now['storage_breaker_opened_times']:,.0f} times", ""]
    if now["saves_are_off"]:
        yield ["saves", "off", "", "blocks do not fit", ""]
    failed = ("failed_load_jobs", "failed_save_jobs", "failed_fetch_jobs", "failed_backup_jobs", "failed_receive_jobs")
    yield ["failed jobs", f"{sum(now[name] for name in failed):,.0f}", "", "", ""]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.1f} %" if part is not None and whole else "-"
