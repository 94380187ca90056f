"""The worker half (layer 2): registers one rank's cache tensors and moves their bytes; decides nothing.

It runs on the thread that launches the model. Loads are submitted before the forward pass in layer groups, and the
compute stream waits for a group in front of its first layer; saves are submitted after it. Nothing here waits for the
device: what has completed is found by polling when the step is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .base import KVConnectorWorker
from .config import Config
from .errors import KVConnectorError
from .storage.base import Storage
from .storage.jobs import StorageJobs
from .transfer.costs import LinkCosts, link_costs
from .transfer.engine import TransferEngine
from .transfer.host_pool import HostPool
from .transfer.layout import CacheLayout
from .transfer.paths import CopyPath, make_fallback, make_path
from .transfer.submissions import Completion
from .types import CopyJob, Direction, StepPlan, StepReport

if TYPE_CHECKING:
    import torch

    from .transfer.streams import Event


class WorkerHalf(KVConnectorWorker):
    """See `KVConnectorWorker` for the calls. `rank` is this rank's index among `world_size` equal ranks.

    `make_path` makes the copy path that moves the bytes; tests put one that fails in its place. `fails_by_request`:
    background loads that failed are told by request, in `get_finished`; else by block, as those of the step are.
    `retries_loads`: a load that fails is tried once more in the simplest way, for an engine that takes it badly.
    `open_storage` opens the storage tier, for blocks of so many bytes that lie in the memory it is given.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        make_path: Callable[[CacheLayout, HostPool, Config, LinkCosts], CopyPath] = make_path,
        fails_by_request: bool = True,
        retries_loads: bool = False,
        open_storage: Callable[[int, memoryview], Storage] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._make_path = make_path
        self._fails_by_request = fails_by_request
        self._retries_loads = retries_loads
        self._open_storage = open_storage
        self._storage: StorageJobs | None = None
        self._layout: CacheLayout | None = None
        self._engine: TransferEngine | None = None
        self._host: HostPool | None = None
        self._plan: StepPlan | None = None
        self._step = 0
        self._loads: dict[int, CopyJob] = {}  # in flight, for the block ids of those that fail
        self._load_failed = False  # in this step
        self._invalid_blocks: set[int] = set()
        self._completed: list[Completion] = []
        self._received: set[str] = set()  # requests whose background load ended, or was announced
        self._announced: set[int] = set()  # loads under way
        self._failed_receiving: set[str] = set()
        self._mark: Event | None = None  # where background loads may start
        self._saves_pending = False
        self._layers: frozenset[str] = frozenset()
        self._hooked: set[str] = set()  # layers that have waited for their load

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
        block_dims: Mapping[str, int] | None = None,
    ) -> None:
        layout = CacheLayout.from_tensors(kv_caches, num_blocks, block_dims)
        self._layout = layout
        self._layers = frozenset(layout.layer_names)
        if self._config.host_memory:
            self._host = HostPool.sized(
                self._config.host_memory // self._world_size,
                layout.block_bytes,
                device=layout.device,
                pin_memory=self._config.pin_memory,
                numa_bind=self._config.numa_bind,
            )
            costs = link_costs(layout, self._host, self._config)
            path = self._make_path(layout, self._host, self._config, costs)
            fallback = make_fallback(layout, self._host) if self._retries_loads else None
            self._engine = TransferEngine(layout, self._host, self._config, path, fallback, costs)
            if self._open_storage is not None:
                blocks = self._host.tensor.numpy()
                storage = self._open_storage(layout.block_bytes, blocks.reshape(-1).data)
                self._storage = StorageJobs(storage, blocks)

    def handle_preemptions(self, plan: StepPlan) -> None:
        if plan.fence and plan.step != self._step and self._engine is not None:
            self._engine.fence()

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        self.handle_preemptions(plan)
        self._plan = plan
        self._step = plan.step
        self._load_failed = False
        self._saves_pending = bool(plan.saves)
        if plan.awaited_loads:
            self._transfer.wait_jobs(plan.awaited_loads)
        self._mark = self._transfer.mark() if plan.background_loads else None
        for job in plan.storage:
            assert self._storage is not None, "the plan has storage jobs, and this half was made without storage"
            self._storage.begin(job)
        if self._storage is not None:
            self._storage.cancel(plan.cancelled_storage)

    def clear_connector_metadata(self) -> None:
        self._plan = None

    def start_load_kv(self, full_graph: bool = False) -> None:
        """A layer that was never seen to wait for its load may never do so: until all were, the whole load is waited
        for here, as in front of a full graph."""
        if self._plan is None:
            return
        loads, background = self._plan.loads, self._plan.background_loads
        self._loads |= {job.job_id: job for job in (*loads, *background)}
        if loads:
            for job_id in self._transfer.submit_load(loads):
                self._load_failed = True
                self._end_load(self._loads.pop(job_id), ok=False)  # the engine must know before it uses the step
            if full_graph or not self._hooked >= self._layers:
                self._transfer.wait_all()
        if background and self._mark is not None:
            self._transfer.submit_background_load(background, self._mark)
            self._mark = None

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._hooked.add(layer_name)
        if self._plan is not None and self._plan.loads:
            self._transfer.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Nothing to do: a save packs all layers of a block into one run of host memory, after the last of them."""

    def wait_for_save(self) -> None:
        if self._plan is None:
            return
        if self._plan.loads:
            self._transfer.wait_all()  # whatever the hooks did, later steps find the load complete
        if not self._saves_pending:
            return
        self._saves_pending = False
        if self._load_failed:
            # Whatever this step computed may rest on bytes that never came: none of it may become matchable.
            self._completed += [Completion(job.job_id, False, 0, Direction.SAVE) for job in self._plan.saves]
        else:
            self._transfer.submit_save(self._plan.saves)

    def get_finished(self) -> tuple[set[str], set[str]]:
        self._poll()
        self._announce()
        finished = self._received, self._failed_receiving
        self._received, self._failed_receiving = set(), set()
        return finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._poll()
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> StepReport:
        self._poll()
        completed, self._completed = self._completed, []
        stored = self._storage.poll() if self._storage is not None else []
        loaded = [c for c in completed if c.direction is Direction.LOAD]
        return StepReport(
            step=self._step,
            rank=self._rank,
            done=tuple([c.job_id for c in completed if c.ok] + [job.job_id for job in stored if job.ok]),
            failed=tuple([c.job_id for c in completed if not c.ok] + [job.job_id for job in stored if not job.ok]),
            num_host_blocks=self._host.num_ready_blocks if self._host else 0,
            block_bytes=self._host.block_bytes if self._host else 0,
            loaded_bytes=sum(c.bytes for c in loaded),
            saved_bytes=sum(c.bytes for c in completed if c.direction is Direction.SAVE),
            loading_bytes=self._engine.pending_bytes(Direction.LOAD) if self._engine else 0,
            saving_bytes=self._engine.pending_bytes(Direction.SAVE) if self._engine else 0,
            load_milliseconds=sum(c.milliseconds for c in loaded),
            load_timings=self._transfer.take_load_timings() if self._engine else (),
            found=tuple((job.job_id, job.found) for job in stored if job.found is not None),
            storage_counters=self._storage.counters() if self._storage is not None and stored else (),
        )

    def describe(self) -> str:
        """One line for a log: what was registered and what it is copied to."""
        if self._layout is None or self._host is None:
            return "nothing registered"
        return (
            f"{len(self._layout.layer_names)} layers in {len(self._layout.regions)} regions of "
            f"{self._layout.num_blocks} blocks on {self._layout.device}; {self._host.num_blocks} host blocks of "
            f"{self._layout.block_bytes} bytes"
        )

    def shutdown(self) -> None:
        if self._engine is not None and self._host is not None:
            self._engine.close()
            if self._storage is not None:
                self._storage.close()
                self._storage = None
            self._host.close()
            self._engine = self._host = None

    @property
    def _transfer(self) -> TransferEngine:
        if self._engine is None:
            raise KVConnectorError("a plan has copies, but register_kv_caches(...) was not called or host_memory is 0")
        return self._engine

    def _poll(self) -> None:
        if self._engine is None:
            return
        completions = self._engine.poll()
        self._completed += completions
        for completion in completions:
            if completion.job_id in self._loads:
                self._end_load(self._loads.pop(completion.job_id), completion.ok)

    def _announce(self) -> None:
        """Call loads received that the plan says will end soon; one that failed on submission has ended before."""
        for job_id in self._plan.announced_loads if self._plan is not None else ():
            job = self._loads.get(job_id)
            if job is not None and job.request_id is not None and job_id not in self._announced:
                self._received.add(job.request_id)
                self._announced.add(job_id)

    def _end_load(self, job: CopyJob, ok: bool) -> None:
        by_request = job.request_id if job.job_id not in self._announced else None
        self._announced.discard(job.job_id)
        if by_request is not None:
            self._received.add(by_request)
        if ok:
            return
        if by_request is not None and self._fails_by_request:
            self._failed_receiving.add(by_request)
        else:
            self._invalid_blocks.update(job.device_ids.tolist())
