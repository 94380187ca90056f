"""The worker half (layer 2): registers one rank's cache tensors and moves their bytes; decides nothing.

It runs on the model-runner thread. Loads begin before the forward pass in layer groups, and the compute stream waits
for a group in front of its first layer; saves follow the forward pass. Nothing here waits for the device: completed
copies are found by polling when the step is reported. Submission threads submit most copies, so a load that fails at
submission is known by the end of the step, not always before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..base import KVConnectorWorker
from ..config import Config
from ..errors import KVConnectorError
from ..peer.protocol.jobs import EndedPeerJob
from ..storage.base import GroupedStorage
from ..storage.jobs import AnotherRanksJobs, EndedStorageJob, StorageJobs
from ..transfer.costs.curves import LinkCosts
from ..transfer.engine import TransferEngine
from ..transfer.form_choice import FormChooser
from ..transfer.memory.host_form import HostForm
from ..transfer.memory.host_pool import HostPool
from ..transfer.memory.host_share import ALONE, HostShare
from ..transfer.memory.layout import CacheLayout
from ..transfer.paths.base import CopyPath
from ..transfer.paths.choice import make_fallback, make_path
from ..transfer.submission.submissions import Completion
from ..types import Direction, StepPlan, StepReport
from .arrivals import Arrivals
from .peers import OpenPeers, StepPeers, awaits

if TYPE_CHECKING:
    import torch

    from ..transfer.cuda.streams import Event


class WorkerHalf(KVConnectorWorker):
    """See `KVConnectorWorker` for the calls. `rank` is this rank's index among `world_size` equal ranks.

    `make_path` makes the copy path that moves the bytes; tests pass one that fails. `fails_by_request`: failed
    background loads are reported by request, in `get_finished`; else by block, like those of the step. `retries_loads`:
    a failed load is retried once by plain copies, for an engine that cannot recompute its requests. `open_storage`
    opens the storage tier: it is given the bytes of a block, the host memory, its arrangement, and the number of ranks
    that share it; `open_peers` opens the links to other engines. `identity` is this rank's identity, for `describe`.
    `open_share`: see `HostShare`; it is called once, as the cache is registered, and may wait for other ranks. `forms`
    chooses the form of host blocks then. `clock` returns seconds; it times the forward pass.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        make_path: Callable[[HostForm, HostPool, Config, LinkCosts], CopyPath] = make_path,
        fails_by_request: bool = True,
        retries_loads: bool = False,
        open_storage: Callable[[int, memoryview, str, int], GroupedStorage] | None = None,
        open_peers: OpenPeers | None = None,
        identity: str = "",
        open_share: Callable[[], HostShare] = lambda: ALONE,
        forms: FormChooser | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._forms = FormChooser(config, world_size) if forms is None else forms
        self._form_name = ""
        self._identity = identity
        self._clock = clock
        self._open_share = open_share
        self._share = ALONE
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._make_path = make_path
        self._retries_loads = retries_loads
        self._open_storage = open_storage
        self._storage: StorageJobs | AnotherRanksJobs | None = None
        self._open_peers = open_peers
        self._peers: StepPeers | None = None
        self._layout: CacheLayout | None = None
        self._engine: TransferEngine | None = None
        self._host: HostPool | None = None
        self._plan: StepPlan | None = None
        self._step = 0
        self._arrivals = Arrivals(fails_by_request)
        self._handed: list[EndedPeerJob] = []  # peer jobs to be reported
        self._distrusted_step = -1  # the last in which a load failed that steps may have computed on
        self._lost_blocks: set[int] = set()  # load errors that were told since the last report
        self._has_failed_in_step = False  # of the load errors told last, some are of blocks that a step was to read
        self._completed: list[Completion] = []
        self._mark: Event | None = None  # where background loads may start
        self._saves_pending = False
        self._called_at: float | None = None  # the end of the last call that may be right in front of a forward pass,
        # later by what its layers have waited for their loads
        self._forward_seconds = 0.0
        self._layers: frozenset[str] = frozenset()
        self._hooked: set[str] = set()  # layers that have waited for their load

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
        block_dims: Mapping[str, int] | None = None,
        head_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        layout = CacheLayout.from_tensors(kv_caches, num_blocks, block_dims, head_dims)
        self._layout = layout
        self._layers = frozenset(layout.layer_names)
        if self._config.host_memory:
            form, costs = self._forms.choose(layout)
            self._form_name = form.name
            self._share = self._open_share()
            self._host = HostPool.sized(
                self._config.host_memory // self._world_size,
                form.block_bytes,
                device=layout.device,
                pin_memory=self._config.pin_memory,
                numa_bind=self._config.numa_bind,
                share=self._share,
            )
            path = self._make_path(form, self._host, self._config, costs)
            fallback = make_fallback(form, self._host) if self._retries_loads else None
            self._engine = TransferEngine(form, self._host, self._config, path, fallback, costs)
            if self._open_storage is not None and self._share.uses_storage:
                blocks = self._host.tensor.numpy()
                storage = self._open_storage(
                    form.block_bytes, blocks.reshape(-1).data, form.arrangement, self._share.count
                )
                self._storage = StorageJobs(storage, blocks)
            elif self._open_storage is not None:
                self._storage = AnotherRanksJobs()
        if self._open_peers is not None:
            self._peers = StepPeers(layout, self._config, self._open_peers)

    def handle_preemptions(self, plan: StepPlan) -> None:
        if plan.fence and plan.step != self._step and self._engine is not None:
            self._engine.fence()

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        self.handle_preemptions(plan)
        self._plan = plan
        self._step = plan.step
        self._saves_pending = bool(plan.saves)
        if plan.unfit:
            self._forms.note_unfit()
        if plan.awaited_loads:
            # Told in this step: the engine may believe its requests complete, and has hit their blocks for others.
            self._fail_loads(self._transfer.wait_jobs(plan.awaited_loads))
        self._mark = self._transfer.mark() if plan.background_loads else None
        for job in plan.storage:
            assert self._storage is not None, "the plan has storage jobs, and this half was made without storage"
            self._storage.begin(job)
        if self._storage is not None:
            self._storage.cancel(plan.cancelled_storage)
        if self._peers is not None:
            self._peers.begin(plan)
            self._arrivals.begin(job for job in plan.peer if awaits(job))
        self._forward_seconds, self._called_at = 0.0, self._clock() if plan.computes else None

    def clear_connector_metadata(self) -> None:
        self._plan = None

    def start_load_kv(self, full_graph: bool = False) -> None:
        """A layer that was never seen to wait for its load may never do so: until all were, the whole load is waited
        for here, as in front of a full graph."""
        if self._plan is None:
            return
        self._time_forward()  # which vLLM has launched by now in a step that loads nothing
        loads, background = self._plan.loads, self._plan.background_loads
        self._arrivals.begin((*loads, *background))
        if loads:
            self._fail_loads(self._transfer.submit_load(loads, self._plan.is_light))
            if full_graph or not self._hooked >= self._layers:
                self._fail_loads(self._transfer.wait_all())
        if background and self._mark is not None:
            self._transfer.submit_background_load(background, self._mark)
            self._mark = None
        self._called_at = self._clock() if self._plan.computes else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._hooked.add(layer_name)
        if self._plan is not None and self._plan.loads:
            began = self._clock()
            self._fail_loads(self._transfer.wait_layer(layer_name))
            if self._called_at is not None:
                self._called_at += self._clock() - began

    def save_kv_layer(self, layer_name: str) -> None:
        """A save packs all layers of a block into one run of host memory, after the last of them; other engines may be
        sent what is there already."""
        if self._peers is not None and not self._is_distrusted:
            self._peers.saved_layer(layer_name)

    def wait_for_save(self) -> None:
        if self._plan is None:
            return
        self._time_forward()
        if self._plan.loads:
            self._fail_loads(self._transfer.wait_all())  # whatever the hooks did, later steps find the load complete
        if self._peers is not None:
            self._peers.computed(ok=not self._is_distrusted)
        if not self._saves_pending:
            return
        self._saves_pending = False
        if self._is_distrusted:
            # Whatever this step computed may rest on bytes that never came: none of it may become matchable.
            self._completed += [Completion(job.job_id, False, 0, Direction.SAVE) for job in self._plan.saves]
        else:
            self._transfer.submit_save(self._share.own_saves(self._plan.saves))

    def get_finished(self) -> tuple[set[str], set[str]]:
        self._time_forward()  # where tokens are drafted, `wait_for_save` comes behind the report
        if self._peers is not None and self._plan is not None and not self._plan.computes:
            self._peers.rest()
        if self._engine is not None:
            self._engine.catch_up()
        self._poll()
        self._arrivals.announce(self._plan.announced_loads if self._plan is not None else ())
        return self._arrivals.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        block_ids, self._has_failed_in_step = self._arrivals.take_invalid_blocks()
        self._lost_blocks |= block_ids
        return block_ids

    def build_connector_worker_meta(self) -> StepReport:
        completed, self._completed = self._completed, []
        stored = self._storage.poll() if self._storage is not None else []
        handed, self._handed = self._handed, []
        lost_blocks, self._lost_blocks = self._lost_blocks, set()
        moved: list[Completion | EndedStorageJob] = [*completed, *stored]
        ended = [*moved, *handed]
        loads = [copy for copy in completed if copy.direction is Direction.LOAD]
        if not all(load.ok for load in loads):
            self._distrusted_step = self._step  # the engine hears of it with this report, and not before
        return StepReport(
            step=self._step,
            rank=self._rank,
            done=tuple(job.job_id for job in ended if job.ok),
            failed=tuple(job.job_id for job in ended if not job.ok),
            num_host_blocks=self._host.num_ready_blocks if self._host else 0,
            block_bytes=self._host.block_bytes // self._share.count if self._host else 0,
            group_blocks=self._storage.group_blocks if self._storage is not None else 1,
            loaded_bytes=sum(load.bytes for load in loads),
            saved_bytes=sum(copy.bytes for copy in completed if copy.direction is Direction.SAVE),
            loading_bytes=self._engine.pending_bytes(Direction.LOAD) if self._engine else 0,
            saving_bytes=self._engine.pending_bytes(Direction.SAVE) if self._engine else 0,
            load_milliseconds=sum((load.milliseconds for load in loads), 0.0),
            launch_milliseconds=1e3 * self._forward_seconds,
            load_timings=self._transfer.take_load_timings() if self._engine else (),
            found=tuple((job.job_id, job.found) for job in stored if job.found is not None),
            missing=tuple((job.job_id, job.missing) for job in moved if job.missing),
            storage_counters=self._storage.counters() if self._storage is not None and stored else (),
            peer_port=self._peers.port if self._peers is not None else 0,
            peer_counters=self._peers.counters() if self._peers is not None else (),
            peers_are_broken=self._peers is not None and self._peers.is_broken,
            lost_blocks=tuple(sorted(lost_blocks)),
            has_failed_in_step=self._has_failed_in_step and bool(lost_blocks),
            job_seconds=tuple((job.job_id, job.seconds) for job in moved if job.ok and job.seconds),
        )

    def drain(self) -> None:
        """Block the calling thread until no copy is in flight, for an engine that frees its cache. The copies are
        reported as usual."""
        if self._engine is not None:
            self._take(self._engine.drain())

    def describe(self) -> str:
        """One line for the log: what was registered, and the host memory it is copied to."""
        if self._layout is None:
            return "nothing registered"
        host = self._host
        on_host = f"{host.num_blocks} host blocks of {host.block_bytes} bytes" if host is not None else "0 host blocks"
        on_host += f", coded as {self._form_name}" if self._form_name else ""
        identity = f"; they are those of {self._identity}" if self._identity else ""
        peers = f"; other engines reach it at port {self._peers.port}" if self._peers is not None else ""
        return (
            f"{len(self._layout.layer_names)} layers in {len(self._layout.regions)} regions of "
            f"{self._layout.num_blocks} blocks on {self._layout.device}; {on_host}{peers}{identity}"
        )

    def shutdown(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None
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

    @property
    def _is_distrusted(self) -> bool:
        """Whether what this step computes may rest on bytes that never came: a load has failed in this step, or in one
        before it that the engine had not heard of when it planned this one."""
        plan = self._plan
        return plan is not None and self._distrusted_step > plan.reported_step

    def _time_forward(self) -> None:
        """A call that may be the first one behind the forward pass: of all that may be, the pass lies in front of that
        for which the thread took longest."""
        if self._called_at is not None:
            self._forward_seconds = max(self._forward_seconds, self._clock() - self._called_at)
            self._called_at = None

    def _poll(self) -> None:
        """See what has ended, once in a step: a job is reported in the step in which its request is named received, or
        its blocks invalid. Reported before, another request with that id would be taken for the one that is named."""
        self._take(self._engine.poll() if self._engine is not None else [])
        for job in self._peers.poll(self._arrivals.open_jobs()) if self._peers is not None else ():
            self._handed.append(job)
            self._end_load(job.job_id, job.ok)

    def _take(self, completions: Sequence[Completion]) -> None:
        self._completed += completions
        for completion in completions:
            self._end_load(completion.job_id, completion.ok)

    def _fail_loads(self, job_ids: Collection[int]) -> None:
        """Loads that this step rests on: the engine must know before it uses the step."""
        for job_id in job_ids:
            self._distrusted_step = self._step
            self._end_load(job_id, ok=False)

    def _end_load(self, job_id: int, ok: bool) -> None:
        """A job has ended; most of them are saves, which nobody waits for."""
        if not ok and self._peers is not None and job_id in self._arrivals:
            self._peers.load_failed(job_id)
        if self._arrivals.end(job_id, ok):
            self._distrusted_step = self._step
