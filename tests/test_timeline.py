"""The summary of a GPU trace, on traces that are small enough to add up by hand."""

from __future__ import annotations

from typing import Any

from integration.bench.vllm_timeline import COMPUTES_US, SMALL_BYTES, covered, summarize


def call(correlation: int, at: float) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "ts": at, "dur": 1, "args": {"correlation": correlation}}


def upload(correlation: int, at: float, duration: float, stream: int = 7, num_bytes: int = 64) -> dict[str, Any]:
    found = {"correlation": correlation, "stream": stream, "bytes": num_bytes}
    return {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": at, "dur": duration, "args": found}


def kernel(correlation: int, at: float, duration: float, stream: int = 7) -> dict[str, Any]:
    found = {"correlation": correlation, "stream": stream}
    return {"cat": "kernel", "name": "gemm", "ts": at, "dur": duration, "args": found}


def test_an_upload_behind_a_large_copy_has_waited_since_its_stream_was_free() -> None:
    found = summarize([
        call(1, 0), kernel(1, 10, 100),
        call(2, 5), upload(2, 20, 400, stream=9, num_bytes=SMALL_BYTES),
        call(3, 50), upload(3, 420, 5),
    ])  # fmt: skip
    assert found["upload_us"] == 425 - 110, "the kernel in front of it ended at 110"
    assert found["uploads"] == 1
    assert found["traced_ms"] == 0.415
    assert found["kernel_share"] == 100 / 415
    assert found["load_share"] == 400 / 415


def test_tokens_that_queue_behind_a_save_have_waited_for_it() -> None:
    def download(correlation: int, at: float, duration: float, stream: int, num_bytes: int) -> dict[str, Any]:
        found = {"correlation": correlation, "stream": stream, "bytes": num_bytes}
        name = "Memcpy DtoH (Device -> Pinned)"
        return {"cat": "gpu_memcpy", "name": name, "ts": at, "dur": duration, "args": found}

    found = summarize([
        call(1, 0), download(1, 10, 300, stream=9, num_bytes=SMALL_BYTES),
        call(2, 20), download(2, 310, 2, stream=8, num_bytes=64),
    ])  # fmt: skip
    assert found["downloads"] == 1
    assert found["download_us"] == 312 - 20
    assert found["save_share"] == 300 / 302
    assert found["uploads"] == found["load_share"] == 0


def test_an_upload_to_an_idle_stream_waits_from_its_call() -> None:
    found = summarize([call(1, 0), kernel(1, 0, 10), call(2, 100), upload(2, 103, 2)])
    assert found["upload_us"] == found["upload_most_us"] == 5


def test_what_a_graph_takes_without_attention_is_told_of_its_first_and_last_replays() -> None:
    """Here kernels follow one another more slowly once one of another stream has run beside them."""
    events: list[dict[str, Any]] = []
    at = 0.0
    for replay in range(20):
        slower = 0 if replay < 10 else 3
        for name, duration, args in (("gemm", 100, {}), ("flash attention", 50 + replay, {}), ("gemm", 100, {})):
            run = kernel(replay, at, duration)
            events.append(run | {"name": name, "args": run["args"] | {"graph id": 7} | args})
            at += duration + slower
    found = summarize([*events, kernel(100, 10 * 250 + 45, 20, stream=9), kernel(101, at, 1)])
    assert found["graph_replays"] == 20
    assert (found["graph_first_us"], found["graph_last_us"]) == (200, 203), "of attention, up to the next kernel"
    assert found["beside_us"] == 20
    assert "graph_replays" not in summarize([kernel(1, 0, 10)])


def test_of_a_prompt_between_two_decoding_steps_it_is_told_when_its_load_began_and_what_was_left() -> None:
    """Sampling runs between steps as well, and is no prompt; a load in front of another step is not the prompt's."""

    def graph(replay: int, at: float) -> dict[str, Any]:
        run = kernel(replay, at, 100)
        return run | {"args": run["args"] | {"graph id": 7}}

    load = upload(10, 1_150, 2_000, stream=9, num_bytes=SMALL_BYTES)
    more = upload(11, 3_200, 300, stream=9, num_bytes=SMALL_BYTES)
    found = summarize([
        graph(1, 0), kernel(2, 120, COMPUTES_US / 2), graph(3, 900),
        load, kernel(4, 1_500, 500), kernel(5, 3_300, 900), more, graph(6, 4_400),
        kernel(7, 4_600, 2 * COMPUTES_US), graph(8, 6_700),
    ])  # fmt: skip
    assert (found["prompts"], found["prompts_with_loads"]) == (2, 1)
    assert found["prompt_us"] == ((4_400 - 1_000) + (6_700 - 4_500)) / 2
    idle = (1_150 - 1_000) + (3_200 - 3_150) + (4_400 - 4_200), 100 + 100
    assert found["prompt_idle_us"] == sum(idle) / 2
    assert (found["load_begins_us"], found["load_us"], found["load_left_us"]) == (150, 2_350, 900)


def test_time_is_counted_once_where_kernels_overlap() -> None:
    assert covered([(0, 10), (5, 8), (9, 20), (30, 31)]) == 21
    assert summarize([]) == {}
