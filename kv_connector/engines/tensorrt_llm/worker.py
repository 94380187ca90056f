"""The worker of the slot: TensorRT-LLM's calls on each rank, translated. It has not run in the engine yet.

    TensorRT-LLM calls                          what follows
    ----------------------------------------------------------------------------------------------------------
    register_kv_caches           start          register_kv_caches: takes the host's memory
    bind_connector_meta          batch          bind_connector_metadata
    start_load_kv                               start_load_kv
    wait_for_layer_load(i)       forward pass   wait_for_layer_load: the stream waits, not the host
    wait_for_save                launched       wait_for_save; ranks tell whether all loads have come
    get_finished                 each iteration the ranks' reports go to rank 0's scheduler half

What becomes of a load that fails. It is tried once more in the simplest way. If that fails too, the tokens of the step
are not to be used, and TensorRT-LLM knows no way to compute them again: what was offered counts as computed. It catches
an error of the forward pass, answers its requests with it and goes on; but it keeps their blocks for later requests,
as if all of them had been computed. So no step of this engine computes any more: `wait_for_save` raises, on all ranks
alike, in that step and in all that follow. Every request is answered with the error until the engine is started anew;
with the overlap scheduler the executor ends with the first. A wrong token there is never.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base import KVConnectorWorker
from ...build import build_worker
from ...errors import ConfigError, KVConnectorError
from ...types import StepPlan, StepReport
from ..settings import needs_identity
from .identity import read_backend, read_identity
from .launch import read_block_size, read_settings, refuse_unsupported, waits_up_front
from .ranks import Ranks, meeting_place

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kv_connector.tensorrt_llm")


class _Told(NamedTuple):
    """What a rank tells the others: reports of its steps since it did last, and whether a load has failed for good.
    is_busy: on rank 0, whether more reports are awaited."""

    reports: tuple[StepReport, ...]
    has_lost: bool
    is_busy: bool


class TieredKVWorker:
    """Moves the bytes of one rank. TensorRT-LLM makes one on each, and calls it from the executor's thread."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for settings that are not supported."""
        self._config = read_settings()
        refuse_unsupported(llm_args)
        self._llm_args = llm_args
        self._ranks = Ranks(llm_args)
        self._place = meeting_place(llm_args)
        self._waits_up_front = waits_up_front(llm_args)
        self._half: KVConnectorWorker | None = None
        self._layers: frozenset[int] = frozenset()
        self._plan: StepPlan | None = None  # of the step that has begun
        self._untold: list[StepReport] = []
        self._has_lost = False  # a load has failed for good here
        self._is_broken = False  # the same on any rank, as all ranks know: no step computes any more
        self._is_busy = False  # of rank 0; the same on all
        self._saving: list[int] = []  # requests that rank 0 holds
        self._close: Callable[[], object] = lambda: None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """All layers in one tensor of shape (blocks, layers, 2, elements), or 1 in place of 2 for MLA. Raises
        ConfigError and LayoutError, and takes the host's memory. Called once, on all ranks."""
        num_blocks, num_layers, kv_factor = kv_cache_tensor.shape[:3]
        size = read_block_size(self._llm_args)
        if kv_factor == 1 and size != 64:
            raise ConfigError(
                f"kv_cache_config.tokens_per_block={size}: FlashMLA makes blocks of 64 tokens whatever is asked for; "
                "give 64, which every MLA backend supports"
            )
        self.shutdown()
        ranks, rank = self._ranks, self._ranks.rank()
        half = build_worker(
            self._config,
            rank,
            ranks.count,
            identity=read_identity(self._llm_args, size, ranks.count) if needs_identity(self._config) else None,
            backend=read_backend(self._llm_args),
            num_replicas=ranks.count if kv_factor == 1 else 1,
            exchange=ranks.exchange,
            exchange_all=ranks.exchange,
            retries_loads=True,
        )
        layers = {str(layer): kv_cache_tensor[:, layer] for layer in range(num_layers)}
        half.register_kv_caches(layers, num_blocks, dict.fromkeys(layers, 0))
        self._half, self._layers = half, frozenset(range(num_layers))
        # TensorRT-LLM does not say when it ends.
        self._close = weakref.finalize(self, half.shutdown)
        logger.info("kv_connector: rank %d: %s", rank, half.describe())

    def register_kv_cache_layout(self, layout: Any) -> None:
        """TensorRT-LLM's second cache manager shows its pools so; one that is a single pool is supported."""
        size = read_block_size(self._llm_args)
        if layout.tokens_per_block != size:
            raise ConfigError(
                f"kv_cache_config.tokens_per_block={size}, but blocks have {layout.tokens_per_block} tokens: "
                f"give {layout.tokens_per_block}"
            )
        windows = [group.window_size for group in layout.groups if group.window_size is not None]
        tensor = layout.as_single_pool_tensor() if not windows else None
        if tensor is None:
            raise ConfigError(
                f"a cache of {len(layout.groups)} groups of layers, with windows {windows}, is not supported yet: only "
                "one of full attention is, without scales of its own; start without kv_connector_config"
            )
        self.register_kv_caches(tensor)

    def register_forward_pass_callable(self) -> None:
        """Nothing is to be done at the end of the forward pass but what `wait_for_save` does."""

    # Each iteration.

    def bind_connector_meta(self, metadata: StepPlan) -> None:
        """A step begins."""
        self._end_step(computed=False)
        self._plan = metadata
        self._bound.bind_connector_metadata(metadata)

    def get_connector_meta(self) -> StepPlan | None:
        """The plan of the step that has begun."""
        return self._plan

    def start_load_kv(self, stream: torch.cuda.Stream | None) -> None:
        """Submit its loads, behind what the current stream, which is this one, was given."""
        if self._plan is not None:
            self._bound.start_load_kv(full_graph=self._waits_up_front)

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        """Make the stream wait until this layer's loads are complete."""
        if self._plan is not None and layer_idx in self._layers:
            self._bound.wait_for_layer_load(str(layer_idx))

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        """All layers of a block are saved together, behind the last."""

    def wait_for_save(self, stream: torch.cuda.Stream | None) -> None:
        """The forward pass was launched: submit the step's saves. Raises KVConnectorError, on all ranks alike, where
        what it computes rests on bytes that never came, and ever after."""
        plan = self._plan
        if plan is None:
            return  # warming up
        self._end_step(computed=True)
        if plan.loads or self._is_broken:
            self._tell()
        if self._is_broken:
            raise KVConnectorError(
                "kv_connector: a load from host memory has failed, twice. TensorRT-LLM cannot compute again what was "
                "to be loaded, and keeps the blocks for other requests: restart the engine"
            )

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Take note of what has ended, here and on other ranks. Returns the held requests whose copies have ended; a
        request counts when all ranks have named it, so that those without a scheduler name it at once. No request
        waits for a load."""
        has_begun = self._plan is not None or bool(self._untold)
        self._end_step(computed=False)
        scheduler = self._place.scheduler
        if has_begun or self._is_busy:
            self._tell()
        self._saving += finished_gen_req_ids
        saved = scheduler.take_saved(self._saving) if scheduler is not None else list(self._saving)
        self._saving = [request_id for request_id in self._saving if request_id not in saved]
        return saved, []

    def shutdown(self) -> None:
        """Wait for copies and let go of the host's memory. Idempotent; also done when the process ends."""
        self._close()
        self._half = None

    @property
    def _bound(self) -> KVConnectorWorker:
        if self._half is None:
            raise KVConnectorError("register_kv_caches(...) must be called before the first step")
        return self._half

    def _end_step(self, computed: bool) -> None:
        """The step is over, or never came to its end: then nothing of what it was to compute is saved."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        half = self._bound
        if not computed:
            half.bind_connector_metadata(replace(plan, saves=(), storage=(), cancelled_storage=()))
        half.wait_for_save()
        report = self._report()
        if not computed and plan.saves:
            report = report._replace(failed=(*report.failed, *(job.job_id for job in plan.saves)))
        half.clear_connector_metadata()
        self._untold.append(report)

    def _report(self) -> StepReport:
        half = self._bound
        half.get_finished()
        self._has_lost |= bool(half.get_block_ids_with_load_errors())
        return half.build_connector_worker_meta()

    def _tell(self) -> None:
        """Each rank hears what all have to report, and rank 0's scheduler takes it in. All ranks call it alike."""
        scheduler = self._place.scheduler
        is_busy = scheduler is not None and scheduler.is_busy
        if not self._untold and self._half is not None:
            self._untold.append(self._report())
        told: Sequence[_Told] = self._ranks.exchange(_Told(tuple(self._untold), self._has_lost, is_busy))
        self._untold = []
        self._is_broken = any(rank.has_lost for rank in told)
        self._is_busy = told[0].is_busy
        if scheduler is not None:
            for reports in zip(*(rank.reports for rank in told), strict=True):
                scheduler.take_reports(reports)
