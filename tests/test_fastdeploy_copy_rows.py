"""FastDeploy's Cache Manager V1, the rows about copies (see test_fastdeploy_rows.py for the others)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kv_connector.config import Config
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import CopyJob, Direction


def copy_parts(device: str, num_blocks: int = 64, piece: int = 1 << 16, layers: int = 8) -> tuple[Any, ...]:
    """Caches of some layers, a host pool with known bytes, and the engine between them."""
    caches = {f"layers.{i}": torch.zeros(num_blocks, piece, dtype=torch.uint8, device=device) for i in range(layers)}
    layout = CacheLayout.from_tensors(caches, num_blocks)
    host = HostPool(num_blocks, raw_form(layout).block_bytes, device=layout.device)
    host.wait_ready()
    host.tensor.copy_(torch.randint(0, 256, host.tensor.shape, dtype=torch.uint8))
    config = Config(layer_group_bytes=4096)
    path_ = make_path(raw_form(layout), host, config)
    return caches, host, TransferEngine(raw_form(layout), host, config, path_), path_


def load_job(num_blocks: int, job_id: int = 1) -> CopyJob:
    ids = np.arange(num_blocks, dtype=np.int64)
    return CopyJob(job_id, Direction.LOAD, ids, ids[::-1].copy())


def keep_gpu_busy(engine: TransferEngine) -> None:
    """Put about a second of work on the current stream, once the copy kernels are compiled."""
    ids = np.arange(64, dtype=np.int64)
    engine.submit_load([CopyJob(98, Direction.LOAD, ids, ids)])
    engine.submit_save([CopyJob(99, Direction.SAVE, ids, ids)])
    engine.drain()
    torch.cuda._sleep(2_000_000_000)


@pytest.mark.gpu
def test_row_layer_done_counter_and_streams() -> None:
    """Row "LayerDoneCounter, cleanup(), Evict counters, Dual streams". Waiting blocked the host, the streams may have
    been the compute stream itself, and a late waiter found its event gone and read stale bytes. Ours: the host runs
    ahead of a busy GPU, and any number of waits see every byte."""
    caches, host, engine, _ = copy_parts("cuda")
    keep_gpu_busy(engine)
    engine.submit_load([load_job(64)])
    for name in (*caches, *caches):
        engine.wait_layer(name)
    copies = {name: tensor.clone() for name, tensor in caches.items()}
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    assert engine.poll() == [], "reported before the bytes arrived"
    torch.cuda.synchronize()
    assert [completion.ok for completion in engine.poll()] == [True]
    engine.wait_layer("layers.0")  # late: there is nothing left to wait for
    for index, copied in enumerate(copies.values()):
        column = host.tensor[:, index << 16 : (index + 1) << 16].flip(0)
        assert torch.equal(copied.cpu(), column)
    engine.close()
    host.close()


@pytest.mark.gpu
def test_row_d2h_all_layers() -> None:
    """Row "D2H all layers". The copy ended in a stream synchronise: ours returns while the GPU is still at work, and is
    reported when the bytes are on the host."""
    caches, host, engine, _ = copy_parts("cuda")
    keep_gpu_busy(engine)
    for index, tensor in enumerate(caches.values()):
        tensor.fill_(index + 1)
    host.tensor.zero_()
    ids = np.arange(64, dtype=np.int64)
    engine.submit_save([CopyJob(1, Direction.SAVE, ids, ids)])
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    assert engine.poll() == [], "reported before the bytes arrived"
    assert [completion.ok for completion in engine.drain()] == [True]
    assert host.tensor.view(64, len(caches), -1).float().mean((0, 2)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    engine.close()
    host.close()


def test_row_failure_marking_empty_ids() -> None:
    """Row "Failure marking". A transfer of no blocks never completed."""
    _, _, engine, _ = copy_parts("cpu", num_blocks=2, piece=16)
    assert engine.submit_load([load_job(0)]) == frozenset()
    assert [(c.job_id, c.ok) for c in engine.poll()] == [(1, True)]


def test_row_h2d_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row "H2D per layer". Two calls, an event and two id uploads per layer: ours merges a step's requests, and layers
    into groups."""
    caches, _, _, _ = copy_parts("cpu", num_blocks=8, piece=512, layers=32)
    layout = CacheLayout.from_tensors(caches, 8)
    host = HostPool(8, raw_form(layout).block_bytes)
    config = Config(layer_group_bytes=8 * 512)
    inner, calls = make_path(raw_form(layout), host, config), []
    copy = inner.copy
    monkeypatch.setattr(inner, "copy", lambda asked: (calls.append(asked.regions), copy(asked)))
    engine = TransferEngine(raw_form(layout), host, config, inner)
    jobs = [CopyJob(i, Direction.LOAD, np.array([i]), np.array([i])) for i in range(8)]
    engine.submit_load(jobs)
    assert [len(group) for group in calls] == [1, 8, 16, 7], "the first layers early, the others in longer rows"


def test_row_dtypes_and_mtp_and_scales_and_key_only() -> None:
    """Row "Dtypes, MTP layers, fp8 block scales, MLA / key-only". Only contiguous 4-D bf16, fp16 and uint8 were copied;
    draft layers, the scales of a layer-wise load and key-only layers were not, and were marked done. Real engines:
    integration/tests/test_mini_engine.py."""
    bf16 = torch.randn(2, 3, 4, 2, 6).to(torch.bfloat16)[..., :5]
    caches = {
        "layers.0": bf16,
        "layers.1": [torch.randn(3, 4, 8).to(torch.float8_e4m3fn), torch.randn(3, 7)],
        "layers.2": torch.randint(0, 99, (3, 11), dtype=torch.int8),
        "draft.0": torch.randn(4, 3, 2).transpose(0, 1),
    }
    layout = CacheLayout.from_tensors(caches, 3)
    host = HostPool(3, raw_form(layout).block_bytes)
    engine = TransferEngine(raw_form(layout), host, Config(layer_group_bytes=4096))
    before = [t.clone() for t in tensors_of(caches)]
    ids = np.arange(3, dtype=np.int64)
    engine.submit_save([CopyJob(1, Direction.SAVE, ids, ids)])
    for tensor in tensors_of(caches):
        tensor.view(torch.uint8).zero_() if tensor.dtype == torch.float8_e4m3fn else tensor.zero_()
    engine.submit_load([CopyJob(2, Direction.LOAD, ids, ids)])
    assert [completion.ok for completion in engine.poll()] == [True, True]
    for tensor, saved in zip(tensors_of(caches), before, strict=True):
        assert torch.equal(tensor.float(), saved.float())


def tensors_of(caches: dict[str, Any]) -> list[torch.Tensor]:
    return [t for entry in caches.values() for t in (entry if isinstance(entry, list) else [entry])]


def test_row_host_layout() -> None:
    """Row "Host layout". Layer-first host arrays needed a gather for storage: here one block is one contiguous run with
    every layer."""
    caches, host, engine, _ = copy_parts("cpu", num_blocks=2, piece=4096, layers=3)
    for index, tensor in enumerate(caches.values()):
        tensor[1] = index + 1
    engine.submit_save([CopyJob(1, Direction.SAVE, np.array([1]), np.array([0]))])
    assert host.tensor[0].is_contiguous()
    assert host.tensor[0].view(3, 4096).float().mean(1).tolist() == [1, 2, 3]
