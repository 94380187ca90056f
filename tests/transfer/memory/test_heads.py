"""How KV heads lie in a rank's pieces, as the engine says: only what is known is divided."""

from __future__ import annotations

import pytest
import torch

from kv_connector.errors import LayoutError
from kv_connector.transfer.memory.layout import CacheLayout

B, N, H, D = 6, 4, 2, 8  # blocks, tokens of each, heads, words of each


def heads_of(head_dims: dict[str, int | None], **tensors: torch.Tensor) -> list[tuple[int, int]]:
    layout = CacheLayout.from_tensors(tensors, B, None, head_dims)
    return [(region.num_heads, region.head_bytes) for region in layout.regions]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensor", "dim", "heads"),
    [
        (zeros(B, 2, N, H, D), 3, [(H, D)]),
        (zeros(B, 2, H, N, D), 2, [(H, N * D)]),
        (zeros(B, 2, H, N, D).transpose(2, 3), 3, [(H, N * D)]),
        (zeros(2, B, N, H, D), 3, [(H, D)] * 2),
        (zeros(B, 2, N, 1, D), 3, [(1, 2 * N * D)]),
        (zeros(B, N, D), None, [(1, N * D)]),
        (zeros(H, B, N, D), 0, [(0, 0)] * H),
        (zeros(B, H, N, D + 4)[..., :D], 1, [(0, 0)] * (H * N)),
    ],
)
def test_heads_are_found_in_every_layout(tensor: torch.Tensor, dim: int | None, heads: list[tuple[int, int]]) -> None:
    assert heads_of({"a": dim}, a=tensor) == heads


def test_what_is_not_said_is_not_known() -> None:
    assert heads_of({"a": 2}, a=zeros(B, N, H, D), b=zeros(B, N, H, D)) == [(H, D), (0, 0)]


def test_layers_that_share_bytes_must_agree() -> None:
    """Layers of several block groups lie in one tensor, or over each other."""
    tensor = zeros(B, N, H, D)
    assert heads_of({"a": 2, "b": 2}, a=tensor, b=tensor) == [(H, D)]
    assert heads_of({"a": 2}, a=tensor, b=tensor) == [(0, 0)]
    assert heads_of({"a": 2, "b": None}, a=tensor, b=tensor) == [(0, 0)]
    assert heads_of({"a": 2, "b": 1}, a=tensor, b=tensor.view(B, N * H, D)) == [(0, 0)]


@pytest.mark.parametrize("dim", [4, -5, 0, -4])
def test_what_cannot_count_heads_is_refused(dim: int) -> None:
    """Blocks are counted by dimension 0 of four."""
    with pytest.raises(LayoutError, match="counts KV heads"):
        heads_of({"a": dim}, a=zeros(B, N, H, D))


def test_heads_may_be_counted_from_behind() -> None:
    few, many = zeros(B, N, H, D), zeros(B, N, 4 * H, D)
    texts = {
        CacheLayout.from_tensors({"a": tensor}, B, None, {"a": dim}).undivided_arrangement
        for tensor in (few, many)
        for dim in (2, -2)
    }
    assert len(texts) == 1


def test_layers_over_each_other_say_in_which_order_their_heads_lie() -> None:
    """It is not known how heads lie there, so nothing else does."""
    tokens_first, heads_first = zeros(B, N, H, D), zeros(B, H, N, D)
    texts = {
        CacheLayout.from_tensors(
            {"a": rows, "b": tensor.view(B, N * H, D)}, B, None, {"a": 2, "b": 1}
        ).undivided_arrangement
        for rows, tensor in ((tokens_first, tokens_first), (heads_first.transpose(1, 2), heads_first))
    }
    assert len(texts) == 2


def test_arrangements_are_equal_but_for_the_number_of_heads() -> None:
    def undivided(tensor: torch.Tensor, dims: dict[str, int | None]) -> str:
        return CacheLayout.from_tensors({"a": tensor}, B, None, dims).undivided_arrangement

    few, many = zeros(B, N, H, D), zeros(B, N, 4 * H, D)
    assert undivided(few, {"a": 2}) == undivided(many, {"a": 2}) == f"1 x uint8[1:{N} 3:{D}] a head"
    assert undivided(few, {}) == CacheLayout.from_tensors({"a": few}, B).arrangement
    assert undivided(few, {"a": 2}) != undivided(few.view(torch.int8), {"a": 2})
