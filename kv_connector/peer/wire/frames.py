"""Frames on the wire: four bytes of length, most significant first, then a message, sealed once there is a session.

A reader never holds more than one frame and what arrived behind it; a frame over the bound is refused by its length,
before any of it is kept.
"""

from __future__ import annotations

import struct

from ..base import PeerError
from .messages import MAX_MESSAGE
from .session import SEAL_BYTES

MAX_FRAME = MAX_MESSAGE + SEAL_BYTES
MAX_HELLO = 256 << 10
"""While nobody has proved anything."""
_LENGTH = struct.Struct(">I")


def frame(payload: bytes) -> bytes:
    """As it is sent."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts what arrives into what was framed."""

    def __init__(self) -> None:
        self.bound = MAX_HELLO
        """Bytes of a frame that is taken; the caller raises it when the peer is known."""
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Bytes that have arrived."""
        self._data += data

    def take(self) -> bytes | None:
        """The next one; None where it is not there yet. Raises PeerError over the bound."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.bound:
            raise PeerError(f"a message of {length} bytes is over the bound of {self.bound}")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        payload = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return payload
