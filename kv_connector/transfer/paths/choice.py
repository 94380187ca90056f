"""Which path a copy takes."""

from __future__ import annotations

from ...config import Config, PathName
from ...errors import ConfigError
from ...types import Direction
from ..costs.curves import BUILT_IN, LinkCosts
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from .base import LONG_SLICE_BYTES, BlockCopy, CopyPath
from .decoding import DecodingPath
from .runs import RunsPath
from .torch import TorchPath


class AutoPath:
    """Chooses a path for each copy: the one that `costs` says takes least, of those that this pool and form have."""

    def __init__(
        self, form: HostForm, host: HostPool, staging_memory: int, costs: LinkCosts, packs_pieces: bool = False
    ) -> None:
        """`staging_memory` is what `StagedPath` may take; where a piece does not fit into it, DMA takes its place.

        `packs_pieces`: where a copy engine has to take a block in several pieces it is packed, whatever that costs, for
        an engine that loses more by the many copies; a load that the model waits for may be a kernel's all the same.
        """
        from .direct import DirectPath
        from .staged import StagedPath, min_staging_memory

        self._form = form
        self._host = host
        self._costs = costs
        self._packs_pieces = packs_pieces
        self._runs = RunsPath(form, host)
        self._paths: dict[PathName, CopyPath] = {PathName.RUNS: self._runs}
        if host.is_pinned:
            self._paths[PathName.DIRECT] = DirectPath(form, host)
            if staging_memory >= min_staging_memory(form):
                self._paths[PathName.STAGED] = StagedPath(form, host, staging_memory)

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`."""
        pieces = self._runs.piece_bytes(copy.regions)
        row_bytes, num_rows = sum(pieces), len(copy.device_ids)
        name = self._choose(copy.direction, copy.regions, num_rows, copy.urgent)
        plan = None
        if len(pieces) == 1 and not (copy.urgent and name is PathName.DIRECT):
            # Of several pieces no two blocks are adjacent on both sides, whatever their ids.
            plan = self._runs.plan(copy)
            if self._host.is_pinned and len(plan) < num_rows:
                name = self._costs.choose(copy.direction, row_bytes * num_rows // len(plan), row_bytes, num_rows)
        if plan is not None and (name is PathName.RUNS or name not in self._paths):
            self._runs.submit(copy, plan)
        else:
            self._paths.get(name, self._runs).copy(copy)

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`: of the path that long ones take."""
        num_rows = max(1, LONG_SLICE_BYTES // self._form.moved_bytes)
        name = self._choose(direction, range(len(self._form.layout.regions)), num_rows)
        return self._paths.get(name, self._runs).slice_bytes(direction)

    def close(self) -> None:
        """See `CopyPath.close`."""
        for path in self._paths.values():
            path.close()

    def _choose(self, direction: Direction, regions: range, num_rows: int, urgent: bool = False) -> PathName:
        """Where no two blocks are neighbours."""
        if not self._host.is_pinned:
            return PathName.RUNS  # only DMA reaches memory that is not page-locked
        pieces = self._runs.piece_bytes(regions)
        row_bytes, is_pitched = sum(pieces), self._runs.is_pitched(regions)
        if self._packs_pieces and len(pieces) > 1 and not is_pitched and not urgent:
            return PathName.STAGED
        # A pitched row moves like a segment of its length.
        segment_bytes = row_bytes if is_pitched else row_bytes // len(pieces)
        return self._costs.choose(direction, segment_bytes, row_bytes, num_rows, urgent)


def make_fallback(form: HostForm, host: HostPool) -> CopyPath:
    """The path that needs least: no kernels, no staging, no pitch, any memory."""
    if form.layout.device.type == "cpu":
        return TorchPath(form, host)
    return DecodingPath(form, host) if form.name else RunsPath(form, host, least_pitched=form.block_bytes + 1)


def make_path(
    form: HostForm, host: HostPool, config: Config, costs: LinkCosts = BUILT_IN, packs_pieces: bool = False
) -> CopyPath:
    """The path that `config.copy_path` names, by `costs` where it is `auto`, see `AutoPath`, and there alone
    `packs_pieces` counts; a cache on the CPU is copied with torch.

    Raises ConfigError where the path cannot serve this pool and form.
    """
    if form.layout.device.type == "cpu":
        return TorchPath(form, host)
    if form.name and config.copy_path not in (PathName.AUTO, PathName.STAGED):
        raise ConfigError(
            f"copy_path={config.copy_path.value!r} cannot copy what host_form='lossless' codes: give 'auto' or 'staged'"
        )
    if config.copy_path is PathName.AUTO and not form.name:
        return AutoPath(form, host, config.staging_memory, costs, packs_pieces)
    if config.copy_path is PathName.RUNS:
        return RunsPath(form, host)
    # Only these need Triton.
    if config.copy_path is PathName.DIRECT:
        from .direct import DirectPath

        return DirectPath(form, host)
    from .staged import StagedPath

    return StagedPath(form, host, config.staging_memory)
