"""A write that NIXL has given up may land in parts yet: whoever waits for it hears that the link is lost, no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peer.peers import Backend, Lost, Pool, Pushed, Side, link_up, needs_nixl, push_all, until

pytestmark = needs_nixl


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    a, b = (Side(Backend("nixl").open(Pool(seed=seed), engine_id=name)) for seed, name in enumerate("ab"))
    yield a, b
    for side in (a, b):
        side.transport.close()


def test_a_write_that_has_failed_costs_its_link(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link that goes on, a word that the producer has stopped would be taken for the truth."""
    a, b = sides
    link, back = link_up(a, b)
    b.transport.grant(back, 1, [3])
    monkeypatch.setattr(a.transport._agent, "check_xfer_state", lambda handle: "ERR")  # type: ignore[attr-defined]
    number = push_all(a, link, [1], [3], grant=1)
    until(lambda: bool(a.of(Pushed) and a.of(Lost) and b.of(Lost)), a, b)
    assert a.of(Pushed) == [Pushed(number, False)]
    assert a.of(Lost) == [Lost(link, "NIXL failed to write to it")]
