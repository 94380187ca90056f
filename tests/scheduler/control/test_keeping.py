"""Pins of the engine's last start, come back: with a real file behind a half whose plans are read by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_connector.base import SchedulerOutput
from kv_connector.build import build_scheduler
from kv_connector.config import Config
from kv_connector.index import BlockGroup, CacheIdentity
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.control.hints import MOST_TTL
from kv_connector.scheduler.control.keeping import NoKeeper, WarningKeeper
from kv_connector.storage.checksums import CRC32
from kv_connector.storage.filesystem.pin_keeper import FolderPinKeeper
from kv_connector.types import KeptPin, StepReport, StorageAction
from tests.scheduler.control.test_hints import Hinted
from tests.scheduler.storage.test_companion import Ticks, make_half, report, step
from tests.scheduler.test_half import Asked, admit, run


class Remembered(NoKeeper):
    """What the last start has pinned."""

    def __init__(self, pins: Sequence[KeptPin]) -> None:
        self._pins = pins

    def take(self) -> Sequence[KeptPin]:
        return self._pins


PIN = {"pin": True, "ttl_s": 60}


def prompt(number: int, num_blocks: int = 10) -> list[int]:
    return [1000 * number + i for i in range(4 * num_blocks + 1)]


@contextmanager
def started(
    root: Path, num_host_blocks: int = 100, identity: bytes = bytes(32)
) -> Iterator[tuple[SchedulerHalf, Ticks]]:
    """An engine over a folder, from its start to its end."""
    half, _, ticks = make_half(num_host_blocks, prefetch="best_effort")
    half.keep_pins(FolderPinKeeper(root, identity, CRC32, clock=lambda: 1e9 + ticks.now))
    yield half, ticks
    half.check()
    half.shutdown()


def ask(half: SchedulerHalf, name: str, number: int, cache: object = None) -> None:
    request = Hinted(name, prompt(number), cache=cache)
    half.on_new_request(request)
    admit(half, request)
    half.request_finished(request)


def pinned(half: SchedulerHalf) -> float:
    return half.get_kv_connector_stats()["pinned_blocks"]


def come_back(half: SchedulerHalf, found: int) -> None:
    """Steps of an engine without requests, for as long as it wants any; storage has so many blocks of each prefix."""
    while half.has_pending_push_work():
        for job in step(half):
            report(half, [job], found=found)


def test_a_request_s_pin_comes_back_and_its_blocks_are_read_from_storage(tmp_path: Path) -> None:
    with started(tmp_path) as (half, _):
        ask(half, "a", 1, PIN)
        ask(half, "b", 2)
    with started(tmp_path) as (half, _):
        assert half.has_pending_push_work(), "an engine that rests is stepped for it"
        come_back(half, found=10)
        assert pinned(half) == 10 == half.host.num_copies


def test_it_ends_when_it_was_to(tmp_path: Path) -> None:
    with started(tmp_path) as (half, ticks):
        ticks.now += 5
        ask(half, "a", 1, PIN)
    with started(tmp_path) as (half, ticks):
        ticks.now += 64.5
        come_back(half, found=0)
        assert pinned(half) == 10
        ticks.now += 0.6
        run(half)
        assert pinned(half) == 0
    with started(tmp_path) as (half, _):
        assert not half.has_pending_push_work()


@pytest.mark.parametrize("is_back", [True, False])
def test_what_is_let_go_of_does_not_come_back_whether_it_was_pinned_again_by_then(
    tmp_path: Path, is_back: bool
) -> None:
    with started(tmp_path) as (half, _):
        ask(half, "a", 1, PIN)
        ask(half, "b", 2, PIN)
    with started(tmp_path, num_host_blocks=100 if is_back else 0) as (half, _):
        if is_back:
            come_back(half, found=0)
        ask(half, "c", 1, {"pin": False})
    with started(tmp_path) as (half, _):
        come_back(half, found=0)
        assert pinned(half) == 10


def test_a_tenant_that_was_cleared_has_no_pins_that_come_back(tmp_path: Path) -> None:
    with started(tmp_path) as (half, _):
        ask(half, "a", 1, PIN)
    with started(tmp_path, num_host_blocks=0) as (half, _):
        half.clear_tenant("default")
    with started(tmp_path) as (half, _):
        assert not half.has_pending_push_work()


def test_pins_of_engines_of_other_models_are_not_read(tmp_path: Path) -> None:
    with started(tmp_path) as (half, _):
        ask(half, "a", 1, PIN)
    with started(tmp_path, identity=bytes(31) + b"\1") as (half, _):
        assert not half.has_pending_push_work()


def test_requests_pins_wait_for_room_and_are_kept_meanwhile(tmp_path: Path) -> None:
    with started(tmp_path) as (half, _):
        for number in (1, 2, 3):
            ask(half, str(number), number, PIN)
        assert pinned(half) == 30
    with started(tmp_path, num_host_blocks=40) as (half, _):
        come_back(half, found=0)
        assert pinned(half) == 20, "half of the host"
        assert not half.has_pending_push_work(), "nobody waits for what may never come"
    with started(tmp_path, num_host_blocks=40) as (half, _):
        come_back(half, found=0)
        half.update_connector_output([StepReport(1, 0, num_host_blocks=100)])
        come_back(half, found=0)
        assert pinned(half) == 30


def test_an_operator_s_pin_comes_back_at_once_and_can_be_undone(tmp_path: Path) -> None:
    hashes = Asked("r", prompt(1)).block_hashes
    with started(tmp_path) as (half, _):
        half.pin_prefix(hashes, are_given=False)
        half.pin_prefix(hashes, are_given=False)
    with started(tmp_path, num_host_blocks=0) as (half, _):
        assert half.pinned_prefixes() == [KeptPin(tuple(hashes), "default", None, False)]
        half.unpin_prefix(hashes)
        assert pinned(half) == 0, "once, however often it was pinned"
    with started(tmp_path) as (half, _):
        assert half.pinned_prefixes() == []


def test_more_prefixes_than_are_read_at_a_time_are_read_one_behind_the_other(tmp_path: Path) -> None:
    with started(tmp_path, num_host_blocks=2000) as (half, _):
        for number in range(70):
            ask(half, str(number), number, PIN)
    with started(tmp_path, num_host_blocks=2000) as (half, ticks):
        jobs = [job for _ in range(70) for job in step(half)]  # storage answers nothing yet
        assert pinned(half) == 700 and len(jobs) == 64
        assert not half._control.is_busy, "no more may be read at a time, so no step is asked for"
        ticks.now += 40
        assert step(half) == (), "they are taken to be lost"
        for _ in range(6):
            assert half._control.is_busy
            report(half, step(half), found=0)
        assert not half._control.is_busy
        report(half, jobs, found=0)


def test_where_storage_keeps_no_pins_the_first_one_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    half, _, _ = make_half(prefetch="best_effort")
    half.keep_pins(WarningKeeper("mooncake"))
    assert not caplog.messages
    for number in (1, 2):
        ask(half, str(number), number, PIN)
    (line,) = caplog.messages
    assert "'mooncake'" in line and "end with this engine" in line


def test_storage_is_asked_for_what_the_host_lacks_and_for_nothing_that_it_has(tmp_path: Path) -> None:
    with started(tmp_path) as (half, _):
        ask(half, "a", 1, PIN)
    with started(tmp_path) as (half, _):
        jobs = []
        while half.has_pending_push_work():
            for job in step(half):
                jobs.append((job.action, job.num_blocks))
                report(half, [job], found=4)
        assert jobs == [(StorageAction.LOOK_UP, 0), (StorageAction.FETCH, 4)]
        assert pinned(half) == 10 and half.host.num_copies == 4


def test_a_prefix_of_which_there_is_nothing_to_read_is_in_the_way_of_no_other() -> None:
    """Five hashes are no hit where it takes six."""
    groups = BlockGroup(hashes_per_block=3), BlockGroup(hashes_per_block=2)
    half, _, ticks = make_half(groups=groups, prefetch="best_effort")
    first, second = Asked("first", prompt(1, 5)), Asked("second", prompt(2, 12))
    kept = [KeptPin(tuple(r.block_hashes), "default", None, False) for r in (first, second)]
    half.keep_pins(Remembered(kept))
    found = []
    while half.has_pending_push_work() and ticks.now < 60:
        ticks.now += 0.5
        for job in step(half):
            found.append(job.action)
            report(half, [job], found=len(job.split_keys()))
    assert found.count(StorageAction.FETCH) == 2, "both groups of the second prefix"


def test_what_was_unpinned_or_cleared_before_it_was_read_is_not_read() -> None:
    half, _, _ = make_half(prefetch="best_effort", tenants={"a": {}})
    operators, cleared = Asked("o", prompt(1)), Asked("c", prompt(2))
    operators_pin = KeptPin(tuple(operators.block_hashes), "default", None, False)
    half.keep_pins(Remembered([operators_pin, KeptPin(tuple(cleared.block_hashes), "a", 60.0, True)]))
    half._control._returning.step(0.0)  # one is pinned again, and none read yet
    half._control._returning._to_warm.appendleft(operators_pin)
    half.unpin_prefix(operators.block_hashes)
    half.clear_tenant("a")
    assert pinned(half) == 0
    half.build_connector_meta(SchedulerOutput())
    assert step(half) == () and not half._control.is_busy


def test_what_is_read_for_a_tenant_is_charged_to_it() -> None:
    half, _, _ = make_half(prefetch="best_effort", tenants={"a": {"weight": 1}, "b": {"weight": 8}})
    request = Asked("a", prompt(1))
    half.keep_pins(Remembered([KeptPin(tuple(request.block_hashes), "a", None, False)]))
    charged: list[int] = []
    hand_out = half.host._hand_out

    def watched(num_free: int, victims: list[int], tenant: int) -> list[int]:
        charged.append(tenant)
        return hand_out(num_free, victims, tenant)

    half.host._hand_out = watched  # type: ignore[method-assign]
    come_back(half, found=10)
    assert set(charged) == {1}
    other = Asked("warmed", prompt(2))
    assert half.warm(other.block_hashes, "b", are_given=False)
    come_back(half, found=10)
    assert set(charged) == {1, 2}
    assert {name: stats["held_blocks"] for name, stats in half.tenant_stats().items()} == {
        "default": 0,
        "a": 10,
        "b": 10,
    }


def test_of_more_than_the_host_holds_as_much_is_read_as_fits() -> None:
    half, _, _ = make_half(prefetch="best_effort")
    pins = [Asked(str(number), prompt(number, 30)) for number in range(5)]
    half.keep_pins(Remembered([KeptPin(tuple(r.block_hashes), "default", None, False) for r in pins]))
    come_back(half, found=30)
    assert half.host.num_copies == 90
    half.update_connector_output([StepReport(half._step, 0, num_host_blocks=200)])
    come_back(half, found=30)
    assert half.host.num_copies == 150


def test_only_what_operators_have_pinned_is_listed_as_theirs(tmp_path: Path) -> None:
    with started(tmp_path) as (half, _):
        ask(half, "a", 1, PIN)
        half.pin_prefix((), are_given=False)
        assert half.pinned_prefixes() == [], "nothing is pinned of a prefix without blocks, nor kept"


def test_a_request_s_pin_without_an_end_or_with_a_far_one_ends_as_any() -> None:
    half, _, ticks = make_half(prefetch="best_effort")
    requests = [Asked(str(number), prompt(number)) for number in (1, 2)]
    seconds: list[float | None] = [None, 1e9]  # whatever a file says, or a clock that was set back
    kept = [KeptPin(tuple(r.block_hashes), "default", s, True) for r, s in zip(requests, seconds, strict=True)]
    half.keep_pins(Remembered(kept))
    come_back(half, found=0)
    assert pinned(half) == 20
    ticks.now += MOST_TTL + 1
    run(half)
    assert pinned(half) == 0


def refused(tmp_path: Path) -> None:
    """The file of an engine with pins that a host of ten blocks has no room for: a prompt, and what goes on from it."""
    with started(tmp_path) as (half, _):
        ask(half, "short", 1, PIN)
        request = Hinted("long", prompt(1, 12), cache=PIN)
        half.on_new_request(request)
        admit(half, request)
        half.request_finished(request)


def test_what_is_over_by_the_time_that_there_is_room_does_not_come_back(tmp_path: Path) -> None:
    refused(tmp_path)
    with started(tmp_path, num_host_blocks=10) as (half, ticks):
        come_back(half, found=0)
        ticks.now += 100
        half.update_connector_output([StepReport(half._step, 0, num_host_blocks=100)])
        come_back(half, found=0)
        assert pinned(half) == 0


def test_what_is_let_go_of_while_there_is_no_room_does_not_come_back(tmp_path: Path) -> None:
    refused(tmp_path)
    with started(tmp_path, num_host_blocks=10) as (half, _):
        come_back(half, found=0)
        ask(half, "end", 1, {"pin": False})
        half.update_connector_output([StepReport(half._step, 0, num_host_blocks=100)])
        come_back(half, found=0)
        assert pinned(half) == 12, "the longer one is not of this prompt"
        assert [len(pin.block_hashes) for pin in half._control.pins._pins.values()] == [12], "and has the shorter in it"


def test_pins_of_tenants_come_back_as_theirs_and_one_is_cleared_without_the_others() -> None:
    half, _, _ = make_half(num_host_blocks=0, prefetch="best_effort", tenants={"a": {}, "b": {}})
    requests = [(name, Asked(name, prompt(number))) for number, name in enumerate(("a", "b", "gone"))]
    half.keep_pins(Remembered([KeptPin(tuple(r.block_hashes), name, 60.0, True) for name, r in requests]))
    assert not half.has_pending_push_work(), "an engine rests until there is host memory"
    half.clear_tenant("a")
    half.update_connector_output([StepReport(half._step, 0, num_host_blocks=300)])
    come_back(half, found=0)
    stats = half.tenant_stats()
    assert {name: stats[name]["pinned_blocks"] for name in stats} == {"default": 10, "a": 0, "b": 10}


def test_pins_come_back_where_blocks_follow_one_another_as_before(tmp_path: Path) -> None:
    """Of windows nothing says what a block follows, so what was given for a prefix may be none."""
    config = Config.from_mapping({"host_memory": 1 << 20, "storage": {"path": str(tmp_path), "capacity": 8 << 20}})
    identity = CacheIdentity("model", "float16", "layout", 4)
    hashes, windows = Asked("r", prompt(1)).block_hashes[3:5], (BlockGroup(window_blocks=2),)
    half = build_scheduler(config, 4, identity=identity, groups=windows)
    half.pin_prefix(hashes)
    half.shutdown()
    for groups, expected in ((windows, [tuple(hashes)]), ((BlockGroup(),), [])):
        half = build_scheduler(config, 4, identity=identity, groups=groups)
        assert [pin.block_hashes for pin in half.pinned_prefixes()] == expected
        half.shutdown()
