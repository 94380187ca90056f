"""Real vLLM engines on small random models, in this process, so that tests can look at their blocks and ours."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.bench.vllm_engine import register_weights
from integration.faults import HeldLoads, LateLoads, break_loads, hold_loads
from integration.models import tiny, tiny_configs
from integration.tests.vllm_starts import prepare_start, started
from kv_connector.storage.objects.backend import ObjectStorage
from tests.storage.objects.stores import connected
from tests.waiting import ANSWER_SECONDS, until

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions are sent to workers
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BLOCK_SIZE = 32
CONNECTOR = {
    "kv_connector": "TieredKVConnector",
    "kv_connector_module_path": "kv_connector.engines.vllm",
    "kv_role": "kv_both",
}


def vllm_version() -> str:
    """Such as "0.32.0+cpu"."""
    import vllm

    return str(vllm.__version__)


def transfer_config(settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What a user pastes behind --kv-transfer-config, but every hit is loaded: tiny models are sooner computed."""
    ours = {"host_memory": "64MiB", "load_choice": "sync"} | (settings or {})
    return CONNECTOR | options | {"kv_connector_extra_config": ours}


def prompts(count: int, num_tokens: int = 420, seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(2, tiny_configs.VOCABULARY) for _ in range(num_tokens)] for _ in range(count)]


def cached_tokens_by_source() -> dict[str, float]:
    """What vLLM's metrics of this process say of where cached tokens came from; older versions do not say."""
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    name = "vllm:prompt_tokens_cached_by_source_total"
    return {sample.labels["source"]: sample.value for sample in samples if sample.name == name and sample.value}


class VllmEngine:
    """An `LLM` with our connector, stepped by this thread."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        """vLLM's device blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def half(self) -> Any:
        """Our scheduler half."""
        return self.scheduler.connector._scheduler.half

    def stats(self) -> dict[str, float]:
        """Our counters since start-up."""
        stats: dict[str, float] = self.half.get_kv_connector_stats()
        return stats

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, adapter: Any = None, **options: Any
    ) -> list[list[int]]:
        """Greedy continuations; all prompts are asked at once, under a LoRARequest of vLLM if one is given."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} | options for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False, lora_request=adapter)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def alone(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, **options: Any) -> list[list[int]]:
        """As `generate`, one after the other."""
        return [self.generate([prompt], num_tokens, **options)[0] for prompt in prompts]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Their clients go away."""
        self.llm.llm_engine.output_processor.abort_requests(request_ids, internal=True)
        self.core.abort_requests(list(request_ids))

    def drain(self) -> None:
        """Step until nothing is under way, as an engine in a process of its own does by itself; vLLM's logger hears of
        every step."""
        until(lambda: not self.scheduler.has_requests(), self.llm.llm_engine.step, self.stats, ANSWER_SECONDS)

    def cached_bytes(self) -> dict[bytes, bytes]:
        """What lies in the device blocks that vLLM has cached, by its name of the block (hash and group).

        With several ranks, the bytes of all of them.
        """
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        ranks = self.llm.collective_rpc(_read_blocks, args=([block.block_id for block in cached],))
        return {bytes(block.block_hash): b"".join(rows) for block, *rows in zip(cached, *ranks, strict=True)}

    def layer_names(self) -> list[str]:
        """Layers that our worker half copies."""
        names: list[str] = self.llm.collective_rpc(_layer_names)[0]
        return names

    def wait_for_storage(self) -> None:
        """Return when every rank has reached it: until then all is a miss."""
        assert all(self.llm.collective_rpc(_has_reached_storage))

    def break_loads(self, broken: bool, rank: int | None = None) -> None:
        """Let every load fail from now on, or none: of all ranks, or of one."""
        self.llm.collective_rpc(_break_loads, args=(broken, rank))

    def hold_loads(self, held: bool) -> None:
        """Hold what is loaded in the background from now on, or let it begin."""
        self.llm.collective_rpc(_hold_loads, args=(held,))

    def delay_loads(self, delayed: bool) -> None:
        """Have what is loaded in the background from now on begin when a step is to wait for it, or at once."""
        self.llm.collective_rpc(_hold_loads, args=(delayed, LateLoads))

    def warm_up(self) -> None:
        """Ask until all host memory is in use: it is page-locked in the background."""
        num_blocks = min(self.llm.collective_rpc(_num_host_blocks))
        until(
            lambda: self.stats()["host_capacity_blocks"] >= num_blocks,
            lambda: self.alone([[2, 3, 4]], 1),
            self.stats,
            ANSWER_SECONDS,
        )

    def check_all_free(self) -> None:
        """No block is pinned or leased on either side, and every invariant of the index holds."""
        self.drain()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1, "device blocks are held for ever"
        host = self.half.host.pool
        assert not [block for block in host.live_ids() if host.refs(block)], "host blocks are leased for ever"
        assert not self.half.has_pending_push_work()
        self.half.check()


def weights(model: str | Path, folder: Path) -> dict[str, Any]:
    """Options of vLLM: a model of `tiny`, with weights under which a token depends on all that came before, or the
    folder of any other model."""
    if isinstance(model, Path):
        return {"model": str(model)}
    if model in tiny.ENGINES_OWN:
        workers = "integration.tests.vllm_workers.KnowsWeights"
        drawn = {"load_format": register_weights(), "worker_extension_cls": workers}
        return {"model": str(tiny.write(model, folder)), **drawn}
    return {"model": str(tiny.write_weights(model, folder))}


@contextmanager
def running(
    folder: Path, model: str | Path = "dense", num_blocks: int = 40, warm_up: bool = True, **options: Any
) -> Iterator[VllmEngine]:
    """An engine on a model of `weights`; `options` are vLLM's, before ours. Without `warm_up` it has run no step."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    settings = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "max_model_len": 1024,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
        "kv_transfer_config": transfer_config(),
    }
    if torch.cuda.is_available():
        # What is free is not measured: engines of other tests come and go on the same GPU.
        settings |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    prepare_start()
    try:
        llm = LLM(**(settings | weights(model, folder) | options))
    except Exception:  # the next one of this process would have what it has begun
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        raise
    try:
        started(llm)
        engine = VllmEngine(llm)
        if warm_up and hasattr(engine.scheduler.connector, "_scheduler"):
            engine.warm_up()
        yield engine
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def schedule_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines from now on plan a step while another one is under way, as they do on GPUs.

    On a CPU vLLM turns that off, as nothing is won by it; its scheduler and runner can do it all the same, but those of
    0.20, with which the test is skipped.
    """
    if vllm_version().startswith("0.20"):
        pytest.skip("its runner plans ahead on GPUs only")
    from vllm.platforms import current_platform

    check = current_platform.check_and_update_config

    def check_and_schedule_ahead(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(current_platform, "check_and_update_config", check_and_schedule_ahead)


def check_loaded_bytes_and_tokens(
    folder: Path, model: str, choice: str, block_major: bool = True, host_form: str = "raw", **options: Any
) -> None:
    """Two prompts from vLLM's own cache, and from the host after vLLM forgot them and wrote other things over them.

    They end alike, so that answers which differ show that the model looks at what is cached.
    """
    from kv_connector.engines.vllm.steps import TELLS_FAILED_REQUESTS

    settings = {"write_policy": "write_through", "load_choice": choice}
    config = transfer_config(settings | {"block_major": block_major, "host_form": host_form})
    with running(folder, model, num_blocks=160, kv_transfer_config=config, **options) as engine:
        asked = [[*prompt[:-4], 5, 6, 7, 8] for prompt in prompts(2)]
        engine.alone(asked)
        from_device = engine.alone(asked)
        assert from_device[0] != from_device[1]
        assert engine.stats()["device_hit_tokens"] == 2 * 13 * BLOCK_SIZE
        engine.drain()
        saved = engine.cached_bytes()
        assert engine.llm.reset_prefix_cache()
        engine.alone(prompts(6, 900, seed=1))
        assert engine.llm.reset_prefix_cache()
        from_host = engine.alone(asked)
        loaded = engine.cached_bytes()
        stats, groups = engine.stats(), engine.scheduler.kv_cache_config.kv_cache_groups
        engine.check_all_free()
    assert stats["host_hit_tokens"] == 2 * 13 * BLOCK_SIZE
    by_request = TELLS_FAILED_REQUESTS and len(groups) > 1
    assert stats["async_loads" if by_request else f"{choice}_loads"] == 2
    same = saved.keys() & loaded.keys()
    assert len(same) >= 2 * 13
    assert all(saved[key] == loaded[key] for key in same)
    assert from_host == from_device


def check_around_sleeps(folder: Path, path: str, block_major: bool) -> None:
    """Saves and loads before, between and after two sleeps, during which others have the device's memory.

    One call a process: vLLM lets one engine of a process sleep. Answers of one shape of step are compared: all of the
    prompt computed, or the rest of it behind what was cached, on the device or on the host.
    """
    settings = {"write_policy": "write_through", "block_major": block_major, "copy_path": path}
    asked = prompts(4)
    options = {"kv_transfer_config": transfer_config(settings), "enable_sleep_mode": True}
    with running(folder, num_blocks=160, **options) as engine:
        computed, cached = engine.alone(asked), engine.alone(asked)
        for turn in range(3):
            if turn:
                engine.drain()
                engine.llm.sleep(level=1)
                taken = [torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, device="cuda") for _ in range(8)]
                torch.cuda.synchronize()
                del taken
                engine.llm.wake_up()
                assert engine.alone(asked) == computed
                assert engine.alone(asked) == cached
            engine.drain()
            assert engine.llm.reset_prefix_cache()
            before = engine.stats()["host_hit_tokens"]
            assert engine.alone(asked) == cached, f"host hits differ after {turn} sleeps"
            assert engine.stats()["host_hit_tokens"] == before + 4 * 13 * BLOCK_SIZE
        stats = engine.stats()
        assert not stats.get("failed_load_jobs") and not stats.get("failed_save_jobs")
        engine.check_all_free()


def _half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker.half


def _read_blocks(worker: Any, block_ids: list[int]) -> list[bytes]:
    regions = _half()._layout.regions
    return [b"".join(region.view[block_id].cpu().numpy().tobytes() for region in regions) for block_id in block_ids]


def _num_host_blocks(worker: Any) -> int:
    return int(_half()._host.num_blocks)


def _layer_names(worker: Any) -> list[str]:
    return list(_half()._layout.layer_names)


def _has_reached_storage(worker: Any) -> bool:
    storage = getattr(_half()._storage, "_storage", None)  # of a rank that does storage's jobs itself
    return not isinstance(storage, ObjectStorage) or connected(storage) is storage


def _break_loads(worker: Any, broken: bool, rank: int | None) -> None:
    if rank not in (None, worker.rank):
        return
    break_loads(_half(), broken)


def _hold_loads(worker: Any, held: bool, kind: type[HeldLoads] = HeldLoads) -> None:
    hold_loads(_half(), held, kind)
