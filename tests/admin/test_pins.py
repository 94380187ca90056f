"""An operator's pins end when their time is over, also where no step of the engine has looked at them."""

from __future__ import annotations

import pytest

from kv_connector.admin import pins as pins_module
from kv_connector.admin.actions import Pin
from kv_connector.admin.base import Owner, Prefix, Refusal, SteeredEngine
from kv_connector.admin.pins import PinBook
from kv_connector.config import Config, TenantConfig
from kv_connector.errors import KVConnectorError
from kv_connector.types import BlockHash
from tests.fakes import make_engine

HASHES = tuple(BlockHash(bytes([number]) * 8) for number in range(3))
PREFIXES = [Prefix(HASHES[:end], are_given=False) for end in range(1, 4)]


def test_a_pin_is_gone_the_moment_its_time_is_over() -> None:
    half = make_engine(Config(host_memory=1 << 20), block_size=4).connector
    assert half is not None
    now = 100.0
    pins = PinBook(half, lambda: now)
    name = pins.pin(PREFIXES[2], 10.0, "default")
    now = 109.5
    assert pins.listed() == [{"id": name, "num_blocks": 3, "seconds_left": 0.5}]
    now = 110.0
    assert pins.listed() == []
    with pytest.raises(KVConnectorError, match="is not pinned"):
        half.unpin_prefix(HASHES)
    with pytest.raises(Refusal, match="no pin has this id"):
        pins.unpin(name)


def test_so_many_prefixes_are_pinned_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "_MOST_PINS", 2)
    half = make_engine(Config(host_memory=1 << 20), block_size=4).connector
    assert half is not None
    pins = PinBook(half, lambda: 0.0)
    names = [pins.pin(PREFIXES[count], None, "default") for count in range(2)]
    with pytest.raises(Refusal, match="2 prefixes are pinned already: unpin some, or give them a ttl_s") as refused:
        pins.pin(PREFIXES[2], None, "default")
    assert refused.value.status == 409 and len(half.pinned_prefixes()) == 2
    assert pins.pin(PREFIXES[0], 5.0, "default") == names[0], "what is pinned may be pinned for another time"
    pins.unpin(names[1])
    pins.pin(PREFIXES[2], None, "default")
    assert len(pins.listed()) == 2


def test_what_is_pinned_stays_so_when_it_is_given_again() -> None:
    half = make_engine(Config(host_memory=1 << 20), block_size=4).connector
    assert half is not None
    pins = PinBook(half, lambda: 0.0)
    half.tree.max_remembered = 0  # what is let go of is forgotten
    pins.pin(PREFIXES[1], None, "default")
    pins.pin(Prefix(HASHES[:2], are_given=True), 7.0, "default")
    for unknown in (HASHES, HASHES[1:2]):
        with pytest.raises(KVConnectorError, match="not known as those of a prompt's blocks"):
            pins.pin(Prefix(unknown, are_given=True), None, "default")
    (pin,) = pins.listed()
    assert pin["num_blocks"] == 2 and pin["seconds_left"] == 7.0
    assert [pin.block_hashes for pin in half.pinned_prefixes()] == [HASHES[:2]]


def test_a_prefix_is_the_tenants_whose_salt_it_has_unless_another_one_is_named() -> None:
    half = make_engine(Config(host_memory=1 << 20, tenants={"a": TenantConfig()}), block_size=4).connector
    assert half is not None
    owners = Owner(None, "a:1"), Owner(None, "b"), Owner(None, ""), Owner("a", ""), Owner("default", "a:1")
    assert [owner.name(half) for owner in owners] == ["a", "default", "default", "a", "default"]
    with pytest.raises(Refusal, match="tenant 'b' is not configured: give one of default, a"):
        Owner("b", "a:1").name(half)
    engine = SteeredEngine(half, 1 << 20, PinBook(half, lambda: 0.0))
    Pin(PREFIXES[2], None, owners[0]).run(engine)
    assert half.tenant_stats()["a"]["pinned_blocks"] == 3
