"""What the device of the modelled SGLang has: pages in a tree, free ones, and what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch

import integration.tests.sglang_engines  # noqa: F401  # what SGLang imports
from integration.tests.sglang_parts import Node

PAGE, LAYERS = 2, 3


def make_pool(num_pages: int, is_latent: bool) -> Any:
    """A pool of SGLang's, with pages 1 to `num_pages`."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if is_latent:
        return MLATokenToKVPool(PAGE * num_pages, PAGE, torch.float32, 2, 2, LAYERS, "cpu", False)
    return MHATokenToKVPool(PAGE * num_pages, PAGE, torch.float32, 1, 2, LAYERS, "cpu", False)


class PageTree:
    """Owns the pages of a pool. What belongs in one follows from its key, the layer, and the weights."""

    def __init__(self, pool: Any, num_pages: int) -> None:
        if hasattr(pool, "kv_buffer"):
            self._buffers = [[buffer] for buffer in pool.kv_buffer]
        else:
            self._buffers = [list(layer) for layer in zip(pool.k_buffer, pool.v_buffer, strict=True)]
        self._num_pages = num_pages
        self._free = list(range(1, num_pages + 1))
        self._nodes: dict[str, Node] = {}
        self._num_uses = 0
        self._weights = 0

    def matched(self, keys: Sequence[str]) -> list[Node]:
        """What it has of a prompt, from the first page on."""
        return [self._use(self._nodes[key]) for key in takewhile(self._nodes.__contains__, keys)]

    def allocate(self, count: int) -> list[int] | None:
        """Those that were freed last are handed out first, as by SGLang's allocator."""
        while len(self._free) < count:
            leaves = [node for node in self._nodes.values() if not node.num_children and not node.num_locks]
            if not leaves:
                return None
            oldest = min(leaves, key=lambda node: node.used)
            del self._nodes[oldest.key]
            self._free.append(oldest.page)
            if oldest.parent is not None:
                oldest.parent.num_children -= 1
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Nobody has use for them."""
        self._free += pages

    def insert(self, keys: Sequence[str], pages: list[int]) -> tuple[list[Node], set[Node]]:
        """The tree takes a prompt's pages, but where it has others, which replace them. Returns the path, and what is
        new in it."""
        path: list[Node] = []
        new: set[Node] = set()
        for i, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(key, pages[i], path[-1] if path else None)
                new.add(node)
                if path:
                    path[-1].num_children += 1
            elif node.page != pages[i]:
                self._free.append(pages[i])
                pages[i] = node.page
            path.append(self._use(node))
        return path, new

    def clear(self, weights_changed: bool) -> None:
        """All pages are free."""
        assert not any(node.num_locks for node in self._nodes.values())
        self._nodes.clear()
        self._free = list(range(1, self._num_pages + 1))
        self._weights += weights_changed

    def check(self) -> None:
        """Once nobody has any, all pages are free or in the tree."""
        assert len(self._free) + len(self._nodes) == self._num_pages, "the model has lost pages"

    def write(self, page: int, key: str, layer: int) -> None:
        """What belongs there."""
        for rows, value in self._rows(page, key, layer):
            rows.fill_(value)

    def holds(self, page: int, key: str, layer: int) -> bool:
        """Whether it is what belongs there."""
        return all(bool((rows == value).all()) for rows, value in self._rows(page, key, layer))

    def _use(self, node: Node) -> Node:
        self._num_uses += 1
        node.used = self._num_uses
        return node

    def _rows(self, page: int, key: str, layer: int) -> Iterator[tuple[torch.Tensor, float]]:
        for i, buffer in enumerate(self._buffers[layer]):
            digest = hashlib.sha256(f"{key} {layer} {i} {self._weights}".encode()).hexdigest()
            yield buffer[page * PAGE : (page + 1) * PAGE], float(int(digest[:5], 16) + 1)
