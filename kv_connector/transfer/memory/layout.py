"""Cache tensors as regions of bytes, found from their real strides, whatever the engine's layout.

A region is a strided column of equal pieces, one a block: the piece of block b lies at `data_ptr + b * block_stride`
and is `piece_bytes` long. A tensor whose block is one run of bytes gives one region; K and V apart, heads outside of
blocks or padding inside a block give several. How pieces lie on the host is said by `host_form.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter

import torch

from ...errors import LayoutError
from .geometry import (
    arrangement_of,
    block_dim,
    byte_strides,
    check_apart,
    head_dim,
    heads_of,
    join_overlaid,
    piece_views,
    undivided_arrangement_of,
)

FIRST_GROUP_BYTES = 8 << 20
"""Of a load's first layer group at least: 150 us of the link, as long as it takes to submit the second. It may have
short rows: a kernel moves it."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One piece of every block. It keeps the cache tensor's storage alive.

    `view` is uint8 of shape (num_blocks, piece_bytes) with strides (block_stride, 1), in the cache tensor's own
    memory. `num_heads` and `head_bytes`: see `heads_of`; 0 where it is not known how heads lie. `dtype` is that of its
    elements, None where tensors of several lie over each other.
    """

    layer: str
    view: torch.Tensor
    num_heads: int = 0
    head_bytes: int = 0
    dtype: torch.dtype | None = None

    @property
    def data_ptr(self) -> int:
        """Address of block 0's piece."""
        return self.view.data_ptr()

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block's piece."""
        return self.view.shape[1]

    @property
    def block_stride(self) -> int:
        """Bytes from one block's piece to the next block's."""
        return self.view.stride(0)


@dataclass(slots=True)
class _Tensor:
    """What its bytes are, also for ranks with other KV heads, which dimension counts those, and its pieces."""

    arrangement: str
    undivided: str
    head_dim: int | str | None
    pieces: range


_UNKNOWN = "unknown"


class _Tensors:
    """Tensors that were registered, each once. `pieces` are (layer, uint8 view), with `heads` as of `heads_of` and the
    `dtypes` of the tensors that have them."""

    def __init__(
        self, num_blocks: int, block_dims: Mapping[str, int] | None, head_dims: Mapping[str, int | None] | None
    ) -> None:
        self.pieces: list[tuple[str, torch.Tensor]] = []
        self.heads: list[tuple[int, int]] = []
        self.dtypes: list[set[torch.dtype]] = []
        self.entries: dict[object, _Tensor] = {}
        self._num_blocks = num_blocks
        self._block_dims = block_dims or {}
        self._head_dims = head_dims or {}

    def add(self, name: str, tensor: torch.Tensor) -> range:
        """Its pieces."""
        geometry = (tensor.data_ptr(), tuple(tensor.shape), byte_strides(tensor), tensor.itemsize)
        given = self._head_dims.get(name, _UNKNOWN)
        entry = self.entries.get(geometry)
        if entry is None:
            entry = self.entries[geometry] = self._look(name, tensor, given)
        elif entry.head_dim != given:
            for piece in entry.pieces:
                self.heads[piece] = 0, 0
        for piece in entry.pieces:
            self.dtypes[piece].add(tensor.dtype)
        return entry.pieces

    def _look(self, name: str, tensor: torch.Tensor, given: int | str | None) -> _Tensor:
        dim = block_dim(name, tensor, self._num_blocks, self._block_dims.get(name))
        views = piece_views(name, tensor, self._num_blocks, dim)
        arrangement = undivided = arrangement_of(tensor, dim, [view.shape[1] for view in views])
        if isinstance(given, int):
            undivided = undivided_arrangement_of(tensor, dim, head_dim(name, tensor, dim, given))
        first = len(self.pieces)
        self.pieces.extend((name, view) for view in views)
        self.dtypes.extend(set() for _ in views)
        for view in views:
            self.heads.append((0, 0) if isinstance(given, str) else heads_of(tensor, given, view.shape[1]))
        return _Tensor(arrangement, undivided, given, range(first, len(self.pieces)))

    # By region, where `went` has the region of each piece.

    def heads_by_region(self, went: Sequence[int], num_regions: int) -> list[tuple[int, int]]:
        """Of layers that lie over each other each may have other heads: then nothing is known of them."""
        by_region, num_pieces = dict(zip(went, self.heads, strict=True)), Counter(went)
        return [by_region[region] if num_pieces[region] == 1 else (0, 0) for region in range(num_regions)]

    def dtypes_by_region(self, went: Sequence[int], num_regions: int) -> list[torch.dtype | None]:
        """None where there are several."""
        found: list[set[torch.dtype]] = [set() for _ in range(num_regions)]
        for region, dtypes in zip(went, self.dtypes, strict=True):
            found[region] |= dtypes
        return [dtypes.pop() if len(dtypes) == 1 else None for dtypes in found]

    def arrangements(
        self, regions: Sequence[tuple[str, torch.Tensor]], went: Sequence[int], heads: Sequence[tuple[int, int]]
    ) -> tuple[str, str]:
        """What the bytes of all are, and the same but for how many KV heads they have."""
        texts, undivided = [], []
        for part in self.entries.values():
            first = part.pieces.start
            shift = self.pieces[first][1].data_ptr() - regions[went[first]][1].data_ptr()
            at = f" at {shift}" if shift else ""
            is_known = all(heads[went[piece]][0] for piece in part.pieces)
            texts.append(f"{part.arrangement}{at}")
            undivided.append(f"{part.undivided if is_known else part.arrangement}{at}")
        return in_runs(texts), in_runs(undivided)


class CacheLayout:
    """Every region of the registered cache tensors. It never changes.

    num_blocks: blocks of the engine's cache, on the device.
    regions: in the order of layers; the regions of one layer are neighbours.
    layer_names: in the order of registration, aliases included.
    layer_stops: ascending, where a layer's regions end: the index behind its last one.
    device: where the tensors lie.
    arrangement: what the bytes of a block are: equal text, equal meaning of every byte. See `arrangement_of`.
    undivided_arrangement: the same but for how many KV heads each region has, where that is known.
    """

    def __init__(
        self,
        num_blocks: int,
        pieces: Sequence[tuple[str, torch.Tensor]],
        layer_regions: Mapping[str, Sequence[int]],
        arrangement: str = "",
        undivided_arrangement: str = "",
        heads: Sequence[tuple[int, int]] = (),
        dtypes: Sequence[torch.dtype | None] = (),
    ) -> None:
        """`pieces` are (layer, uint8 view) in order; `layer_regions[name]` are the regions that a layer reads; `heads`
        are (KV heads, bytes of each in a row) of the pieces, and `dtypes` their elements, where that is known of any.

        Engines use `from_tensors`, which finds both.
        """
        columns = zip(pieces, heads or [(0, 0)] * len(pieces), dtypes or [None] * len(pieces), strict=True)
        regions = [Region(layer, view, *of_heads, dtype) for (layer, view), of_heads, dtype in columns]
        self.num_blocks = num_blocks
        self.arrangement = arrangement
        self.undivided_arrangement = undivided_arrangement
        self.regions = tuple(regions)
        self.layer_names = tuple(layer_regions)
        self.device = regions[0].view.device
        self._last_region = {name: max(own) for name, own in layer_regions.items()}
        firsts = [*(min(own) for own in layer_regions.values()), len(regions)]
        self._num_complete = list(accumulate(reversed(firsts), min))[::-1]
        self.layer_stops = tuple(
            i + 1 for i, region in enumerate(regions) if i + 1 == len(regions) or regions[i + 1].layer != region.layer
        )

    @classmethod
    def from_tensors(
        cls,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
        block_dims: Mapping[str, int] | None = None,
        head_dims: Mapping[str, int | None] | None = None,
    ) -> CacheLayout:
        """The layout of `kv_caches`: one tensor or several by layer name, in the order of the forward pass.

        Tensors may have any dtype and strides. One dimension counts blocks: it has size `num_blocks`, or a multiple of
        it where the engine's kernels use smaller blocks; `block_dims` names that dimension by layer where sizes do not
        tell. `head_dims`: see `KVConnectorWorker.register_kv_caches`. A tensor that is registered twice is copied once,
        and so are bytes that tensors of several block groups share: see `join_overlaid`. Reads no bytes. Raises
        LayoutError.
        """
        if num_blocks < 1:
            raise LayoutError(f"num_blocks={num_blocks}: give the number of blocks of the engine's cache, at least 1")
        found = _Tensors(num_blocks, block_dims, head_dims)
        own: dict[str, list[int]] = {name: [] for name in kv_caches}
        for name, entry in kv_caches.items():
            for tensor in [entry] if isinstance(entry, torch.Tensor) else entry:
                own[name] += found.add(name, tensor)
        pieces = found.pieces
        missing = [name for name in kv_caches if not own[name]]
        if missing or not pieces:
            raise LayoutError(f"no cache tensor was registered for {missing or 'any layer'}: pass them all")
        devices = {view.device for _, view in pieces}
        if len(devices) > 1:
            raise LayoutError(f"cache tensors lie on {sorted(map(str, devices))}: register one rank's tensors only")
        regions, went = join_overlaid(pieces)
        check_apart(regions)
        layer_regions = {name: [went[piece] for piece in own[name]] for name in kv_caches}
        heads = found.heads_by_region(went, len(regions))
        texts, undivided = found.arrangements(regions, went, heads)
        return cls(
            num_blocks, regions, layer_regions, texts, undivided, heads, found.dtypes_by_region(went, len(regions))
        )

    def last_region(self, layer_name: str) -> int:
        """Index of the last region that the layer reads; an alias reads its owner's. -1 for an unknown layer."""
        return self._last_region.get(layer_name, -1)

    def num_complete(self, num_layers: int) -> int:
        """Leading regions that hold what they should once the first so many layers have written: none of the others
        lies in them, as layers of several block groups lie over each other. An alias counts as a layer."""
        return self._num_complete[num_layers]


def in_runs(texts: Sequence[str]) -> str:
    """The texts, neighbours that are equal as one with their number."""
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return ", ".join(f"{count} x {text}" for text, count in runs)


def layer_groups(
    layer_stops: Sequence[int],
    piece_bytes: Sequence[int],
    num_blocks: int,
    target_bytes: int,
    least_row: int = 0,
    long_row: int = 0,
) -> tuple[range, ...]:
    """Cut regions into consecutive groups of whole layers, in order, for a copy of `num_blocks` blocks. `layer_stops`:
    see `CacheLayout`; `piece_bytes` are those that move, by region.

    The first group is there early: it closes once it holds `FIRST_GROUP_BYTES`. Each one behind it has at least twice
    the bytes, up to `target_bytes`, and twice the row, from `least_row` to `long_row` bytes. The last group may be
    smaller.
    """
    groups: list[range] = []
    before = [0, *accumulate(piece_bytes)]
    start = wanted_row = 0
    least_bytes = min(FIRST_GROUP_BYTES, target_bytes)
    for stop in layer_stops:
        row_bytes = before[stop] - before[start]
        is_full = row_bytes >= wanted_row and num_blocks * row_bytes >= least_bytes
        if is_full or stop == len(piece_bytes):
            groups.append(range(start, stop))
            wanted_row = max(least_row, min(2 * row_bytes, long_row))
            least_bytes = min(2 * num_blocks * row_bytes, target_bytes)
            start = stop
    return tuple(groups)


def last_group(groups: Sequence[range], region: int) -> int:
    """Index of the group that holds the region."""
    return bisect_right(groups, region, key=attrgetter("stop"))
