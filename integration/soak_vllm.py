"""A soak of the connector inside a real vLLM engine: `python -m integration.soak_vllm --seconds 600`.

Users chat about shared documents with a small random model, more than fits on the device and than fits on the host.
They come, pause, give up in every phase, the operator resets caches and copies fail. Every answer must be that of a
vLLM without connector, every loaded byte that of the host block, and whenever the engine rests nothing may be in use.
The same users act on a vLLM without connector first: what goes wrong there is not the connector's.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.soak_chats import (
    ANSWER_TOKENS,
    BLOCK_BYTES,
    CONCURRENCY,
    NUM_HOST_BLOCKS,
    NUM_TURNS,
    Turn,
    WatchedPath,
    make_chats,
    make_engine,
    send,
    write_model,
)
from kv_connector.config import LoadChoice, WritePolicy

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

STEP_SECONDS = 60  # a step that takes longer hangs
IDLE_STEPS = 500  # in a row without any progress
LEAST_ROUNDS = 3
NEEDED = ("answers", "loaded_blocks", "saved_blocks", "host_evicted_blocks", "preemptions", "aborts")


@dataclass
class Asked:
    """A request under way: which turn of which chat, and its name in the engine's core."""

    chat: int
    turn: int
    core_id: str
    num_tokens: int


class Soak:
    """Users, an operator and faults around one engine, until the time is over; `problems` says what was wrong."""

    def __init__(self, engine: LLMEngine, chats: list[list[Turn]], args: argparse.Namespace) -> None:
        self.engine, self.chats, self.rng = engine, chats, random.Random(args.seed)
        self.core: Any = engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        self.live: dict[str, Asked] = {}
        self.next_turn = [0] * len(chats)
        self.connector = self.scheduler.connector
        self.path: WatchedPath | None = None
        if self.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.worker_half = get_kv_transfer_group()._worker.half
            self.path = WatchedPath(self.worker_half, self.rng, args)
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen["preemptions"] += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def run(self, seconds: float) -> None:
        """Live for so long, rest, and check; a few times at least, also on a machine that stands still meanwhile."""
        end, num_rounds = time.monotonic() + seconds, 0
        while (time.monotonic() < end or num_rounds < LEAST_ROUNDS) and not self.problems:
            num_rounds += 1
            for _ in range(self.rng.choice((20, 200, 600))):
                self.arrive()
                self.disturb()
                self.step()
            self.rest()
        faulthandler.cancel_dump_traceback_later()
        self.seen["seconds"] = round(seconds)

    def arrive(self) -> None:
        while len(self.live) < CONCURRENCY:
            chat = self.rng.randrange(len(self.chats))
            turn, self.next_turn[chat] = self.next_turn[chat], (self.next_turn[chat] + 1) % NUM_TURNS
            self.seen["asked"] += 1
            name, num_tokens = f"r{self.seen['asked']}", self.rng.choice((1, 8, ANSWER_TOKENS, ANSWER_TOKENS))
            core_id = send(self.engine, name, self.chats[chat][turn].prompt, num_tokens)
            self.live[name] = Asked(chat, turn, core_id, num_tokens)

    def disturb(self) -> None:
        """Users give up, some of them while the model runs; an operator resets caches."""
        if self.rng.random() < 0.05:
            name = self.rng.choice(list(self.live))
            asked = self.live.pop(name)
            phase = self.scheduler.requests[asked.core_id].status.name.lower()
            self.seen["aborts"] += 1
            if self.rng.random() < 0.5:
                self.seen[f"aborts_{phase}"] += 1
                self.engine.abort_request([name])
            else:  # as a server does: seen between the step's execution and its output
                self.seen[f"aborts_in_the_step_{phase}"] += 1
                self.core.aborts_queue.put(self.engine.output_processor.abort_requests([name], internal=False))
        if self.rng.random() < 0.02:
            self.reset(self.rng.random() < 0.5, self.rng.random() < 0.5)

    def reset(self, running: bool, connector: bool) -> None:
        """vLLM refuses with an error where requests hold blocks that it cannot preempt, such as those being loaded."""
        name = f"resets{'_running' * running}{'_connector' * connector}"
        try:
            done = self.engine.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError as error:
            done = False
            if not self.core.batch_queue and not self.blocks_of_requests():
                self.problems.append(f"a reset was refused though no request holds blocks: {error}")
        self.seen[name if done else f"{name}_refused"] += 1

    def blocks_in_use(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def blocks_of_requests(self) -> set[int]:
        tables = map(self.scheduler.kv_cache_manager.get_block_ids, self.scheduler.requests)
        return {block_id for table in tables for group in table for block_id in group} - {0}

    def step(self) -> None:
        faulthandler.dump_traceback_later(STEP_SECONDS, exit=True)
        outputs = self.engine.step()
        self.seen["steps"] += 1
        self.seen["steps_without_progress"] = 0 if outputs else self.seen["steps_without_progress"] + 1
        if self.path is not None:
            self.path.end_step()
        for output in outputs:
            asked = self.live.get(output.request_id)
            if asked is not None and output.finished:
                del self.live[output.request_id]
                self.check_answer(output, asked)
        if self.seen["steps_without_progress"] > IDLE_STEPS:
            states = Counter(request.status.name for request in self.scheduler.requests.values())
            raise RuntimeError(f"no progress in {IDLE_STEPS} steps: {dict(states)}, {len(self.live)} requests")

    def check_answer(self, output: Any, asked: Asked) -> None:
        self.seen["answers"] += 1
        answer = list(output.outputs[0].token_ids)
        expected = self.chats[asked.chat][asked.turn].answer[: asked.num_tokens]
        if answer != expected:
            self.seen["wrong_answers"] += 1
            if self.seen["wrong_answers"] <= 3:
                self.problems.append(
                    f"{output.request_id} (chat {asked.chat}, turn {asked.turn}, step {self.seen['steps']}, "
                    f"{output.outputs[0].finish_reason}): {answer} instead of {expected}"
                )

    def rest(self) -> None:
        """No more arrivals until the engine has nothing to do; then nothing is in use."""
        while self.has_work:
            self.step()
        self.seen["rests"] += 1
        left = {"requests without an end": len(self.live), "device blocks in use": self.blocks_in_use()}
        if self.connector is not None:
            left |= self.left_in_halves()
        self.problems += [f"at rest: {count} {what}" for what, count in left.items() if count]

    def left_in_halves(self) -> dict[str, int]:
        role = self.connector._scheduler
        half, worker = role.half, self.worker_half
        half.check()
        host = half.host.pool
        return {
            "host blocks leased": sum(host.refs(block_id) > 0 for block_id in host.live_ids()),
            "host copies never written": half.host.num_copies - sum(1 for b in host.live_ids() if not host.refs(b)),
            "jobs open": len(half._ledger) + len(worker._arrivals),
            "pushes pending": int(self.connector.has_pending_push_work()),
            "frees pending": int(self.connector.has_pending_block_frees()),
            "requests remembered": len(half._requests) + len(half._loads._asked) + len(role._local_tokens),
            "host blocks being loaded": len(half._loads._reading) + len(half._loads._background),
            "requests that wait": len(worker._arrivals._waits),
        }

    def result(self) -> dict[str, Any]:
        """What was met, and what was wrong."""
        seen: dict[str, float] = dict(self.seen)
        if self.path is not None:
            seen |= self.path.seen
            seen |= self.connector._scheduler.half.get_kv_connector_stats()
            if seen.get("different_bytes"):
                self.problems.append(f"{seen['different_bytes']} loaded bytes differ from the host's")
            self.problems += [f"the run met no {name}: it shows nothing" for name in NEEDED if not seen.get(name)]
        return {"seen": {k: v for k, v in sorted(seen.items()) if v}, "problems": self.problems}


def soak(
    folder: Path, chats: list[list[Turn]], policy: str, choice: str, pipelined: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """One engine with the connector, from start-up to shut-down."""
    settings = {
        "host_memory": NUM_HOST_BLOCKS * BLOCK_BYTES,
        "write_policy": policy,
        "write_back_lookahead": 16,
        "load_choice": choice,
        "layer_group_bytes": 1,
    }
    engine = make_engine(folder, settings, pipelined)
    try:
        run = Soak(engine, chats, args)
        run.run(args.seconds)
        return run.result()
    finally:
        engine.engine_core.shutdown()


def soak_all(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What each engine met: those without connector, which also tell the right answers, and one for each policy."""
    results: dict[str, Any] = {}
    policies = [policy.value for policy in WritePolicy] if args.policy == "all" else [args.policy]
    pipelined = policies if args.pipelined == [] else args.pipelined or []
    chats: list[list[Turn]] = []
    for ahead in sorted({policy in pipelined for policy in policies}):
        engine = make_engine(folder, pipelined=ahead)
        chats = chats or make_chats(engine, random.Random(args.seed))
        control = Soak(engine, chats, args)
        control.run(max(3.0, args.seconds / 5))
        results["without connector" + ", pipelined" * ahead] = control.result()
        engine.engine_core.shutdown()
    for policy, choice in zip(policies, cycle(args.choice), strict=False):
        results[policy] = soak(folder, chats, policy, choice, policy in pipelined, args)
    return results


def main() -> int:
    """Run the soak; 1 where anything was wrong."""
    policies, choices = [policy.value for policy in WritePolicy], [choice.value for choice in LoadChoice]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="for each policy")
    parser.add_argument("--policy", choices=[*policies, "all"], default="all")
    parser.add_argument("--choice", choices=choices, nargs="+", default=["auto"], help="several: the policies in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.02, help="share of the saves and background loads that fail")
    parser.add_argument("--sync-faults", type=float, default=0.0, help="share of the other loads that fail")
    parser.add_argument("--spoil", action="store_true", help="load wrong bytes: shows that the soak would see them")
    ahead = "plan a step while the one before it runs, with these policies or with all"
    parser.add_argument("--pipelined", choices=policies, nargs="*", help=ahead)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Started as a module: the folder `triton_kernels` beside us is not the package of that name which vLLM looks for.
    sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parents[1]]
    with tempfile.TemporaryDirectory() as name:
        results = soak_all(write_model(Path(name)), args)
    for title, result in results.items():
        print(f"{title}: " + ", ".join(f"{name} {value:g}" for name, value in result["seen"].items()))
        for problem in result["problems"]:
            print(f"  WRONG: {problem}")
    if args.json is not None:
        args.json.write_text(json.dumps({"arguments": vars(args), "results": results}, indent=2, default=str) + "\n")
    return int(any(result["problems"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
