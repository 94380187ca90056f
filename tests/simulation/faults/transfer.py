"""Faults of copies: order on streams, memory and streams that are somebody else's."""

from __future__ import annotations

from .mutant import Mutant, Patch, tested
from .scheduler import WORLDS

_UPLOADS = "kv_connector/transfer/cuda/uploads.py"
_STREAMS = "kv_connector/transfer/cuda/streams.py"
_WRITES = "kv_connector/transfer/paths/peer_writes.py"
_TURNS = "kv_connector/transfer/cuda/turns.py"
_RUNS = "kv_connector/transfer/paths/runs.py"
_STAGED = "kv_connector/transfer/paths/staged.py"
_ENGINE = "kv_connector/transfer/engine.py"
_QUEUE = "kv_connector/transfer/submission/queue.py"
_TIMING = "kv_connector/transfer/submission/timing.py"
_DRIVER = "kv_connector/transfer/cuda/driver.py"
_GEOMETRY = "kv_connector/transfer/memory/geometry.py"
_LAYOUT = "tests/transfer/memory/test_layout.py"
_TESTS = "tests/transfer/test_engine.py"
_OWNERS = "tests/transfer/test_owners.py"
_TEST_QUEUE = "tests/transfer/submission/test_queue.py"
_PACING = "tests/transfer/submission/test_pacing.py"
_TEST_STREAMS = "tests/transfer/cuda/test_streams.py"
_DRIVER_TURNS = "tests/transfer/cuda/test_driver_turns.py"

TRANSFER: tuple[Mutant, ...] = (
    Mutant(
        "overlays-cut",
        "of layers that overlay each other the bytes of the last one move",
        (Patch(_GEOMETRY, "ends[-1] = max(ends[-1], end)", "ends[-1] = end"),),
        tested(f"{_LAYOUT}::test_of_any_overlays_every_byte_is_copied_once"),
    ),
    Mutant(
        "overlays-misread",
        "where a layer lies over another one does not decide what the bytes mean",
        (
            Patch(
                "kv_connector/transfer/memory/layout.py",
                'texts.append(f"{part.arrangement}{at}")',
                "texts.append(part.arrangement)",
            ),
        ),
        tested(_LAYOUT),
    ),
    Mutant(
        "turns-shared",
        "copies of both directions, enqueued by two threads, record each other's events",
        (
            Patch(
                _TURNS,
                "made = [DriverTurns(device, direction) for direction, _ in TURN_BYTES]",
                "made = [DriverTurns(device, Direction.LOAD)] * len(TURN_BYTES)",
            ),
        ),
        tested(_DRIVER_TURNS),
    ),
    Mutant(
        "turns-behind-the-model",
        "turns go through the driver's queues of kernels, and wait for what streams of the engine wait for",
        (Patch(_TURNS, "_PAGE_BYTES = 4096", "_PAGE_BYTES = 8"),),
        tested(_DRIVER_TURNS),
    ),
    Mutant(
        "turns-events-gone",
        "the events of turns are freed while copies wait for them",
        (
            Patch(_TURNS, "self._handles = tuple(", "self._handles, self._events = tuple("),
            Patch(_TURNS, "for event in self._events)", "for event in self._events), []"),
        ),
        tested(_DRIVER_TURNS),
    ),
    Mutant(
        "save-unordered",
        "a save does not wait for the forward pass that computes its blocks",
        (Patch(_ENGINE, "position = self._queues[Direction.SAVE].lane.position()", "position = None"),),
        WORLDS,
    ),
    Mutant(
        "guarded-at-once",
        "guarded blocks are filled at once",
        (
            Patch(
                _ENGINE,
                "BlockPairs(device_ids[own], host_ids[own]), job.num_guarded, after)",
                "BlockPairs(device_ids[own], host_ids[own]), 0, after)",
            ),
        ),
        tested("tests/transfer/test_progress.py", "tests/transfer/submission/test_queue.py"),
    ),
    Mutant(
        "ids-overwritten",
        "ids are sent to where kernels still read others",
        (
            Patch(
                _UPLOADS,
                "(end := self._uses[0].end) is not None and end.query():",
                "(end := self._uses[0].end) is not None:",
            ),
        ),
        tested("tests/transfer/cuda/test_uploads.py::test_what_kernels_may_still_read_stays_as_it_was"),
    ),
    Mutant(
        "ids-in-new-memory",
        "memory for ids is made in service",
        (Patch(_UPLOADS, "start = self._free_start(num_ids)", "start = None"),),
        tested("tests/transfer/cuda/test_uploads.py::test_no_memory_is_made_for_copies_in_service"),
    ),
    Mutant(
        "ids-of-torch",
        "ids lie in memory of torch's, which the engine may discard or a kernel still use",
        (
            Patch(
                _UPLOADS,
                "self.there = device_tensor((num_ids,), torch.int64, device)",
                "self.there = torch.empty(num_ids, dtype=torch.int64, device=device)",
            ),
        ),
        tested(_OWNERS),
    ),
    Mutant(
        "staging-of-torch",
        "staging buffers lie in memory of torch's, which the engine may discard",
        (
            Patch(
                _STAGED,
                "device_tensor((NUM_BUFFERS, self.buffer_bytes), torch.uint8, device)",
                "torch.zeros((NUM_BUFFERS, self.buffer_bytes), dtype=torch.uint8, device=device)",
            ),
        ),
        tested(_OWNERS),
    ),
    Mutant(
        "pitched-unequal",
        "pieces that are not as long as each other move as if they were",
        (Patch(_RUNS, "any(len(set(column.tolist())) > 1 for column in (sizes, strides))", "False"),),
        tested("tests/transfer/paths/test_paths.py::test_what_a_copy_engine_cannot_take_in_one_stays_apart"),
    ),
    Mutant(
        "pitched-across-allocations",
        "a copy engine is to go from one allocation into the next, where the driver may refuse it",
        (Patch(_RUNS, " if is_one else None", ""),),
        tested("tests/transfer/paths/test_paths.py::test_what_a_copy_engine_cannot_take_in_one_stays_apart"),
    ),
    Mutant(
        "refused-for-ever",
        "every save fails where the driver refuses a pitched copy",
        (
            Patch(
                _RUNS, "        except TransferError as error:  # saves", "        except TypeError as error:  # saves"
            ),
        ),
        tested("tests/transfer/paths/test_paths.py::test_a_driver_that_refuses_a_pitched_copy_is_asked_for_no_other"),
    ),
    Mutant(
        "refused-and-lost",
        "what a refused pitched copy was to copy is taken to have been copied",
        (Patch(_RUNS, "            return False\n        return True\n", "        return True\n"),),
        tested("tests/transfer/paths/test_paths.py::test_a_driver_that_refuses_a_pitched_copy_is_asked_for_no_other"),
    ),
    Mutant(
        "lock-out-of-turn",
        "a step's load waits until the submitting thread has submitted all that is queued",
        (Patch(_QUEUE, "        with self._next:\n", "        if True:\n"),),
        tested("tests/transfer/submission/test_queue.py"),
    ),
    Mutant(
        "lock-owned-for-ever",
        "a signal's handler that raises while a step waits for its turn leaves the queue to nobody",
        (
            Patch(
                _QUEUE,
                "        with self._next, self._lock:\n            self._waiting.appendleft(submission)\n"
                "            self._advance(submission)\n",
                "        with self._next:\n            self._lock.acquire()\n"
                "        self._waiting.appendleft(submission)\n        self._advance(submission)\n"
                "        self._lock.release()\n",
            ),
        ),
        tested(
            "tests/transfer/submission/test_queue.py::test_a_signal_s_handler_that_raises_leaves_the_queue_to_others"
        ),
    ),
    Mutant(
        "streams-of-torch",
        "lanes are torch's streams, of which it hands out the same 32 to everybody",
        (
            Patch(
                _STREAMS,
                "self.stream: Any = make_stream(device, priority)",
                "self.stream: Any = torch.cuda.Stream(device, priority=int(priority))",
            ),
        ),
        tested(_OWNERS),
    ),
    Mutant(
        "streams-by-link",
        "each link to another engine takes streams and memory of its own",
        (
            Patch(
                _WRITES,
                "        return RemoteWriter(self, bases, strides)",
                "        return RemoteWriter(RemoteWriters(self.layout, self.lane, self.copier), bases, strides)",
            ),
        ),
        tested("tests/transfer/paths/test_peer_writes.py::test_links_that_come_and_go_share_streams_and_ids"),
    ),
    Mutant(
        "failed-write-unjoined",
        "what was enqueued of a write that fails is not waited for",
        (
            Patch(
                _WRITES,
                "        try:\n            for number, first in enumerate(",
                "        if True:\n            for number, first in enumerate(",
            ),
            Patch(
                _WRITES,
                "        finally:  # where a part fails, those in front of it run all the same",
                "        if True:",
            ),
        ),
        tested("tests/transfer/paths/test_peer_writes.py::test_what_was_enqueued_of_a_write_that_fails_is_waited_for"),
    ),
    Mutant(
        "calls-captured",
        "a call of the driver spoils a graph that is captured at the time",
        (
            Patch(
                _DRIVER,
                "        before = _exchange_capture_mode(_CAPTURE_MODE_RELAXED)\n",
                "        before = _exchange_capture_mode(0)\n",
            ),
        ),
        tested("tests/transfer/cuda/test_driver.py"),
    ),
    Mutant(
        "threads-captured",
        "what a thread of ours calls spoils a graph that is captured at the time",
        (
            Patch(
                _DRIVER,
                '"cuCtxSetCurrent")\n    _exchange_capture_mode(_CAPTURE_MODE_RELAXED)\n',
                '"cuCtxSetCurrent")\n',
            ),
        ),
        tested("tests/transfer/cuda/test_driver.py"),
    ),
    Mutant(
        "dropped-under-way",
        "an engine that is dropped takes memory away from copies that run",
        (
            Patch(
                _ENGINE,
                "weakref.finalize(self, _end_copies, tuple(self._submitters.values()), tuple(self._queues.values()))",
                "weakref.finalize(self, self._submitters[Direction.SAVE].close)",
            ),
        ),
        tested(f"{_TESTS}::test_an_engine_that_is_dropped_ends_its_copies_before_their_memory_goes"),
    ),
    Mutant(
        "traced-elsewhere",
        "traced waits are those of whichever device is current",
        (
            Patch(
                _TIMING,
                "before = self._lane.mark(stream)",
                "before = self._lane.mark()",
            ),
        ),
        tested(f"{_TESTS}::test_a_timing_is_of_the_stream_that_waits_and_no_other_devices"),
    ),
    Mutant(
        "filled-too-early",
        "a staging buffer is filled while its blocks are still being unpacked",
        (
            Patch(
                _STAGED,
                "buffer.free.wait(buffer.stream if stream is None else stream)",
                "buffer.free.wait(buffer.stream)",
            ),
        ),
        tested("tests/transfer/paths/test_staged.py"),
    ),
    Mutant(
        "packed-too-early",
        "a staging buffer is packed while its rows are still on their way to the host",
        (Patch(_STAGED, "        ring.give(number, ring.lane.stream)\n", "        ring.give(number, stream)\n"),),
        tested("tests/transfer/paths/test_staged.py"),
    ),
    Mutant(
        "unpacked-too-early",
        "blocks are unpacked from a buffer that is still being filled",
        (
            Patch(
                _STAGED,
                "        ring.pass_on(ring.lane.stream, stream)\n",
                "",
            ),
        ),
        tested("tests/transfer/paths/test_staged.py"),
    ),
    Mutant(
        "ended-too-early",
        "a job that has failed ends while what was enqueued for it still runs",
        (
            Patch(
                _QUEUE,
                "            submission.end = self._mark_end()\n        except",
                "            submission.end = HostEvent()\n        except",
            ),
        ),
        tested(f"{_TESTS}::test_a_failed_job_ends_only_after_what_was_enqueued_for_it"),
    ),
    Mutant(
        "any-layer",
        "a layer waits for the first group of a load only",
        (
            Patch(
                _ENGINE,
                "return self._wait_region(load, region)",
                "return self._wait_region(load, 0)",
            ),
        ),
        tested(f"{_TESTS}::test_each_layer_waits_for_its_group_and_only_that"),
    ),
    Mutant(
        "waits-of-other-groups",
        "a stream that waits for a group of a load does not wait for the next",
        (Patch(_ENGINE, "load.ok and region < self._waiting[1] and", "load.ok and self._waiting[1] and"),),
        tested(f"{_TESTS}::test_each_layer_waits_for_its_group_and_only_that"),
    ),
    Mutant(
        "waits-of-one-region-more",
        "a stream that waits for a group does not wait for the region behind it, which is the next layer's",
        (Patch(_ENGINE, "load.groups[group].stop\n", "load.groups[group].stop + 1\n"),),
        tested(f"{_TESTS}::test_a_layer_of_one_region_waits_for_its_own_group"),
    ),
    Mutant(
        "waits-of-other-streams",
        "a stream does not wait for what another one waits for",
        (Patch(_ENGINE, "self._waiting[1] and self._waiting[0] == current:", "self._waiting[1]:"),),
        tested(f"{_TESTS}::test_each_stream_waits_for_a_layer"),
    ),
    Mutant(
        "waits-of-lost-loads",
        "a stream that waits for a group of a load is not told that the load has failed meanwhile",
        (Patch(_ENGINE, "if load.ok and region", "if region"),),
        tested(f"{_TESTS}::test_a_load_that_fails_behind_a_wait_is_told_to_whoever_asks_next"),
    ),
    Mutant(
        "all-but-the-last",
        "who waits for all layers waits for the first group of a load only",
        (Patch(_ENGINE, "self._load.groups[-1].stop - 1", "self._load.groups[0].stop - 1"),),
        tested(f"{_TESTS}::test_each_layer_waits_for_its_group_and_only_that"),
    ),
    Mutant(
        "waits-with-the-lock",
        "the submitting thread waits for the device with the lock that everybody needs",
        (
            Patch(
                _QUEUE,
                "            if event is None:\n                self._advance(front)\n            return event\n",
                "            if event is not None:\n                event.synchronize()\n"
                "            self._advance(front)\n            return None\n",
            ),
        ),
        WORLDS,
    ),
    Mutant(
        "goes-on-as-before",
        "a thread that has waited submits what was next before it did",
        (
            Patch(
                _QUEUE,
                "            front = self._waiting[0]\n            event",
                '            front = vars(self).pop("kept", self._waiting[0])\n            event',
            ),
            Patch(
                _QUEUE,
                "                self._advance(front)\n            return event\n",
                "                self._advance(front)\n            else:\n                self.kept = front\n"
                "            return event\n",
            ),
        ),
        WORLDS,
    ),
    Mutant(
        "needed-and-paced",
        "what a fence needs is submitted no faster than the device gets on",
        (
            Patch(
                _QUEUE,
                "            if not self._waiting:\n                return False\n",
                "            if not self._waiting or self._still_to_come(MOST_UNDER_WAY - 1) is not None:\n"
                "                return False\n",
            ),
        ),
        WORLDS,
    ),
    Mutant(
        "awaited-and-paced",
        "the thread waits for the device with what a step waits for",
        (
            Patch(
                _QUEUE,
                "None if front.is_awaited else self._still_to_come(MOST_UNDER_WAY - 1)",
                "self._still_to_come(MOST_UNDER_WAY - 1)",
            ),
        ),
        tested(_PACING),
    ),
    Mutant(
        "one-too-many-under-way",
        "the thread submits a part while the device has two",
        (Patch(_QUEUE, "self._still_to_come(MOST_UNDER_WAY - 1)", "self._still_to_come(MOST_UNDER_WAY)"),),
        tested(_PACING),
    ),
    Mutant(
        "before-the-device-may-begin",
        "copies fill the driver's queues behind what the device has not reached",
        (Patch(_QUEUE, "events = self._waiting[0].next_part().after, *ends", "events = (*ends,)"),),
        tested(_PACING),
    ),
    Mutant(
        "thread-lost-with-the-device",
        "a thread that waits for a lost device ends, and what is queued does not",
        (
            Patch(
                _QUEUE,
                "        except RuntimeError:  # the device is lost, and with it what is queued\n",
                "        except TypeError:\n",
            ),
        ),
        tested(_PACING),
    ),
    Mutant(
        "caught-up-while-busy",
        "a step submits what the device would only put behind what it has",
        (Patch(_QUEUE, " and self._still_to_come(0) is None:", ":"),),
        tested(_TEST_QUEUE),
    ),
    Mutant(
        "caught-up-with-the-thread",
        "a step waits for the part that the thread submits, though it needs none",
        (Patch(_QUEUE, "if seen is None or seen != self._seen:", "if self._seen is None:"),),
        tested(_TEST_QUEUE),
    ),
    Mutant(
        "starved-thread",
        "a step never waits for the part that the thread submits, which gets Python's lock back once in 5 ms",
        (Patch(_QUEUE, "or seen != self._seen:", "or seen != self._seen or self._lock.locked():"),),
        tested(_TEST_QUEUE),
    ),
    Mutant(
        "awaited-and-recycled",
        "an event that a thread waits for is recorded again by somebody else",
        (Patch(_ENGINE, "lane.recycle([start])", "lane.recycle([start, *events])"),),
        tested(_TESTS, "tests/transfer/test_progress.py"),
    ),
    Mutant(
        "traced-and-recycled",
        "an event of a traced load that a thread waits for is recorded again by somebody else",
        (Patch(_TIMING, "[trace.start, *waits]", "[trace.start, *trace.groups, *waits]"),),
        tested(_TESTS),
    ),
    Mutant(
        "position-recycled",
        "the position that a thread waits for is recorded again by somebody else",
        (Patch(_STREAMS, "return self._mark_once(self.current())", "return self.mark(self.current())"),),
        tested(_TEST_STREAMS),
    ),
    Mutant(
        "waits-busily",
        "a thread that waits for the device keeps a core busy",
        (Patch(_STREAMS, ", blocking=True)", ")"),),
        tested(_TEST_STREAMS),
    ),
    Mutant(
        "packed-in-short-slices",
        "long copies that are packed stand still after every 64 MiB",
        (
            Patch(
                "kv_connector/transfer/paths/choice.py",
                "        return self._paths.get(name, self._runs).slice_bytes(direction)\n",
                "        return self._runs.slice_bytes(direction)\n",
            ),
        ),
        tested("tests/transfer/paths/test_paths.py"),
    ),
    Mutant(
        "lock-let-go-of-too-shortly",
        "the lock is let go of, and taken back before the thread that waits for it has woken up",
        (Patch(_DRIVER, "time.sleep(1e-6)", "time.sleep(0)"),),
        tested("tests/transfer/cuda/test_copier.py"),
    ),
    Mutant(
        "lock-kept-for-pitched-copies",
        "pitched copies keep Python's lock until all of a long load is submitted",
        (Patch("kv_connector/transfer/cuda/pitched.py", "            let_go()\n", "            pass\n"),),
        tested("tests/transfer/cuda/test_copier.py"),
    ),
)
