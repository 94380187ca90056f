"""The worker half (layer 2): registers one rank's cache tensors and moves their bytes; decides nothing.

It runs on the thread that launches the model. Loads are submitted before the forward pass in layer groups, and the
compute stream waits for a group in front of its first layer; saves are submitted after it. Nothing here waits for the
device: what has completed is found by polling when the step is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .base import KVConnectorWorker
from .config import Config
from .errors import KVConnectorError
from .transfer.engine import Completion, TransferEngine
from .transfer.host_pool import HostPool
from .transfer.layout import CacheLayout
from .transfer.paths import CopyPath, make_path
from .types import CopyJob, Direction, StepPlan, StepReport

if TYPE_CHECKING:
    import torch


class WorkerHalf(KVConnectorWorker):
    """See `KVConnectorWorker` for the calls. `rank` is this rank's index among `world_size` equal ranks.

    `make_path` makes the copy path that moves the bytes; tests put one that fails in its place.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        make_path: Callable[[CacheLayout, HostPool, Config], CopyPath] = make_path,
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._make_path = make_path
        self._engine: TransferEngine | None = None
        self._host: HostPool | None = None
        self._plan: StepPlan | None = None
        self._step = 0
        self._loads: dict[int, CopyJob] = {}  # in flight, for the block ids of those that fail
        self._load_failed = False  # in this step
        self._invalid_blocks: set[int] = set()
        self._completed: list[Completion] = []

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
        block_dims: Mapping[str, int] | None = None,
    ) -> None:
        layout = CacheLayout.from_tensors(kv_caches, num_blocks, block_dims)
        if self._config.host_memory:
            self._host = HostPool.sized(
                self._config.host_memory // self._world_size,
                layout.block_bytes,
                device=layout.device,
                pin_memory=self._config.pin_memory,
                numa_bind=self._config.numa_bind,
            )
            path = self._make_path(layout, self._host, self._config)
            self._engine = TransferEngine(layout, self._host, self._config, path)

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        self._plan = plan
        self._step = plan.step
        self._load_failed = False

    def clear_connector_metadata(self) -> None:
        self._plan = None

    def start_load_kv(self, full_graph: bool = False) -> None:
        if self._plan is None or not self._plan.loads:
            return
        self._loads |= {job.job_id: job for job in self._plan.loads}
        self._note_failed_loads(self._transfer.submit_load(self._plan.loads))
        if full_graph:
            self._transfer.wait_all()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._plan is not None and self._plan.loads:
            self._transfer.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Nothing to do: a save packs all layers of a block into one run of host memory, after the last of them."""

    def wait_for_save(self) -> None:
        if self._plan is None or not self._plan.saves:
            return
        if self._load_failed:
            # Whatever this step computed may rest on bytes that never came: none of it may become matchable.
            self._completed += [Completion(job.job_id, False, 0, Direction.SAVE) for job in self._plan.saves]
        else:
            self._transfer.submit_save(self._plan.saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._poll()
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> StepReport:
        self._poll()
        completed, self._completed = self._completed, []
        loaded = [c for c in completed if c.direction is Direction.LOAD]
        for completion in loaded:
            del self._loads[completion.job_id]
        return StepReport(
            step=self._step,
            rank=self._rank,
            done=tuple(c.job_id for c in completed if c.ok),
            failed=tuple(c.job_id for c in completed if not c.ok),
            num_host_blocks=self._host.num_ready_blocks if self._host else 0,
            loaded_bytes=sum(c.bytes for c in loaded),
            saved_bytes=sum(c.bytes for c in completed if c.direction is Direction.SAVE),
            load_timings=self._transfer.take_load_timings() if self._engine else (),
        )

    def shutdown(self) -> None:
        if self._engine is not None and self._host is not None:
            self._engine.close()
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
        self._note_failed_loads(c.job_id for c in completions if not c.ok and c.direction is Direction.LOAD)

    def _note_failed_loads(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            self._load_failed = True
            self._invalid_blocks.update(self._loads[job_id].device_ids.tolist())
