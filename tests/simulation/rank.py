"""One rank of a simulated engine: its process, which takes steps in order, and the model that runs on its device.

The process runs ahead of the device: it calls the worker half, puts the forward pass on the compute stream, and
reports. The report travels with the step's tokens, so it leaves when the device has come so far. A frozen process takes
no step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kv_connector.worker import WorkerHalf

from . import model
from .checks import JobBook, Violation
from .device import Device, SimulatedEvent, Stream, on, path_maker
from .pool import NULL_BLOCK
from .requests import Item, Places, RankResult, Step

if TYPE_CHECKING:
    from .engine import Engine


IDLE_SECONDS = 3e-3
"""What a step without requests takes at least: a process rests a moment where nothing is to be computed."""
MOST_IDLE = 20
"""Times as long a process rests at most, the longer nothing is to be computed."""


class Rank:
    """`engine` is told of what its steps came to."""

    def __init__(self, engine: Engine, index: int) -> None:
        config, world = engine.config, engine.world
        self.engine = engine
        self.index = index
        self.is_frozen = False
        self.book: JobBook = engine.book
        name = f"engine{engine.index}.{engine.incarnation}/rank{index}"
        self.device = Device(world.time, world.time.stream(name), name, config.seconds)
        self.device.stalls = config.stalls
        self.device.on_copy = lambda copy: self.book.copied(index, copy)
        self.shape = engine.shape
        num_tensors = max(self.shape.tensors) + 1
        self.heads = config.heads_of(index)
        self._block_rows = max(config.block_sizes) // config.num_parts
        inside = (self._block_rows, len(self.heads))
        words = (num_tensors, config.num_device_blocks, *(inside[::-1] if config.heads_first else inside))
        self.kv = np.full(words, 0xAAAAAAAAAAAAAAAA, dtype=np.uint64)
        # By tensor, block, row and head.
        self._cells = self.kv.swapaxes(2, 3) if config.heads_first else self.kv
        self._inbox: deque[Step] = deque()
        self._is_busy = False
        self._num_idle = 0  # steps without requests, one behind the other
        self._delay = 0.0  # of the process, for its next step
        self._seconds = 0.0  # that it was at forward passes
        self._last_result: SimulatedEvent | None = None  # of the last step that waited for the device
        self._host_born = world.time.now()
        with on(self.device):
            self.worker = self._make_worker()

    def _make_worker(self) -> WorkerHalf:
        config = self.engine.config
        worker = WorkerHalf(
            self.engine.connector_config,
            self.index,
            config.num_ranks,
            path_maker(self.device, self._num_ready_blocks, config.refused_share),
            fails_by_request=config.fails_by_request,
            open_storage=self.engine.world.outside.open_storage(self.engine, self.index),
            open_peers=self.engine.world.outside.open_peers(self.engine, self.index),
            open_share=lambda: self.engine.host_shares[self.index],
            clock=lambda: self._seconds,
        )
        tensors = [torch.from_numpy(tensor.view(np.int64)) for tensor in self.kv]
        names = {f"layers.{layer}": tensors[tensor] for layer, tensor in enumerate(self.shape.tensors)}
        dims = dict.fromkeys(names, 1 if config.heads_first else 2) if config.num_heads else None
        worker.register_kv_caches(names, config.num_device_blocks, dict.fromkeys(names, 0), dims)
        return worker

    def _num_ready_blocks(self) -> int:
        """Host memory is page-locked piece by piece after the start."""
        config = self.engine.config
        if not config.host_ready_seconds:
            return config.num_host_blocks
        share = (self.engine.world.time.now() - self._host_born) / (config.host_ready_seconds * (1 + self.index))
        return int(config.num_host_blocks * min(1.0, share))

    # The process.

    def receive(self, step: Step) -> None:
        """The step's plan has come."""
        self._inbox.append(step)
        self._pump()

    def freeze(self) -> None:
        self.is_frozen = True
        self.engine.world.outside.freeze(self.engine, self.index)

    def thaw(self) -> None:
        self.is_frozen = False
        self.engine.world.outside.thaw(self.engine, self.index)
        self._pump()

    @property
    def is_idle(self) -> bool:
        return not self._inbox and not self._is_busy and self.device.is_idle

    def _pump(self) -> None:
        if self._inbox and not self._is_busy and not self.is_frozen:
            self._is_busy = True
            seconds = self.engine.config.host_seconds
            self._num_idle = 0 if self._inbox[0].items else min(self._num_idle + 1, MOST_IDLE)
            self._delay = self.device.delay(max(seconds, IDLE_SECONDS * self._num_idle))
            self.engine.world.time.call_after(self._delay, self._run, f"{self.device.name}/process")

    def _run(self) -> None:
        self._is_busy = False
        if self.engine.is_dead or self.is_frozen:
            return
        self._execute(self._inbox.popleft())
        self._pump()

    def _execute(self, step: Step) -> None:
        """A step, in the order of calls that `kv_connector.base` states."""
        config, worker, plan = self.engine.config, self.worker, step.plan
        self._copy_states(step)
        if config.binds_first:
            worker.bind_connector_metadata(plan)
            worker.handle_preemptions(plan)
        else:
            worker.handle_preemptions(plan)
            worker.bind_connector_metadata(plan)
        is_late = config.loads_after_forward and not plan.loads
        if not is_late:
            worker.start_load_kv(full_graph=config.full_graphs or not step.items)
        if step.items:
            self._launch(step)
            self._seconds += self._delay
        if is_late:
            worker.start_load_kv()
        worker.wait_for_save()
        received, failed = worker.get_finished()
        invalid = worker.get_block_ids_with_load_errors()
        result = RankResult(worker.build_connector_worker_meta(), received, failed, invalid)
        worker.clear_connector_metadata()
        self.book.reported(self.index, result.report, invalid)
        if step.items:
            after = None if config.pipeline else step.sampled[self.index]
            self._report(step, result, after)
            if config.num_drafts:
                self.device.compute.put(lambda: self._write_again(step))
        elif self._last_result is None or self._last_result.done:
            self.engine.rank_done(step, self.index, result)
        else:
            self._report(step, result, self._last_result)

    def _report(self, step: Step, result: RankResult, after: SimulatedEvent | None) -> None:
        """The result leaves when the device has come so far, behind those of earlier steps."""
        compute = self.device.compute
        compute.put(lambda: self.engine.rank_done(step, self.index, result), after)
        self._last_result = compute.record()

    # The model.

    def _launch(self, step: Step) -> None:
        """Put the forward pass on the compute stream; with the hooks of each layer, or one graph for all of them."""
        compute, num_layers, config = self.device.compute, self.shape.num_layers, self.engine.config
        self._wait_for_inputs(step, compute)
        pending: list[Callable[[], None]] = []

        def flush() -> None:
            if pending:
                works = tuple(pending)
                pending.clear()
                compute.put(lambda: [work() for work in works] and None)

        for layer in range(num_layers):
            pending.append(lambda layer=layer: self._write(step, layer))
            has_hooks = not config.full_graphs and not self.shape.is_recurrent(layer)
            if has_hooks:
                if config.splits_layers or step.plan.loads:
                    flush()
                self.worker.wait_for_layer_load(f"layers.{layer}")
            pending.append(lambda layer=layer: self._read(step, layer))
            if has_hooks:
                if config.splits_layers or step.plan.peer:
                    flush()
                self.worker.save_kv_layer(f"layers.{layer}")
        pending.append(lambda: self._finish(step))
        flush()

    def _wait_for_inputs(self, step: Step, compute: Stream) -> None:
        """Ranks that share every layer keep step with one another; stages of a pipeline run apart."""
        if not self.engine.config.pipeline:
            if step.previous is not None:
                step.previous[self.index].wait(compute)
            return
        if self.index:
            step.stages[self.index - 1].wait(compute)
        for item in step.items:
            if item.sampled_before is not None:
                item.sampled_before[self.index].wait(compute)

    def _copy_states(self, step: Step) -> None:
        """As vLLM does in front of all that a connector is asked for, each request's state comes to where the step will
        go on with it. Those that are kept are copied before."""
        for source, target in (copy for item in step.items for copy in item.copies):
            self.device.compute.put(lambda source=source, target=target: self._copy_state(source, target))
        recurrent = [group for group, is_recurrent in enumerate(self.shape.recurrent) if is_recurrent]
        for source, target in (item.states[group] for item in step.items for group in recurrent):
            if source not in (NULL_BLOCK, target):
                self.device.compute.put(lambda source=source, target=target: self._copy_state(source, target))

    def _copy_state(self, source: int, target: int) -> None:
        self.kv[:, target] = self.kv[:, source]

    def _write(self, step: Step, layer: int) -> None:
        for item in step.items:
            if layer == 0:
                item.resolve()
                where = item.inputs, item.start, item.device.epoch
                heads = [self.shape.first_alike(head) for head in self.heads]
                item.h[self.index] = np.array([model.embed(*where, head) for head in heads])
                self._check_write(step, item)
            h = item.h[self.index]
            assert h is not None
            written = item.rows[self.index] = model.rows_of(h, layer)
            if not self.shape.is_recurrent(layer):
                self._write_rows(item, layer, written)

    def _write_rows(self, item: Item, layer: int, written: model.Words) -> None:
        places = self._places(item, self.shape.layer_groups[layer], item.start)
        self._cells[self.shape.tensors[layer]][places.blocks, places.rows] = written.T[places.is_own]

    def _read(self, step: Step, layer: int) -> None:
        group, sight = self.shape.layer_groups[layer], self.shape.sight(layer)
        for item in step.items:
            h = item.h[self.index]
            assert h is not None
            if self.shape.is_recurrent(layer):
                item.h[self.index] = self._go_on(item, layer, h)
                continue
            first = sight.first(item.start)
            read = self._read_rows(layer, self._places(item, group, first))
            item.h[self.index] = model.attend(h, read, first, item.start, sight)

    def _read_rows(self, layer: int, places: Places) -> model.Words:
        """The rows of each head; nothing for those of other ranks."""
        read = np.zeros((len(places.is_own), len(self.heads)), dtype=np.uint64)
        read[places.is_own] = self._cells[self.shape.tensors[layer]][places.blocks, places.rows]
        return read.T

    def _places(self, item: Item, group: int, first: int) -> Places:
        """Where the rows of this group's layers lie, from this position on: the same for all of these layers."""
        key = self.index, group, first
        if key not in item.places:
            item.places[key] = self._places_of(item.slots[group][first : item.end])
        return item.places[key]

    def _places_of(self, slots: NDArray[np.int64]) -> Places:
        """Which of these slots of an engine's blocks lie on this rank, their blocks, and the rows of its part: as
        vLLM's `ComputeSlotMappingKernel` has it."""
        parts, run = self.shape.num_parts, self.shape.interleave
        blocks, offsets = np.divmod(slots, self._block_rows * parts)
        is_own = offsets // run % parts == self.index % parts
        rows = offsets // (parts * run) * run + offsets % run
        return Places(is_own, blocks[is_own], rows[is_own])

    def _go_on(self, item: Item, layer: int, h: model.Words) -> model.Words:
        """A recurrent layer: the state in the step's block goes on with what the step computes."""
        state = self._cells[self.shape.tensors[layer], item.states[self.shape.layer_groups[layer]][1], :, 0]
        rows = item.rows[self.index]
        assert rows is not None and item.start == item.num_computed, "no drafts are modelled of such layers"
        before = state if item.start else model.first_state(len(state))
        (head,), (own_rows,) = h, rows  # ranks do not divide a state by heads
        after, state[:] = model.go_on(head, own_rows, item.start, before)
        return after[None]

    def _finish(self, step: Step) -> None:
        step.stages[self.index].come()
        step.num_computing -= 1
        if not step.num_computing:
            for item in step.items:
                item.sample(self.engine.sampler, self.engine.config)
            for event in step.sampled:
                event.come()

    def _write_again(self, step: Step) -> None:
        """A drafter goes on writing to a step's rows after the step's own tokens are out."""
        layer = self.shape.num_layers - 1
        for item in step.items:
            self._check_write(step, item)
            written = item.rows[self.index]
            assert written is not None
            self._write_rows(item, layer, written)

    def _check_write(self, step: Step, item: Item) -> None:
        for group, size in enumerate(self.engine.config.block_sizes):
            written = item.tables[group][item.start // size : -(-item.end // size)]
            row = 0 if self.shape.recurrent[group] else item.start % size  # of the first one
            for block in item.states[group][1:] if self.shape.recurrent[group] else written:
                if not 0 < block < self.engine.config.num_device_blocks:
                    name = item.request.request_id
                    raise Violation("engine", f"step {step.number} writes to block {block} of {name}")
                self.book.written(self.index, block, step.number, row if block == written[0] else 0)
