"""What vLLM engines of the benchmarks are started with, and the part of the command line that says so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from integration.bench.vllm_peers import environment, parse_connector, slug

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
TINY = LLAMA_8B | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}


def bytes_per_token(tiny: bool) -> int:
    """Of the KV cache."""
    model = TINY if tiny else LLAMA_8B
    values = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    return int(values * (4 if tiny else 2))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is started with.

    `device_tokens`: size of its KV cache; `logs` holds the model's shape too; `device`: index of its GPU.
    """

    connector: str
    host_bytes: int
    device_tokens: int
    max_model_len: int
    tiny: bool = False
    eager: bool = False
    ours: dict[str, Any] = field(default_factory=dict)
    logs: Path = Path()
    device: int = 0

    @property
    def block_size(self) -> int:
        return 32 if self.tiny else 16

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.tiny)

    def environment(self) -> dict[str, str]:
        """Variables that its process starts with. What an operator has set for vLLM's cache and network stays."""
        # Engines that compile at the same time, on any device, must not write into one cache.
        root = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CACHE_ROOT": os.path.join(root, f"bench_{slug(self.connector)}_{self.device}"),
        }
        if self.device:  # as an operator keeps servers apart; vLLM takes the first that it sees
            variables["CUDA_VISIBLE_DEVICES"] = str(self.device)
        return variables | environment(self.connector, self.host_bytes)


def add_arguments(parser: argparse.ArgumentParser, host_memory: str, device_tokens: int) -> None:
    """What all benchmarks of vLLM engines take."""
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--connectors",
        type=connectors,
        default="none,offloading,simple,lmcache,ours",
        help="of these; with settings as in offloading:KEY=VALUE, ours:POLICY (default: the default policy)",
    )
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--host-memory", default=host_memory, help="of each engine with a connector")
    parser.add_argument("--device-tokens", type=int, default=device_tokens, help="KV cache of each engine")
    parser.add_argument("--ours-config", type=json.loads, default={}, help="more settings of ours, a JSON object")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small sizes, for a machine without a GPU")
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs and the model's shape")


def connectors(text: str) -> list[str]:
    """Names of `vllm_peers`, with commas between them."""
    names = text.split(",")
    try:
        for name in names:
            parse_connector(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def unavailable(options: argparse.Namespace) -> str:
    """Why nothing can be measured here; empty where it can."""
    if importlib.util.find_spec("vllm") is None:
        return "no vLLM here: nothing to measure"
    if not options.tiny and not torch.cuda.is_available():
        return "no GPU: nothing to measure (--tiny runs on the CPU)"
    return ""


def engine_options(
    options: argparse.Namespace, connector: str, max_model_len: int, host_bytes: int, **ours: Any
) -> EngineOptions:
    """From the command line; `ours` are settings of our connector that this benchmark needs."""
    if options.logs is None:
        options.logs = Path(tempfile.mkdtemp(prefix="vllm_bench_"))
    options.logs.mkdir(parents=True, exist_ok=True)
    (options.logs / "config.json").write_text(json.dumps(TINY if options.tiny else LLAMA_8B))
    return EngineOptions(
        connector=connector,
        host_bytes=host_bytes,
        device_tokens=options.device_tokens,
        max_model_len=max_model_len,
        tiny=options.tiny,
        eager=options.eager,
        ours=ours | options.ours_config,
        logs=options.logs.resolve(),
        device=options.device,
    )
