"""Which bytes of a cache tensor belong to which block: sizes and strides in, uint8 views out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from ...errors import LayoutError


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in bytes."""
    return tuple(stride * tensor.itemsize for stride in tensor.stride())


def piece_views(layer: str, tensor: torch.Tensor, num_blocks: int, dim: int) -> list[torch.Tensor]:
    """The fewest strided columns of bytes that together are the tensor: uint8 views of shape (num_blocks, bytes).
    Dimension `dim` counts blocks.

    Block b of the tensor is row b of every view, in the order of the tensor's dimensions. The views share the tensor's
    storage. Raises LayoutError where two elements share a byte.
    """
    strides = byte_strides(tensor)
    kernel_blocks = tensor.shape[dim] // num_blocks
    block_stride = strides[dim] * kernel_blocks
    # Kernel blocks smaller than a block: (num_blocks * r, ...) is (num_blocks, r, ...), regular by construction.
    inner = [(kernel_blocks, strides[dim])] + [
        (size, stride) for i, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)) if i != dim
    ]
    inner = [(size, stride) for size, stride in inner if size > 1]
    _check_no_overlap(layer, tensor, [*inner, (num_blocks, block_stride)])
    piece, apart = _coalesce(inner, tensor.itemsize)
    start = int(tensor.storage_offset()) * tensor.itemsize
    return [_view(tensor, start + shift, num_blocks, block_stride, piece) for shift in _shifts(apart)]


def arrangement_of(tensor: torch.Tensor, dim: int, pieces: Sequence[int]) -> str:
    """What the bytes of a block's `pieces` (bytes of each) are: element type, and the tensor's dimensions but `dim`,
    which counts blocks, each with its size, the one with the longest stride first. However many blocks there are."""
    strides: tuple[int, ...] = tensor.stride()
    order = sorted((i for i, size in enumerate(tensor.shape) if i != dim and size > 1), key=lambda i: (-strides[i], i))
    dims = " ".join(f"{i}:{tensor.shape[i]}" for i in order)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{dims}] in {'+'.join(map(str, pieces))}"


def undivided_arrangement_of(tensor: torch.Tensor, dim: int, head_dim: int) -> str:
    """The same of ranks that hold other numbers of KV heads, which dimension `head_dim` counts: it is left out."""
    strides: tuple[int, ...] = tensor.stride()
    kept = [i for i, size in enumerate(tensor.shape) if i not in (dim, head_dim) and size > 1]
    order = sorted(kept, key=lambda i: (-strides[i], i))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{' '.join(f'{i}:{tensor.shape[i]}' for i in order)}] a head"


def heads_of(tensor: torch.Tensor, head_dim: int | None, piece_bytes: int) -> tuple[int, int]:
    """How many KV heads a piece of the tensor holds, and the bytes that each has in a row; (0, 0) where they lie in
    pieces of their own. Dimension `head_dim` counts them, or every rank holds the same, which is one head."""
    if head_dim is None or tensor.shape[head_dim] == 1:
        return 1, piece_bytes
    num_heads, head_bytes = tensor.shape[head_dim], byte_strides(tensor)[head_dim]
    return (num_heads, head_bytes) if head_bytes < piece_bytes else (0, 0)


def head_dim(layer: str, tensor: torch.Tensor, dim: int, given: int) -> int:
    """Which dimension counts KV heads, as the engine says; `dim` counts blocks. Raises LayoutError where it cannot."""
    shape = tuple(tensor.shape)
    if not -len(shape) <= given < len(shape) or given % len(shape) == dim:
        raise LayoutError(
            f"layer {layer!r}: head_dims says dimension {given} of shape {shape} counts KV heads, and {dim} counts "
            "blocks; name another, None where every rank holds the same, or leave the layer out"
        )
    return given % len(shape)


def block_dim(layer: str, tensor: torch.Tensor, num_blocks: int, given: int | None) -> int:
    """Which dimension counts blocks: `given` where the engine says so. Raises LayoutError where it cannot be told."""
    shape = tuple(tensor.shape)
    if given is not None:
        if not -len(shape) <= given < len(shape) or shape[given] == 0 or shape[given] % num_blocks:
            raise LayoutError(
                f"layer {layer!r}: block_dims says dimension {given} of shape {shape} counts blocks, "
                f"which is not a multiple of num_blocks={num_blocks}"
            )
        return given % len(shape)
    fits = [dim for dim, size in enumerate(shape) if size and size % num_blocks == 0]
    exact = [dim for dim in fits if shape[dim] == num_blocks]
    if exact:
        # A larger multiple inside a block is a head or token count; outside it, it may count kernel blocks.
        fits = [dim for dim in fits if dim in exact or tensor.stride(dim) > max(map(tensor.stride, exact))]
    if len(fits) == 1:
        return fits[0]
    problem = f"dimensions {fits} all fit" if fits else "no dimension fits"
    raise LayoutError(
        f"layer {layer!r}: cannot tell which dimension of shape {shape} counts blocks for num_blocks={num_blocks} "
        f"({problem}): pass block_dims={{{layer!r}: <dimension>}}"
    )


def join_overlaid(pieces: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[tuple[str, torch.Tensor]], list[int]]:
    """Make one of (layer, uint8 view) pairs that lie over each other in every block; and say where each pair went.

    Block groups overlay their layers so: a block belongs to one group at a time, and its bytes are those of all. What
    is joined goes under the name, and in the place, of the layer that was registered first. Raises LayoutError where
    bytes of one block are those of another.
    """
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i][1].stride(0), pieces[i][1].data_ptr()))
    clusters: list[list[int]] = []
    ends: list[int] = []
    for i in order:
        view = pieces[i][1]
        end = view.data_ptr() + view.shape[1]
        if clusters and _is_over(view, pieces[clusters[-1][0]][1], ends[-1]):
            clusters[-1].append(i)
            ends[-1] = max(ends[-1], end)
        else:
            clusters.append([i])
            ends.append(end)
    joined: list[tuple[str, torch.Tensor]] = []
    went = [0] * len(pieces)
    for cluster, end in sorted(zip(clusters, ends, strict=True), key=lambda entry: min(entry[0])):
        for i in cluster:
            went[i] = len(joined)
        name = pieces[min(cluster)][0]
        joined.append((name, _union(name, pieces[cluster[0]][1], end)))
    return joined, went


def check_apart(pieces: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise LayoutError where two of the (layer, uint8 view) pairs share a byte."""
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][1].data_ptr())
    cluster: list[int] = []
    end = 0
    for i in order:
        view = pieces[i][1]
        if cluster and view.data_ptr() >= end:
            _check_cluster([pieces[j] for j in cluster])
            cluster = []
        cluster.append(i)
        end = max(end, view.data_ptr() + (view.shape[0] - 1) * view.stride(0) + view.shape[1])
    _check_cluster([pieces[j] for j in cluster])


def _check_no_overlap(layer: str, tensor: torch.Tensor, dims: list[tuple[int, int]]) -> None:
    extent = tensor.itemsize
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size > 1 and stride < extent:
            raise LayoutError(
                f"layer {layer!r}: elements of shape {tuple(tensor.shape)} with strides {tensor.stride()} share bytes; "
                "register the tensor that owns the memory, not an expanded or overlapping view"
            )
        extent += (size - 1) * stride


def _coalesce(dims: list[tuple[int, int]], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the longest run in a block, and the dimensions (size, stride) that repeat it."""
    piece = itemsize
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride != piece:
            break
        piece *= size
    return piece, [(size, stride) for size, stride in dims if stride >= piece]


def _shifts(dims: list[tuple[int, int]]) -> Iterator[int]:
    for index in product(*(range(size) for size, _ in dims)):
        yield sum(i * stride for i, (_, stride) in zip(index, dims, strict=True))


def _is_over(view: torch.Tensor, first: torch.Tensor, end: int) -> bool:
    """Whether a view begins in front of `end`, where what begins with `first` ends in block 0."""
    return view.stride(0) == first.stride(0) and view.data_ptr() < end


def _union(layer: str, first: torch.Tensor, end: int) -> torch.Tensor:
    num_blocks, stride, piece = first.shape[0], first.stride(0), end - first.data_ptr()
    if piece == first.shape[1]:
        return first
    if piece > stride and num_blocks > 1:
        raise LayoutError(
            f"layer {layer!r}: bytes of a block are those of the next one, with what lies over it: {piece} bytes, "
            f"{stride} from block to block; register tensors whose blocks begin together"
        )
    return _view(first, int(first.storage_offset()), num_blocks, stride, piece)


def _view(tensor: torch.Tensor, start: int, num_blocks: int, stride: int, piece: int) -> torch.Tensor:
    with torch.inference_mode(False):  # engines register in that mode, and its tensors cannot be written outside of it
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return view.set_(tensor.untyped_storage(), start, (num_blocks, piece), (max(stride, piece), 1))


def _check_cluster(pieces: list[tuple[str, torch.Tensor]]) -> None:
    """Exact test of views whose extents overlap, as those of layers interleaved in one storage do."""
    if len(pieces) < 2:
        return
    starts = np.array([view.data_ptr() for _, view in pieces], dtype=np.int64)
    strides = np.array([view.stride(0) for _, view in pieces], dtype=np.int64)
    sizes = np.array([view.shape[1] for _, view in pieces], dtype=np.int64)
    stride = int(strides[0])
    if (strides == stride).all() and int(sizes.sum()) <= stride:
        # One stride for all: apart within one period means apart everywhere. Saves listing every block.
        phase = (starts - starts.min()) % stride
        order = np.argsort(phase)
        ends = phase[order] + sizes[order]
        if (ends[:-1] <= phase[order][1:]).all() and ends[-1] <= stride + phase[order][0]:
            return
    blocks = np.arange(pieces[0][1].shape[0], dtype=np.int64)
    begins = (starts[:, None] + blocks * strides[:, None]).ravel()
    owners = np.repeat(np.arange(len(pieces)), len(blocks))
    order = np.argsort(begins, kind="stable")
    hit = np.flatnonzero(begins[order][:-1] + sizes[owners[order]][:-1] > begins[order][1:])
    if len(hit):
        first, second = (pieces[owners[order[hit[0] + i]]][0] for i in (0, 1))
        raise LayoutError(
            f"layers {first!r} and {second!r} share bytes without being the same tensor: "
            "register the tensor that owns the memory once, or the very same view under both names"
        )
