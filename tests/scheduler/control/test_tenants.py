"""Tenants by their cache salts: shares of the host, quotas, counts, and an operator who clears one."""

from __future__ import annotations

import random

import pytest

from kv_connector.config import Config
from kv_connector.errors import ConfigError, KVConnectorError
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepReport
from tests.scheduler.control.test_hints import Hinted, on_host, prompt
from tests.scheduler.test_half import Asked, admit, make_half, report, run, save

TENANTS = {"a": {"weight": 1}, "b": {"weight": 2}}  # and the default one, of weight 1


def held(half: SchedulerHalf) -> dict[str, float]:
    return {name: stats["held_blocks"] for name, stats in half.tenant_stats().items()}


def of(tenant: str | None, number: int, num_blocks: int = 2, **cache: object) -> Hinted:
    return Hinted(f"{tenant} {number}", prompt(number, num_blocks), cache=cache or None, cache_salt=tenant)


def test_a_tenant_that_floods_pushes_nobody_below_his_share() -> None:
    half, _ = make_half(num_host_blocks=16, tenants=TENANTS)
    for number in range(4):
        save(half, of("b", number))
    assert held(half) == {"default": 0, "a": 0, "b": 8}
    for number in range(10, 40):
        save(half, of("a", number))
        half.check()
    assert held(half) == {"default": 0, "a": 8, "b": 8}, "the default tenant's share is borrowed"
    assert all(on_host(half, of("b", number)) == 2 for number in range(4))
    for number in range(50, 54):
        save(half, Asked(f"r{number}", prompt(number)))
    assert held(half) == {"default": 4, "a": 4, "b": 8}, "and given back"


def test_a_share_is_given_back_whatever_its_blocks_are_worth() -> None:
    half, _ = make_half(num_host_blocks=16, tenants=TENANTS, write_policy="adaptive")
    half.reuse.least_part = 8
    popular = [of("a", number, priority=2) for number in range(8)]
    for _ in range(4):
        for request in popular:
            save(half, request)
    assert held(half)["a"] == 16
    for number in range(20, 24):
        save(half, of("b", number))
    assert held(half) == {"default": 0, "a": 8, "b": 8}


def test_a_quota_holds_also_where_there_is_room() -> None:
    config = {"a": {"quota": 4 << 10}, "b": {"weight": 2}}
    half, _ = make_half(num_host_blocks=16, tenants=config)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=16, block_bytes=1 << 10)])
    for number in range(6):
        save(half, of("a", number))
        assert held(half)["a"] <= 4
    assert on_host(half, of("a", 5)) == 2 and on_host(half, of("a", 0)) == 0
    assert half.host.pool.num_free == 12


def test_whose_a_request_is_its_salt_says_up_to_a_colon() -> None:
    half, _ = make_half(num_host_blocks=40, tenants=TENANTS)
    for number, salt in enumerate(("a", "a:alice", "b:", "other", "", ":a", "ab", "b:a")):
        save(half, of(salt, number))
    assert held(half) == {"default": 8, "a": 4, "b": 4}
    stats = half.tenant_stats()
    assert [stats[name]["requests"] for name in ("default", "a", "b")] == [4, 2, 2]
    assert stats["a"]["queries_tokens"] == 16


def test_hits_are_counted_by_tenant() -> None:
    half, _ = make_half(num_host_blocks=40, tenants=TENANTS, load_choice="sync")
    for tenant in ("a", "b"):
        save(half, of(tenant, 1, 3))
    request = Hinted("again", [*prompt(1, 3), 7], cache_salt="a")
    assert admit(half, request, num_local=4) == 8
    report(half, run(half, request, computed=12))
    stats = half.tenant_stats()
    assert (stats["a"]["device_hit_tokens"], stats["a"]["host_hit_tokens"]) == (4, 8)
    assert (stats["b"]["device_hit_tokens"], stats["b"]["host_hit_tokens"]) == (0, 0)
    assert half.metrics.host_hit_tokens == 8


def test_a_tenant_pins_a_share_of_its_own_share() -> None:
    half, _ = make_half(num_host_blocks=16, tenants=TENANTS)
    for number in range(3):
        save(half, of("a", number, pin=True))
    assert half.metrics.refused_pins == 2
    save(half, of("b", 1, pin=True))
    assert [half.tenant_stats()[name]["pinned_blocks"] for name in ("a", "b")] == [2, 2]


def test_a_tenant_is_cleared_and_nobody_else() -> None:
    half, _ = make_half(num_host_blocks=40, tenants=TENANTS)
    save(half, of("a", 1, pin=True))
    save(half, of("b", 1, pin=True))
    running = of("a", 2)
    admit(half, running)
    plan = run(half, running)
    assert half.clear_tenant("a") == 4
    report(half, plan)
    assert held(half) == {"default": 0, "a": 0, "b": 2}
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2
    half.request_finished(running)
    half.check()
    with pytest.raises(KVConnectorError, match="'c' is not configured: give one of default, a, b"):
        half.clear_tenant("c")


def test_without_tenants_all_are_one() -> None:
    half, _ = make_half(num_host_blocks=8)
    save(half, of("a", 1))
    save(half, of("b", 1))
    assert held(half) == {"default": 4}
    assert half.clear_tenant("default") == 4


@pytest.mark.parametrize("policy", ["write_through", "write_back", "adaptive"])
def test_shares_hold_in_whatever_order_tenants_come(policy: str) -> None:
    rng = random.Random(7)
    config = {"a": {"weight": 1}, "b": {"weight": 3, "quota": 6 << 10}, "default": {"weight": 2}}
    half, blocks = make_half(num_host_blocks=18, tenants=config, write_policy=policy)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=18, block_bytes=1 << 10)])
    shares = {name: stats["share_blocks"] for name, stats in half.tenant_stats().items()}
    assert shares == {"default": 6, "a": 3, "b": 6}
    for _ in range(150):
        tenant = rng.choice(["a", "b", None])
        before = held(half)
        request = of(tenant, rng.randrange(12), rng.randint(1, 5))
        if policy == "write_back":
            blocks.order = list(enumerate(request.block_hashes))
        save(half, request)
        half.check()
        for name, count in held(half).items():
            assert count >= min(before[name], shares[name]) or name == (tenant or "default")
        assert held(half)["b"] <= 6


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ("a", "tenants='a' is not an object"),
        ({"a": 3}, "tenants.a=3 is not an object"),
        ({"a": {"weight": 0}}, "tenants.a.weight=0 is too small: give at least 1"),
        ({"a": {"quota": "much"}}, "tenants.a.quota='much' is not a size"),
        ({"a": {"wait": 1}}, "unknown setting 'tenants.a.wait'.*did you mean 'weight'"),
        ({"": {}}, "has a name of 0 characters"),
        ({f"t{i}": {} for i in range(33)}, "tenants has 33 entries: give at most 32"),
    ],
)
def test_what_is_wrong_with_tenants_is_said_at_the_start(tenants: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping({"host_memory": 1 << 20, "tenants": tenants})


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "half"])
def test_the_share_that_may_be_pinned_is_one(share: object) -> None:
    with pytest.raises(ConfigError, match=r"pinned_share=.* is not a share: give a number from 0 to 1"):
        Config.from_mapping({"pinned_share": share})


def test_of_several_names_that_a_salt_begins_with_the_longest_counts() -> None:
    half, _ = make_half(num_host_blocks=40, tenants={"a": {}, "a:night": {}, "\u00e9quipe": {}, "x" * 64: {}})
    salts = "a:night:user", "a:nightly", "a:night", "\u00e9quipe:1", "x" * 64 + ":1", "x" * 65, ":" * 100_000, "a" * 70
    for number, salt in enumerate(salts):
        save(half, of(salt, number))
    assert held(half) == {"default": 6, "a": 2, "a:night": 4, "\u00e9quipe": 2, "x" * 64: 2}
    assert [half.tenant_of(salt) for salt in ("a:x", "a:night:", "")] == ["a", "a:night", "default"]


def test_what_a_cleared_tenant_has_on_the_device_is_not_saved_before_reuse() -> None:
    half, blocks = make_half(num_host_blocks=40, tenants=TENANTS, write_policy="write_back")
    cleared, other = of("a", 1), of("b", 1)
    for request in (cleared, other):
        save(half, request)
    half.clear_tenant("a")
    blocks.order = list(enumerate([*cleared.block_hashes, *other.block_hashes]))
    report(half, run(half))
    assert held(half) == {"default": 0, "a": 0, "b": 2}
    save(half, of("a", 1))
    half._saves.before_reuse.changed()
    report(half, run(half))
    assert held(half)["a"] == 2, "somebody asks for it"
    half.check()


def test_who_clears_a_tenant_takes_nothing_of_others_nor_what_operators_have_pinned() -> None:
    half, _ = make_half(num_host_blocks=40, tenants={"a": {"quota": "7KiB"}, "b": {}})
    half.update_connector_output([StepReport(0, 0, num_host_blocks=40, block_bytes=1 << 10)])
    pinned, cleared, running = of("a", 1), of("a", 2), of("b", 2)
    half.pin_prefix(pinned.block_hashes, tenant="a", are_given=False)
    admit(half, cleared)
    admit(half, running, 50)
    half.clear_tenant("a")
    assert half.tenant_stats()["a"]["pinned_blocks"] == 2
    report(half, run(half, cleared, running))
    assert held(half) == {"default": 0, "a": 0, "b": 2}, "what runs is saved, but of the tenant's"
    assert [half.tenant_stats()[name]["quota_blocks"] for name in ("a", "b")] == [7, 40]
