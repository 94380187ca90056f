"""How many host blocks a chat takes: layers grouped into blocks as vLLM groups them.

Layers of one kind are one group, a block of which holds a piece of each. Of several kinds vLLM makes groups of equally
many layers and pages of one size, so that any block serves any group: the widest page counts, shorter ones span more
tokens where a multiple fits and are padded otherwise, and a state takes a page. A host block holds what a device block
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layers import Kind, Layer

STATE_ALIGNMENT = 16
"""Where layers of attention stand beside states, vLLM makes their blocks as long as a state needs, in multiples of so
many tokens; some backends of attention want 32, 64 or 128."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table. `block_tokens` are those of one of its blocks."""

    kind: Kind
    num_layers: int
    block_tokens: int
    span: int

    def num_blocks(self, num_tokens: int) -> int:
        """Host blocks that keep a prefix of so many tokens matchable."""
        whole = num_tokens // self.block_tokens
        if self.kind is Kind.STATE:
            return min(1, whole)
        if self.kind is Kind.WINDOW:
            return min(whole, -(-(self.span - 1) // self.block_tokens))
        if self.kind is Kind.CHUNK:
            return min(whole, self.span // self.block_tokens)
        return whole


@dataclass(frozen=True, slots=True)
class Blocks:
    """`block_bytes`: of a block of any group, one rank's part of it."""

    page_bytes: int
    block_bytes: int
    groups: Sequence[Group]

    def num_blocks(self, num_tokens: int) -> int:
        """Over all groups."""
        return sum(group.num_blocks(num_tokens) for group in self.groups)


def block_tokens_beside_states(layers: Sequence[Layer], block_tokens: int) -> int:
    """Tokens of a block where attention stands beside states; `block_tokens` for other models."""
    state = max((layer.state_bytes for layer in layers), default=0)
    token = max((layer.token_bytes for layer in layers), default=0)
    if not state or not token:
        return block_tokens
    needed = -(-state // (STATE_ALIGNMENT * token)) * STATE_ALIGNMENT
    return max(block_tokens, needed)


def to_blocks(layers: Sequence[Layer], block_tokens: int) -> Blocks:
    """Of the layers of one rank."""
    buckets: dict[Layer, int] = {}
    for layer in layers:
        buckets[layer] = buckets.get(layer, 0) + 1
    kinds = {(layer.kind, layer.span) for layer in buckets}
    if len(kinds) == 1 and (len(buckets) == 1 or next(iter(kinds))[0] is not Kind.STATE):
        first = layers[0]
        page = max(_page(layer, block_tokens) for layer in layers)
        total = sum(_page(layer, block_tokens) for layer in layers)
        return Blocks(page, total, (Group(first.kind, len(layers), block_tokens, first.span),))
    page = max(_page(layer, block_tokens) for layer in buckets)
    least, most = min(buckets.values()), max(buckets.values())
    size = most if most < 1.5 * least else least
    groups: list[Group] = []
    for layer, count in buckets.items():
        number = -(-count // size)
        tokens = _spanned(layer, block_tokens, page)
        groups += (Group(layer.kind, len(range(i, count, number)), tokens, layer.span) for i in range(number))
    return Blocks(page, page * max(group.num_layers for group in groups), tuple(groups))


def _page(layer: Layer, block_tokens: int) -> int:
    return layer.state_bytes or layer.token_bytes * block_tokens


def _spanned(layer: Layer, block_tokens: int, page: int) -> int:
    own = _page(layer, block_tokens)
    return block_tokens * (page // own) if not layer.state_bytes and page % own == 0 else block_tokens
