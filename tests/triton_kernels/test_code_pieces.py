"""The kernels of coded pieces against the reference, byte for byte: interpreted where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_connector.triton_kernels import code_pieces
from kv_connector.triton_kernels.code_pieces import decode_pieces, encode_pieces
from kv_connector.triton_kernels.coded_rows import coded_bytes, decode_reference, encode_reference
from kv_connector.triton_kernels.copy_pieces import RegionTable

POISON = 0xA5
NUM_BLOCKS, NUM_ROWS = 6, 7
BLOCKS, ROWS = [5, 0, 3, 4], [1, 6, 2, 0]


def normal(size: int, seed: int, device: torch.device) -> torch.Tensor:
    elements = torch.randn((NUM_BLOCKS, size // 2), generator=torch.Generator().manual_seed(seed))
    elements[:, ::401] *= 2.0**-20  # exceptions
    return elements.to(torch.bfloat16).view(torch.uint8).to(device)


def noise(size: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NUM_BLOCKS, size), dtype=torch.uint8, generator=generator).to(device)


def placed(view: torch.Tensor, padding: int) -> torch.Tensor:
    """The same with `padding` poisoned bytes behind each block's piece."""
    memory = torch.full((view.shape[0], view.shape[1] + padding), POISON, dtype=torch.uint8, device=view.device)
    memory[:, : view.shape[1]] = view
    return memory[:, : view.shape[1]]


def whole(view: torch.Tensor) -> torch.Tensor:
    """All of the view's memory, padding included."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def offsets_of(sizes: list[int], gap: int = 0) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += coded_bytes(size) + gap
    return offsets, end


def check(views: list[torch.Tensor], padding: int = 0, gap: int = 0, num_programs: int = 3) -> torch.Tensor:
    """Both directions of scattered blocks; every byte of both sides is compared. Returns the verdicts."""
    device = views[0].device
    views = [placed(view, padding) for view in views]
    sizes = [view.shape[1] for view in views]
    offsets, row_bytes = offsets_of(sizes, gap)
    block_ids, flat_ids = torch.tensor(BLOCKS, device=device), torch.tensor(ROWS, device=device)
    flat = torch.full((NUM_ROWS, row_bytes), POISON, dtype=torch.uint8, device=device)
    expected, fits = flat.clone(), torch.ones(len(BLOCKS), dtype=torch.bool, device=device)
    for view, offset, size in zip(views, offsets, sizes, strict=True):
        coded, good = encode_reference(view[block_ids])
        expected[flat_ids, offset : offset + coded_bytes(size)] = coded
        fits &= good
    verdicts = torch.zeros(len(BLOCKS), dtype=torch.int32, device=device)
    encode_pieces(RegionTable.upload(views, offsets), block_ids, flat, verdicts, flat_ids, num_programs=num_programs)
    assert torch.equal(flat, expected)
    assert torch.equal(verdicts, (~fits).to(torch.int32))
    back = [placed(torch.full_like(view, POISON), padding) for view in views]
    wanted = [placed(torch.full_like(view, POISON), padding) for view in views]
    for view, offset, size in zip(wanted, offsets, sizes, strict=True):
        view[block_ids] = decode_reference(flat[flat_ids, offset : offset + coded_bytes(size)], size)
    decode_pieces(RegionTable.upload(back, offsets), block_ids, flat, flat_ids, num_programs=num_programs)
    for view, other, original in zip(back, wanted, views, strict=True):
        assert torch.equal(whole(view), whole(other))
        assert torch.equal(view[block_ids[fits]], original[block_ids[fits]])
    return verdicts


@pytest.mark.parametrize("size", [64, 192, 1984, 2048, 2112, 4096, 6144, 7168, 32768, 36864, 65536 + 64])
def test_edge_lengths(size: int, device: torch.device) -> None:
    check([normal(size, 1, device), normal(size, 2, device)])


@pytest.mark.parametrize("size", [64, 2112, 4096])
def test_bytes_between_pieces_and_blocks_stay(size: int, device: torch.device) -> None:
    check([normal(size, 1, device), normal(size, 2, device)], padding=48, gap=32)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 64])
def test_regions_of_different_sizes(num_programs: int, device: torch.device) -> None:
    check([normal(size, size, device) for size in (65536, 2048, 320, 34816)], num_programs=num_programs)


def test_all_patterns(device: torch.device) -> None:
    patterns = torch.arange(1 << 16)
    ordered = patterns[torch.argsort((patterns >> 7) & 255, stable=True)].to(torch.int32).to(torch.int16)
    windows = ordered.view(torch.uint8).view(16, 8192)  # 16 exponents each
    for first in range(0, 16, len(BLOCKS)):
        view = torch.zeros((NUM_BLOCKS, 8192), dtype=torch.uint8)
        view[BLOCKS] = windows[first : first + len(BLOCKS)]
        assert not check([view.to(device)]).any()


def test_a_block_of_which_one_piece_does_not_fit_is_named(device: torch.device) -> None:
    views = [normal(4096, seed, device) for seed in range(3)]
    views[1][BLOCKS[2]] = noise(4096, 0, device)[0]
    assert check(views).tolist() == [0, 0, 1, 0]


def test_nothing_fits_of_noise(device: torch.device) -> None:
    assert check([noise(4096, 1, device), noise(34816 + 64, 2, device)]).all()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_any_pieces(units: list[int], num_programs: int, seed: int, is_noise: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("each shape would be compiled")
    made = noise if is_noise else normal
    check([made(64 * unit, seed, torch.device("cpu")) for unit in units], num_programs=num_programs)


def test_a_part_of_the_blocks_and_regions(device: torch.device) -> None:
    views = [normal(4096, seed, device) for seed in range(3)]
    offsets, row_bytes = offsets_of([4096] * 3)
    table = RegionTable.upload(views, offsets).narrow(1, 2)
    ids = torch.tensor([1, 4, 2, 0], device=device)
    flat = torch.full((2, row_bytes), POISON, dtype=torch.uint8, device=device)
    verdicts = torch.full((4,), 7, dtype=torch.int32, device=device)
    encode_pieces(table, ids, flat, verdicts, first=1, count=2, flat_shift=-offsets[1])
    expected = torch.cat([encode_reference(view[ids[1:3]])[0] for view in views[1:]], dim=1)
    assert torch.equal(flat[:, : expected.shape[1]], expected)
    assert (flat[:, expected.shape[1] :] == POISON).all()
    assert verdicts.tolist() == [7] * 4
    before = [view.clone() for view in views]
    for view in views:
        view.zero_()
    decode_pieces(table, ids, flat, first=1, count=2, flat_shift=-offsets[1])
    assert not views[0].any()
    for view, old in zip(views[1:], before[1:], strict=True):
        assert torch.equal(view[ids[1:3]], old[ids[1:3]])
        assert not view[[0, 1, 3, 5]].any()


def test_rows_of_anything_are_written_within_their_pieces(device: torch.device) -> None:
    for size in (192, 4096, 36864):
        view = placed(torch.full((NUM_BLOCKS, size), POISON, dtype=torch.uint8, device=device), 64)
        flat = torch.randint(0, 256, (3, coded_bytes(size)), dtype=torch.uint8, device=device)
        decode_pieces(RegionTable.upload([view], [0]), torch.tensor([4, 1, 2], device=device), flat)
        memory = whole(view).view(NUM_BLOCKS, size + 64)
        assert (memory[[0, 3, 5]] == POISON).all()
        assert (memory[:, size:] == POISON).all()


def test_no_blocks_is_no_launch(device: torch.device) -> None:
    flat = torch.full((2, coded_bytes(4096)), POISON, dtype=torch.uint8, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    verdicts = torch.zeros(0, dtype=torch.int32, device=device)
    encode_pieces(RegionTable.upload([normal(4096, 0, device)], [0]), empty, flat, verdicts)
    assert (flat == POISON).all()


@pytest.mark.parametrize("size", [64, 2048, 4096, 6144, 8192, 32768, 65536, 1 << 20])
def test_pieces_of_any_length_have_as_many_warps(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the coder's rate is much the same at all lengths: those of 4 KiB go in 128 programs of one warp."""
    launched: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *given, num_warps: launched.append(grid[0] * num_warps)

    monkeypatch.setattr(code_pieces, "encode_kernel", Kernel())
    monkeypatch.setattr(code_pieces, "_launches", {})
    views = [torch.zeros(256, size, dtype=torch.uint8)]
    rows = torch.zeros(1, coded_bytes(size), dtype=torch.uint8).expand(256, -1)
    monkeypatch.setattr(code_pieces, "flat_rows", lambda flat, shift: (0, coded_bytes(size)))
    encode_pieces(RegionTable.upload(views, [0]), torch.arange(256), rows, torch.zeros(256, dtype=torch.int32))
    assert launched == [code_pieces.NUM_WARPS]


def test_misuse_is_refused(device: torch.device) -> None:
    table = RegionTable.upload([normal(4096, 0, device)], [0])
    flat = torch.zeros((2, coded_bytes(4096)), dtype=torch.uint8, device=device)
    ids, verdicts = torch.tensor([0, 1], device=device), torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="multiples of 16"):
        decode_pieces(table, ids, flat, flat_shift=8)
    for other in (
        RegionTable.upload([normal(4096, 0, device)], [8]),
        RegionTable.upload([normal(4000, 0, device)], [0]),
    ):
        with pytest.raises(ValueError, match="at multiples of 16 on both sides"):
            decode_pieces(other, ids, flat)
    with pytest.raises(ValueError, match="adjacent int32"):
        encode_pieces(table, ids, flat, verdicts.long())
    with pytest.raises(ValueError, match="1 verdicts where 2 are needed"):
        encode_pieces(table, ids, flat, verdicts[:1])
    with pytest.raises(ValueError, match="1 verdicts where 2 are needed"):
        encode_pieces(table, ids, flat, verdicts[:1], first=1, count=1)
    with pytest.raises(ValueError, match="there are"):
        decode_pieces(table, ids[:1], flat, ids)


@pytest.mark.gpu
def test_verdicts_in_page_locked_memory_and_launches_through_the_driver() -> None:
    device = torch.device("cuda")
    view = normal(4096, 0, device)
    view[2] = noise(4096, 0, device)[0]
    table = RegionTable.upload([view], [0])
    ids = torch.tensor([4, 2, 1], device=device)
    flat = torch.zeros((3, coded_bytes(4096)), dtype=torch.uint8, device=device)
    for _ in range(2):  # the second goes through the driver
        verdicts = torch.zeros(3, dtype=torch.int32, pin_memory=True)
        encode_pieces(table, ids, flat, verdicts)
        torch.cuda.synchronize()
        assert verdicts.tolist() == [0, 1, 0]
        before = view.clone()
        view[[4, 1]] = 0
        decode_pieces(table, ids[[0, 2]], flat[[0, 2]])
        assert torch.equal(view[[4, 1]], before[[4, 1]])
    assert {launch.__name__ for launch in code_pieces._launches.values()} == {"by_driver"}


def test_one_compiled_kernel_serves_every_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Triton compiles anew where an argument outgrows 32 bits: only addresses may."""
    launched: list[tuple[Any, ...]] = []

    class AnyKey(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return lambda programs, stream, arguments: launched.append(tuple(arguments))

    monkeypatch.setattr(code_pieces, "_launches", AnyKey())
    monkeypatch.setattr(code_pieces, "is_observed", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    table = RegionTable.upload([normal(4096, 0, device)], [0])
    flat = torch.empty((1, coded_bytes(4096)), dtype=torch.uint8, device=device).expand(1 << 26, -1)
    ids = torch.zeros(1, dtype=torch.int64, device=device).expand(1 << 26)
    decode_pieces(table, ids, flat)
    (arguments,) = launched
    assert all(abs(value) < 1 << 31 for value in arguments[-5:]), "counts and lengths"


COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kv_connector.triton_kernels.decoding import decode_kernel
from kv_connector.triton_kernels.encoding import encode_kernel

ADDRESSES = {"block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"}
for kernel in (encode_kernel, decode_kernel):
    for capability, asm, rows, whole, warps in ((90, 2, 16, True, 8), (90, 2, 1, False, 1), (80, 1, 2, False, 1)):
        constants = {"IN_ORDER": False, "WHOLE": whole, "ROWS": rows, "ASM": asm}
        types = dict.fromkeys(constants, "constexpr") | {"verdicts": "i64", "flat_base": "i64"}
        names = kernel.arg_names
        signature = {name: types.get(name, "*i64" if name in ADDRESSES else "i32") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        found = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        print(kernel.fn.__name__, rows, found.asm["ptx"].count("global.v4.b32"))
"""


def test_the_kernels_compile_for_gpus_that_are_not_here_with_wide_loads(tmp_path: Path) -> None:
    """The interpreter takes what the compiler does not, and does not tell of loads that it would cut up."""
    environment = dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-P", "-c", COMPILE]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for name, chunks, wide in rows:
        chunks_per_thread = 2 if int(chunks) > 1 else 1
        pieces = 2 * 4 + 3 if name == "encode_kernel" else 2 * 3 + 4  # words of this segment, of the next, and coded
        assert int(wide) == pieces * chunks_per_thread
