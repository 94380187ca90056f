"""Plain data that crosses between the halves (layer 0).

Everything here is frozen and picklable. Block ids travel as NumPy int64 arrays, never as lists of objects, so that a
plan for thousands of blocks costs one buffer to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, NewType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BlockHash = NewType("BlockHash", bytes)
"""Chained hash of a block: it names the block's tokens and everything in front of them."""


class KeptPin(NamedTuple):
    """A pinned prefix, as it is kept for the engine's next start: the hashes of its blocks, its tenant, the seconds
    that are left of it (None: no end), and whether a request pinned it, else an operator."""

    block_hashes: tuple[BlockHash, ...]
    tenant: str
    seconds: float | None
    is_of_request: bool

    @property
    def name(self) -> tuple[int, BlockHash, bool]:
        """Pins of equal names are the same pin."""
        return len(self.block_hashes), self.block_hashes[-1], self.is_of_request


NO_BLOCK = -1
"""Stands in a block table where the engine holds no block: in front of a sliding window."""


class Tier(IntEnum):
    """Where a copy of a block lies. The value indexes per-tier arrays. STORAGE names storage in events; the tree does
    not track what it holds."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class Direction(Enum):
    """Which way a copy goes: a load runs toward the device, a save away from it."""

    LOAD = "load"
    SAVE = "save"

    __hash__ = object.__hash__  # there is one of each: Enum's own is Python's code, in every lookup of a dictionary


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """One copy of whole blocks between device and host; it ends exactly once on every rank, done or failed.

    `device_ids` and `host_ids` are int64 of shape (num_blocks,): block `device_ids[i]` pairs with `host_ids[i]`.
    `request_id` names the request that waits for an asynchronous load, and `admission` numbers that wait, since request
    ids may be reused. The last `num_guarded` device blocks of such a load may still be used by steps in flight, and are
    filled after those steps.
    """

    job_id: int
    direction: Direction
    device_ids: NDArray[np.int64]
    host_ids: NDArray[np.int64]
    request_id: str | None = None
    num_guarded: int = 0
    admission: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the job moves."""
        return len(self.device_ids)

    @property
    def brings(self) -> bool:
        """Whether the job writes device blocks that steps compute on."""
        return self.direction is Direction.LOAD

    @property
    def carries_computed(self) -> bool:
        """Whether the job carries away what steps have computed."""
        return self.direction is Direction.SAVE


class StorageAction(Enum):
    """What a storage job does: ask which keys exist, read blocks into host memory, or write them."""

    LOOK_UP = "look_up"
    FETCH = "fetch"
    BACK_UP = "back_up"


@dataclass(frozen=True, slots=True, eq=False)
class StorageJob:
    """Host blocks and their keys in storage; like a copy job it ends exactly once on every rank, done or failed.

    `keys` are 32 bytes each, concatenated; `host_ids`, int64 of shape (num_blocks,), pair with the keys whose positions
    are not in `skipped`; a lookup has no host blocks. Storage may keep blocks in groups of `group_blocks` (see
    `StepReport`), neighbours of one prefix of which the first is at a multiple of that: then the keys are those of
    whole groups, one behind the other, of which only the last may be shorter. A fetch skips the members of a group that
    are not wanted, and a lookup is of one prefix, whose leading blocks count. With `singly`, for windows and states,
    which are saved and evicted one by one, each block is a group of its own, and a lookup asks for each.
    """

    job_id: int
    action: StorageAction
    keys: bytes
    host_ids: NDArray[np.int64]
    skipped: tuple[int, ...] = ()
    singly: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the job moves."""
        return len(self.host_ids)

    @property
    def request_id(self) -> None:
        """Always None: no step waits for storage."""

    carries_computed = False

    def split_keys(self) -> list[bytes]:
        """The keys, one by one."""
        return [self.keys[i : i + 32] for i in range(0, len(self.keys), 32)]


class PeerAction(Enum):
    """What a peer job does with device blocks: offer them to another engine, or have one fill them."""

    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True, eq=False)
class PeerJob:
    """Device blocks sent from one engine to another; like a copy job it ends exactly once on every rank, done or
    failed.

    `transfer_id` names the KV transfer on both sides; the blocks are those of one block group, `group`, of the prompt
    from position `first` on. A SEND has in `names`, where it is the first of its KV transfer and group, the names of
    all blocks that will be offered from `first` on, 32 bytes each; without blocks it says no more than that. A RECEIVE
    has the name of its last block there, and asks `engine_id` (any where empty) at `host` and `ports`, one for each of
    that engine's ranks: `tp_size` of each stage of its pipeline, 0 where there are no whole stages. Without blocks it
    tells the producer that nothing is wanted of this group of the prompt whose last whole block has that name.
    `request_id` names the request that waits for it, and `admission` numbers that wait, since request ids may be
    reused.
    """

    job_id: int
    action: PeerAction
    transfer_id: str
    first: int
    device_ids: NDArray[np.int64]
    names: bytes = b""
    host: str = ""
    ports: tuple[int, ...] = ()
    tp_size: int = 1
    engine_id: str = ""
    request_id: str | None = None
    admission: int = 0
    group: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the job moves."""
        return len(self.device_ids)

    @property
    def carries_computed(self) -> bool:
        """Whether the job carries away what steps have computed."""
        return self.action is PeerAction.SEND


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the worker half does in one step; `build_connector_meta` makes it and every rank gets the same one.

    step: its number, from 1 on.
    loads: of the step's requests, submitted before the forward pass, which waits for them.
    saves: submitted after the forward pass, since they may read blocks that it computes.
    background_loads: no request of this step waits for them.
    announced_loads: ids of background loads that will end soon. Their requests are reported to the engine as received
        in this step, before their bytes are known to be there.
    awaited_loads: ids of announced loads that are still under way and that the step may read: it waits for them first.
    fence: the step may write blocks that copies of earlier steps use: it waits for those first.
    storage: storage jobs; no step waits for them.
    cancelled_storage: ids of storage jobs, of this step or of earlier ones, to be skipped if not yet begun.
    peer: peer jobs; no step waits for them. The blocks of a SEND are computed by the end of this step.
    suspended: ids of KV transfers of requests that were preempted: not offered until a later SEND.
    withdrawn: ids of KV transfers that will not be offered any more: consumers stop waiting.
    cancelled_peer: ids of RECEIVE jobs that are cancelled.
    reported_step: the last step of which the scheduler half had every rank's report when it made this plan. A load that
        failed in a later step was not known: what this step computes may depend on bytes that never arrived.
    unfit: most blocks did not fit into the lossless form, and nothing is saved any more.
    computes: false for a step without tokens, made for background work alone; it may pause for a moment.
    is_light: the step computes so little beside what it loads that the model waits for most of the load.
    """

    step: int
    loads: tuple[CopyJob, ...] = ()
    saves: tuple[CopyJob, ...] = ()
    background_loads: tuple[CopyJob, ...] = ()
    announced_loads: tuple[int, ...] = ()
    awaited_loads: tuple[int, ...] = ()
    fence: bool = False
    storage: tuple[StorageJob, ...] = ()
    cancelled_storage: tuple[int, ...] = ()
    peer: tuple[PeerJob, ...] = ()
    suspended: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    cancelled_peer: tuple[int, ...] = ()
    reported_step: int = -1
    unfit: bool = False
    computes: bool = True
    is_light: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the step copies nothing."""
        return not (self.loads or self.background_loads or self.saves or self.storage or self.peer)


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """How one step's loads went on the device, in milliseconds; `load_stall_ms[i]` is what layer group i cost."""

    load_ms: float
    load_stall_ms: tuple[float, ...]


class StepReport(NamedTuple):
    """What one rank says after a step; a tuple, as each step makes one. A job is in `done` only when its last byte has
    arrived.

    `num_host_blocks` is how many host blocks are ready for use on this rank; it only grows. `block_bytes` is the size
    of one. `load_milliseconds` is how long the loads of `loaded_bytes` took. `loading_bytes` and `saving_bytes` belong
    to copies in flight and are not known to have arrived. `launch_milliseconds` is how long the model-runner thread was
    at the forward pass, where the step has one, without what layers have waited for their loads. `found` has, for each
    lookup in `done`, a number whose bit i says that its key i exists here, and all in front of it unless they are kept
    `singly`. `missing` has, for jobs in `done`, those of their host blocks that were not moved on this rank, or whose
    content did not fit. `group_blocks` is a power of two: how many blocks of a prefix this rank's storage keeps as one
    object. `storage_counters` are the sums and gauges of this rank's storage, by name, whenever they may have changed,
    and `peer_counters` those of its links to other engines. `peer_port` is where those reach this rank, 0 if nowhere;
    with `peers_are_broken` they never will again. `lost_blocks` are device blocks whose load failed, as the engine was
    told since the previous report; with `has_failed_in_step` the step was to read some of them. `job_seconds` has, for
    jobs in `done`, how long they ran on this rank, where that is known: of jobs that were copied together the first has
    the time of all.
    """

    step: int
    rank: int
    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    num_host_blocks: int = 0
    block_bytes: int = 0
    group_blocks: int = 1
    loaded_bytes: int = 0
    saved_bytes: int = 0
    loading_bytes: int = 0
    saving_bytes: int = 0
    load_milliseconds: float = 0.0
    launch_milliseconds: float = 0.0
    load_timings: tuple[LoadTiming, ...] = ()
    found: tuple[tuple[int, int], ...] = ()
    missing: tuple[tuple[int, tuple[int, ...]], ...] = ()
    storage_counters: tuple[tuple[str, float], ...] = ()
    peer_port: int = 0
    peer_counters: tuple[tuple[str, float], ...] = ()
    peers_are_broken: bool = False
    lost_blocks: tuple[int, ...] = ()
    has_failed_in_step: bool = False
    job_seconds: tuple[tuple[int, float], ...] = ()
