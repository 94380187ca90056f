"""Token slots of SGLang's pools, as the pages that they are: others are told, and neither read nor written."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from integration.tests.sglang_driver import PAGE, PAGES, Make, buffers, keys, linkers, make_pool
from kv_connector.config import Config
from kv_connector.engines.sglang import pools
from kv_connector.engines.sglang.pools import DevicePages
from kv_connector.errors import ConfigError
from kv_connector.transfer.costs.curves import BUILT_IN
from kv_connector.transfer.paths import choice


@pytest.fixture
def make() -> Iterator[Make]:
    with linkers() as make:
        yield make


def test_what_is_copied_in_several_pieces_is_packed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU: SGLang waits for the driver where that takes in copies one by one."""
    wanted: list[bool] = []
    monkeypatch.setattr(choice, "AutoPath", lambda *given: wanted.append(given[-1]))
    on_a_gpu = SimpleNamespace(name="", layout=SimpleNamespace(device=torch.device("cuda")))
    make().linker._replica.worker._make_path(on_a_gpu, None, Config(), BUILT_IN)
    assert wanted == [True]


def test_slots_that_are_no_pages_are_told_and_not_written(make: Make) -> None:
    """SGLang's allocator gives whole pages; where it does not, the request that they are of is aborted."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("request", keys(3)) == 3
    odd = driver.transfer(keys(3), [4, 5, 6])
    odd[0].device_indices += 1
    before = [buffer.clone() for buffer in buffers(driver.pool)]
    assert driver.linker.load("request", odd)
    assert not driver.forward()
    assert all(map(torch.equal, before, buffers(driver.pool)))
    driver.linker.offload(driver.transfer(keys(3, "others"), [7, 8, 9])[:1])
    odd = driver.transfer(keys(3, "odd"), [4, 5, 6])
    odd[0].device_indices += 1
    driver.linker.offload(odd)
    driver.round()
    driver.round()
    assert driver.lookup("next", keys(3, "others")) == 3
    assert driver.lookup("next", keys(3, "odd")) == 0
    driver.check()


def test_an_offer_of_other_than_its_pages_is_refused(make: Make) -> None:
    """SGLang would lock what is not saved."""
    driver = make()
    driver.round()
    for num_slots in (2 * PAGE, 3 * PAGE - 1):
        odd = driver.transfer(keys(3), [1, 2, 3])
        odd[0].device_indices = odd[0].device_indices[:num_slots]
        assert not driver.linker.offload(odd)
    assert driver.lookup("request", keys(3)) == 0


@pytest.mark.parametrize("page", [-1, PAGES + 1])
def test_slots_that_are_not_of_the_pool_are_no_pages(page: int) -> None:
    pages = DevicePages(make_pool(), PAGE)
    ids = [pages.ids_of(torch.arange(PAGE) + PAGE * at) for at in (PAGES, page, 1)]
    assert [*map(pages.read, ids)] == [[PAGES], None, [1]]


def test_slots_are_whole_pages_or_none() -> None:
    """Some end within a page, some have another page's last slot in one of their own, two are right, of which one is
    told by slots that lie apart."""
    pages = DevicePages(make_pool(), PAGE)
    right = torch.arange(PAGE, 3 * PAGE)
    torn = right.clone()
    torn[PAGE - 1] = torn[-1]
    told = torch.arange(3 * PAGE, 5 * PAGE - 1), torn, right, torch.stack((right, torn), dim=1)[:, 0]
    assert [pages.read(pages.ids_of(slots)) for slots in told] == [None, None, [1, 2], [1, 2]]


def test_ids_of_pages_are_read_when_the_device_has_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: until then others lie where they come to."""

    class Slots(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    class Event:
        """As CUDA's: one that was never recorded is over."""

        stream: object = None
        waited = False

        def record(self, stream: object) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.stream is None

        def synchronize(self) -> None:
            self.waited = self.stream is not None

    event = Event()
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda device: "stream of the scheduler")
    host = SimpleNamespace(cuda=cuda, empty=lambda shape, dtype, pin_memory: torch.zeros(shape, dtype=dtype))
    known = DevicePages(make_pool(), PAGE)
    monkeypatch.setattr(pools, "torch", host)
    ids = known.ids_of(torch.arange(PAGE, 3 * PAGE).as_subclass(Slots))
    assert event.stream == "stream of the scheduler" and not ids.have_come()
    assert known.read(ids) == [1, 2] and event.waited


def test_a_cache_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="the cache of this model \\(SimpleNamespace\\) is not supported yet"):
        DevicePages(SimpleNamespace(), PAGE)
