"""Blocks that are coded in slots on their way: what arrives is what was sent, bit for bit, whatever it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.config import PeerConfig
from kv_connector.errors import ConfigError, TransferError
from kv_connector.peer.base import Ids, PeerCounters
from kv_connector.peer.carriers.staged import forms
from kv_connector.peer.carriers.staged.forms import Packed
from kv_connector.peer.carriers.staged.slot_sender import SlotSender
from kv_connector.peer.wire.channel import SideChannel
from kv_connector.peer.wire.messages import CodedSlotFilled, RingMapped, SlotFilled, Stop, WireMessage
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.host_form import coded_form
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.coded_slots import DeviceCoder, HostCoder, Rows
from kv_connector.worker.peers import pool_of
from tests.copies import copy_now
from tests.peer.coded_pools import ALL_PATTERNS, NOISE, NUM_BLOCKS, STAGING, CodedPool, LateMarker, open_staged
from tests.peer.peers import STAGED, Arrived, Lost, Message, Push, Pushed, Side, ids, link_up, until

SLOT = STAGING // 8
NUM_REGIONS = 6
FITTING = [block for block in range(NUM_BLOCKS) if block not in NOISE]
POOLS = {
    "cpu": CodedPool,
    "late": lambda seed, **named: CodedPool(seed, **named).as_device(),
    "cuda": lambda seed, **named: CodedPool(seed, torch.device("cuda", 0), **named),
}
DEVICES = ["cpu", "late", pytest.param("cuda", marks=pytest.mark.gpu)]


class Two:
    """A producer and a consumer, with a link between them; `codes` says which of them ask for coded slots."""

    def __init__(
        self, carrier: str, device: str = "cpu", codes: tuple[bool, bool] = (True, True), staging: int = STAGING
    ) -> None:
        make: Callable[..., CodedPool] = POOLS[device]
        self.source, self.target = make(1, codes=codes[0]), make(2, codes=codes[1])
        self.a = Side(open_staged(carrier, self.source, staging, engine_id="a"))
        self.b = Side(open_staged(carrier, self.target, engine_id="b"))
        self.link, self.back = link_up(self.a, self.b)

    def send(self, sources: list[int], targets: list[int], regions: range = range(NUM_REGIONS), grant: int = 7) -> None:
        """And wait until all of it has arrived, and the push has ended."""
        known = len(self.a.of(Pushed))
        self.b.transport.grant(self.back, grant, targets)
        self.a.transport.push(self.link, Push(known, grant, 0, ids(sources), ids(targets), regions))
        until(lambda: len(self.a.of(Pushed)) > known, self.a, self.b)
        assert self.a.of(Pushed)[-1] == Pushed(known, True)
        self.a.transport.send(self.link, Stop(grant))  # behind all that a push has said
        until(lambda: any(event.message == Stop(grant) for event in self.b.of(Message)), self.a, self.b)
        until(lambda: self.num_arrived(grant) == len(sources) * len(regions), self.a, self.b)
        self.b.transport.revoke(self.back, grant)

    def num_arrived(self, grant: int) -> int:
        """Pieces."""
        return sum(e.count * len(e.regions) for e in self.b.of(Arrived) if e.grant == grant)

    def close(self) -> None:
        self.a.transport.close()
        self.b.transport.close()


@pytest.fixture(params=STAGED)
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Open = Callable[..., Two]


@pytest.fixture
def make(carrier: str) -> Iterator[Open]:
    opened: list[Two] = []

    def make(*args: Any, **named: Any) -> Two:
        opened.append(Two(carrier, *args, **named))
        return opened[-1]

    yield make
    for two in opened:
        two.close()


@pytest.mark.parametrize("device", DEVICES)
def test_whatever_is_sent_arrives_as_it_was(make: Open, device: str) -> None:
    """All patterns, blocks that do not fit, pieces that are not coded; nothing else is written."""
    two = make(device)
    sources = [*range(NUM_BLOCKS - 1)]
    targets = [(7 * block + 3) % (NUM_BLOCKS - 1) for block in sources]
    untouched = two.target.block(NUM_BLOCKS - 1)
    two.send(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert two.target.block(target) == two.source.block(source), source
    assert two.target.block(NUM_BLOCKS - 1) == untouched


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("regions", [range(1), range(1, 3), range(2, 6), range(5, 6)])
def test_layers_can_be_sent_one_behind_the_other(make: Open, device: str, regions: range) -> None:
    two = make(device)
    before = [region.view.clone() for region in two.target.layout.regions]
    two.send([3, *ALL_PATTERNS, 4], list(range(18)), regions)
    for index, (mine, theirs) in enumerate(zip(two.target.layout.regions, two.source.layout.regions, strict=True)):
        expected = before[index].clone()
        if index in regions:
            expected[:18] = theirs.view[[3, *ALL_PATTERNS, 4]]
        assert torch.equal(mine.view, expected), index


def test_a_row_that_is_longer_than_a_slot_is_cut(make: Open) -> None:
    """Two pieces to a slot."""
    two = make(staging=8 * 8192)
    two.send([*range(9, 14)], [*range(5)])
    assert [two.target.block(block) for block in range(5)] == [two.source.block(block) for block in range(9, 14)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_travels_is_three_quarters_and_what_does_not_fit_goes_as_it_is(make: Open, device: str) -> None:
    two = make(device)
    blocks, regions = [block for block in range(12) if block not in NOISE], range(5, 6)
    two.send(blocks, blocks, regions)
    counters = two.a.transport.counters
    assert counters.sent_bytes == len(blocks) * 4096 == two.b.transport.counters.received_bytes
    assert counters.slot_bytes == len(blocks) * 3136
    two.send([11], [11], regions, grant=8)
    assert counters.slot_bytes == len(blocks) * 3136 + 4096


@pytest.mark.parametrize("codes", [(True, False), (False, True), (False, False)])
def test_slots_are_coded_where_both_sides_say_so(make: Open, codes: tuple[bool, bool]) -> None:
    two = make(codes=codes)
    two.send(FITTING, FITTING)
    assert [two.target.block(block) for block in FITTING] == [two.source.block(block) for block in FITTING]
    assert two.a.transport.counters.slot_bytes == two.a.transport.counters.sent_bytes


ODD_SLOTS = 5000
"""Bytes of slots in which rows do not begin at multiples of 16."""


@pytest.mark.parametrize(
    "told", [{"coded": "another form"}, {}, {"coded": 7}, {"coded": ["?"]}, {"slot_bytes": ODD_SLOTS}]
)
def test_slots_are_raw_for_who_tells_of_no_such_form(
    make: Open, monkeypatch: pytest.MonkeyPatch, told: dict[str, object]
) -> None:
    """An engine whose coder is of another version, one of before there were any, and one that says anything."""
    open_channel = SideChannel.__init__

    def say(self: SideChannel, bind: str, port: int, secret: bytes, info: PeerInfo, *rest: Any) -> None:
        known = dict(info.extra)
        if "slot_bytes" not in told:
            del known["coded"]
        open_channel(self, bind, port, secret, replace(info, extra=known | told), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(SideChannel, "__init__", say)
        two = make()
    two.send(FITTING, FITTING)
    assert [two.target.block(block) for block in FITTING] == [two.source.block(block) for block in FITTING]
    assert two.a.transport.counters.slot_bytes == two.a.transport.counters.sent_bytes


def test_where_most_does_not_fit_slots_are_tried_no_more(
    make: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so. What the other side sends is decoded as before."""
    monkeypatch.setattr(forms, "JUDGED_SLOTS", 6)
    two = make()
    noise = list(NOISE)
    with caplog.at_level(logging.WARNING, logger="kv_connector.peer"):
        for grant in range(6):
            two.send([noise[0] if grant % 2 else 5], [grant], grant=grant)
    assert sum("did not fit into the lossless form" in record.getMessage() for record in caplog.records) == 1
    before = two.a.transport.counters.slot_bytes
    two.send([5], [9], grant=20)
    assert two.a.transport.counters.slot_bytes - before == len(two.source.block(5))
    assert two.target.block(9) == two.source.block(5)
    two.a.transport.grant(two.link, 1, [0])
    two.b.transport.push(two.back, Push(99, 1, 0, ids([6]), ids([0]), range(NUM_REGIONS)))
    until(lambda: bool(two.b.of(Pushed) and two.a.of(Arrived)), two.a, two.b)
    assert two.source.block(0) == two.target.block(6)
    assert two.b.transport.counters.slot_bytes < two.b.transport.counters.sent_bytes


def test_what_does_not_fit_seldom_keeps_slots_coded(make: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is judged by the last slots, not by all there ever were."""
    monkeypatch.setattr(forms, "JUDGED_SLOTS", 6)
    two = make()
    for grant in range(24):
        two.send([4 if grant % 3 == 0 else 5], [grant], grant=grant)
    before = two.a.transport.counters.slot_bytes
    two.send([5], [30], grant=30)
    assert two.a.transport.counters.slot_bytes - before < 0.9 * len(two.source.block(5))


def test_slots_that_held_what_did_not_fit_are_used_again(make: Open) -> None:
    """There are eight."""
    two = make()
    for grant in range(12):
        two.send([4], [grant], grant=grant)
        assert two.target.block(grant) == two.source.block(4)


def test_whether_blocks_fit_is_asked_when_the_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds out while it copies."""
    marks: list[LateMarker] = []

    class LateCoder(HostCoder):
        def encode(self, *given: Any) -> Callable[[], bool]:
            fits, number = super().encode(*given), len(marks)

            def answer() -> bool:
                assert marks[number].left <= 0, "nobody knows yet"
                return fits()

            return answer

    def mark() -> LateMarker:
        marks.append(LateMarker())
        return marks[-1]

    make = POOLS["late"]
    monkeypatch.setitem(POOLS, "late", lambda seed, **named: with_coder(make(seed, **named)))

    def with_coder(pool: CodedPool) -> CodedPool:
        pool.pool = replace(pool.pool, mark=mark, coder=lambda slot_bytes: LateCoder(coded_form(pool.layout)))
        return pool

    two = Two("shared_memory", "late")
    two.send([3, 4, 5], [0, 1, 2])
    assert two.a.transport.counters.link_faults == 0
    assert [two.target.block(i) for i in range(3)] == [two.source.block(i) for i in (3, 4, 5)]
    two.close()


@pytest.mark.parametrize("device", ["cpu", "late"])
def test_pushes_end_once_whatever_becomes_of_them(make: Open, device: str) -> None:
    """Cancelled while some of their slots do not fit, and then lost with the link."""
    two = make(device)
    everything = list(range(NUM_BLOCKS))
    two.b.transport.grant(two.back, 1, everything)
    for number in range(8):
        two.a.transport.push(two.link, Push(number, 1, 0, ids(everything), ids(everything), range(NUM_REGIONS)))
        if number % 2:
            two.a.transport.cancel(number)
    until(lambda: len(two.a.of(Pushed)) == 8, two.a, two.b)
    assert {event.number for event in two.a.of(Pushed) if event.ok} == {0, 2, 4, 6}
    two.a.transport.push(two.link, Push(8, 1, 0, ids(everything), ids(everything), range(NUM_REGIONS)))
    two.a.poll()
    two.b.transport.drop(two.back, "enough")
    until(lambda: bool(two.a.of(Lost)) and len(two.a.of(Pushed)) == 9, two.a, two.b)
    assert sorted(event.number for event in two.a.of(Pushed)) == list(range(9))


def test_who_says_that_a_slot_is_coded_where_that_was_not_agreed_on_is_dropped(make: Open) -> None:
    two = make(codes=(False, True))
    two.send([0], [0])  # there is a ring
    before = two.target.all_bytes()
    two.b.transport.grant(two.back, 9, [1])
    two.a.transport._channel.send(two.link, CodedSlotFilled(9, 0, 1, 0, 1, 0))  # type: ignore[attr-defined]
    until(lambda: bool(two.b.of(Lost)), two.a, two.b)
    assert "not agreed on" in two.b.of(Lost)[0].reason
    assert two.target.all_bytes() == before


@pytest.mark.parametrize("device", ["cpu", DEVICES[-1]])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"count": 30}, "more than a slot"),
        ({"count": 3}, "were granted"),
        ({"first": 1}, "were granted"),
        ({"start": 5, "stop": 7}, "regions 5 to 7 of 6"),
        ({"count": 0}, "0 blocks"),
        ({"slot": 8}, "slot 8 of 8"),
        ({}, "no block that fits"),
    ],
)
def test_who_claims_what_is_not_so_of_a_coded_slot_is_dropped(
    make: Open, device: str, change: dict[str, int], reason: str
) -> None:
    """The last one: the slot has blocks as they are, and they are said to be coded."""
    two = make(device)
    two.send([11], [0])
    before = two.target.all_bytes()
    two.b.transport.grant(two.back, 9, [1, 2])
    told = {"grant": 9, "first": 0, "count": 2, "start": 0, "stop": 6, "slot": 1} | change
    sender = two.a.transport._links[two.link].sender  # type: ignore[attr-defined]
    sender.way.ring.slots[1, :] = np.frombuffer(two.source.block(11) * 8, np.uint8)[:SLOT]
    marker = sender.way.carry(1, SLOT)
    until(lambda: marker is None or marker.query(), two.a, two.b)
    two.a.transport._channel.send(two.link, CodedSlotFilled(**told))  # type: ignore[attr-defined]
    until(lambda: bool(two.b.of(Lost)), two.a, two.b)
    assert reason in two.b.of(Lost)[0].reason
    assert not [event for event in two.b.of(Arrived) if event.grant == 9], "the receive has failed"
    assert two.target.all_bytes() == before


@given(data=st.binary(min_size=1, max_size=64), totals=st.lists(st.integers(0, 12), min_size=5, max_size=5))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_lies_in_a_slot_no_other_block_is_written(data: bytes, totals: list[int]) -> None:
    """Numbers of exceptions that are right and wrong, over any bytes."""
    pool = CodedPool(5)
    coder = pool.make_coder()
    row = coder.row_bytes(range(NUM_REGIONS))
    memory = np.frombuffer((data * (2 * row // len(data) + 1))[: 2 * row], np.uint8).copy()
    form = coded_form(pool.layout)
    for index, total in zip([i for i, coded in enumerate(form.is_coded) if coded], [*totals, 0], strict=False):
        at = form.offsets[index] + form.stored_bytes[index] - 32 * -(-form.layout.regions[index].piece_bytes // 2048)
        chunks = -(-form.layout.regions[index].piece_bytes // 2048)
        for first in (at, row + at):
            memory[first + 4 * chunks : first + 4 * chunks + 4] = np.array([total], "<i4").view(np.uint8)
    before = pool.all_bytes()
    try:
        coder.decode(ids([7, 2]), range(NUM_REGIONS), memory.ctypes.data, False)
    except TransferError:
        assert pool.all_bytes() == before
    after = pool.all_bytes()
    others = [block for block in range(NUM_BLOCKS) if block not in (7, 2)]
    assert [after[block] for block in others] == [before[block] for block in others]


def test_kernels_do_what_torch_does(device: torch.device) -> None:
    """Rows of the one are decoded by the other, and each finds out what does not fit, and what is no row."""
    generator = torch.Generator().manual_seed(3)
    layers = [torch.randn(6, size, generator=generator).to(torch.bfloat16) for size in (256, 1056)]
    layers.insert(1, torch.randn(6, 16, generator=generator))
    layers[0][5] = torch.randint(0, 1 << 15, (256,), generator=generator).to(torch.int16).view(torch.bfloat16)

    def layout_on(where: torch.device) -> CacheLayout:
        caches = {str(index): layer.clone().to(where) for index, layer in enumerate(layers)}
        return CacheLayout.from_tensors(caches, 6, dict.fromkeys(caches, 0))

    here, there = layout_on(torch.device("cpu")), layout_on(device)
    lane = make_lane(device, Priority.PEER, timing=False)
    coders = (
        HostCoder(coded_form(here)),
        DeviceCoder(coded_form(there), lane, SLOT, copy_now if device.type == "cpu" else None),
    )
    for regions in (range(3), range(1)):
        row = coders[0].row_bytes(regions)
        assert coders[1].row_bytes(regions) == row
        rows = [np.zeros(2 * row, np.uint8) for _ in coders]
        for coder, memory in zip(coders, rows, strict=True):
            fits = coder.encode(ids([3, 1]), regions, memory.ctypes.data, False)
            lane.wait_idle()
            assert fits()
        assert np.array_equal(*rows)
        for layout, coder, memory in zip((here, there), coders, reversed(rows), strict=True):
            before = [region.view.clone() for region in layout.regions]
            coder.decode(ids([0, 4]), regions, memory.ctypes.data, False)
            lane.wait_idle()
            for index, (region, old) in enumerate(zip(layout.regions, before, strict=True)):
                if index in regions:
                    old[[0, 4]] = old[[3, 1]]
                assert torch.equal(region.view, old)
    for coder in coders:
        memory = np.full(2 * coder.row_bytes(range(1)), 0x7F, np.uint8)
        with pytest.raises(TransferError, match="no block that fits"):
            coder.decode(ids([0, 4]), range(1), memory.ctypes.data, False)
        fits = coder.encode(ids([2, 5]), range(1), memory.ctypes.data, False)
        lane.wait_idle()
        assert not fits()


def test_a_cache_without_numbers_to_code_is_told_of_at_the_start() -> None:
    for tensor in (torch.zeros(4, 64, dtype=torch.float16), torch.zeros(4, 3, dtype=torch.bfloat16)):
        layout = CacheLayout.from_tensors({"layer": tensor}, 4, {"layer": 0})
        with pytest.raises(ConfigError, match=r"peer.wire_form='lossless' gains nothing here"):
            pool_of(layout, make_lane(layout.device, Priority.PEER, timing=False), codes=True)


def test_a_route_that_goes_round_host_memory_codes_nothing() -> None:
    with pytest.raises(ConfigError, match=r"peer.wire_form='lossless' codes what goes through host memory"):
        PeerConfig(route="direct", wire_form="lossless", secret="known to this test")  # type: ignore[arg-type]


def test_what_a_peer_changes_behind_the_check_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is shared: what was looked at is what is taken."""
    pool = CodedPool(5)
    coder = pool.make_coder()
    assert isinstance(coder, HostCoder)
    memory = np.zeros(coder.row_bytes(range(NUM_REGIONS)), np.uint8)
    assert coder.encode(ids([5]), range(NUM_REGIONS), memory.ctypes.data, False)()
    check = Rows.check

    def check_and_change(rows: Rows, found: torch.Tensor) -> None:
        check(rows, found)
        memory[:] = 0xFF

    monkeypatch.setattr(Rows, "check", check_and_change)
    coder.decode(ids([7]), range(NUM_REGIONS), memory.ctypes.data, False)
    assert pool.block(7) == pool.block(5)


class FakeSlots:
    """A form whose rows have a byte; `fits` says whether blocks are there once the marker is over."""

    told_as = SlotFilled

    def __init__(self, marker: LateMarker | None, fits: bool) -> None:
        self.packed: list[list[int]] = []
        self._marker, self._fits = marker, fits

    def bytes_of(self, regions: range) -> int:
        return 1

    def pack(self, block_ids: Ids, regions: range, ring: Any, slot: int) -> Packed:
        self.packed.append(block_ids.tolist())
        return Packed(self._marker, lambda: self._fits)

    def unpack(self, block_ids: Ids, regions: range, ring: Any, slot: int) -> None:
        raise AssertionError("nothing comes")


class FakeWay:
    ring: Any = None

    def accepted(self, mapped: RingMapped) -> None: ...

    def carry(self, slot: int, num_bytes: int) -> None: ...

    def close(self, is_quiet: Callable[[], bool]) -> None: ...


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_did_not_fit_is_not_packed_again_where_its_push_was_cancelled_meanwhile(is_cancelled: bool) -> None:
    raw, coded = FakeSlots(None, True), FakeSlots(LateMarker(), False)
    said: list[WireMessage] = []
    ended: list[Pushed] = []
    way = FakeWay()
    sender = SlotSender(
        raw, lambda: coded, PeerCounters(), 4, lambda *_: (way, ""), lambda: True, said.append, ended.append
    )
    sender.add(Push(1, 9, 0, ids([5, 6]), ids([0, 1]), range(1)))
    sender.advance()
    sender.accepted(RingMapped(0, ""))
    sender.advance()
    assert coded.packed == [[5, 6]] and sender.is_busy
    if is_cancelled:
        sender.cancel(1)
    while sender.is_busy:
        sender.advance()
    assert raw.packed == ([] if is_cancelled else [[5, 6]])
    assert ended == [Pushed(1, not is_cancelled)]
    assert sum(isinstance(message, SlotFilled) for message in said) == len(raw.packed)
