"""vLLM's scheduler, its blocks and both sides of our connector over ranks that share out a context, without a model.

No attention backend of vLLM's for the CPU serves decode context parallel (`check_attention_cp_compatibility` wants the
log-sum-exp of a decode, which neither `cpu_attn` nor `cpu_mla` returns), its kernel for slots knows one rank alone, and
prefill context parallel needs the model runner that runs on Triton. So the ranks here write and read rows themselves,
where `ComputeSlotMappingKernel` of vLLM's block_table.py says that a token's row lies.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from integration.tests.vllm_context import Group, Sizes, cache_of, config_of, entries_of, groups_of
from tests.waiting import ANSWER_SECONDS, until

_MASK = (1 << 62) - 1


def digests(tokens: Iterable[int]) -> list[int]:
    """A word for each position that depends on every token up to there: what a layer's row is made of."""
    word, words = 1, []
    for token in tokens:
        word = ((word ^ token) * 6364136223846793005 + 1442695040888963407) & _MASK
        words.append(word)
    return words


class Rank:
    """A worker: its part of the cache, and the worker's side of the connector."""

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.part = engine.sizes.part(index)
        config = copy.copy(engine.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = index
        self.connector = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=engine.cache
        )
        self.rows = {
            name: torch.full(
                (engine.cache.num_blocks, group.block_size // group.tokens_of_row(layer), 8), -1, dtype=torch.int64
            )
            for group, names in zip(engine.groups, engine.names, strict=True)
            for layer, name in enumerate(names)
        }
        self.connector.register_kv_caches(self.rows)

    def slots(self, group: Group, layer: int, table: Sequence[int], num_tokens: int) -> list[tuple[int, int, int]]:
        """Position, block and place in it of each row that this rank has, as vLLM's kernel maps them: of its last
        token, where it is of several."""
        sizes = self.engine.sizes
        parts = sizes.num_parts if group.is_shared_out else 1
        part, run = self.part if parts > 1 else 0, sizes.interleave
        of_row = group.tokens_of_row(layer)
        found = []
        for position in range(of_row - 1, num_tokens, of_row):
            index, offset = divmod(position, group.block_size * parts)
            if offset // run % parts == part:
                place = offset // (parts * run) * run + offset % run
                found.append((position, table[index], place // of_row))
        return found

    def execute(self, output: Any) -> ModelRunnerOutput:
        """A step, in the order of calls of vLLM's model runners."""
        connector, engine = self.connector, self.engine
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.start_load_kv(SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=None))
        for group, names in enumerate(engine.names):
            for layer, name in enumerate(names):
                for request in engine.scheduled:
                    self._write(name, layer, request, group)
                connector.wait_for_layer_load(name)
                for request in engine.scheduled:
                    self._read(name, layer, request, group)
                connector.save_kv_layer(name, self.rows[name], None)
        if not engine.finalizes_late:
            connector.wait_for_save()
        reported = KVConnectorOutput()
        if hasattr(reported, "failed_recving"):
            results = connector.get_transfer_results(output.finished_req_ids)
            reported.finished_recving, reported.failed_recving = results.finished_recving, results.failed_recving
        else:
            _, reported.finished_recving = connector.get_finished(output.finished_req_ids)
        reported.invalid_block_ids = connector.get_block_ids_with_load_errors()
        reported.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if engine.finalizes_late:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        names = [request.request_id for request in engine.scheduled]
        sampled = [request.sampled() for request in engine.scheduled]
        return ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled, None, {}, kv_connector_output=reported
        )

    def _write(self, name: str, layer: int, request: Running, group: int) -> None:
        entry, table = self.engine.groups[group], request.tables[group]
        for position, block, place in self.slots(entry, layer, table, request.end):
            if position >= request.start:
                self.rows[name][block, place] = request.words[position] + layer

    def _read(self, name: str, layer: int, request: Running, group: int) -> None:
        """Every row that attention would read of this rank is the one of these tokens."""
        entry, table = self.engine.groups[group], request.tables[group]
        first = entry.first_read(request.start)
        for position, block, place in self.slots(entry, layer, table, request.end):
            if position < first:
                continue
            row = self.rows[name][block, place].tolist()
            if row != [request.words[position] + layer] * 8:
                self.engine.wrong.append((self.index, request.request_id, name, position))


@dataclass
class Running:
    """A request on the ranks."""

    request_id: str
    request: Request
    tables: list[list[int]] = field(default_factory=list)
    start: int = 0
    end: int = 0
    words: list[int] = field(default_factory=list)

    def sampled(self) -> list[int]:
        """The next token, where the step computes the last known one."""
        return [self.words[-1] % 500 + 2] if self.end == self.request.num_tokens else []


class Engine:
    """As vLLM's `EngineCore`, without processes: asked for prompts, it steps until all are answered.

    `wrong`: rows that a rank has read and that were not those of the request: rank, request, layer and position.
    `transfers`: what other engines are to be told of requests that have ended. `finalizes_late`: steps are reported
    before their saves are asked for, as where a drafter runs behind the model (`defer_finalize`).
    """

    def __init__(
        self,
        folder: Path,
        sizes: Sizes,
        groups: Sequence[Group] | Mapping[str, KVCacheSpec] = (Group(),),
        num_blocks: int = 120,
        finalizes_late: bool = False,
        **settings: Any,
    ) -> None:
        """`groups`, or the layers of a model by name, which vLLM makes groups of."""
        self.sizes = sizes
        self.finalizes_late = finalizes_late
        settings = {"host_memory": "16MiB", "write_policy": "write_through"} | settings
        self.config = config_of(folder, sizes, settings)
        if isinstance(groups, Mapping):
            self.config.cache_config.kv_cache_layout = "BLNHC"  # as such models need it
            entries = kv_cache_utils.get_kv_cache_groups(self.config, dict(groups))
            groups = groups_of(entries)
        else:
            entries = entries_of(groups)
        self.groups = groups
        self.cache, block_size, hash_size = cache_of(self.config, entries, num_blocks)
        self.names = [list(group.layer_names) for group in self.cache.kv_cache_groups]
        self.layers = [name for names in self.names for name in names]
        self.wrong: list[tuple[int, str, str, int]] = []
        self.transfers: list[dict[str, Any]] = []
        self.scheduled: list[Running] = []
        self._running: dict[str, Running] = {}
        self._numbers = itertools.count()
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_size, hash_function)
        told = self.cache
        if any(hasattr(entry.kv_cache_spec, "kv_cache_specs") for entry in entries):  # layers alike, but for their size
            told = kv_cache_utils.generate_scheduler_kv_cache_config([self.cache])
        self.scheduler = Scheduler(
            self.config, told, StructuredOutputManager(self.config), block_size, hash_size, log_stats=False
        )
        self.ranks = [Rank(self, rank) for rank in range(sizes.world_size)]
        self._aggregator = KVOutputAggregator.from_connector(self.connector, sizes.world_size)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def half(self) -> Any:
        return self.connector._scheduler.half

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def stats(self) -> dict[str, float]:
        found: dict[str, float] = self.half.get_kv_connector_stats()
        return found

    def tell_ready(self) -> None:
        """Ranks say what they have before the first step, under the keys that vLLM's workers give it: ranks that differ
        in prefill context parallel alone have one key, and one of them is heard."""
        ready = {(0, r.index % self.sizes.tensor): r.connector._worker.get_handshake_metadata() for r in self.ranks}
        self.connector.set_xfer_handshake_metadata_pp_aware(ready)

    def step(self) -> None:
        output = self.scheduler.schedule()
        self._take_in(output)
        results = [rank.execute(output) for rank in self.ranks]
        for outputs in self.scheduler.update_from_output(output, self._aggregator.aggregate(results)).values():
            self.transfers += [each.kv_transfer_params for each in outputs.outputs if each.kv_transfer_params]

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 4,
        transfer: Mapping[str, Any] | None = None,
        beside: Sequence[Engine] = (),
    ) -> list[list[int]]:
        """All at once, while other engines step as well; what each is continued with."""
        asked = []
        for prompt in prompts:
            extra = {"kv_transfer_params": dict(transfer)} if transfer is not None else None
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
            params.update_from_generation_config({}, 1)
            name = f"request {next(self._numbers)}"
            request = Request(name, list(prompt), params, None, block_hasher=self._hasher)
            self._running[name] = Running(name, request)
            asked.append(request)
            self.scheduler.add_request(request)

        def step_all() -> None:
            for engine in (self, *beside):
                engine.step()

        until(lambda: all(request.is_finished() for request in asked), step_all, self.stats, ANSWER_SECONDS)
        return [list(request.output_token_ids) for request in asked]

    def drain(self) -> None:
        """Step until nothing is under way."""
        until(lambda: not self.scheduler.has_requests(), self.step, self.stats, ANSWER_SECONDS)

    def forget_device(self) -> None:
        """vLLM forgets what it has cached, and the memory holds nothing."""
        self.drain()
        assert self.scheduler.reset_prefix_cache()
        for rank in self.ranks:
            for rows in rank.rows.values():
                rows.fill_(-2)

    def check_all_free(self) -> None:
        """No block is pinned or leased on either side, and every invariant of the index holds."""
        self.drain()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        host = self.half.host.pool
        assert not [block for block in host.live_ids() if host.refs(block)]
        self.half.check()

    def shutdown(self) -> None:
        self.connector.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def _take_in(self, output: Any) -> None:
        """What the step computes of which request, and where its blocks are."""
        self.scheduled = []
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._schedule(output, new.req_id, new.num_computed_tokens, [list(ids) for ids in new.block_ids])
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tables = self._running[name].tables
            if name in cached.resumed_req_ids:
                tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                tables = [[*table, *ids] for table, ids in zip(tables, blocks, strict=True)]
            self._schedule(output, name, computed, tables)

    def _schedule(self, output: Any, name: str, computed: int, tables: list[list[int]]) -> None:
        running = self._running[name]
        running.tables, running.start = tables, computed
        running.end = computed + output.num_scheduled_tokens[name]
        running.words = digests(running.request.all_token_ids[: running.end])
        self.scheduled.append(running)


@contextmanager
def sharing(folder: Path, sizes: Sizes, *args: Any, **settings: Any) -> Iterator[Engine]:
    """Such an engine, all of whose host memory is in use."""
    engine = Engine(folder, sizes, *args, **settings)
    try:
        engine.tell_ready()
        num_blocks = min(rank.connector._worker.half._host.num_blocks for rank in engine.ranks)
        until(
            lambda: engine.stats()["host_capacity_blocks"] >= num_blocks,
            lambda: engine.ask([[2, 3, 4]], 1),
            engine.stats,
            ANSWER_SECONDS,
        )
        yield engine
    finally:
        engine.shutdown()
