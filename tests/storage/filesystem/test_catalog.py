"""What is known of packs, without a file."""

from __future__ import annotations

from kv_connector.storage.filesystem.catalog import Pack, PackCatalog


def test_a_pack_that_came_back_is_offered_once_and_in_its_turn() -> None:
    """It was stored, evicted and stored again: its old place in the queue says nothing any more."""
    catalog = PackCatalog(lambda: 0)
    catalog.add([(Pack("back", 4096, 1, None), ())])
    catalog.forget("back")
    catalog.add([(Pack("back", 4096, 3, None), ()), (Pack("other", 4096, 2, None), ())])
    offered = [pack.name for _ in range(4) if (pack := catalog.take_oldest()) is not None]
    assert offered == ["other", "back"]
