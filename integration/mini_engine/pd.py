"""`make demo-pd`: one process computes prompts, another continues them, and a client asks for chats over both.

SmolLM2-135M-Instruct answers the same prompts in one engine alone and in the pair. Tokens must be the same; the table
shows for each request where its prompt came from, and the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from integration.models.smollm2 import load_smollm2
from integration.report import Report, hardware
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import Config
from kv_connector.index import CacheIdentity

from .engine import MiniEngine
from .model import PagedLlama
from .runner import LlamaModel, LocalRunner
from .scheduler import Scheduler
from .workload import make_chats

_ANSWER_SECONDS = 300.0
_IDLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for an engine in another process."""

    prompt: tuple[int, ...]
    num_tokens: int
    params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it. `seconds` is the time to the first token, in the engine."""

    token_ids: tuple[int, ...]
    device_hit_tokens: int
    external_hit_tokens: int
    seconds: float
    transfer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What an engine process is made of."""

    num_blocks: int
    block_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    max_step_tokens: int = 512
    name: str = "engine"


def make_engine(model: PagedLlama, shape: EngineShape, model_name: str) -> MiniEngine:
    """A mini engine that hands blocks over if its settings say so."""
    config = Config.from_mapping(shape.settings)
    identity = CacheIdentity(model_name, str(model.dtype), "NHD", shape.block_size, tp_size=model.config.tp_size)
    engine_id = f"{shape.name}-{secrets.token_hex(8)}"
    scheduler = Scheduler(shape.num_blocks, shape.block_size, shape.max_step_tokens)
    worker = partial(build_worker, config, identity=identity, engine_id=engine_id)
    runner = LocalRunner(LlamaModel(model), shape.num_blocks, shape.block_size, worker)
    half = build_scheduler(
        config, shape.block_size, runner.world_size, tree=scheduler.tree, identity=identity, engine_id=engine_id
    )
    return MiniEngine(scheduler, runner, identity, half)


class EngineProcess:
    """An engine in a process of its own; `build` makes it there and must be picklable. One thread calls."""

    def __init__(self, build: Callable[[], MiniEngine]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self.process = context.Process(target=_serve, args=(remote, build), daemon=True)
        self.process.start()
        remote.close()
        self._answers: dict[int, Answer] = {}
        self._num_asked = 0

    def ask(self, ask: Ask) -> int:
        """Begin; `answer` takes the number that this returns."""
        self._num_asked += 1
        self._pipe.send((self._num_asked, ask))
        return self._num_asked

    def answer(self, number: int) -> Answer:
        """Wait for the answer. Raises RuntimeError where the process has ended or says nothing for long."""
        while number not in self._answers:
            try:
                if not self._pipe.poll(_ANSWER_SECONDS):
                    raise RuntimeError(f"the engine has said nothing for {_ANSWER_SECONDS:g} s")
                done, answer = self._pipe.recv()
            except (EOFError, OSError):
                raise RuntimeError("the engine process has ended") from None
            self._answers[done] = answer
        return self._answers.pop(number)

    def stats(self) -> dict[str, float]:
        """The connector's statistics."""
        self._pipe.send((0, None))
        stats: Any = self.answer(0)
        return dict(stats)

    def end(self) -> None:
        """Stop the process, whatever it does."""
        self._pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, build: Callable[[], MiniEngine]) -> None:
    engine = build()
    running: dict[str, int] = {}
    try:
        while True:
            while pipe.poll(0 if engine.scheduler.has_work else _IDLE_SECONDS):
                number, ask = pipe.recv()
                if ask is None:
                    assert engine.connector is not None
                    pipe.send((0, dict(engine.connector.get_kv_connector_stats())))
                    continue
                request = engine.add(ask.prompt, ask.num_tokens, kv_transfer_params=ask.params)
                running[request.request_id] = number
            if not engine.scheduler.has_work:
                continue
            is_waiting = not engine.scheduler.running and not engine.scheduler.waiting
            for request in engine.step():
                answer = Answer(
                    tuple(request.output_token_ids),
                    request.device_hit_tokens,
                    request.host_hit_tokens,
                    request.ttft,
                    request.transfer,
                )
                pipe.send((running.pop(request.request_id), answer))
            if is_waiting:
                time.sleep(_IDLE_SECONDS / 4)  # for another engine, or for nobody: the machine is for those who work
    except (EOFError, OSError):
        engine.shutdown()


class Pair:
    """A prefill and a decode engine, asked as a proxy asks them."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        self.prefill = prefill
        self.decode = decode

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[Answer, Answer]]:
        """Prefill's and decode's part of each request; all are asked at once."""
        first = [self.prefill.ask(Ask(tuple(p), 1, {"do_remote_decode": True})) for p in prompts]
        told = [self.prefill.answer(number) for number in first]
        second = [
            self.decode.ask(Ask(tuple(prompt), num_tokens, answer.transfer))
            for prompt, answer in zip(prompts, told, strict=True)
        ]
        return list(zip(told, map(self.decode.answer, second), strict=True))

    def end(self) -> None:
        """Stop both."""
        self.prefill.end()
        self.decode.end()


def peer_settings(kind: str, role: str, route: str = "auto") -> dict[str, Any]:
    """`peer` of one of a pair on this machine; the secret is the demo's own."""
    return {"kind": kind, "role": role, "route": route, "secret": "known to both of the demo's engines"}


def _build(shape: EngineShape, folder: Path | None, device: str) -> MiniEngine:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, _ = load_smollm2(folder, device)
    return make_engine(model, shape, "SmolLM2-135M-Instruct")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the tokens are the same, 1 where they are not."""
    parser = argparse.ArgumentParser(prog="make demo-pd ARGS=...", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["shared_memory", "nixl"], default="shared_memory")
    parser.add_argument("--route", choices=["auto", "direct", "staged"], default="auto")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--document-tokens", type=int, default=400)
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="folder of the converted model (default: the cache folder)")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    _, tokenizer = load_smollm2(options.model, "cpu")
    chats = make_chats(options.users, options.turns, options.document_tokens, tokenizer)

    def start(role: str) -> EngineProcess:
        settings = {} if role == "both" else {"peer": peer_settings(options.kind, role, options.route)}
        shape = EngineShape(1024, 16, settings, name=role)
        return EngineProcess(partial(_build, shape, options.model, options.device))

    pair, alone = Pair(start("producer"), start("consumer")), start("both")
    print(f"SmolLM2-135M-Instruct (fp32) on {hardware()['gpu'] or hardware()['cpu']}, blocks over {options.kind}\n")
    print("turn  user  prompt | prefill: computed | decode: on device  received  computed | TTFT ms prefill  decode")
    report, same = Report("pd_demo"), True
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    for turn in range(options.turns):
        if turn:
            told = [list(answer.token_ids) for answer in answers]
            prompts = [chat.prompt(turn, p, a) for chat, p, a in zip(chats, prompts, told, strict=True)]
        else:
            prompts = [chat.prompt(0) for chat in chats]
        parts = pair.generate(prompts, options.answer_tokens)
        expected = [alone.answer(alone.ask(Ask(tuple(p), options.answer_tokens))) for p in prompts]
        answers = [decode for _, decode in parts]
        for user, (prompt, (prefill, decode)) in enumerate(zip(prompts, parts, strict=True)):
            row = _row(turn, user, len(prompt), prefill, decode)
            report.rows.append(row)
            print(_line(row))
        same &= [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    received = sum(row["received"] for row in report.rows)
    print()
    report.claim("tokens equal to one engine's", float(same), 1.0, "bool", "higher")
    report.claim("prompt tokens received", float(received), 1.0, "tokens", "higher")
    print(json.dumps({k: v for k, v in pair.decode.stats().items() if "peer" in k or "receive" in k}))
    report.write(options.json)
    pair.end()
    alone.end()
    return 0 if same else 1


def _row(turn: int, user: int, prompt: int, prefill: Answer, decode: Answer) -> dict[str, Any]:
    local, received = decode.device_hit_tokens, decode.external_hit_tokens
    return {
        "turn": turn,
        "user": user,
        "prompt": prompt,
        "prefill_computed": prompt - prefill.device_hit_tokens - prefill.external_hit_tokens,
        "decode_on_device": local,
        "received": received,
        "decode_computed": prompt - local - received,
        "ttft_prefill_ms": round(1e3 * prefill.seconds, 1),
        "ttft_decode_ms": round(1e3 * decode.seconds, 1),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['turn']:4}  {row['user']:4}  {row['prompt']:6} | {row['prefill_computed']:17} | "
        f"{row['decode_on_device']:17}  {row['received']:8}  {row['decode_computed']:8} | "
        f"{row['ttft_prefill_ms']:15}  {row['ttft_decode_ms']:6}"
    )


if __name__ == "__main__":
    sys.exit(main())
