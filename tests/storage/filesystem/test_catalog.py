"""What is known of packs, without a file."""

from __future__ import annotations

from kv_connector.storage.filesystem.catalog import Facts, Pack, PackCatalog
from kv_connector.storage.filesystem.packs import PackHeader
from tests.storage.storages import BLOCK, IDENTITY, key


def facts(name: str, used_ns: int, text: bytes | None = None) -> Facts:
    return name, BLOCK, used_ns, text


def taken(catalog: PackCatalog) -> list[str]:
    """Names of the packs, in the order in which they are to go."""
    packs: list[Pack] = []
    while (oldest := catalog.take_oldest()) is not None:
        packs.append(oldest[0])
    return [pack.name for pack in packs]


def test_a_pack_that_came_back_is_offered_once_and_in_its_turn() -> None:
    """It was stored, evicted and stored again: its old place in the queue says nothing any more."""
    catalog = PackCatalog(lambda: 0)
    catalog.add([(facts("back", 1), ())])
    catalog.forget("back")
    catalog.add([(facts("back", 3), ()), (facts("other", 2), ())])
    assert taken(catalog) == ["other", "back"]


def test_a_pack_that_was_used_since_goes_behind_those_that_were_not() -> None:
    catalog = PackCatalog(lambda: 0)
    text = PackHeader(IDENTITY, BLOCK, (key(1),), (bytes(4),)).text()
    catalog.add([(facts("used", 1, text), [key(1)]), (facts("other", 2), ())])
    (slot,) = catalog.slots([key(1)])
    assert slot is not None
    catalog.used([slot.pack], 3)
    assert taken(catalog) == ["other", "used"]


def test_who_holds_a_pack_that_is_gone_does_not_take_the_one_that_came_back_for_it() -> None:
    catalog = PackCatalog(lambda: 0)
    text = PackHeader(IDENTITY, BLOCK, (key(1),), (bytes(4),)).text()
    catalog.add([(facts("back", 1, text), [key(1)])])
    (slot,) = catalog.slots([key(1)])
    assert slot is not None and catalog.text(slot.pack) == text
    gone = slot.pack
    catalog.forget("back")
    catalog.add([(facts("back", 3, text), [key(1)])])
    assert catalog.text(gone) is None
    catalog.used([gone], 5)
    catalog.queue(gone, 5)
    assert catalog.hide(gone) == 0 and not catalog.drop(gone, [0])
    assert catalog.num_blocks == 1
    assert [used_ns for _, _, used_ns, _ in catalog.packs()] == [3]
    assert taken(catalog) == ["back"]


def test_of_a_listing_what_is_new_is_told_and_what_it_lacks_is_forgotten() -> None:
    catalog = PackCatalog(lambda: 0)
    for known, listed in [("abc", "abc"), ("abc", "ac"), ("abc", "acd"), ("abc", "de"), ("abc", "abcd"), ("", "a")]:
        catalog.keep([])
        catalog.add((facts(name, 1), ()) for name in known)
        assert sorted(catalog.keep(list(listed))) == sorted(set(listed) - set(known))
        assert [name for name in "abcde" if name in catalog] == sorted(set(listed) & set(known))
        assert catalog.used_bytes == len(set(listed) & set(known)) * BLOCK


def test_what_is_used_is_in_order_also_where_the_clock_stands_still_or_goes_back_a_little() -> None:
    """Clocks are coarse: two writes of one tick would else go in any order."""
    ticks = [100, 100, 100, 90, 90, 102, 102]
    clock = iter(ticks)
    catalog = PackCatalog(lambda: next(clock))
    times = [catalog.now() for _ in ticks]
    assert times == sorted(set(times))
    catalog.add((facts(f"pack {time}", time), ()) for time in reversed(times))
    assert taken(catalog) == [f"pack {time}" for time in times]
