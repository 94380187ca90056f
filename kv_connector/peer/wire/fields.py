"""How the fields of what a peer says are checked: each before anybody uses it, whoever said it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..base import Ids, PeerError


def check_ids(ids: Sequence[int], num_blocks: int) -> Ids:
    """Block ids from a message: distinct, and in [0, num_blocks). Raises PeerError."""
    outside = [value for value in ids if not 0 <= value < num_blocks]
    if outside:
        raise PeerError(f"block {outside[0]} is outside of a pool of {num_blocks} blocks")
    if len(set(ids)) != len(ids):
        raise PeerError("a block is named twice")
    return np.array(ids, dtype=np.int64)


def check_int(body: Mapping[str, Any], name: str, least: int = 0, most: int = 1 << 53) -> int:
    """An integer field of a message. Raises PeerError."""
    value = body.get(name)
    if type(value) is not int or not least <= value <= most:
        raise PeerError(f"{name} is not an integer from {least} to {most}")  # a stranger's, maybe: not shown
    return value


def check_text(body: Mapping[str, Any], name: str, most: int = 512) -> str:
    """A text field of a message, which can be written in UTF-8. Raises PeerError."""
    value = body.get(name)
    if type(value) is not str or len(value) > most:
        raise PeerError(f"{name} is not text of up to {most} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PeerError(f"{name} is not text: it has half a character")
    return value


def check_hex(body: Mapping[str, Any], name: str, num_bytes: int) -> bytes:
    """A field of so many bytes, in hexadecimal. Raises PeerError."""
    value = body.get(name)
    try:
        found = bytes.fromhex(value) if type(value) is str and len(value) == 2 * num_bytes else b""
    except ValueError:
        found = b""
    if len(found) != num_bytes:
        raise PeerError(f"{name} is not {num_bytes} bytes in hexadecimal")
    return found


def check_numbers(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A field that is a list of numbers of blocks. Raises PeerError."""
    value = body.get(name)
    if type(value) is not list or not all(type(number) is int and 0 <= number < 1 << 32 for number in value):
        raise PeerError(f"{name} is not a list of integers from 0 to {(1 << 32) - 1}")
    return tuple(value)
