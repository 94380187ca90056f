"""Names of hosts, looked up beside the peer thread: a lookup may take as long as the system's resolver likes.

A host may come from a request, so any text may be asked about. Addresses need no lookup. Each name gets a thread of
its own, which ends with its lookup; there are never more than a few, and nobody waits for one.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base import PeerError

_MOST_LOOKUPS = 8
LookUp = Callable[..., list[Any]]
"""As `socket.getaddrinfo`."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a socket is made and connected with."""

    family: int
    kind: int
    protocol: int
    address: Any


@dataclass(frozen=True, slots=True)
class Resolved:
    """What came of a lookup: an address, or why there is none."""

    link: int
    address: Address | None
    reason: str = ""


class Resolver:
    """One thread asks and takes; `wake` is called from others when there is something to take."""

    def __init__(self, wake: Callable[[], None], look_up: LookUp = socket.getaddrinfo) -> None:
        self._wake = wake
        self._look_up = look_up
        self._found: deque[Resolved] = deque()
        self._under_way = threading.Semaphore(_MOST_LOOKUPS)

    def address_of(self, host: str, port: int) -> Address | None:
        """Of a host that is an address already; None for a name. Raises PeerError for what is neither."""
        try:
            return _first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (OverflowError, UnicodeError, ValueError) as error:
            raise PeerError(f"cannot be reached: {error}") from None
        except OSError:
            return None

    def ask(self, link: int, host: str, port: int) -> None:
        """Look a name up for a link. Raises PeerError where too many lookups hang."""
        if not self._under_way.acquire(blocking=False):
            raise PeerError(f"cannot be reached: {_MOST_LOOKUPS} names are being looked up; give addresses")
        threading.Thread(target=self._run, args=(link, host, port), name="kv-peer-name", daemon=True).start()

    def take(self) -> list[Resolved]:
        """Lookups that have ended."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def _run(self, link: int, host: str, port: int) -> None:
        try:
            resolved = Resolved(link, _first(self._look_up(host, port, type=socket.SOCK_STREAM)))
        except (OSError, UnicodeError, OverflowError, ValueError) as error:
            resolved = Resolved(link, None, f"cannot be reached: {error}")
        self._under_way.release()
        self._found.append(resolved)
        self._wake()


def _first(found: list[Any]) -> Address:
    family, kind, protocol, _, address = found[0]
    return Address(family, kind, protocol, address)
