"""What requests of a real vLLM engine say of their own blocks, and tenants by vLLM's cache salts.

Hints go where a client of the server puts them: `kv_transfer_params`, which vLLM hands on as extra arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, prompts, running, transfer_config
from kv_connector.index import BlockState
from tests.waiting import until

PROMPT_BLOCKS = 13
HOST_BLOCKS = 6 * PROMPT_BLOCKS

pytestmark = pytest.mark.usefixtures("slow_machine")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, stable_hashes: None) -> Iterator[VllmEngine]:
    """With a host of six prompts, which two tenants share with all others, and a folder behind it."""
    folder = tmp_path_factory.mktemp("control")
    storage = {"path": str(folder / "store"), "capacity": "256MiB", "prefetch": "wait_complete"}
    tenants = {"calm": {"weight": 1}, "loud": {"weight": 1}}
    settings = {"write_policy": "write_through", "storage": storage, "tenants": tenants}
    config = transfer_config(settings)
    with running(folder, num_blocks=60, kv_transfer_config=config) as one:
        one.wait_for_storage()
        one.half.resize_host(HOST_BLOCKS)
        yield one


@pytest.fixture(autouse=True)
def afresh(engine: VllmEngine) -> Iterator[None]:
    """Each test begins with empty caches, storage among them, and leaves nothing behind."""
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    yield
    engine.check_all_free()


def ask(engine: VllmEngine, prompt: Sequence[int], cache: Any = None, salt: str | None = None) -> list[int]:
    """The answer to one prompt, which the device has forgotten."""
    from vllm import SamplingParams

    engine.drain()
    engine.llm.reset_prefix_cache()
    extra = {"kv_transfer_params": {"cache": cache}} if cache is not None else None
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, extra_args=extra)
    asked = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
    (output,) = engine.llm.generate([asked], params, use_tqdm=False)
    engine.drain()
    return list(output.outputs[0].token_ids)


def hits(engine: VllmEngine, prompt: Sequence[int], **how: Any) -> tuple[int, int]:
    """Blocks of the prompt that were on the host when it was asked again, and those of them that storage had."""
    before = engine.stats()
    ask(engine, prompt, **how)
    after = engine.stats()
    host, storage = (after[name] - before[name] for name in ("host_hit_tokens", "storage_hit_tokens"))
    return int(host) // BLOCK_SIZE, int(storage) // BLOCK_SIZE


def test_a_pinned_conversation_survives_a_flood(engine: VllmEngine) -> None:
    (conversation,), flood = prompts(1, seed=50), prompts(8, seed=51)
    answer = ask(engine, conversation, {"pin": True, "ttl_s": 600})
    assert engine.stats()["pinned_blocks"] == PROMPT_BLOCKS
    for prompt in flood:
        ask(engine, prompt)
    assert hits(engine, flood[0])[1] == PROMPT_BLOCKS, "what is not pinned has gone from the host"
    assert hits(engine, conversation) == (PROMPT_BLOCKS, 0)
    assert ask(engine, conversation, {"pin": False}) == answer
    assert engine.stats()["pinned_blocks"] == 0


def test_a_tenant_that_floods_pushes_nobody_below_his_share(engine: VllmEngine) -> None:
    (calm,), flood = prompts(1, seed=52), prompts(8, seed=53)
    answer = ask(engine, calm, salt="calm:alice")
    for prompt in flood:
        ask(engine, prompt, salt="loud")
    stats = engine.half.tenant_stats()
    assert stats["calm"]["held_blocks"] == PROMPT_BLOCKS <= stats["calm"]["share_blocks"]
    assert stats["loud"]["held_blocks"] == HOST_BLOCKS - PROMPT_BLOCKS, "what others leave may be borrowed"
    assert hits(engine, calm, salt="calm:alice") == (PROMPT_BLOCKS, 0)
    assert ask(engine, calm, salt="calm:alice") == answer
    assert engine.half.tenant_stats()["calm"]["host_hit_tokens"] - stats["calm"]["host_hit_tokens"] == (
        2 * PROMPT_BLOCKS * BLOCK_SIZE
    )


def test_what_is_not_to_be_cached_is_nowhere(engine: VllmEngine) -> None:
    (private,) = prompts(1, seed=54)
    before = engine.stats()
    answer = ask(engine, private, {"do_not_cache": True})
    assert engine.half.host.num_copies == 0
    assert engine.stats()["backed_up_blocks"] == before["backed_up_blocks"]
    assert hits(engine, private, cache={"do_not_cache": True}) == (0, 0)
    assert ask(engine, private) == answer
    assert hits(engine, private, cache={"do_not_cache": True}) == (PROMPT_BLOCKS, 0), "hits are used all the same"


def test_what_was_not_used_in_time_is_dropped_and_was_never_stored(
    engine: VllmEngine,
) -> None:
    (short,) = prompts(1, seed=55)
    before = engine.stats()
    ask(engine, short, {"ttl_s": 300})
    assert hits(engine, short, cache={"ttl_s": 300}) == (PROMPT_BLOCKS, 0)
    engine.half._control.step(engine.half._shared.clock() + 301)
    assert engine.half.host.num_copies == 0
    assert engine.stats()["backed_up_blocks"] == before["backed_up_blocks"]
    assert hits(engine, short) == (0, 0)


def test_a_wrong_field_costs_nothing_but_a_count(engine: VllmEngine) -> None:
    (prompt,) = prompts(1, seed=56)
    answer = ask(engine, prompt)
    before = engine.stats()["ignored_hints"]
    for wrong in ("pin", {"pin": "yes"}, {"ttl": 3}, {"priority": 10**12}, [1], {"ttl_s": -1}):
        assert ask(engine, prompt, wrong) == answer
    assert engine.stats()["ignored_hints"] == before + 6
    assert engine.stats()["pinned_blocks"] == 0


def test_an_operator_drains_the_host_and_warms_it_again(engine: VllmEngine) -> None:
    (prompt,) = prompts(1, seed=57)
    ask(engine, prompt)
    tree, host = engine.half.tree, engine.half.host
    nodes = [node for node in tree.nodes() if host.node_state(node) is BlockState.RESIDENT]
    path = tree.hashes_of(sorted(nodes, key=tree.depth.__getitem__))
    until(lambda: not engine.half.drain(), engine.core.step_fn, engine.stats)
    assert engine.half.clear_tenant("default") == PROMPT_BLOCKS
    assert engine.half.warm(path)
    engine.drain()
    assert engine.half.host.num_copies == PROMPT_BLOCKS
    assert hits(engine, prompt) == (PROMPT_BLOCKS, 0)
