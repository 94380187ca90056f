"""Copies of blocks that are coded on the host: what comes back is what was saved, or the block was refused."""

from __future__ import annotations

from typing import Any

import torch

from kv_connector.config import Config, HostFormName
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import HostForm, make_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.choice import make_path
from kv_connector.transfer.paths.torch import TorchPath
from kv_connector.types import Direction
from tests.copies import LOAD, SAVE, ids, job

NUM_BLOCKS = 9
NOISE = {2: "first", 5: "last"}
"""Blocks that cannot be coded, and which layer's numbers lie too far apart."""


def coded(device: torch.device) -> tuple[HostForm, HostPool, list[torch.Tensor]]:
    """Layers of bf16, one of them of two tensors, and one of fp8 with scales, whose values are like a model's."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(NUM_BLOCKS, *shape, generator=generator).to(torch.bfloat16)

    caches: dict[str, Any] = {
        "first": numbers(16, 2, 64),
        "split": [numbers(16, 2, 64), numbers(16, 96)],
        "fp8": [numbers(16, 64).to(torch.float8_e4m3fn), torch.randn(NUM_BLOCKS, 16, generator=generator)],
        "last": numbers(4, 2, 16),
    }
    for block, name in NOISE.items():
        tensor = caches[name]
        tensor[block] = torch.randint(0, 1 << 15, tensor[block].shape, generator=generator).short().view(torch.bfloat16)
    moved = {
        name: [tensor.to(device) for tensor in (entry if isinstance(entry, list) else [entry])]
        for name, entry in caches.items()
    }
    layout = CacheLayout.from_tensors(moved, NUM_BLOCKS, dict.fromkeys(moved, 0))
    form = make_form(layout, HostFormName.LOSSLESS)
    assert form.is_coded == (True, True, True, False, False, True)
    pool = HostPool(NUM_BLOCKS, form.block_bytes, device=device)
    pool.wait_ready()
    return form, pool, [region.view for region in layout.regions]


def test_what_is_loaded_is_what_was_saved_and_the_rest_is_refused() -> None:
    form, pool, views = coded(torch.device("cpu"))
    engine = TransferEngine(form, pool, Config(layer_group_bytes=1))
    engine.submit_save([job(1, SAVE, [0, 1, 2, 3], [8, 7, 6, 5]), job(2, SAVE, [4, 5], [4, 3])])
    saved = {completion.job_id: completion for completion in engine.drain()}
    assert saved[1].ok and saved[2].ok
    assert (saved[1].missing, saved[2].missing) == ((6,), (3,))
    before = [view.clone() for view in views]
    blocks, places = [0, 1, 3, 4], [8, 7, 5, 4]
    for view in views:
        view.fill_(0xAA)
    engine.submit_load([job(3, LOAD, blocks, places)])
    for name in form.layout.layer_names:
        engine.wait_layer(name)
    seen = [view.clone() for view in views]
    assert [completion.ok for completion in engine.drain()] == [True]
    for view, old in zip(seen, before, strict=True):
        assert torch.equal(view[blocks], old[blocks])
        assert bool((view[[2, 5, 6, 7, 8]] == 0xAA).all()), "nothing else is written"
    engine.close()
    pool.close()


def test_any_part_of_a_coded_block_comes_back_in_the_simplest_way_too(device: torch.device) -> None:
    form, pool, views = coded(device)
    path = TorchPath(form, pool)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    refusals: list[Any] = []
    everything = range(len(views))
    path.copy(BlockCopy(SAVE, everything, ids(*range(NUM_BLOCKS)), ids(*range(NUM_BLOCKS)), stream, False, refusals))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert sorted(block for refused in refusals for block in refused()) == sorted(NOISE)
    before = [view.clone() for view in views]
    for regions in (range(1), range(1, 3), range(2, 5), range(3, 6), range(5, 6)):
        for index in regions:
            views[index].zero_()
        path.copy(BlockCopy(LOAD, regions, ids(8, 0, 4), ids(8, 0, 4), stream))
        if device.type == "cuda":
            torch.cuda.synchronize()
        for index in regions:
            assert torch.equal(views[index][[8, 0, 4]], before[index][[8, 0, 4]])
            views[index].copy_(before[index])
    path.close()
    pool.close()


def test_a_save_says_nothing_of_refusals_where_all_is_raw() -> None:
    form, pool, _ = coded(torch.device("cpu"))
    raw = make_form(form.layout, HostFormName.RAW)
    pool = HostPool(NUM_BLOCKS, raw.block_bytes)
    refusals: list[Any] = []
    make_path(raw, pool, Config()).copy(
        BlockCopy(Direction.SAVE, range(6), ids(2, 5), ids(0, 1), None, False, refusals)
    )
    assert refusals == []
