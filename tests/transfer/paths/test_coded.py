"""Copies of blocks that are coded on the host: what comes back is what was saved, or the block was refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv_connector.config import Config, HostFormName, PathName
from kv_connector.errors import ConfigError
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import HostForm, make_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths import packing
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.choice import make_path
from kv_connector.transfer.paths.decoding import DecodingPath
from kv_connector.transfer.paths.staged import StagedPath, min_staging_memory
from kv_connector.types import Direction
from tests.copies import LOAD, SAVE, copy_now, ids, job

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


def test_what_is_loaded_is_what_was_saved_and_the_rest_is_refused(device: torch.device) -> None:
    form, pool, views = coded(device)
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


def make_coded_path(name: str, form: HostForm, pool: HostPool) -> CopyPath:
    if name == "torch" and form.layout.device.type == "cpu":
        return make_path(form, pool, Config())
    copier = copy_now if form.layout.device.type == "cpu" else None
    least = min_staging_memory(form)
    return StagedPath(form, pool, least if name == "cut into parts" else 8 * least, copier)


def make_decoding_path(form: HostForm, pool: HostPool) -> CopyPath:
    """What a load is tried with that has failed on a GPU."""
    return DecodingPath(form, pool, copy_now if form.layout.device.type == "cpu" else None)


@pytest.mark.parametrize("name", ["torch", "staged", "cut into parts"])
def test_any_part_of_a_coded_block_comes_back_whichever_way_it_went(name: str, device: torch.device) -> None:
    """Also where the parts of a block are packed apart: a block is refused if one of them is."""
    form, pool, views = coded(device)
    path, fallback = make_coded_path(name, form, pool), make_decoding_path(form, pool)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    places = [(5 * block + 2) % NUM_BLOCKS for block in range(NUM_BLOCKS)]
    refusals: list[Any] = []
    copy = BlockCopy(SAVE, range(len(views)), ids(*range(NUM_BLOCKS)), ids(*places), stream, False, refusals)
    path.copy(copy)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert sorted(block for refused in refusals for block in refused()) == sorted(places[block] for block in NOISE)
    before = [view.clone() for view in views]
    some = (range(6), range(1), range(1, 3), range(2, 5), range(3, 6), range(5, 6))
    for regions, loads in [(part, by) for part in some for by in (path, fallback)]:
        for index in regions:
            views[index].zero_()
        loads.copy(BlockCopy(LOAD, regions, ids(8, 0, 4), ids(places[8], places[0], places[4]), stream))
        if device.type == "cuda":
            torch.cuda.synchronize()
        for index in regions:
            assert torch.equal(views[index][[8, 0, 4]], before[index][[8, 0, 4]])
            views[index].copy_(before[index])
    path.close()
    pool.close()


def test_each_way_writes_the_same_bytes(device: torch.device) -> None:
    """What one engine stores another finds, whatever it copies with: also what no piece has put anything in."""
    form, pool, _ = coded(device)
    written = []
    blocks = ids(*(block for block in range(NUM_BLOCKS) if block not in NOISE))
    for name in ("torch", "staged", "cut into parts"):
        pool.tensor.fill_(0)
        path = make_coded_path(name, form, pool)
        path.copy(
            BlockCopy(SAVE, range(6), blocks, blocks, torch.cuda.current_stream() if device.type == "cuda" else None)
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        written.append(pool.tensor.clone())
        path.close()
    assert torch.equal(written[0], written[1]) and torch.equal(written[0], written[2])
    pool.close()


def test_what_says_that_a_block_does_not_fit_is_nobody_else_s_meanwhile() -> None:
    """Saves under way, of which some end before others, and one that is larger than all of the memory."""
    verdicts = packing._Slab(8, torch.device("cpu"))
    held = [verdicts.take(3), verdicts.take(3)]
    held[0].memory[1] = held[1].memory[2] = 1
    places = ids(10, 11, 12)
    assert held[0].refused(places) == [11]
    held.append(verdicts.take(3))
    assert held[2].refused(places) == [], "there is no room behind the others"
    held.append(verdicts.take(100))
    assert [entry.refused(places) for entry in held] == [[11], [12], [], []]
    del held[0:3]
    for _ in range(20):
        entry = verdicts.take(30)
        assert entry.refused(ids(*range(30))) == []
        entry.memory[:] = 1
    assert len(verdicts._memory) < 1000, "memory that nobody holds is used again"


def test_memory_that_goes_round_leaves_the_oldest_in_use_alone() -> None:
    verdicts = packing._Slab(12, torch.device("cpu"))
    first, oldest = verdicts.take(4), verdicts.take(4)
    oldest.memory[:] = 1
    del first
    held = [verdicts.take(4), verdicts.take(3)]  # the last one from the start again
    held.append(verdicts.take(3))
    assert oldest.refused(ids(0, 1, 2, 3)) == [0, 1, 2, 3]
    assert not any(entry.refused(ids(*range(4))[: len(entry.memory)]) for entry in held)


@pytest.mark.parametrize("name", [HostFormName.RAW, HostFormName.LOSSLESS])
def test_no_page_locked_memory_is_made_in_service(name: HostFormName, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds. Loads have no use for any, nor has a form that refuses nothing."""
    form, _, _ = coded(torch.device("cpu"))
    form = make_form(form.layout, name)
    pool = HostPool(NUM_BLOCKS, form.block_bytes)
    path = StagedPath(form, pool, 8 * min_staging_memory(form), copy_now)
    monkeypatch.setattr(packing, "page_locked_int64", None)
    held: list[Any] = []
    for direction in [LOAD, SAVE] * 4:
        path.copy(BlockCopy(direction, range(6), ids(0, 1), ids(0, 1), None, False, held))
    assert len(held) == (4 if name is HostFormName.LOSSLESS else 0)
    path.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [PathName.RUNS, PathName.DIRECT])
def test_paths_that_only_move_bytes_say_that_they_cannot(name: PathName) -> None:
    form, pool, _ = coded(torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"copy_path='{name.value}' cannot copy what host_form='lossless' codes"):
        make_path(form, pool, Config(copy_path=name))
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
