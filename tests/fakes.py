"""Stand-ins for what a test wants to control: a model whose cache says whose it is, copies that fail or come late."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import torch

from integration.mini_engine.attention import SequenceChunk
from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.kv_layout import LayerCache
from integration.mini_engine.model import LayerHooks
from integration.mini_engine.runner import LocalRunner
from integration.mini_engine.scheduler import Scheduler
from kv_connector.config import Config
from kv_connector.errors import TransferError
from kv_connector.index import CacheIdentity
from kv_connector.scheduler import SchedulerHalf
from kv_connector.storage.base import Storage
from kv_connector.transfer.costs.curves import LinkCosts
from kv_connector.transfer.memory.host_form import HostForm
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import CopyJob, Direction, StepPlan
from kv_connector.worker import WorkerHalf

ROW_BYTES = 8
VOCABULARY = 1000


class PatternModel:
    """A "transformer" over digests: row p of a layer is the digest of rows 0 to p of the layer below, on all ranks.

    So the next token depends on every cached byte of the sequence and on no other: one wrong byte changes it, and
    `expected_tokens` knows it without any cache.
    """

    def __init__(self, num_layers: int = 3, num_ranks: int = 1) -> None:
        self.num_layers = num_layers
        self.num_ranks = num_ranks

    def allocate_kv_caches(self, num_blocks: int, block_size: int) -> list[dict[str, LayerCache]]:
        """Poisoned caches; every layer has two tensors, and those of odd layers are strided."""
        layers = range(self.num_layers)
        return [
            {f"layers.{index}": _poisoned(num_blocks, block_size, strided=index % 2 == 1) for index in layers}
            for _ in range(self.num_ranks)
        ]

    def prepare(self, chunks: Sequence[SequenceChunk], block_size: int) -> tuple[Sequence[SequenceChunk], int]:
        """As `integration.mini_engine.runner.Model.prepare`."""
        return chunks, block_size

    def next_tokens(
        self,
        inputs: tuple[Sequence[SequenceChunk], int],
        kv_caches: Sequence[Mapping[str, LayerCache]],
        hooks: Sequence[LayerHooks],
    ) -> tuple[list[int], list[int] | None]:
        """As `integration.mini_engine.runner.Model.next_tokens`."""
        chunks, block_size = inputs
        rows = [[_embed(token, chunk.start + i) for i, token in enumerate(chunk.token_ids)] for chunk in chunks]
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            for rank, caches in enumerate(kv_caches):
                for chunk, new in zip(chunks, rows, strict=True):
                    _write(caches[name], chunk, [_shard(row, layer, rank) for row in new], block_size)
            for hook in hooks:
                hook.wait_for_layer_load(name)
            rows = [_attend(_read(kv_caches, name, chunk, block_size), chunk.start) for chunk in chunks]
            for hook in hooks:
                hook.save_kv_layer(name)
        return [_to_token(row[-1]) for row in rows], None

    def expected_tokens(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What the prompt is answered with."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            rows = [_embed(token, position) for position, token in enumerate(tokens)]
            for layer in range(self.num_layers):
                ranks = range(self.num_ranks)
                rows = _attend([b"".join(_shard(row, layer, rank) for rank in ranks) for row in rows], 0)
            tokens.append(_to_token(rows[-1]))
        return tokens[len(prompt) :]


class FaultyPath:
    """Passes copies on to the real path until told to fail; a failing load leaves garbage behind."""

    def __init__(self, inner: CopyPath, layout: CacheLayout) -> None:
        self._inner = inner
        self._layout = layout
        self.fail_in: dict[Direction, int] = {}  # copies of that direction until one fails; absent: none does

    def copy(self, copy: BlockCopy) -> None:
        """As `CopyPath.copy`."""
        self._inner.copy(copy)
        if copy.direction not in self.fail_in:
            return
        self.fail_in[copy.direction] -= 1
        if self.fail_in[copy.direction] < 0:
            del self.fail_in[copy.direction]
            if copy.direction is Direction.LOAD:
                with torch.cuda.stream(copy.stream):
                    for region in self._layout.regions[copy.regions.start : copy.regions.stop]:
                        region.view[torch.tensor(copy.device_ids)] = 0xEE
            raise TransferError("injected fault")

    def slice_bytes(self, direction: Direction) -> int:
        """As `CopyPath.slice_bytes`."""
        return self._inner.slice_bytes(direction)

    def close(self) -> None:
        """As `CopyPath.close`."""
        self._inner.close()


class LateWorker(WorkerHalf):
    """A worker whose saves and background loads move bytes only when `hold` is off: the link is busy otherwise."""

    def __init__(
        self, config: Config, rank: int = 0, world_size: int = 1, storages: Sequence[Storage] | None = None
    ) -> None:
        open_storage = None if storages is None else lambda *_: storages[rank]
        super().__init__(config, rank, world_size, self._make_faulty, open_storage=open_storage)
        self.hold = False
        self.num_awaited = 0
        self.path: FaultyPath | None = None
        self._late: list[CopyJob] = []
        self._late_loads: list[CopyJob] = []

    def _make_faulty(self, form: HostForm, host: HostPool, config: Config, costs: LinkCosts) -> CopyPath:
        self.path = FaultyPath(make_path(form, host, config, costs), form.layout)
        return self.path

    def handle_preemptions(self, plan: StepPlan) -> None:
        """As `WorkerHalf.handle_preemptions`: a fence waits for late copies too."""
        if plan.fence:
            self._catch_up()
        super().handle_preemptions(plan)

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        """As `WorkerHalf.bind_connector_metadata`; a step that awaits a late load has it."""
        if set(plan.awaited_loads) & {job.job_id for job in self._late_loads}:
            self.num_awaited += 1
            self._catch_up_loads()
        super().bind_connector_metadata(plan)

    def start_load_kv(self, full_graph: bool = False) -> None:
        """As `WorkerHalf.start_load_kv`, background loads late unless they fail."""
        assert self._plan is not None
        if self.path is None or Direction.LOAD not in self.path.fail_in:
            self._late_loads += self._plan.background_loads
            self._arrivals.begin(self._plan.background_loads)
            self._plan = replace(self._plan, background_loads=())
        super().start_load_kv(full_graph)

    def wait_for_save(self) -> None:
        """As `WorkerHalf.wait_for_save`, but late."""
        if self._is_distrusted:
            super().wait_for_save()
        elif self._plan is not None:
            self._late += self._plan.saves
        if not self.hold:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._late:
            self._transfer.submit_save(self._late)
        self._late = []
        self._catch_up_loads()

    def _catch_up_loads(self) -> None:
        """Whether a load fails was known when it was submitted, and it was not to."""
        if not self._late_loads or self.path is None:
            return
        fault = self.path.fail_in.pop(Direction.LOAD, None)
        self._transfer.submit_background_load(self._late_loads, self._transfer.mark())
        self._late_loads = []
        if fault is not None:
            self.path.fail_in[Direction.LOAD] = fault


def make_engine(
    config: Config,
    num_device_blocks: int = 16,
    block_size: int = 4,
    model: PatternModel | None = None,
    max_step_tokens: int = 12,
    max_running: int = 4,
    storages: Sequence[Storage] | None = None,
) -> MiniEngine:
    """A mini engine over a `PatternModel` with both halves and late, fault-injecting workers; a storage for each."""
    model = model or PatternModel()
    looks = count()

    def clock() -> float:
        """A millisecond passes at every look."""
        return next(looks) / 1e3

    scheduler = Scheduler(num_device_blocks, block_size, max_step_tokens, max_running, clock=clock)
    runner = LocalRunner(model, num_device_blocks, block_size, lambda r, size: LateWorker(config, r, size, storages))
    connector = SchedulerHalf(config, block_size, runner.world_size, scheduler.tree, clock)
    identity = CacheIdentity("pattern", "uint8", "rows", block_size, tp_size=runner.world_size)
    return MiniEngine(scheduler, runner, identity, connector)


def check_engine(engine: MiniEngine) -> None:
    """Every invariant of tree, device tier and host tier."""
    assert engine.connector is not None
    engine.connector.check()
    engine.scheduler.device.check()


def _poisoned(num_blocks: int, block_size: int, strided: bool) -> list[torch.Tensor]:
    if not strided:
        return [torch.full((num_blocks, block_size, ROW_BYTES // 2), 0xAA, dtype=torch.uint8) for _ in range(2)]
    both = torch.full((2, num_blocks, block_size, ROW_BYTES // 2 + 1), 0xAA, dtype=torch.uint8)
    return [both[half, :, :, : ROW_BYTES // 2] for half in range(2)]


def _embed(token: int, position: int) -> bytes:
    return hashlib.blake2b(f"{token}@{position}".encode(), digest_size=ROW_BYTES).digest()


def _shard(row: bytes, layer: int, rank: int) -> bytes:
    return hashlib.blake2b(row, digest_size=ROW_BYTES, salt=bytes((layer, rank))).digest()


def _attend(rows: Sequence[bytes], first: int) -> list[bytes]:
    running, out = hashlib.blake2b(digest_size=ROW_BYTES), []
    for position, row in enumerate(rows):
        running.update(row)
        if position >= first:
            out.append(running.copy().digest())
    return out


def _to_token(row: bytes) -> int:
    return int.from_bytes(row, "little") % VOCABULARY


def _write(cache: LayerCache, chunk: SequenceChunk, rows: Sequence[bytes], block_size: int) -> None:
    data = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), ROW_BYTES)
    positions = torch.arange(chunk.start, chunk.start + len(rows))
    blocks = torch.tensor(chunk.block_ids)[positions // block_size]
    for half, tensor in enumerate(cache):
        tensor[blocks, positions % block_size] = data[:, half * ROW_BYTES // 2 : (half + 1) * ROW_BYTES // 2]


def _read(
    kv_caches: Sequence[Mapping[str, LayerCache]], name: str, chunk: SequenceChunk, block_size: int
) -> list[bytes]:
    end = chunk.start + len(chunk.token_ids)
    positions = torch.arange(end)
    blocks = torch.tensor(chunk.block_ids)[positions // block_size]
    shards = [tensor[blocks, positions % block_size] for caches in kv_caches for tensor in caches[name]]
    return [row.numpy().tobytes() for row in torch.cat(shards, dim=1)]
