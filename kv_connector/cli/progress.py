"""A progress bar on a terminal, where rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def progress(items: Sequence[_Item], what: str, weight: Callable[[_Item], int] = lambda _: 1) -> Iterator[_Item]:
    """The items; each counts with its weight, once the caller comes for the next."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield from items
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=sum(map(weight, items)))
        for item in items:
            yield item
            bar.advance(task, weight(item))
