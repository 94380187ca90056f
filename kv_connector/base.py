"""The connector interface (layer 1): vLLM's V1 connector stated on engine-neutral types.

Method names and the order of calls are those of vLLM's `KVConnectorBase_V1`, so that an engine's adapter only
translates; nothing here needs vLLM. One step of an engine calls:

    scheduler process                                  worker process (one per rank)
    on_new_request(request)              at arrival
    get_num_new_matched_tokens(...)      per waiting request
    update_state_after_alloc(...)        per admitted request
    build_connector_meta(output) ------- StepPlan ---> handle_preemptions(plan)
                                                       bind_connector_metadata(plan)
                                                       start_load_kv()
                                                         wait_for_layer_load(name)   before each layer's attention
                                                         save_kv_layer(name)         after it
                                                       wait_for_save()
                                                       get_finished()
                                                       get_block_ids_with_load_errors()
    update_connector_output(reports) <--- StepReport - build_connector_worker_meta()
    request_finished(request)                          clear_connector_metadata()

Scheduler-side calls come from one thread of the scheduler's process and never block; worker-side calls come from the
thread that launches the model in each worker's process, and none of them waits for the device. Misuse by the engine
fails an assertion, or raises KVConnectorError where it depends on what a user configured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from .events import CacheEvent
    from .types import BlockHash, StepPlan, StepReport


class Request(Protocol):
    """What the connector reads of an engine's request; the engine owns it and the connector never changes it."""

    @property
    def request_id(self) -> str:
        """Unique among live requests."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hash of every full block among those tokens, in order, of 16 bytes or more each; it grows as tokens are
        generated. Where block groups have blocks of different sizes, every block of a group ends where one of these
        does."""

    # A request may have `kv_transfer_params`, a mapping or None, which names another engine: see docs/peers.md.


class DeviceBlocks(Protocol):
    """The engine's device blocks, as far as the scheduler half needs them (vLLM: its `BlockPool`); called from the
    scheduler's thread, within the calls of `KVConnectorScheduler`."""

    def touch(self, block_ids: Sequence[int]) -> None:
        """Pin each block once: it is neither reused nor evicted until `free_blocks` names it as often."""

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Undo one `touch` of each block."""

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        """Ids and hashes of cached blocks among the next `limit` blocks to be allocated, the next one first.

        With several block groups a block's name is `index.group_key` of its hash and group.
        """

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now, those that hold a cached block included."""

    def forget(self, block_ids: Collection[int]) -> None:
        """Remove these blocks from the engine's prefix cache, whoever holds them: their content does not match their
        hashes."""


class ScheduledRequest(NamedTuple):
    """One request's share of a step; a tuple, as each step makes one for every request that runs.

    `new_block_ids` are the device blocks appended to its table since the last step, without those that
    `update_state_after_alloc` has already told: one sequence for each block group, or nothing where none has any.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Once a step has run, this device block of a block group holds the recurrent state behind a request's first
    `num_tokens` tokens, which fill whole blocks of that group.

    Where hits may end inside of blocks (`index.GroupedTree.ends_within`) they may be any number of hashes; and of full
    attention, if none of its blocks ends there, the engine tells the block that the last of these tokens is in, in
    which their rows stay as they are.
    """

    request_id: str
    group: int
    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the engine's scheduler decided for one step. A preempted request has lost its device blocks.

    `states`: of groups whose block table does not tell (`index.BlockGroup.states_are_told`), those of live requests
    that later ones may begin with; and ends inside of blocks. `num_untold_tokens` are computed in the step by requests
    that are not among `scheduled`.
    """

    scheduled: Sequence[ScheduledRequest] = ()
    preempted_req_ids: Collection[str] = ()
    states: Sequence[StateBlock] = ()
    num_untold_tokens: int = 0


class KVConnectorScheduler(ABC):
    """Scheduler side: knows what is cached where and plans copies. All calls come from the scheduler's thread, and none
    blocks."""

    def bind_block_pool(self, blocks: DeviceBlocks) -> None:
        """Give access to the engine's device blocks; called once, before the first request."""

    def on_new_request(self, request: Request) -> None:
        """A request has arrived; nothing is allocated yet."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own `num_computed_tokens` can be loaded, and whether asynchronously.

        Admits nothing and may be asked any number of times; it may start storage lookups, and notes the answer for
        `update_state_after_alloc`. `None` means "ask again in the next step". The blocks of an asynchronous load are
        allocated at once; the request is scheduled when every rank's `get_finished` has named it, and is not looked up
        again unless the load failed.
        """

    @abstractmethod
    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_local_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """The request was admitted: `block_ids` is its whole block table, by block group, and replaces what was known.

        A block that the engine does not hold is `NO_BLOCK`. The first `num_local_tokens` are on the device; the blocks
        behind them receive `num_external_tokens`, which must be what `get_num_new_matched_tokens` answered just before,
        or less: whole blocks where every group is of full attention, else none. Called for every admission, also of a
        request that was preempted, and with 0 external tokens; after an asynchronous load once more, when the request
        is scheduled; and without a lookup, with the blocks that it has kept in front, for a request that was at its
        end and goes on with more input.
        """

    @abstractmethod
    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        """The plan of this step, for every rank. Called exactly once a step, also for a step without requests."""

    @abstractmethod
    def update_connector_output(self, reports: Sequence[StepReport]) -> None:
        """Take in what ranks reported; jobs end here, and only here.

        Called as the engine takes in the outputs of the step: after that step's load errors, and before the requests
        that its ranks report as received; in one call or several, and nothing is planned in between. From then on the
        ids of requests whose jobs have ended may come again, and plans take it that the engine has heard of the errors.
        """

    @abstractmethod
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The request ended, was aborted or refused. True means "hold its blocks" (we pin instead: always False).

        The engine holds the blocks of an asynchronous load that is under way until `get_finished` has named it.
        """

    @abstractmethod
    def reset_cache(self) -> bool:
        """Forget every cached block, also with copies in flight. True when nothing old can be matched any
        more, nor be sent to another engine: else an engine whose requests are paused asks again after a step."""

    @abstractmethod
    def has_pending_push_work(self) -> bool:
        """Whether jobs are open or something waits to be planned, so that an idle engine keeps stepping until all is
        reported."""

    @abstractmethod
    def has_pending_block_frees(self) -> bool:
        """Whether copies under way pin device blocks: an engine that is short of blocks waits for them instead of
        preempting a request. They are freed without further ado as the copies end. False while one of them hangs."""

    @abstractmethod
    def take_events(self) -> Iterable[CacheEvent]:
        """KV events since the last call, in the order in which they happened; none is returned twice."""

    @abstractmethod
    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """Counters and gauges by name, as of the last reports of all ranks; see `metrics.DOCUMENTATION`."""

    def shutdown(self) -> None:
        """Release the resources of this side. Idempotent."""


class KVConnectorWorker(ABC):
    """Worker side: moves the bytes of one rank. All calls come from the model-runner thread of that rank's process."""

    @abstractmethod
    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
        block_dims: Mapping[str, int] | None = None,
        head_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        """Name the cache tensors, by layer in the order of the forward pass; called once, before the first step.

        Every tensor that a block needs belongs here: keys, values, scales, draft layers. Any strides will do.
        `block_dims` names, by layer, the dimension that counts blocks where sizes do not tell it, and
        `head_dims` the one that counts this rank's KV heads, or None where every rank holds the same (MLA). Layers that
        are not in `head_dims` are exchanged with engines of the same TP size alone. Allocates host memory, and opens
        storage and links to other engines where they are configured. Raises LayoutError for tensors that cannot be
        described, and ConfigError for settings that do not fit them.
        """

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Before a step reuses blocks. Blocks that copies use are pinned in the engine's pool, unless `plan.fence`."""

    @abstractmethod
    def bind_connector_metadata(self, plan: StepPlan) -> None:
        """The plan of the step that begins; the current stream waits for the plan's `awaited_loads`."""

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """The step is over."""

    @abstractmethod
    def start_load_kv(self, full_graph: bool = False) -> None:
        """Submit the step's loads. With `full_graph` the current stream waits for all of them here.

        Called before the forward pass where the plan has `loads`; where it has only background loads, later will do.
        """

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Make the current stream wait until this layer's loads are complete; the host does not wait."""

    @abstractmethod
    def save_kv_layer(self, layer_name: str) -> None:
        """The layer's attention has been launched: its blocks are written by what the current stream holds now."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """The forward pass has been launched: submit the step's saves. The host does not wait for them. Idempotent."""

    @abstractmethod
    def get_finished(self) -> tuple[set[str], set[str]]:
        """The first of three questions at the end of each step: what is found to have ended is in the answers to all.

        Returns ids of requests whose asynchronous load, since the last call, ended on this rank or was announced (its
        bytes may still be arriving, and later steps wait for them), and those among them whose load failed. vLLM's
        method of this name returns (sending, receiving) instead."""

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks whose load failed since the last call: their content must not be used."""

    @abstractmethod
    def build_connector_worker_meta(self) -> StepReport:
        """What has completed since the last report. Called once a step, also for empty ones, behind `get_finished` and
        `get_block_ids_with_load_errors`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Block until copies in flight have ended, then release streams, host memory, storage and links. Idempotent."""
