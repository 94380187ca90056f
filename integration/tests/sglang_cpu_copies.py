"""What SGLang's own host tier lacks on the CPU, as a plugin of SGLang: memory that need not be page-locked, streams and
events that have nothing to wait for, and the copies of its "direct" I/O backend, which are kernels for GPUs there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_ENTRY = "[sglang.srt.plugins]\ncpu_copies = integration.tests.sglang_cpu_copies:install\n"


def write_plugin(folder: Path) -> None:
    """Make SGLang's processes that have this folder on their path load the plugin."""
    about = folder / "cpu_copies-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-copies\nVersion: 0\n")
    (about / "entry_points.txt").write_text(_ENTRY)


def install() -> None:
    """Called in each of SGLang's processes at its start."""
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda *_: None
    for kind in (torch.cpu.Stream, torch.cpu.Event):
        for name, answer in (("synchronize", None), ("wait", None), ("query", True), ("record", None)):
            if not hasattr(kind, name):
                setattr(kind, name, lambda *_, answer=answer: answer)
    mha.transfer_kv_direct = copy_layers
    mha.transfer_kv_per_layer_direct_pf_lf = copy_from_pages
    mha.transfer_kv_all_layer_direct_lf_pf = copy_to_pages


def copy_layers(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Token slots of each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_from_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """A layer of host pages, (pages, layers, page, heads, width), to token slots of the device."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for page, slots in _pages(src_indices, dst_indices, page_size):
            target[slots] = source[page, layer_id]


def copy_to_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Token slots of all layers' keys, then of all layers' values, to host pages."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        for page, slots in _pages(dst_indices, src_indices, page_size):
            dst_ptrs[i // num_layers][page, i % num_layers] = source[slots]


def _pages(host: torch.Tensor, device: torch.Tensor, page_size: int) -> Iterator[tuple[int, Any]]:
    """Each host page by number, with the device's token slots of it."""
    firsts = host[::page_size].tolist()
    return zip((first // page_size for first in firsts), device.view(-1, page_size), strict=True)
