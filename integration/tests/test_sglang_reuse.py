"""What is learned from what SGLang asks for, and what stays on the host because of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.tests.sglang_driver import Driver, Make, keys, linkers
from kv_connector.engines.sglang import fragments, linker
from kv_connector.types import BlockHash
from tests.waiting import until

CHAT = 3


@pytest.fixture
def make() -> Iterator[Make]:
    with linkers() as make:
        yield make


def turn(driver: Driver, name: str, number: int) -> int:
    """A request for a chat's pages, none of which the device has; how many the host had. They are offered when they
    are computed, and when it ends."""
    names, pages = keys(CHAT, name), range(1, 1 + CHAT)
    request_id = f"{name} {number}"
    if found := driver.lookup(request_id, names):
        assert driver.linker.load(request_id, driver.transfer(names[:found], pages[:found]))
        assert driver.forward()
    for _ in range(2):
        driver.save(names, pages)
    return found


def test_of_chats_that_do_not_all_fit_as_many_stay_as_do(make: Make) -> None:
    """By recency each would go before it comes back. Prompts that come once between them take no place."""
    driver = make(host_memory="48KiB", write_policy="adaptive")  # 12 blocks: 4 chats
    driver.half.reuse.least_part = 4
    found = []
    for number in range(12):
        turn(driver, f"once {number}", 0)
        found.append(sum(turn(driver, f"chat {i}", number) for i in range(6)))
    assert found[-6:] == [12] * 6
    driver.check()


def test_what_a_request_misses_counts_once_when_it_is_looked_up(make: Make) -> None:
    """However often that is, whatever the device has of it by then, and not again when it gives up."""
    driver = make(host_memory="48KiB")
    turn(driver, "chat", 0)
    driver.half.reset_cache()
    names, tree = keys(CHAT, "chat"), driver.half.tree
    time = tree.time
    for first in (0, 0, 1, 0):
        assert driver.lookup("again", names[first:]) == 0
    driver.learn()
    assert tree.time == time + CHAT
    driver.linker.reset()
    assert tree.time == time + CHAT
    assert driver.lookup("gives up", keys(2, "other")) == 0
    driver.linker.reset()
    assert tree.time == time + CHAT + 2, "of what was cached before"


def test_what_nobody_computes_counts_after_a_while(make: Make) -> None:
    driver = make()
    time = driver.half.tree.time
    assert driver.lookup("gives up", keys(CHAT)) == 0
    for _ in range(linker._QUIET_ROUNDS):
        driver.round()
    assert driver.half.tree.time == time + CHAT


@pytest.mark.parametrize("prefetch", ["best_effort", "timeout"])
def test_what_storage_brings_for_a_request_was_not_known_to_it(make: Make, tmp_path: Path, prefetch: str) -> None:
    """A prompt that comes once after a restart would be like one that comes back, at once."""
    storage = {"path": str(tmp_path), "capacity": "64MiB", "prefetch": prefetch}
    names = keys(CHAT)
    before = make(storage=storage)
    before.save(names, range(1, 1 + CHAT))
    until(lambda: before.linker.stats()["backed_up_blocks"] >= CHAT, before.round, before.linker.stats)
    driver = make(storage=storage)
    tree = driver.half.tree
    driver.lookup("comes once", names)
    until(lambda: driver.linker.stats()["host_cached_blocks"] >= CHAT, driver.round, driver.linker.stats)
    driver.save(names, range(1, 1 + CHAT))
    assert tree.time == CHAT
    assert [round(tree.visits[node]) for node in tree.match(fragments.page_hashes(names))] == [0] * CHAT
    assert driver.half.metrics.histograms["reuse_distance_blocks", "all"].count == 0


def test_a_request_that_has_the_name_of_one_before_asks_for_itself(make: Make) -> None:
    """A client may name its requests, and all turns of a chat alike. What turns are longer by tells them apart."""
    driver = make(host_memory="48KiB")
    for count in (2, 3, 6):
        time = driver.half.tree.time
        driver.lookup("chat", keys(count))
        driver.learn()
        assert driver.half.tree.time == time + count


def test_a_request_that_has_the_name_of_one_before_finds_its_own_pages(make: Make) -> None:
    """Its prompt is as long."""
    driver = make()
    driver.save(keys(CHAT), range(1, 1 + CHAT))
    assert driver.lookup("chat", keys(CHAT)) == CHAT
    assert driver.lookup("chat", keys(CHAT, "other")) == 0
    assert driver.load("chat", keys(CHAT), range(10, 10 + CHAT))
    driver.check()


def test_a_request_s_own_offers_are_no_visits(make: Make) -> None:
    """SGLang offers what a request has computed several times, or a prompt that comes once would be like one that comes
    back."""
    driver = make()
    for number in range(3):
        turn(driver, "chat", number)
        tree = driver.half.tree
        nodes = tree.match(fragments.page_hashes(keys(CHAT, "chat")))
        assert [round(tree.visits[node]) for node in nodes] == [number] * CHAT


def test_a_node_that_is_offered_with_all_that_is_behind_it_is_used_once(make: Make) -> None:
    driver = make(write_policy="write_through")
    driver.save(keys(4), range(1, 5))
    driver.round()
    tree = driver.half.tree
    (node,) = tree.match(fragments.page_hashes(keys(1)))
    hits = tree.hits[node]
    for _ in range(3):
        assert not driver.linker.offload(driver.transfer(keys(2), [1, 2]))
    driver.round()
    assert tree.hits[node] == hits + 1


def test_how_far_apart_uses_are_is_told_in_pages_that_requests_ask_for(make: Make) -> None:
    """By which an operator sees how large a host would have to be. A use on the device is one from which it counts."""
    driver = make()
    distances = driver.half.metrics.histograms["reuse_distance_blocks", "all"]
    turn(driver, "chat", 0)
    driver.lookup("nobody knows these", keys(5, "other"))
    assert distances.count == 0
    driver.lookup("comes back", keys(CHAT, "chat"))
    driver.learn()
    assert (distances.count, sum(distances.sums)) == (1, 5)
    driver.lookup("nobody knows these either", keys(4, "another"))
    driver.save(keys(CHAT, "chat"), range(1, 1 + CHAT))
    driver.lookup("nor this", keys(1, "one more"))
    driver.lookup("comes back again", keys(CHAT, "chat"))
    driver.learn()
    assert (distances.count, sum(distances.sums)) == (2, 5 + 1)


def insert(driver: Driver, *nodes: list[str]) -> None:
    """As SGLang does: each node is offered behind all in front of it that are not locked."""
    page, pages, locked = 1, [], -1
    for end, node in enumerate(nodes):
        pages.append(range(page, page := page + len(node)))
        for i in range(locked + 1, end + 1):
            if driver.linker.offload(driver.transfer(nodes[i], pages[i])):
                locked = i


def test_what_the_device_serves_of_a_request_counts_once_too(make: Make) -> None:
    """SGLang looks up what the device lacks alone. That a chat goes on shows when the rest of its prompt is offered
    behind the nodes that the device had; and the request's end, which offers all of them again, is no other turn."""
    driver = make()
    nodes = [keys(2, "one"), keys(1, "two"), keys(3, "three"), keys(2, "four")]
    tree = driver.half.tree

    def visits() -> list[list[int]]:
        rows = [tree.match(fragments.page_hashes(node)) for node in nodes]
        return [[round(tree.visits[row]) for row in each] for each in rows]

    def compute(count: int) -> None:
        insert(driver, *nodes[:count])
        driver.round()
        driver.round()

    driver.lookup("first", nodes[0])
    compute(1)
    compute(2)
    assert visits()[:2] == [[0, 0], [0]]
    driver.lookup("second", nodes[2])
    compute(3)
    assert visits()[:3] == [[1, 1], [1], [0, 0, 0]]
    compute(4)
    assert visits()[:3] == [[1, 1], [1], [0, 0, 0]]
    driver.check()


def test_what_the_device_serves_counts_where_the_host_has_let_go_of_it_too(make: Make) -> None:
    """SGLang locks it for a save, and does not offer it again with what is behind it."""
    driver, front = make(host_memory="48KiB", write_policy="write_through"), keys(2, "front")  # 12 blocks
    driver.save(front, [1, 2])
    driver.save(keys(12, "others"), range(3, 15))
    driver.round()
    tree = driver.half.tree
    nodes = tree.match(fragments.page_hashes(front))
    assert driver.half.host.absent(nodes) == [0, 1]
    driver.lookup("request", keys(1, "tail"))
    insert(driver, front, keys(1, "tail"))
    driver.learn()
    assert [round(tree.visits[node]) for node in nodes] == [1, 1]
    driver.round()
    driver.check()


def test_the_host_is_of_no_use_for_what_the_device_serves(make: Make) -> None:
    """However often a chat comes back to it."""
    driver, front = make(write_policy="write_through"), keys(2, "front")
    tree, reuse = driver.half.tree, driver.half.reuse
    reuse.least_part = 1
    driver.save(front, [1, 2])
    for number in range(10):
        driver.lookup(f"request {number}", keys(1, f"tail {number}"))
        insert(driver, front, keys(1, f"tail {number}"))
        driver.round()
    nodes = tree.match(fragments.page_hashes(front))
    assert len(nodes) == len(front)
    for node in nodes:
        assert tree.visits[node] > 1
        assert reuse.worth(node) == 0
    driver.check()


def test_however_often_a_request_is_looked_up_what_is_in_front_has_one_visit(make: Make) -> None:
    """As the device gets some of its pages, and loses them."""
    driver, front, rest = make(write_policy="write_through"), keys(2, "front"), keys(4, "rest")
    driver.save(front, [1, 2])
    for first in (0, 1, 0):
        driver.lookup("waits", rest[first:])
    for _ in range(3):  # itself, and others that the device serves
        insert(driver, front, rest)
        driver.round()
        driver.round()
    tree = driver.half.tree
    assert [round(tree.visits[node]) for node in tree.match(fragments.page_hashes(front))] == [1, 1]
    driver.check()


def test_what_a_prompt_s_last_chunk_computes_is_not_in_front_of_another_prompt(make: Make) -> None:
    """Both are inserted in one round."""
    driver, chunks = make(write_policy="write_through"), [keys(2, "long"), keys(2, "long", first=2)]
    driver.lookup("long", [*chunks[0], *chunks[1]])
    insert(driver, chunks[0])
    driver.round()
    driver.round()
    driver.lookup("other", keys(1, "other"))
    driver.learn()
    for chunk, pages in zip(chunks, ([1, 2], [3, 4]), strict=True):
        driver.linker.offload(driver.transfer(chunk, pages))
    time = driver.half.tree.time
    insert(driver, keys(1, "other"))
    driver.round()
    tree = driver.half.tree
    assert tree.time == time
    assert [round(tree.visits[node]) for node in tree.match(fragments.page_hashes([*chunks[0], *chunks[1]]))] == [0] * 4


def nodes_named(names: str) -> list[list[BlockHash]]:
    """A node of one page for each letter."""
    return [[BlockHash(name.encode() * 32)] for name in names]


def offered(inserts: fragments.Inserts, *nodes: list[BlockHash], locked: str = "", new: str = "") -> list[str]:
    """What the device is taken to have had in front of each of them."""
    front = []
    for node in nodes:
        name = chr(node[0][0])
        front.append("".join(chr(each[0][0]) for each in inserts.offer(node, name in new, name in locked)))
    return front


def test_what_others_offer_is_not_taken_for_what_is_in_front() -> None:
    """Two requests of one round are inserted one behind the other, and of one the node in front is locked."""
    inserts = fragments.Inserts()
    a, b, c, d, e = nodes_named("abcde")
    inserts.show(c)
    inserts.show(d)
    inserts.show(e)
    assert offered(inserts, a, a, b, a, b, c) == ["", "", "", "", "", "ab"]
    assert offered(inserts, a, a, d) == ["", "", "a"]
    assert offered(inserts, e) == [""], "the node in front of it is being saved"
    assert offered(inserts, a, b, c, d, e) == [""] * 5, "each counts once"
    assert offered(inserts, a, a) == [""] * 2
    inserts.begin_round()
    inserts.show(c)
    assert offered(inserts, c) == [""]


def test_who_has_nothing_in_front_is_not_taken_to_have_what_another_request_has() -> None:
    """Before it in the round another one computed the last chunk of its prompt, or found all of it on the device."""
    inserts = fragments.Inserts()
    a, b, c, d = nodes_named("abcd")
    inserts.show(d)
    assert offered(inserts, a, b, c, d, new="c", locked="c") == [""] * 4
    inserts.show(d)
    assert offered(inserts, c, d, new="c", locked="c") == [""] * 2, "the chunks in front of it are being saved"
    inserts.show(d)
    assert offered(inserts, a, a, b, d) == [""] * 4
    inserts.show(d)
    assert offered(inserts, a, a, b, a, b, d) == [""] * 5 + ["ab"], "it is offered again with what is behind it"


def test_what_is_locked_as_it_is_offered_is_in_front_too() -> None:
    """The host lacks some of what the device has: each node is offered once then."""
    inserts = fragments.Inserts()
    a, b, c = nodes_named("abc")
    inserts.show(c)
    assert offered(inserts, a, b, c, locked="ab") == ["", "", "ab"]
    inserts.show(c)
    assert offered(inserts, a, a, b, c, locked="b") == ["", "", "", "ab"]


def test_each_of_two_requests_for_the_same_counts() -> None:
    """They are looked up in one round, and inserted one behind the other."""
    inserts = fragments.Inserts()
    a, b = nodes_named("ab")
    inserts.show(b)
    inserts.show(b)
    assert [offered(inserts, a, a, b) for _ in range(3)] == [["", "", "a"], ["", "", "a"], ["", "", ""]]


def test_requests_that_give_up_are_forgotten_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were looked up the longest ago: nobody says that they have."""
    monkeypatch.setattr(fragments, "_MOST_LOOKED_UP", 2)
    inserts = fragments.Inserts()
    a, b, c, d = nodes_named("abcd")
    for node in (b, c, b, d):
        inserts.show(node)
    assert len(inserts._looked_up) == 2
    assert [offered(inserts, a, a, node)[-1] for node in (c, d, b)] == ["", "a", "a"]
