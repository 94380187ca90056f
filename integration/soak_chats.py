"""What the soak in `soak_vllm.py` is made of: a model, chats with the answers of a plain vLLM, and a watched path."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the soak looks into the engine: same process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for a tiny model a second thread only waits

import torch

from kv_connector.errors import TransferError
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.types import Direction

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from kv_connector.transfer.paths.base import BlockCopy
    from kv_connector.worker import WorkerHalf

BLOCK_SIZE = 32
BLOCK_BYTES = 32 << 10  # of the model below
NUM_DEVICE_BLOCKS = 96
NUM_HOST_BLOCKS = 128
NUM_CHATS, NUM_TURNS = 24, 4  # about 250 different blocks
CONCURRENCY = 32
ANSWER_TOKENS = 32
MIN_MARGIN = 0.05 if torch.cuda.is_available() else 0.002
"""Logits that are closer may change places with the size of a batch; Triton's kernels round float32."""
ON_GPUS: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",  # of vLLM's own the one that takes float32
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(folder: Path) -> Path:
    """A random Llama that looks back sharply, so that one wrong block changes what it says."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(scale * columns**-0.5)

    shapes = {"q_proj": (128, 128, 1.8), "k_proj": (64, 128, 1.8), "v_proj": (64, 128, 2.0), "o_proj": (128, 128, 2.0)}
    mlp = {"gate_proj": (256, 128, 1.0), "up_proj": (256, 128, 1.0), "down_proj": (128, 256, 1.0)}
    tensors = {"model.embed_tokens.weight": weight(512, 128, 11.0), "lm_head.weight": weight(512, 128, 4.0)}
    tensors["model.norm.weight"] = torch.ones(128)
    for layer in range(LLAMA["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}mlp.{name}.weight": weight(*shape) for name, shape in mlp.items()}
        tensors |= {f"{prefix}{name}_layernorm.weight": torch.ones(128) for name in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def make_engine(folder: Path, connector: dict[str, Any] | None = None, pipelined: bool = False) -> LLMEngine:
    """vLLM in this process; with `connector`, our settings."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    transfer = None
    if connector is not None:
        transfer = KVTransferConfig(
            kv_connector="TieredKVConnector",
            kv_connector_module_path="kv_connector.engines.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=connector,
        )
    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_DEVICE_BLOCKS,
        enforce_eager=True,
        max_num_seqs=CONCURRENCY,
        max_num_batched_tokens=256,
        kv_transfer_config=transfer,
        **(ON_GPUS if torch.cuda.is_available() else {}),
    )
    config = args.create_engine_config()
    config.scheduler_config.async_scheduling = pipelined
    return LLMEngine.from_vllm_config(config)


def send(engine: LLMEngine, name: str, prompt: list[int], num_tokens: int, logprobs: int | None = None) -> str:
    """Ask; returns the name by which the engine's core knows the request."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return engine.add_request(name, {"prompt_token_ids": prompt}, params) or name


@dataclass
class Turn:
    """A prompt and what it is answered with."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)


def make_chats(engine: LLMEngine, rng: random.Random) -> list[list[Turn]]:
    """Chats over shared systems and documents, answered by an engine without connector.

    Questions are drawn until no token of the answer was a close call.
    """

    def words(count: int) -> list[int]:
        return [rng.randrange(2, LLAMA["vocab_size"]) for _ in range(count)]

    systems = [words(100) for _ in range(3)]
    documents = [systems[i % 3] + words(120) for i in range(6)]
    histories = [documents[i % 6] for i in range(NUM_CHATS)]
    chats: list[list[Turn]] = [[] for _ in histories]
    for number in range(NUM_TURNS):
        open_chats = set(range(NUM_CHATS))
        while open_chats:
            turns = {index: Turn(histories[index] + words(25)) for index in sorted(open_chats)}
            for index, turn in turns.items():
                send(engine, f"{number}.{index}", turn.prompt, ANSWER_TOKENS, logprobs=2)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if not output.finished:
                        continue
                    index, answer = int(output.request_id.split(".")[1]), output.outputs[0]
                    best_two = [sorted((p.logprob for p in row.values()), reverse=True)[:2] for row in answer.logprobs]
                    if min(first - second for first, second in best_two) > MIN_MARGIN:
                        turns[index].answer = list(answer.token_ids)
                        chats[index].append(turns[index])
                        histories[index] = turns[index].prompt + turns[index].answer
                        open_chats.remove(index)
    return chats


class WatchedPath:
    """Passes copies on to the real path, compares what was loaded with the host, and breaks a share of the copies.

    `sync_faults` is the share of the loads that the step waits for, `faults` that of all others. With `spoil` loads
    bring wrong bytes and nobody is told: the answers must show it.
    """

    def __init__(self, half: WorkerHalf, rng: random.Random, args: argparse.Namespace) -> None:
        assert half._engine is not None and half._layout is not None and half._host is not None
        self._half, self._inner = half, half._engine._queues[Direction.SAVE].paths[0]
        self._layout = half._layout
        self._columns = raw_form(half._layout).columns(half._host.tensor)
        self._rng, self._args = rng, args
        self._loaded: list[BlockCopy] = []  # in this step
        self.seen: Counter[str] = Counter()
        for queue in half._engine._queues.values():
            queue.paths = (self, *queue.paths[1:])

    def copy(self, copy: BlockCopy) -> None:
        """As `CopyPath.copy`."""
        self._inner.copy(copy)
        with torch.cuda.stream(copy.stream):
            self._watch(copy)

    def _watch(self, copy: BlockCopy) -> None:
        load = copy.direction is Direction.LOAD
        waited_for = load and self._half._plan is not None and bool(self._half._plan.loads)
        fails = self._rng.random() < (self._args.sync_faults if waited_for else self._args.faults)
        if load and (fails or self._args.spoil):
            for region in self._layout.regions[copy.regions.start : copy.regions.stop]:
                region.view[torch.tensor(copy.device_ids)] = 0x33
        if fails:
            self._loaded = [entry for entry in self._loaded if entry.device_ids is not copy.device_ids]
            self.seen[f"injected_{copy.direction.value}_faults"] += 1
            raise TransferError("injected fault")
        if load and not self._args.spoil:
            self._loaded.append(copy)
            self._compare(copy)

    def end_step(self) -> None:
        """What was loaded in the step is still there: nothing else of the step has written to these blocks."""
        for entry in self._loaded:
            self._compare(entry)
        self._loaded = []

    def close(self) -> None:
        """As `CopyPath.close`."""
        self._inner.close()

    def _compare(self, copy: BlockCopy) -> None:
        part = slice(copy.regions.start, copy.regions.stop)
        for region, column in zip(self._layout.regions[part], self._columns[part], strict=True):
            device = region.view[torch.tensor(copy.device_ids)]
            host = column[torch.tensor(copy.host_ids)]
            self.seen["compared_bytes"] += device.numel()
            self.seen["different_bytes"] += int((device.cpu() != host).sum())
