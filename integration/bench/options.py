"""What engines of the benchmarks are started with, and the part of the command line that says so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from integration.bench.peers import parse_connector, slug

if TYPE_CHECKING:
    from integration.bench.engines import EngineServer

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


def usual_dtype(tiny: bool) -> str:
    """Of the model and of its KV cache."""
    return "float32" if tiny else "bfloat16"


_ENGINE_BYTES = 2_500_000_000
"""Of the GPU that an engine takes beside weights and KV cache, at least: its context, and what a large step needs."""


def bytes_per_token(tiny: bool, dtype: str) -> int:
    """Of the KV cache."""
    model = TINY if tiny else LLAMA_8B
    values = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    return int(values * getattr(torch, dtype).itemsize)


@dataclass(frozen=True, slots=True)
class EngineOptions(ABC):
    """What an engine is started with; each kind of engine has a class of its own.

    `device_tokens`: size of its KV cache; `logs` holds the model's shape too; `device`: index of its GPU.
    """

    package: ClassVar[str]
    """The engine's."""
    kinds: ClassVar[str]
    """Of connectors that it is measured with, with commas between them."""

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
    @abstractmethod
    def block_size(self) -> int:
        """Tokens of a block of its KV cache."""

    @property
    def dtype(self) -> str:
        """Of its model and of its KV cache."""
        return usual_dtype(self.tiny)

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.tiny, self.dtype)

    @property
    def host_blocks(self) -> int:
        """That its host memory has room for, but for one that may be cut off."""
        return self.host_bytes // (self.block_size * self.bytes_per_token) - 1

    @property
    def name(self) -> str:
        """For files and folders."""
        return slug(self.connector)

    @classmethod
    def host_size(cls, num_bytes: int) -> int:
        """The next size of host memory that all engines of this kind can be given."""
        return num_bytes

    def environment(self) -> dict[str, str]:
        """Variables that its process starts with."""
        variables = {"HF_HUB_OFFLINE": "1"}
        if self.device:  # as an operator keeps servers apart; an engine takes the first that it sees
            variables["CUDA_VISIBLE_DEVICES"] = str(self.device)
        return variables

    @abstractmethod
    def serve(self) -> EngineServer:
        """Start the engine in this process."""

    @abstractmethod
    def fault(self, log: str) -> str:
        """Why the engine of this process is not what its name says; empty where it is. `log`: all it has written."""


def add_arguments(
    kind: type[EngineOptions], parser: argparse.ArgumentParser, host_memory: str, device_tokens: int
) -> None:
    """What all benchmarks of engines take."""
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--connectors",
        type=partial(connectors, kind.kinds.split(",")),
        default=kind.kinds,
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


def weights_bytes() -> int:
    """Of the model that is no tiny one."""
    hidden, keys = LLAMA_8B["hidden_size"], LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"]
    layer = hidden * (2 * hidden + 2 * keys + 3 * LLAMA_8B["intermediate_size"])
    values = LLAMA_8B["num_hidden_layers"] * layer + 2 * LLAMA_8B["vocab_size"] * hidden
    return int(values * getattr(torch, usual_dtype(tiny=False)).itemsize)


def check_device(wanted: Sequence[EngineOptions]) -> None:
    """Exits where the engines, all on one GPU, need more memory than that has: which of them fail would be chance."""
    if wanted[0].tiny:
        return
    total = torch.cuda.get_device_properties(wanted[0].device).total_memory
    needed = sum(weights_bytes() + one.device_tokens * one.bytes_per_token + _ENGINE_BYTES for one in wanted)
    if needed > total:
        raise SystemExit(
            f"{len(wanted)} engines need {needed / 2**30:.0f} GiB of the GPU's memory at least, it has "
            f"{total / 2**30:.0f} GiB: give fewer --connectors"
        )


def connectors(kinds: Collection[str], text: str) -> list[str]:
    """Names of `peers`, with commas between them, each of one of these kinds."""
    names = text.split(",")
    try:
        for name in names:
            if parse_connector(name).kind not in kinds:
                raise ValueError(f"connector {name!r} is none of this engine's: give {', '.join(kinds)}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def unavailable(kind: type[EngineOptions], options: argparse.Namespace) -> str:
    """Why nothing can be measured here; empty where it can."""
    if importlib.util.find_spec(kind.package) is None:
        return f"no {kind.package} here: nothing to measure"
    if not options.tiny and not torch.cuda.is_available():
        return "no GPU: nothing to measure (--tiny runs on the CPU)"
    return ""


def engine_options(
    kind: type[EngineOptions],
    options: argparse.Namespace,
    connector: str,
    max_model_len: int,
    host_bytes: int,
    **ours: Any,
) -> EngineOptions:
    """From the command line; `ours` are settings of our connector that this benchmark needs."""
    if options.logs is None:
        options.logs = Path(tempfile.mkdtemp(prefix="engines_bench_"))
    options.logs.mkdir(parents=True, exist_ok=True)
    (options.logs / "config.json").write_text(json.dumps(TINY if options.tiny else LLAMA_8B))
    return kind(
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
