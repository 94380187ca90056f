"""A plain coder of blocks for simulated engines, as the model's numbers have no exponents.

Whoever takes coded bytes for raw ones, or those of one piece for another's, brings a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from kv_connector.transfer.memory import host_form
from kv_connector.transfer.paths import coded_slots
from kv_connector.transfer.paths import torch as torch_path

_HEAD = 16
_MARK = 0x5A


def coded_bytes(piece_bytes: int) -> int:
    """A head, the piece, and what is missing to a multiple of 16."""
    return _HEAD + -(-piece_bytes // 16) * 16


def encode(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Backwards, and other bits; one piece of 32 does not fit."""
    num_pieces, piece_bytes = pieces.shape
    coded, fits = torch.full((num_pieces, coded_bytes(piece_bytes)), _MARK, dtype=torch.uint8), pieces[:, 0] % 32 != 0
    coded[:, _HEAD : _HEAD + piece_bytes] = pieces.flip(1) ^ _MARK
    coded[~fits] = 0xEE
    return coded, fits


def decode(coded: torch.Tensor, piece_bytes: int) -> torch.Tensor:
    assert coded.shape[1] == coded_bytes(piece_bytes)
    assert bool(fit(coded, piece_bytes).all()), "a block is loaded that did not fit, or was never saved"
    return (coded[:, _HEAD : _HEAD + piece_bytes] ^ _MARK).flip(1)


def fit(coded: torch.Tensor, piece_bytes: int) -> torch.Tensor:
    """Whether pieces have a head."""
    return (coded[..., :_HEAD] == _MARK).all(-1)


@contextmanager
def plain_coder() -> Iterator[None]:
    """Inside, it codes whatever is to be coded."""
    with ExitStack() as stack:
        for module, name, stand_in in (
            (host_form, "_can_code", lambda region: True),
            (host_form, "coded_bytes", coded_bytes),
            (torch_path, "encode_reference", encode),
            (torch_path, "decode_reference", decode),
            (coded_slots, "encode_reference", encode),
            (coded_slots, "decode_reference", decode),
            (coded_slots, "pieces_fit", fit),
        ):
            stack.enter_context(patch.object(module, name, stand_in))
        yield
