"""Messages on the wire: four bytes of length, most significant first, then a JSON object in UTF-8 with a "t" in it.

A reader never holds more than one frame and what arrived behind it; a frame over the bound is refused by its length,
before any of it is kept.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from ..base import PeerError

MAX_MESSAGE = 1 << 20
MAX_HELLO = 256 << 10
"""While nobody has proved anything."""
_LENGTH = struct.Struct(">I")


def encode(body: Mapping[str, Any]) -> bytes:
    """A frame. Raises PeerError over the bound."""
    text = json.dumps(body, separators=(",", ":")).encode()
    if len(text) > MAX_MESSAGE:
        raise PeerError(f"a message of {len(text)} bytes is over the bound of {MAX_MESSAGE}")
    return _LENGTH.pack(len(text)) + text


class FrameReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self.bound = MAX_HELLO
        """Bytes of a message that is taken; the caller raises it when the peer is known."""
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Bytes that have arrived."""
        self._data += data

    def take(self) -> dict[str, Any] | None:
        """The next message; None where it is not there yet. Raises PeerError for what is none."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.bound:
            raise PeerError(f"a message of {length} bytes is over the bound of {self.bound}")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        text = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return _parse(text)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a message is not JSON: {type(error).__name__}") from None
    if not isinstance(body, dict) or not isinstance(body.get("t"), str):
        raise PeerError('a message is not an object with a "t"')
    return body
