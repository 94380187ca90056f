"""What stands between the executor and a connector: who is asked when, on which rank, and what is told to whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .blocks import LlmRequest, State
from .collectives import mpi_allgather, mpi_broadcast


@dataclass
class RequestData:
    """One request's share of a step, for the connector's scheduler. Tokens and blocks are those since the last."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """All requests of a step; each is new once."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


@dataclass
class Transfers:
    """Requests that are parked for a load, or held for a save, by id."""

    saving: dict[int, LlmRequest] = field(default_factory=dict)
    loading: dict[int, LlmRequest] = field(default_factory=dict)

    def take(self, other: Transfers) -> None:
        """All of the other's are these."""
        self.saving |= other.saving
        self.loading |= other.loading
        other.saving, other.loading = {}, {}

    def extract(self, saving: Any, loading: Any) -> Transfers:
        """Those with these ids are these no more. KeyError for one that is none of them."""
        return Transfers({i: self.saving.pop(i) for i in saving}, {i: self.loading.pop(i) for i in loading})


class ConnectorManager:
    """On each rank; `scheduler` is there on rank 0 alone."""

    def __init__(self, worker: Any, scheduler: Any) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self._told: dict[int, tuple[int, int]] = {}  # tokens and blocks that were reported, by request
        self._matched: dict[int, int] = {}  # in this iteration, by request
        self._new = Transfers()  # `get_finished` has not been told
        self._pending = Transfers()
        self._ended_here = Transfers()
        self.loaded: set[int] = set()

    def get_num_new_matched_tokens(self, request: LlmRequest, num_computed_tokens: int) -> int:
        """Every rank asks; rank 0 answers."""
        num_tokens, is_async = self._on_leader("get_num_new_matched_tokens", request, num_computed_tokens)
        assert num_tokens or not is_async, "an asynchronous load of nothing"
        if is_async:
            self._new.loading[request.request_id] = request
        self._matched[request.request_id] = num_tokens
        return int(num_tokens)

    def update_state_after_alloc(self, request: LlmRequest) -> None:
        """Rank 0 alone."""
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, list(request.block_ids))

    def start_batch(self, requests: list[LlmRequest]) -> list[LlmRequest]:
        """Metadata to every rank, and loads begin; returns the requests that are not parked for one."""
        output = SchedulerOutput()
        for request in requests:
            if request.request_id not in self._new.loading:
                self._report(request, output)
        self._matched = {}
        for request in self._new.loading.values():
            request.state = State.LOADING
        metadata = self._on_leader("build_connector_meta", output)
        self.worker.bind_connector_meta(metadata)
        self.worker.start_load_kv(None)
        return [request for request in requests if request.request_id not in self._new.loading]

    def request_finished(self, request: LlmRequest) -> bool:
        """Whether its blocks stay its own for now."""
        self.loaded.discard(request.request_id)
        is_saving = bool(self._on_leader("request_finished", request, list(request.block_ids)))
        if is_saving:
            self._new.saving[request.request_id] = request
            request.state = State.SAVING
        self._told.pop(request.request_id, None)
        return is_saving

    def reset_request(self, request: LlmRequest) -> None:
        """Its blocks were taken away, and it will be replayed: it is new once more."""
        self._told.pop(request.request_id, None)
        if self.scheduler is not None:
            self.scheduler.request_reset(request)

    def get_finished(self) -> list[LlmRequest]:
        """Once an iteration: those that need not be held any more; parked ones may run. A request counts when all ranks
        have named it, and each names it once."""
        told = list(self._new.saving), list(self._new.loading)
        self._pending.take(self._new)
        self._ended_here.take(self._pending.extract(*self.worker.get_finished(*told)))
        ended = mpi_allgather((set(self._ended_here.saving), set(self._ended_here.loading)))
        saved, loaded = (set.intersection(*(rank[i] for rank in ended)) for i in (0, 1))
        all_ended = self._ended_here.extract(saved, loaded)
        for request in all_ended.loading.values():
            request.state = State.CONTEXT_INIT
            self.loaded.add(request.request_id)
        return list(all_ended.saving.values())

    def _report(self, request: LlmRequest, output: SchedulerOutput) -> None:
        is_new = request.request_id not in self._told
        num_tokens, num_blocks = self._told.get(request.request_id, (0, 0))
        self._told[request.request_id] = len(request.tokens), len(request.block_ids)
        if request.state is State.CONTEXT_INIT:
            position, num_scheduled = request.context_current_position, request.context_chunk_size
        else:
            position, num_scheduled = len(request.tokens) - 1, 1
        data = RequestData(
            request.request_id,
            request.tokens[num_tokens:],
            request.block_ids[num_blocks:],
            position - self._matched.get(request.request_id, 0),
            num_scheduled,
            cache_salt=request.cache_salt,
        )
        (output.new_requests if is_new else output.cached_requests).append(data)

    def _on_leader(self, name: str, *args: Any) -> Any:
        answer = getattr(self.scheduler, name)(*args) if self.scheduler is not None else None
        return mpi_broadcast(answer)
