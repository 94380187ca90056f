"""The layers of DeepSeek-V4 in vLLM's scheduler and block pool: latents of several tokens in a row, windows of latents,
and rings of what is being compressed, in blocks of 256, 64, 8 and 4 tokens that share one pool. No model: ranks write
and check rows (`vllm_ranks`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.test_vllm_hybrid import host_blocks_of
from integration.tests.vllm_context import Sizes
from integration.tests.vllm_engines import prompts
from integration.tests.vllm_ranks import Engine, sharing
from kv_connector.engines.vllm.groups import TELLS_STATES
from kv_connector.index import BlockGroup
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="vLLM 0.32 and newer have such layers"),
    pytest.mark.usefixtures("stable_hashes", "slow_machine"),
]

ALONE = Sizes(tensor=1, decode=1)
HIT = 256
"""Tokens of the largest block: hits end at multiples of them."""
LENGTHS = (100, 256, 257, 400, 511, 512, 513, 900, 1024, 1300)


def layers_of(num_layers: int = 6) -> dict[str, Any]:
    """As vLLM's `deepseek_v4` asks for them with a cache of fp8: of three layers one has a window alone, one a row for
    four tokens with an indexer, and one a row for 128."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    common: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}
    packed = common | {
        "head_size": 512,
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    found: dict[str, Any] = {}
    for layer in range(num_layers):
        of_row = (1, 4, 128)[layer % 3]
        found[f"{layer}.window"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **packed)
        if of_row == 1:
            continue
        found[f"{layer}.rows"] = MLAAttentionSpec(block_size=HIT, tokens_per_state=of_row, **packed)
        ring = common | {"dtype": torch.float32}
        if of_row == 4:
            found[f"{layer}.index"] = MLAAttentionSpec(
                block_size=HIT, tokens_per_state=4, head_size=132, dtype=torch.uint8, **common
            )
            for name, head_size in (("ring", 2048), ("index_ring", 512)):
                found[f"{layer}.{name}"] = SlidingWindowMLASpec(
                    block_size=4, sliding_window=8, head_size=head_size, **ring
                )
        else:
            found[f"{layer}.ring"] = SlidingWindowMLASpec(block_size=8, sliding_window=128, head_size=1024, **ring)
    return found


def asked() -> list[list[int]]:
    return [prompt[:length] for prompt, length in zip(prompts(len(LENGTHS), max(LENGTHS)), LENGTHS, strict=True)]


def hits(engine: Engine, source: str) -> list[int]:
    """Tokens of each prompt that come from there."""
    counts = []
    for prompt in asked():
        before = engine.stats()[f"{source}_hit_tokens"]
        engine.ask([prompt])
        counts.append(int(engine.stats()[f"{source}_hit_tokens"] - before))
    return counts


def num_worth_saving(num_tokens: int) -> int:
    """Blocks of a prompt that some hit needs: of windows and rings those in front of where hits end."""
    return sum(
        index >= (index * size // HIT + 1) * HIT // size - window
        for size, window in ((HIT, HIT), (64, 2), (64, 2), (64, 2), (8, 16), (4, 2))
        for index in range(num_tokens // size)
    )


EXPECTED = [(length - 1) // HIT * HIT for length in LENGTHS]
SETTINGS: dict[str, Any] = {"num_blocks": 2500, "host_memory": "64MiB"}


@pytest.mark.parametrize("choice", ["sync", "async"])
def test_the_host_gives_as_much_as_the_device_and_the_rows_that_were_written(tmp_path: Path, choice: str) -> None:
    with sharing(tmp_path, ALONE, layers_of(), load_choice=choice, **SETTINGS) as engine:
        served = sorted(engine.connector._scheduler.shape.groups, key=lambda group: -group.hashes_per_block)
        full, windows = BlockGroup(None, 64), [BlockGroup(2, 16)] * 3
        assert served == [full, *windows, BlockGroup(16, 2), BlockGroup(2, 1)]
        hits(engine, "device")
        assert hits(engine, "device") == EXPECTED
        engine.drain()
        assert engine.stats()["saved_blocks"] == sum(num_worth_saving(length + 3) for length in LENGTHS)
        engine.forget_device()
        assert hits(engine, "host") == EXPECTED
        engine.check_all_free()
    assert engine.wrong == []


def test_each_kind_of_layer_is_read_from_the_host(tmp_path: Path) -> None:
    """What is spoilt there is seen by the layers of its group, and by no others."""
    with sharing(tmp_path, ALONE, layers_of(), **SETTINGS) as engine:
        seen = {}
        for group, number in enumerate(engine.connector._scheduler.shape.group_ids):
            engine.ask(asked()[-1:])
            engine.forget_device()
            spoilt = host_blocks_of(engine.half, group)
            engine.ranks[0].connector._worker.half._host.tensor[spoilt] = 0
            engine.ask(asked()[-1:])
            seen[number] = {name for _, _, name, _ in engine.wrong}
            engine.wrong.clear()
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert seen == {number: set(names) for number, names in enumerate(engine.names)}


def test_the_next_engine_answers_from_storage(tmp_path: Path) -> None:
    storage = {"path": str(tmp_path / "store"), "capacity": "256MiB", "prefetch": "wait_complete"}
    found = []
    for _ in range(2):
        with sharing(tmp_path, ALONE, layers_of(), storage=storage, **SETTINGS) as engine:
            found.append(hits(engine, "storage"))
            engine.check_all_free()
        assert engine.wrong == []
    assert found == [[0] * len(LENGTHS), EXPECTED]


def test_many_at_once_with_a_device_that_holds_few(tmp_path: Path) -> None:
    """Preempted, evicted and loaded again, in steps of chunks of prompts."""
    with sharing(tmp_path, ALONE, layers_of(), num_blocks=450, host_memory="64MiB") as engine:
        answers = engine.ask(asked(), 20)
        for some in (asked()[::-1], asked()) * 2:
            again = engine.ask(some, 20)
            assert answers == (again if some == asked() else again[::-1])
        assert engine.stats()["host_hit_tokens"] > 0
        engine.check_all_free()
    assert engine.wrong == []


@pytest.mark.parametrize("length", [257, 700])
def test_what_one_engine_has_computed_another_continues(tmp_path: Path, length: int) -> None:
    peer = {"secret": "a secret of these tests only", "deadline_ms": 60_000, "timeout_ms": 60_000}
    prompt = asked()[-1][:length]
    with (
        sharing(tmp_path, ALONE, layers_of(), peer=peer | {"role": "producer"}, **SETTINGS) as prefill,
        sharing(tmp_path, ALONE, layers_of(), peer=peer | {"role": "consumer"}, **SETTINGS) as decode,
    ):
        prefill.ask([prompt], 1, {"do_remote_decode": True})
        (params,) = prefill.transfers
        (answer,) = decode.ask([prompt], 4, params, beside=[prefill])
        assert decode.stats()["peer_hit_tokens"] == length // HIT * HIT
        assert prefill.ask([prompt]) == [answer]
        until(lambda: not prefill.half.has_pending_push_work(), prefill.step, prefill.stats)
        prefill.check_all_free()
        decode.check_all_free()
    assert prefill.wrong == decode.wrong == []
