"""What a request says of its own blocks: `kv_transfer_params["cache"]`, an object of hints.

One key, beside those of KV transfers (docs/peers.md) and of other connectors, so that within it whatever is not known
is a mistake. Hints come from whoever may send requests: one that is wrong is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...base import Request
from ...index import LEAST_PRIORITY, MOST_PRIORITY, PLAIN, Terms, terms_of
from ...values import is_one_line, shortened, shown

HINTS_KEY = "cache"
LEAST_TTL, MOST_TTL = 1.0, 7 * 24 * 3600.0
"""Seconds."""
_MOST_HINTS = 16
_MOST_TEXT = 1000
"""Characters of a wrong hint that are looked at."""


@dataclass(frozen=True, slots=True)
class Hints:
    """`pin`: keep the prompt (True), or let go of what requests with this prefix have pinned (False). `ttl_s`: how long
    a pin lasts, and without one how long the blocks may go unused. `priority`: blocks of the lowest go first.
    `do_not_cache`: nothing of it is saved. `prefetch`: all that storage has of the prompt is worth fetching."""

    pin: bool | None = None
    ttl_s: float | None = None
    priority: int = 0
    do_not_cache: bool = False
    prefetch: bool = False

    def terms(self, tenant: int) -> Terms:
        """On which a request of this tenant's has its blocks kept; `PLAIN` itself where they are those."""
        if self is NO_HINTS:
            return terms_of(tenant)
        terms = Terms(tenant, self.priority, self.ttl_s is not None and not self.pin)
        return PLAIN if terms == PLAIN else terms


NO_HINTS = Hints()


def hints_of(request: Request, on_ignored: Callable[[str], None] = lambda reason: None) -> Hints:
    """The hints of a request; `on_ignored` is told of each that is wrong, with the value, the limit and the fix."""
    params = getattr(request, "kv_transfer_params", None)
    given = params.get(HINTS_KEY) if isinstance(params, Mapping) else None
    if given is None:
        return NO_HINTS
    if not isinstance(given, Mapping) or len(given) > _MOST_HINTS:
        on_ignored(f'cache={_told(given)} is not an object of at most {_MOST_HINTS} hints, such as {{"pin": true}}')
        return NO_HINTS
    valid: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _CHECKS:
            is_name = isinstance(name, str) and is_one_line(name[:_MOST_TEXT])
            on_ignored(f"cache.{shortened(name) if is_name else _told(name)} is unknown: known hints are {_KNOWN}")
        elif wanted := _CHECKS[name](value):
            on_ignored(f"cache.{name}={_told(value)} is not {wanted}")
        else:
            valid[name] = value
    if valid.get("do_not_cache") and valid.get("pin"):
        del valid["pin"]
        on_ignored("cache.pin is true where cache.do_not_cache is: leave one of them out")
    return Hints(**valid)


def _told(value: object) -> str:
    """In a message, on one line of it, and at once however much it is: who sends requests may send megabytes."""
    if isinstance(value, Mapping):
        return "{...}" if value else "{}"
    if isinstance(value, list | tuple):
        return "[...]" if value else "[]"
    return shown(value[:_MOST_TEXT] if isinstance(value, str | bytes) else value)


def _not_boolean(value: object) -> str:
    return "" if isinstance(value, bool) else "a boolean: give true or false"


def _no_ttl(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_number and LEAST_TTL <= value <= MOST_TTL  # type: ignore[operator]  # a number; NaN is in no range
    return "" if is_valid else f"a time: give {LEAST_TTL:.0f} to {MOST_TTL:.0f} seconds"


def _no_priority(value: object) -> str:
    is_valid = type(value) is int and LEAST_PRIORITY <= value <= MOST_PRIORITY
    return "" if is_valid else f"a priority: give an integer from {LEAST_PRIORITY} to {MOST_PRIORITY}"


_CHECKS: Mapping[str, Callable[[object], str]] = {
    "pin": _not_boolean,
    "ttl_s": _no_ttl,
    "priority": _no_priority,
    "do_not_cache": _not_boolean,
    "prefetch": _not_boolean,
}
_KNOWN = ", ".join(_CHECKS)
