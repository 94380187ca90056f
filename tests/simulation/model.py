"""The model of a simulated engine: digests of 8 bytes, so that every byte of a cache shows in the next token.

    row of layer l at position p    mix(h_l[p] + a constant of the layer), which is what lies in the KV cache
    h_(l+1)[p]                      mix(h_l[p] + sum over the rows q that p attends to of row[q] * C[q])
    token behind p                  mix(sum over KV heads of the last h[p])

A recurrent layer keeps the sum itself, as a state of many words of which each depends on it, in place of rows.
Ranks that share out a context have the rows of some positions each, and attend to those: the token rests on all ranks'.
C[q] is odd, so one wrong row changes the sum whatever it is. h_0 depends on the token, its position, the head (the
first of those that are alike) and the `epoch` of the weights: after an update of the weights no row of before fits any
more. Layers of a windowed group attend to the last `window` positions only, those of a chunked one to the positions of
their own chunk. `Oracle` computes the same without any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

VOCABULARY = 997
MOST_TOKENS = 1 << 12
_MASK = (1 << 64) - 1
_M1, _M2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_A, _B, _D = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFT = np.uint64(33)
_NM1, _NM2 = np.uint64(_M1), np.uint64(_M2)


def mix(words: Words) -> Words:
    """A bijection of 64 bits that spreads every bit (the finaliser of MurmurHash 3)."""
    words = words ^ (words >> _SHIFT)
    words *= _NM1
    words ^= words >> _SHIFT
    words *= _NM2
    words ^= words >> _SHIFT
    return words


def mix_one(word: int) -> int:
    """`mix` of one number."""
    word &= _MASK
    word = ((word ^ (word >> 33)) * _M1) & _MASK
    word = ((word ^ (word >> 33)) * _M2) & _MASK
    return word ^ (word >> 33)


COEFFICIENTS: Words = mix(np.arange(MOST_TOKENS, dtype=np.uint64) + np.uint64(_A)) | np.uint64(1)
_COEFFICIENTS_LIST: list[int] = COEFFICIENTS.tolist()
_POSITIONS: Words = np.arange(MOST_TOKENS, dtype=np.uint64) * np.uint64(_B)


class Sight(NamedTuple):
    """Which positions a layer attends to: all, the last few, or those of a chunk."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class ModelShape:
    """`layer_groups[l]` is the block group of layer l; `sights[g]` what a group's layers attend to;
    `recurrent[g]` whether they keep states. `num_parts`, `interleave`: as in `EngineConfig`; ranks that share out a
    context have a head each. `replicas`: all ranks compute, and cache, the same."""

    layer_groups: tuple[int, ...] = (0, 0)
    sights: tuple[Sight, ...] = (Sight(),)
    recurrent: tuple[bool, ...] = (False,)
    num_heads: int = 1
    num_parts: int = 1
    interleave: int = 1
    replicas: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layer_groups)

    def first_alike(self, head: int) -> int:
        """The first head that is the same."""
        return 0 if self.replicas else head

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Of each layer the cache tensor it lies in: the i-th layers of all groups share one, as in vLLM."""
        return tuple(self.layer_groups[:index].count(group) for index, group in enumerate(self.layer_groups))

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent[self.layer_groups[layer]]

    def sight(self, layer: int) -> Sight:
        return self.sights[self.layer_groups[layer]]

    def has_row(self, head: int, layer: int, position: int) -> bool:
        """Whether the head has the row of this position. A state is whole on every rank."""
        part = position // self.interleave % self.num_parts
        return self.is_recurrent(layer) or part == head % self.num_parts

    def has_rows(self, head: int, layer: int, count: int) -> NDArray[np.bool_]:
        """Of the first so many positions, whether the head has the row."""
        parts = np.arange(count) // self.interleave % self.num_parts
        return (parts == head % self.num_parts) | self.is_recurrent(layer)


def _salt(epoch: int, head: int) -> int:
    return mix_one(epoch * _D + head * _A + 1)


def embed(tokens: Sequence[int], start: int, epoch: int, head: int) -> Words:
    """h_0 of these tokens, the first of them at position `start`."""
    words = np.array(tokens, dtype=np.uint64) * np.uint64(_D) + _POSITIONS[start : start + len(tokens)]
    return mix(words + np.uint64(_salt(epoch, head)))


def rows_of(h: Words, layer: int) -> Words:
    """What the layer writes to the cache."""
    return mix(h + np.uint64(mix_one(layer + 17)))


def attend(h: Words, rows: Words, first: int, start: int, sight: Sight) -> Words:
    """h of the next layer at `start` and behind; `rows` are those from position `first` on, up to the last h's. Both of
    one head, or by head."""
    num_positions = h.shape[-1]
    products = rows * COEFFICIENTS[first : first + rows.shape[-1]]
    if num_positions == 1:
        return mix(h + products.sum(axis=-1, dtype=np.uint64, keepdims=True))
    sums = products.cumsum(axis=-1, dtype=np.uint64)
    behind = sums[..., start - first :]
    if sight != Sight():
        firsts = np.array([sight.first(position) for position in range(start, start + num_positions)])
        lows = firsts - 1 - first  # the last position that is not attended to
        behind = behind - np.where(lows >= 0, sums[..., np.maximum(lows, 0)], np.uint64(0))
    return mix(h + behind)


def go_on(h: Words, rows: Words, start: int, state: Words) -> tuple[Words, Words]:
    """h of the next layer at `start` and behind, and the state behind them. `state`: the one in front of them."""
    salts = COEFFICIENTS[: len(state)]
    words = state - salts  # which are equal, but for one that is wrong
    before = words[0] + (words - words[0]).sum(dtype=np.uint64)
    sums = before + np.cumsum(rows * COEFFICIENTS[start : start + len(rows)], dtype=np.uint64)
    return mix(h + sums), sums[-1] + salts


def first_state(num_words: int) -> Words:
    """In front of the first token."""
    return COEFFICIENTS[:num_words].copy()


def token_of(words: int) -> int:
    """The token that the sum over heads of the last h says."""
    return mix_one(words) % VOCABULARY


class Oracle:
    """What a sequence is continued with, computed without a cache. It holds the sequence up to its last known token."""

    def __init__(self, shape: ModelShape, epoch: int, tokens: Sequence[int]) -> None:
        self.shape = shape
        self.epoch = epoch
        self.tokens = list(tokens)
        self._sums = [[0] * shape.num_layers for _ in range(shape.num_heads)]
        self._products: list[list[list[int]]] = [[[] for _ in range(shape.num_layers)] for _ in range(shape.num_heads)]
        self._salts = [_salt(epoch, shape.first_alike(head)) for head in range(shape.num_heads)]
        self._known: list[int] = []  # tokens behind the sequence that were computed ahead
        self._num_ahead = len(self.tokens) - 1
        self._prefill()

    def peek(self, count: int) -> list[int]:
        """The next tokens."""
        while len(self._known) < count:
            self._extend()
        return self._known[:count]

    def next(self) -> int:
        """The next token, which belongs to the sequence from now on."""
        token = self.peek(1)[0]
        del self._known[0]
        self.tokens.append(token)
        return token

    def _prefill(self) -> None:
        """All but the last token at once."""
        start, tokens = 0, self.tokens[:-1]
        for head in range(self.shape.num_heads if tokens else 0):
            h = embed(tokens, start, self.epoch, self.shape.first_alike(head))
            for layer in range(self.shape.num_layers):
                rows = rows_of(h, layer) * self.shape.has_rows(head, layer, len(h))
                products = rows * COEFFICIENTS[: len(rows)]
                sight = self.shape.sight(layer)
                self._products[head][layer] = products.tolist()
                kept = products[sight.first(len(products) - 1) :]
                self._sums[head][layer] = int(kept.sum(dtype=np.uint64))
                h = attend(h, rows, 0, 0, sight)
        self._num_ahead = len(tokens)

    def _extend(self) -> None:
        """Compute the token behind the last one."""
        position = self._num_ahead
        token = self.tokens[position] if position < len(self.tokens) else self._known[position - len(self.tokens)]
        total = 0
        for head in range(self.shape.num_heads):
            h = mix_one(token * _D + position * _B + self._salts[head])
            for layer in range(self.shape.num_layers):
                row = mix_one(h + mix_one(layer + 17))
                product = row * _COEFFICIENTS_LIST[position] & _MASK if self.shape.has_row(head, layer, position) else 0
                products, sight = self._products[head][layer], self.shape.sight(layer)
                products.append(product)
                left = sum(products[sight.first(max(0, position - 1)) : sight.first(position)])
                self._sums[head][layer] = (self._sums[head][layer] + product - left) & _MASK
                h = mix_one(h + self._sums[head][layer])
            total += h
        self._num_ahead += 1
        self._known.append(token_of(total))
