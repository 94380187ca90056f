"""Time to first token of a prompt whose blocks lie in storage only, beside computing it, one prompt at a time.

One engine is asked for prompts and leaves their blocks in storage. The next one is asked for a prompt that nobody has
seen, for one of those, and for the same again, by then on the device; in turn, `--prompts` times. The model is
SmolLM2-135M-Instruct (fp32), in the mini engine with `--engine mini`, in vLLM on the CPU with `--engine vllm`, in whose
environment this is then to be started; default: vLLM where it is installed. All answers must agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from integration.models.smollm2 import default_folder, load_smollm2
from integration.report import Report, hardware

ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt was answered with, how long the first token took, and how much of it was on the host by then."""

    token_ids: list[int]
    seconds: float
    host_hit_tokens: int


Ask = Callable[[Sequence[int]], Answer]
Start = Callable[[], AbstractContextManager[Ask]]
KINDS = ("computed", "storage hit", "device hit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=["mini", "vllm"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--lengths", default="256,1024", help="tokens of the prompts")
    parser.add_argument("--prompts", type=int, default=5, help="of each length")
    options = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    name = options.engine or ("vllm" if has_vllm else "mini")
    if name == "vllm" and not has_vllm:
        print("no vLLM here: run this in an environment that has it, such as .venv-vllm-0.32.0 (make vllm)")
        return 0
    report = Report("storage_ttft")
    lengths = [int(length) for length in options.lengths.split(",")]
    root = Path(tempfile.mkdtemp(prefix="storage_ttft_", dir=options.folder))
    try:
        start = (vllm_engines if name == "vllm" else mini_engines)(root, max(lengths) + 64, options.prompts)
        print(f"{name} on {hardware()['gpu'] or hardware()['cpu']}; storage in {options.folder}", flush=True)
        measure(report, name, start, lengths, options.prompts)
    finally:
        shutil.rmtree(root)
    report.write(options.json)
    return 0


def measure(report: Report, name: str, start: Start, lengths: Sequence[int], num_prompts: int) -> None:
    """One engine leaves blocks in storage; of the next one, prompts with and without them are asked in turn."""
    rng = random.Random(0)
    prompts = {length: [_prompt(rng, length) for _ in range(num_prompts)] for length in lengths}
    with start() as ask:
        expected = {length: [ask(prompt) for prompt in prompts[length]] for length in lengths}
    answers: dict[tuple[int, str], list[Answer]] = {(length, kind): [] for length in lengths for kind in KINDS}
    with start() as ask:
        for length in lengths:
            unseen = _prompt(rng, length)
            for _ in range(2):  # whatever happens once happens here, also on the way of a hit
                ask(unseen)
            for prompt in prompts[length]:
                for kind, asked in zip(KINDS, (_prompt(rng, length), prompt, prompt), strict=True):
                    answers[length, kind].append(ask(asked))
    print("tokens  time to first token in ms, median (least to most)")
    for length in lengths:
        told = []
        for kind in KINDS:
            ms = [1e3 * answer.seconds for answer in answers[length, kind]]
            hit = median(answer.host_hit_tokens for answer in answers[length, kind])
            report.rows.append({"engine": name, "tokens": length, "kind": kind, "ms": ms, "host_hit_tokens": hit})
            told.append(f"{kind} {median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})")
        print(f"{length:6}  " + "; ".join(told))
        claim(report, name, length, expected[length], *(answers[length, kind] for kind in KINDS))


def claim(
    report: Report,
    name: str,
    length: int,
    expected: Sequence[Answer],
    computed: Sequence[Answer],
    stored: Sequence[Answer],
    on_device: Sequence[Answer],
) -> None:
    """One length: how much sooner a storage hit is, and whether anything was answered differently."""
    missing = length - min(answer.host_hit_tokens for answer in stored)
    different = sum(
        a.token_ids != b.token_ids for hits in (stored, on_device) for a, b in zip(expected, hits, strict=True)
    )
    speedup = median(a.seconds for a in computed) / median(a.seconds for a in stored)
    print(f"        at most {missing} tokens of a storage hit were computed")
    report.claim(f"{name}_storage_hit_sooner_than_computed_{length}", speedup, 1, "x", "higher")
    report.claim(f"{name}_different_answers_{length}", different, 0, "answers", "lower")


def mini_engines(root: Path, max_tokens: int, num_prompts: int) -> Start:
    """SmolLM2 in the mini engine, as in the demo; engines share the model."""
    from integration.mini_engine.demo import make_engine

    model, _ = load_smollm2(None, "cpu")
    options = argparse.Namespace(
        device_blocks=(max_tokens // 16 + 1) * (2 * num_prompts + 4), block_size=16, host_memory="2GiB", storage=root
    )

    @contextmanager
    def start() -> Iterator[Ask]:
        engine = make_engine(options, model, "write_through")

        def ask(prompt: Sequence[int]) -> Answer:
            (request,) = engine.generate([prompt], ANSWER_TOKENS)
            return Answer(list(request.output_token_ids), request.ttft, request.host_hit_tokens)

        yield ask
        engine.run()
        engine.shutdown()

    return start


def vllm_engines(root: Path, max_tokens: int, num_prompts: int) -> Start:
    """The same model in vLLM, in this process."""
    os.environ.setdefault("PYTHONHASHSEED", "0")  # else names of blocks change with every start
    from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, transfer_config

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    storage = {"path": str(root / "store"), "capacity": "4GiB", "prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage, "host_memory": "1GiB"})
    settings: dict[str, Any] = {
        "model": str(default_folder()),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": max_tokens,
        "max_num_batched_tokens": max(2048, max_tokens),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": (max_tokens // BLOCK_SIZE + 2) * (2 * num_prompts + 4),
        "enforce_eager": True,
        "disable_log_stats": False,
        "kv_transfer_config": config,
    }

    @contextmanager
    def start() -> Iterator[Ask]:
        engine = VllmEngine(LLM(**settings))
        engine.warm_up()

        def ask(prompt: Sequence[int]) -> Answer:
            before = engine.stats()["host_hit_tokens"]
            begin = time.perf_counter()
            (first,) = engine.generate([prompt], 1)
            seconds = time.perf_counter() - begin
            hit = int(engine.stats()["host_hit_tokens"] - before)
            engine.drain()
            return Answer(first, seconds, hit)

        try:
            yield ask
        finally:
            engine.llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()

    return start


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(length)]


if __name__ == "__main__":
    sys.exit(main())
