"""The linker between SGLang's own pools and classes, called as SGLang calls it: what is saved comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from integration.tests.sglang_driver import Driver, Make, keys, linkers, make_pool
from kv_connector.engines.sglang import fragments, identity, offers
from kv_connector.transfer.engine import TransferEngine
from kv_connector.types import CopyJob


@pytest.fixture
def make() -> Iterator[Make]:
    with linkers() as make:
        yield make


@pytest.mark.parametrize("is_latent", [False, True], ids=["keys and values", "latent"])
def test_pages_come_back_as_they_went(make: Make, is_latent: bool) -> None:
    driver = make(make_pool(is_latent))
    names = keys(6)
    assert driver.save(names, range(1, 7))
    driver.write(keys(6, "others"), range(1, 7))
    assert driver.load("request", names, [9, 3, 4, 20, 21, 22])
    assert driver.holds(names, [9, 3, 4, 20, 21, 22])
    driver.check()


def test_a_prefix_that_was_offered_in_parts_is_one_hit(make: Make) -> None:
    """SGLang offers node by node, and looks up what is behind the node that the device still has."""
    driver = make()
    driver.save(keys(2), [1, 2])
    driver.save(keys(3, first=4), [5, 6, 7])
    driver.save(keys(2, first=2), [3, 4])
    assert driver.load("all", keys(7), range(10, 17))
    assert driver.holds(keys(7), range(10, 17))
    assert driver.load("tail", keys(4, first=3), range(20, 24))
    assert driver.holds(keys(4, first=3), range(20, 24))
    driver.check()


def found_again(driver: Driver, num_pages: int, chunk: int) -> list[int]:
    """Two prompts are computed, in chunks, one behind the other, under one name that a client gives; how many pages of
    each are found then."""
    for name in ("first", "second"):
        names = keys(num_pages, name)
        driver.lookup("request", names)
        for start in range(0, num_pages, chunk):
            end = min(start + chunk, num_pages)
            driver.save(names[start:end], range(1 + start, 1 + end))
    return [driver.lookup(f"{name} again", keys(num_pages, name)) for name in ("first", "second")]


@pytest.mark.parametrize("policy", ["write_through", "adaptive"])
@pytest.mark.parametrize("num_pages", [8, 14], ids=["more than half of the host", "more than the host"])
def test_a_prompt_that_was_computed_in_chunks_is_found_as_one_that_was_not(
    make: Make, policy: str, num_pages: int
) -> None:
    """SGLang offers each chunk alone. Tails go first all the same: nobody reaches them without their heads."""
    whole, chunks = (make(host_memory="48KiB", write_policy=policy) for _ in range(2))  # 12 blocks
    found = found_again(whole, num_pages, num_pages)
    assert sum(found) == 12
    assert found_again(chunks, num_pages, 3) == found


def test_what_was_looked_up_lately_is_known_by_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is looked up."""
    monkeypatch.setattr(fragments, "_LEAST_REMEMBERED", 10)
    order = fragments.PageOrder()
    chats = [fragments.page_hashes(keys(6, f"chat {i}")) for i in range(6)]
    for i, chat in enumerate(chats):
        order.show(chat)
        assert order.in_front_of(chat[0]) is None
        for shown in chats[max(0, i - 1) : i + 1]:
            assert [order.in_front_of(page) for page in shown[1:]] == shown[:-1]
    assert not any(map(order.in_front_of, chats[0])), "it is forgotten some day"


def test_pages_are_saved_by_those_who_ask_again(make: Make) -> None:
    """SGLang offers a prompt's pages twice with its own request; the next request is a hit that counts."""
    driver = make(write_policy="write_through_selective")
    assert [driver.save(keys(3), [1, 2, 3]) for _ in range(4)] == [False, False, True, False]


def test_what_the_host_has_let_go_of_before_it_is_counted_as_used_is_not_saved(make: Make) -> None:
    """It had all of it when it was offered, so its pages were not asked for, and SGLang did not lock them."""
    driver = make(host_memory="48KiB", write_policy="write_through")  # 12 blocks
    driver.save(keys(4), range(1, 5))
    driver.save(keys(8, "newer"), range(5, 13))
    driver.round()
    assert not driver.linker.offload(driver.transfer(keys(4), range(1, 5)))
    driver.half.reset_cache()
    driver.round()
    driver.round()
    assert driver.lookup("request", keys(4)) == 0
    assert driver.linker.stats()["failed_save_jobs"] == 0
    driver.check()


def test_what_is_in_front_of_pages_is_not_saved_with_them(make: Make) -> None:
    """The host has let go of it, and nobody says which page of the device it is in."""
    driver = make()
    driver.lookup("request", keys(4))
    driver.save(keys(2), [1, 2])
    driver.half.reset_cache()
    driver.save(keys(2, first=2), [3, 4])
    assert driver.lookup("in front", keys(1, first=1)) == 0
    driver.check()
    assert driver.linker.stats()["failed_save_jobs"] == 0


def test_pages_whose_slots_are_not_theirs_are_not_saved(make: Make) -> None:
    """Fewer, or none."""
    driver = make()
    odd = driver.transfer(keys(3), [1, 2])
    assert not driver.linker.offload(odd)
    assert not driver.linker.offload(driver.transfer(keys(3)))
    driver.round()
    assert driver.lookup("request", keys(1)) == 0
    driver.check()


def test_what_is_offered_in_a_round_is_saved_in_one_step(make: Make) -> None:
    """And what of it the host has is counted as used first: nobody's save makes room there."""
    driver = make(host_memory="48KiB", write_policy="write_through")  # 12 blocks
    driver.save(keys(4), range(1, 5))
    driver.save(keys(8, "newer"), range(5, 13))
    driver.round()
    driver.write(keys(3, "others"), range(13, 16))
    assert driver.linker.offload(driver.transfer(keys(2, "others"), range(13, 15)))
    assert driver.linker.offload(driver.transfer(keys(1, "others", first=2), [15]))
    assert not driver.linker.offload(driver.transfer(keys(4), range(1, 5)))
    num_jobs = driver.linker._replica._last_job
    assert driver.round() == 2, "both have ended, with their job"
    assert driver.linker._replica._last_job == num_jobs + 1
    assert driver.load("request", keys(4), range(20, 24))
    assert driver.holds(keys(4), range(20, 24))
    assert driver.load("next", keys(3, "others"), range(24, 27))
    assert driver.holds(keys(3, "others"), range(24, 27))
    assert driver.linker.stats()["failed_save_jobs"] == 0
    driver.check()


def test_pages_are_locked_until_the_save_of_their_step_has_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were offered in the round: SGLang would compute others into them, under the copy."""
    driver = make(write_policy="write_through")
    driver.write(keys(3), range(1, 4))
    for number, page in enumerate(range(1, 4)):
        assert driver.linker.offload(driver.transfer(keys(1, first=number), [page]))
    under_way: set[int] = set()
    has_saved = driver.linker._replica.has_saved
    with monkeypatch.context() as patch:
        patch.setattr(driver.linker._replica, "has_saved", lambda job_id: under_way.add(job_id))
        assert [driver.round() for _ in range(3)] == [0, 0, 0]
    assert len(under_way) == 1 and has_saved(*under_way)
    assert driver.round() == 3
    assert driver.load("request", keys(3), range(20, 23))
    driver.check()


@pytest.mark.parametrize("num_missing", [0, 1], ids=["all loaded", "a page computed"])
def test_a_batch_that_computes_little_waits_for_all_of_its_load(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_missing: int
) -> None:
    """It computes what the host lacks of the prompt, as far as the linker is asked about it."""
    driver = make()
    names = keys(8)
    driver.save(names[: 8 - num_missing], range(1, 9 - num_missing))
    urgent = []
    submit = TransferEngine.submit_load

    def watch(engine: TransferEngine, jobs: Sequence[CopyJob], is_urgent: bool = False) -> frozenset[int]:
        urgent.append(is_urgent)
        return submit(engine, jobs, is_urgent)

    monkeypatch.setattr(TransferEngine, "submit_load", watch)
    num_found = driver.lookup("request", names)
    assert num_found == 8 - num_missing
    assert driver.linker.load("request", driver.transfer(names[:num_found], range(1, 1 + num_found)))
    assert driver.forward()
    assert urgent == [not num_missing]
    driver.check()


def test_offers_from_before_a_flush_are_not_told_after_it(make: Make) -> None:
    """SGLang has unlocked them itself, and would unlock others in their place that are yet to be read."""
    driver = make()
    driver.round()
    assert driver.linker.offload(driver.transfer(keys(4), range(1, 5)))
    assert driver.linker.num_completed_offloads()
    driver.linker.reset()
    assert driver.linker.offload(driver.transfer(keys(4, "new"), range(5, 9)))
    assert [driver.round() for _ in range(3)] == [1, 0, 0]
    assert driver.lookup("request", keys(4, "new")) == 4


def test_what_was_offered_before_a_flush_is_not_saved_after_it(make: Make) -> None:
    """Its pages are others' by then."""
    driver = make()
    driver.round()
    assert driver.linker.offload(driver.transfer(keys(3), [1, 2, 3]))
    driver.linker.reset()
    driver.write(keys(3, "others"), [1, 2, 3])
    driver.round()
    assert driver.lookup("request", keys(3)) == 0
    driver.check()


def test_a_flush_forgets_all(make: Make) -> None:
    """Also what was promised, and what is queued."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    driver.lookup("request", keys(3))
    assert driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    driver.lookup("other", keys(3))
    driver.linker.reset()
    assert driver.linker.start_layer_wise_loading() == -1
    assert driver.lookup("next", keys(3)) == 0
    driver.check()
    kept = make(keep_on_flush=True)
    kept.save(keys(3), [1, 2, 3])
    kept.linker.reset()
    assert kept.load("next", keys(3), [4, 5, 6])


def test_adapters_are_named_by_their_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang gives one of the launch line the same id in each start."""
    adapter = SimpleNamespace(lora_name="mine", lora_path=str(tmp_path))
    monkeypatch.setattr(identity, "get_lora", lambda: SimpleNamespace(lora_paths=[adapter]))
    found = []
    for text in ("first", "second"):
        (tmp_path / "adapter_model.safetensors").write_text(text)
        found.append(identity._adapters()["mine"])
    assert found[0] != found[1]


def test_a_setting_that_is_new_is_named() -> None:
    """Whatever a namespace has decides the bytes, but for what is known not to."""
    kernels = SimpleNamespace(_fields={"attention_backend": "triton"}, _subs={})
    fields = {"quantization": None, "new": 3, "download_dir": "/models"}
    bag = SimpleNamespace(_fields=fields, _subs={"kernels": kernels})
    assert identity._leaves(bag) == {"quantization": None, "new": 3, "kernels.attention_backend": "triton"}


def test_an_insert_of_many_nodes_is_looked_at_node_by_node(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang offers the path to each node; a chat has as many nodes as turns. In the next round they are used anew."""
    driver = make()
    names = keys(12)
    nodes = [driver.transfer(names[i : i + 2], range(1 + i, 3 + i)) for i in range(0, 12, 2)]
    driver.save(names, range(1, 13))
    read: list[int] = []
    monkeypatch.setattr(offers, "page_hashes", lambda keys: read.append(len(keys)) or fragments.page_hashes(keys))
    for _ in range(2):
        driver.round()
        read.clear()
        for last in range(len(nodes)):
            assert not any(driver.linker.offload(node) for node in nodes[: last + 1])
        assert read == [2] * len(nodes)
        assert len(driver.linker._offers) == len(nodes)
    driver.linker.reset()
    driver.write(names, range(1, 13))
    assert driver.linker.offload(nodes[0]), "it was forgotten in this round"
    driver.round()
    driver.round()
    driver.check()
