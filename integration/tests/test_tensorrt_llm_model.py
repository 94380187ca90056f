"""TensorRT-LLM's own expectations of its connector slot, restated for the model of its executor: what is called how
often, in which order, with which requests, tokens and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from integration.tensorrt_llm import smoke
from integration.tensorrt_llm.engine import LLM, Connector
from integration.tensorrt_llm.executor import Options

NUM_LAYERS = 3
SIZE = 32


class Recorded:
    """A scheduler, or a worker, that notes each call and answers as it is told, None by default."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any) -> Any:
            self.calls.append((name, args))
            return self._answers[name](*args) if name in self._answers else None

        return called

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of the calls with this name."""
        return [args for called, args in self.calls if called == name]


def nothing(*args: Any) -> tuple[int, bool]:
    """Is cached."""
    return 0, False


def at_once(saving: Sequence[int], loading: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """All that is under way has ended."""
    return saving, loading


@contextmanager
def modelled(
    overlap: bool,
    matched: Callable[..., tuple[int, bool]] = nothing,
    is_saving: bool = False,
    tp_size: int = 1,
    **options: Any,
) -> Iterator[tuple[LLM, Recorded, list[Recorded]]]:
    """An engine with a scheduler and workers that are looked at, once it has ended its last iteration."""
    scheduler = Recorded(get_num_new_matched_tokens=matched, request_finished=lambda *args: is_saving)
    workers: list[Recorded] = []

    def make_worker(args: Any) -> Recorded:
        workers.append(Recorded(get_finished=at_once))
        return workers[-1]

    settings = {"tokens_per_block": SIZE, "max_num_tokens": 512} | options
    llm = LLM(Options(overlap=overlap, **settings), Connector(lambda args: scheduler, make_worker), tp_size)
    yield llm, scheduler, workers
    llm.shutdown()
    for executor in llm.ranks:
        executor.kv.check_idle()


both = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


@both
def test_simple(overlap: bool) -> None:
    with modelled(overlap) as (llm, scheduler, (worker,)):
        assert len(worker.of("register_kv_caches")) == 1
        llm.generate([[5, 6, 7]], 8)
        llm.shutdown()
        names = ("build_connector_meta", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")
        assert [len(scheduler.of(name)) for name in names] == [8, 1, 1, 1]
        assert len(scheduler.of("update_state_after_alloc")[0][1]) == 1
        for i, (output,) in enumerate(scheduler.of("build_connector_meta")):
            assert (len(output.new_requests), len(output.cached_requests)) == ((1, 0) if i == 0 else (0, 1))
            if i:
                assert len(output.cached_requests[0].new_tokens) == (0 if i == 1 and overlap else 1)
        names = ("bind_connector_meta", "start_load_kv", "wait_for_save", "get_finished")
        assert [len(worker.of(name)) for name in names] == [8, 8, 8, 8 + overlap]
        for name in ("wait_for_layer_load", "save_kv_layer"):
            assert [layer for layer, _ in worker.of(name)] == [*range(NUM_LAYERS)] * 8


@both
def test_a_step_in_order(overlap: bool) -> None:
    with modelled(overlap) as (llm, _, (worker,)):
        llm.generate([[5, 6, 7]], 1)
        llm.shutdown()
        layers = [name for _ in range(NUM_LAYERS) for name in ("wait_for_layer_load", "save_kv_layer")]
        step = ["bind_connector_meta", "start_load_kv", *layers, "wait_for_save", "get_finished"]
        called = [name for name, _ in worker.calls if name != "register_kv_caches"]
        assert called[: len(step)] == step


@both
def test_an_asynchronous_load_parks_its_request(overlap: bool) -> None:
    with modelled(overlap, matched=lambda request, num_computed: (SIZE, True)) as (llm, scheduler, (worker,)):
        (response,) = llm.generate([list(range(2, 2 + SIZE + 8))], 8)
        llm.shutdown()
        told = worker.of("get_finished")
        assert len(told) == 8 + 1 + overlap
        assert told[0][1] == [response.request.request_id]
        outputs = [output for (output,) in scheduler.of("build_connector_meta")]
        assert not outputs[0].new_requests, "who is parked is not scheduled"
        assert outputs[1].new_requests[0].computed_position == SIZE, "and has what was loaded afterwards"
        assert worker.calls[2][0] == "start_load_kv"


@both
def test_an_asynchronous_save_holds_the_blocks(overlap: bool) -> None:
    with modelled(overlap, is_saving=True) as (llm, _, (worker,)):
        (response,) = llm.generate([[5, 6, 7]], 8)
        llm.shutdown()
        told = worker.of("get_finished")
        assert len(told) == 8 + overlap
        named = [saving for saving, _ in told if saving]
        assert named == [[response.request.request_id]]
        assert told[-1][0] == named[0], "in the iteration that it ends in"


@both
def test_what_the_scheduler_is_told(overlap: bool) -> None:
    num_input, num_tokens = 48, 32
    with modelled(overlap) as (llm, scheduler, _):
        llm.generate([[1] * num_input], num_tokens)
        llm.shutdown()
        (allocated,) = scheduler.of("update_state_after_alloc")
        assert len(allocated[1]) == 2
        outputs = [output for (output,) in scheduler.of("build_connector_meta")]
        first = outputs[0].new_requests[0]
        assert (len(first.new_tokens), len(first.new_block_ids)) == (num_input, 2)
        assert (first.computed_position, first.num_scheduled_tokens) == (0, num_input)
        for i, output in enumerate(outputs[1:], 1):
            (data,) = output.cached_requests
            assert len(data.new_tokens) == (0 if i == 1 and overlap else 1)
            assert len(data.new_block_ids) == ((data.computed_position + overlap) % SIZE == 0)
            assert data.num_scheduled_tokens == 1
        (ended,) = scheduler.of("request_finished")
        assert len(ended[1]) == -(-(num_input + num_tokens - 1) // SIZE)


@both
def test_matched_tokens_are_not_in_the_first_position(overlap: bool) -> None:
    with modelled(overlap, matched=lambda request, num_computed: (SIZE, False)) as (llm, scheduler, _):
        llm.generate([[1] * 48], 2)
        llm.shutdown()
        (output,) = scheduler.of("build_connector_meta")[0]
        assert output.new_requests[0].computed_position == 0
        assert output.new_requests[0].num_scheduled_tokens == 48 - SIZE


@both
def test_prompts_in_chunks(overlap: bool) -> None:
    chunk = 128
    with modelled(overlap, max_num_tokens=chunk) as (llm, scheduler, _):
        llm.generate([[1] * (2 * chunk)], SIZE)
        llm.shutdown()
        (allocated,) = scheduler.of("update_state_after_alloc")
        assert len(allocated[1]) == 2 * chunk // SIZE
        outputs = [output for (output,) in scheduler.of("build_connector_meta")]
        first, second = outputs[0].new_requests[0], outputs[1].cached_requests[0]
        assert (len(first.new_tokens), len(first.new_block_ids)) == (2 * chunk, 2 * chunk // SIZE)
        assert (first.computed_position, first.num_scheduled_tokens) == (0, chunk)
        assert (second.new_tokens, second.new_block_ids) == ([], [])
        assert (second.computed_position, second.num_scheduled_tokens) == (chunk, chunk)
        assert len(outputs[2].cached_requests[0].new_tokens) == (0 if overlap else 1)


def test_who_is_held_keeps_others_waiting() -> None:
    """Two requests that do not fit beside each other: the second is let in when the first is held no more."""
    with modelled(False, is_saving=True, num_blocks=4) as (llm, scheduler, _):
        answers = llm.generate([[1] * 70, [2] * 70], 4)
        llm.shutdown()
        assert all(answer.token_ids is not None for answer in answers)
        names = [name for name, _ in scheduler.calls]
        assert names.index("request_finished") < len(names) - 1 - names[::-1].index("get_num_new_matched_tokens")
        assert len(scheduler.of("request_finished")) == 2


def test_ranks_hear_the_same_and_count_together() -> None:
    with modelled(True, is_saving=True, tp_size=2) as (llm, scheduler, workers):
        (response,) = llm.generate([[5, 6, 7]], 8)
        llm.shutdown()
        assert len(scheduler.of("build_connector_meta")) == 8
        assert len(scheduler.of("get_num_new_matched_tokens")) == 1
        first, second = ([call for call in worker.calls if call[0] == "get_finished"] for worker in workers)
        assert first == second
        assert [len(worker.of("wait_for_layer_load")) for worker in workers] == [8 * NUM_LAYERS] * 2
        assert response.token_ids is not None


@pytest.mark.skipif(find_spec("tensorrt_llm") is not None, reason="the engine is here")
def test_where_the_engine_is_missing_its_test_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not call each kind of executor wrong."""
    monkeypatch.setattr("sys.argv", ["smoke.py", "MODEL"])
    with pytest.raises(SystemExit) as left:
        smoke.main()
    assert left.value.code == 2 and "TensorRT-LLM is not installed here" in capsys.readouterr().err
