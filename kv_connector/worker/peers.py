"""The worker half's KV transfers (layer 2): which layers of a step are ready to be sent, and what has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..config import Config, WireForm
from ..peer.base import PeerPool, PoolRegion
from ..peer.protocol.jobs import EndedPeerJob, PeerJobs
from ..transfer.cuda.copier import driver_copier
from ..transfer.cuda.driver import prepare_thread
from ..transfer.cuda.streams import Event, Lane, Priority, make_lane
from ..transfer.memory.layout import CacheLayout, layer_groups
from ..transfer.paths.coded_slots import make_coder
from ..types import PeerAction, PeerJob, StepPlan

if TYPE_CHECKING:
    from ..transfer.paths.peer_writes import RemoteWriter, RemoteWriters

_GROUP_BYTES = 32 << 20
"""Of a step's blocks that are sent at once, unless the config says otherwise."""

OpenPeers = Callable[[PeerPool], PeerJobs]
"""Opens the links of one rank for its pool."""


@dataclass(slots=True)
class _Unsure:
    """Sends of a step that waited for loads which may yet turn out to have failed."""

    job_ids: list[int]
    load_ids: frozenset[int]
    behind: Event


class StepPeers:
    """Passes a step's blocks to `PeerJobs` as layers are computed. Called from the model-runner thread."""

    def __init__(self, layout: CacheLayout, config: Config, open_peers: OpenPeers) -> None:
        """Raises ConfigError where the links cannot be opened, or blocks not be coded for them as it says."""
        self._layout = layout
        self._piece_bytes = [region.piece_bytes for region in layout.regions]
        self._group_bytes = config.layer_group_bytes or _GROUP_BYTES
        self._lane = make_lane(layout.device, Priority.PEER, timing=False)
        codes = config.peer is not None and config.peer.wire_form is WireForm.LOSSLESS
        self._jobs = open_peers(pool_of(layout, self._lane, codes))
        self._sends: list[int] = []  # of this step, that are not wholly ready
        self._stops: list[int] = []  # of layer groups, in regions, that are to come
        self._is_layerwise = False
        self._saved: set[str] = set()
        self._num_saved = 0  # leading layers
        self._awaited: frozenset[int] = frozenset()
        self._unsure: list[_Unsure] = []
        self._failed_loads: set[int] = set()
        self._ended: list[EndedPeerJob] = []

    @property
    def port(self) -> int:
        """Where other engines reach this rank."""
        return self._jobs.port

    @property
    def is_broken(self) -> bool:
        """Whether the peer thread has ended: no blocks are exchanged any more."""
        return self._jobs.is_broken

    def counters(self) -> tuple[tuple[str, float], ...]:
        """Sums since the start, by name."""
        return self._jobs.counters()

    def begin(self, plan: StepPlan) -> None:
        """A step begins; its blocks may be used by what is enqueued on the current stream."""
        self._jobs.suspend(plan.suspended)
        self._jobs.withdraw(plan.withdrawn)
        if plan.peer:
            behind = self._lane.mark()
            for job in plan.peer:
                self._jobs.begin(job, behind)
        self._jobs.cancel(plan.cancelled_peer)
        self._sends = [job.job_id for job in plan.peer if job.action is PeerAction.SEND]
        self._awaited = frozenset(plan.awaited_loads)
        self._is_layerwise = bool(self._sends) and not self._awaited
        self._saved.clear()
        self._num_saved = 0
        if self._is_layerwise:
            num_blocks = sum(job.num_blocks for job in plan.peer if job.action is PeerAction.SEND)
            groups = layer_groups(self._layout.layer_stops, self._piece_bytes, num_blocks, self._group_bytes)
            self._stops = [group.stop for group in groups[:-1]]

    def saved_layer(self, layer_name: str) -> None:
        """The step has enqueued whatever writes this layer. Layers may come in any order: leading ones are sent."""
        if not self._is_layerwise:
            return
        names = self._layout.layer_names
        self._saved.add(layer_name)
        while self._num_saved < len(names) and names[self._num_saved] in self._saved:
            self._num_saved += 1
        if self._num_saved and self._stops:
            ready = self._layout.num_complete(self._num_saved)
            if ready >= self._stops[0]:
                self._stops = [stop for stop in self._stops if stop > ready]
                self._jobs.ready(self._sends, ready, self._lane.mark())

    def computed(self, ok: bool) -> None:
        """The whole step is enqueued; not `ok`: what it computes may rest on bytes that never came. Idempotent."""
        sends, self._sends = self._sends, []
        self._is_layerwise = False
        if not sends:
            return
        if not ok:
            self._jobs.fail(sends)
        elif self._awaited:
            self._unsure.append(_Unsure(sends, self._awaited, self._lane.mark()))
        else:
            self._jobs.ready(sends, len(self._layout.regions), self._lane.mark())

    def poll(self, loads_under_way: Collection[int]) -> list[EndedPeerJob]:
        """Jobs that have ended since the last call."""
        for entry in [e for e in self._unsure if not e.load_ids.intersection(loads_under_way)]:
            self._unsure.remove(entry)
            if self._failed_loads & entry.load_ids:
                self._jobs.fail(entry.job_ids)
            else:
                self._jobs.ready(entry.job_ids, len(self._layout.regions), entry.behind)
        if not self._unsure:
            self._failed_loads.clear()
        return self._jobs.poll()

    def rest(self) -> None:
        """Nothing is computed in this step: leave the processor, and the GIL, to those who hand blocks over."""
        self._jobs.rest()

    def load_failed(self, job_id: int) -> None:
        """A load failed that steps may have waited for."""
        self._failed_loads.add(job_id)

    def close(self) -> None:
        """End every job, and the links."""
        self._jobs.close()


def awaits(job: PeerJob) -> bool:
    """Whether a request waits for the job's blocks."""
    return job.action is PeerAction.RECEIVE and job.request_id is not None


def pool_of(layout: CacheLayout, lane: Lane, codes: bool = False) -> PeerPool:
    """The cache tensors as peers are shown them; copies between devices run on the lane. `codes` says that what goes
    through host memory is to be coded; raises ConfigError where nothing can be."""
    regions = tuple(
        PoolRegion(r.data_ptr, r.block_stride, r.piece_bytes, r.num_heads, r.head_bytes) for r in layout.regions
    )
    coder = make_coder(layout, lane) if codes else None
    if layout.device.type != "cuda":
        return PeerPool(layout.num_blocks, regions, layout.undivided_arrangement, coder=coder, keeps=layout)

    @cache
    def writers() -> RemoteWriters:
        from ..transfer.paths.peer_writes import RemoteWriters

        return RemoteWriters(layout, lane)

    def writer(there: Sequence[PoolRegion]) -> RemoteWriter:
        bases = np.array([region.address for region in there], dtype=np.int64)
        strides = np.array([region.block_stride for region in there], dtype=np.int64)
        return writers().writer(bases, strides)

    return PeerPool(
        layout.num_blocks,
        regions,
        layout.undivided_arrangement,
        device=layout.device.index or 0,
        copy=driver_copier(),
        writer=writer,
        mark=lambda: lane.mark(lane.stream),
        coder=coder,
        prepare_thread=partial(prepare_thread, layout.device.index or 0),
        stream=lane.handle,
        keeps=layout,
    )
