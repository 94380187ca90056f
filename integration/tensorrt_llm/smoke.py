"""The connector in TensorRT-LLM itself, for whoever has the engine and a GPU: one command, the package installed.

    python -P integration/tensorrt_llm/smoke.py MODEL [--tp 2] [--json out.json]

For each kind of executor (overlap or not, prompts whole or in chunks, and the second cache manager where there is one)
an engine without the connector says what it generates, at first and when its own cache hits; then one with it, on a
device cache of few blocks, is asked the same: first when nothing is cached, then when only the host has the prompt. All
answers must be equal, and the host must have been hit. Prompts are asked one by one, so that batches are the same. Then
many at once, some of them given up, and the first prompt once more. Prints a line for each, and exits with 1 where one
is wrong. Nobody has seen it run yet: docs/tensorrt_llm.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kv_connector.engines.tensorrt_llm import TieredKVScheduler, TieredKVWorker
from kv_connector.engines.tensorrt_llm.launch import VARIABLE

__all__ = ["TieredKVWorker", "WatchedScheduler"]

_MODULE = "kv_connector_smoke"
"""This file, where the processes of all ranks find it."""
_STATS = "TRTLLM_KV_CONNECTOR_STATS"
_BLOCK = 32
_PROMPT = 40 * _BLOCK + 5
_DEVICE_TOKENS = 100 * _BLOCK  # of two prompts
KINDS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"disable_overlap_scheduler": True},
    "chunked prefill": {"enable_chunked_prefill": True, "max_num_tokens": 8 * _BLOCK},
    "second cache manager": {"use_kv_cache_manager_v2": True},
}


class WatchedScheduler(TieredKVScheduler):
    """Writes its statistics to a file, from whichever process it is in."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As it is, and then the statistics so far."""
        plan = super().build_connector_meta(scheduler_output)
        Path(os.environ[_STATS]).write_text(json.dumps(self.stats()))
        return plan


@contextmanager
def running(model: str, tp_size: int, kind: dict[str, Any], connected: bool) -> Iterator[Any]:
    """TensorRT-LLM's LLM, on a small device cache where it has the connector."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    options = {name: value for name, value in kind.items() if name != "use_kv_cache_manager_v2"}
    manager = {name: value for name, value in kind.items() if name == "use_kv_cache_manager_v2"}
    tokens = _DEVICE_TOKENS if connected else 10 * _DEVICE_TOKENS
    cache = KvCacheConfig(
        max_tokens=tokens, tokens_per_block=_BLOCK, enable_partial_reuse=False, host_cache_size=0, **manager
    )
    if connected:
        options["kv_connector_config"] = KvCacheConnectorConfig(
            connector_module=_MODULE,
            connector_scheduler_class="WatchedScheduler",
            connector_worker_class="TieredKVWorker",
        )
    llm = LLM(
        model=model, backend="pytorch", cuda_graph_config=None, tensor_parallel_size=tp_size, kv_cache_config=cache,
        **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.shutdown()


def prompts(count: int, seed: str, length: int = _PROMPT) -> list[list[int]]:
    """Of token ids that any vocabulary has."""
    chance = random.Random(seed)
    return [[chance.randrange(1000, 20000) for _ in range(length)] for _ in range(count)]


def ask(llm: Any, prompt: Sequence[int], num_tokens: int = 16) -> list[int]:
    """One prompt alone, greedily."""
    from tensorrt_llm import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, top_k=1, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": list(prompt)}, params).outputs[0].token_ids)


def crowd(llm: Any, asked: Sequence[Sequence[int]]) -> None:
    """All at once; every third is given up."""
    from tensorrt_llm import SamplingParams

    params = SamplingParams(max_tokens=64, temperature=0.0, top_k=1, ignore_eos=True)
    answers = [llm.generate_async({"prompt_token_ids": list(prompt)}, params) for prompt in asked]
    for i, answer in enumerate(answers):
        if i % 3 == 0:
            answer.abort()
    for i, answer in enumerate(answers):
        if i % 3:
            answer.result()


def check(model: str, tp_size: int, kind: dict[str, Any], stats_file: Path) -> dict[str, Any]:
    """What was asked, and what was wrong with it."""
    asked = prompts(4, "asked")
    with running(model, tp_size, kind, connected=False) as llm:
        first = [ask(llm, prompt) for prompt in asked]
        hit = [ask(llm, prompt) for prompt in asked]
    with running(model, tp_size, kind, connected=True) as llm:
        computed = [ask(llm, prompt) for prompt in asked]
        before = json.loads(stats_file.read_text())
        loaded = [ask(llm, prompt) for prompt in asked]  # the device holds two prompts, and four were asked
        after = json.loads(stats_file.read_text())
        crowd(llm, prompts(12, "crowd"))
        once_more = ask(llm, asked[0])
        stats = json.loads(stats_file.read_text())
    num_loaded = after["host_hit_tokens"] - before["host_hit_tokens"]
    wrong = {
        "computed": computed != first,
        "loaded": loaded != hit,
        "after a crowd": once_more != hit[0],
        "nothing was loaded": num_loaded < 2 * 40 * _BLOCK,
        "a copy has failed": stats["failed_load_jobs"] + stats["failed_save_jobs"] > 0,
    }
    return {"wrong": [name for name, is_wrong in wrong.items() if is_wrong], "host_hit_tokens": num_loaded, **stats}


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name, of full attention")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if find_spec("tensorrt_llm") is None:
        parser.error("TensorRT-LLM is not installed here: run this with the Python that has it")
    folder = Path(tempfile.mkdtemp())
    shutil.copy(__file__, folder / f"{_MODULE}.py")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    stats_file = folder / "stats.json"
    os.environ[_STATS] = str(stats_file)
    os.environ.setdefault(VARIABLE, json.dumps({"host_memory": "8GiB", "write_policy": "write_through"}))
    results = {}
    for name in arguments.kind or KINDS:
        try:
            results[name] = check(arguments.model, arguments.tp, KINDS[name], stats_file)
        except Exception as error:  # noqa: BLE001 - the other kinds are looked at all the same
            results[name] = {"wrong": [f"{type(error).__name__}: {error}"]}
        wrong = results[name]["wrong"]
        print(f"{name:22} {'ok' if not wrong else 'WRONG: ' + ', '.join(wrong)}; {results[name]}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(any(result["wrong"] for result in results.values()))


if __name__ == "__main__":
    main()
