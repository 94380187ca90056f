"""Real SGLang engines on small random models, on a GPU where there is one, in processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.bench.sglang_engine import ROOT, SHIMS
from integration.models import tiny, tiny_configs
from integration.tests.forks import forking_sglang, start_forks_of_sglang
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Answer, Expected
from tests.waiting import until

if find_spec("sglang") is None:
    pytest.skip("real SGLang runs in a virtual environment of its own: make test-sglang", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
if ON_GPU:
    os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"
else:
    sys.path.insert(0, str(SHIMS))  # before it is imported, here and in its processes
    os.environ["PYTHONPATH"] = f"{SHIMS}:{ROOT}"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # several ranks would compile a line of SGLang's, for seconds in each
    start_forks_of_sglang()  # it imports SGLang meanwhile

PAGE_SIZE = 16
SETTINGS = {"host_memory": "64MiB", "write_policy": "write_through"}
OPTIONS = {
    "device": "cuda" if ON_GPU else "cpu",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16" if ON_GPU else "float32",  # its kernels know no other
    "enable_deterministic_inference": ON_GPU,
    "attention_backend": "triton" if ON_GPU else "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.6,  # of what other engines leave; the next line says how much is taken
    "max_total_tokens": 1024,
    "page_size": PAGE_SIZE,
    "max_running_requests": 16,
    "random_seed": 1,
    "log_level": "warning",
}


class SglangEngine:
    """An engine, with our linker or without; see `engine_contract.ContractEngine`."""

    def __init__(self, engine: Any, page_size: int, device_tokens: int) -> None:
        self.engine = engine
        self.block_tokens = page_size
        self.device_tokens = device_tokens
        self.num_token_ids = tiny_configs.VOCABULARY
        self.controls: list[Connection] = []  # to our linker on each rank
        self._num_requests = 0
        self._started: dict[str, asyncio.Task[Answer]] = {}

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[Answer]:
        """Greedy continuations; all prompts are asked at once."""
        return self.finish(self.start(prompts, num_tokens, salt))

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 8,
        salt: str = "",
        session: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Ask, and do not wait; they run while something else is waited for. `session`: SGLang's session_params."""
        # Of one length: SGLang aborts every request whose id begins with the one that is given.
        rids = [f"request {self._num_requests + i:06}" for i in range(len(prompts))]
        self._num_requests += len(prompts)
        for rid, prompt in zip(rids, prompts, strict=True):
            self._started[rid] = self.engine.loop.create_task(self._ask(rid, list(prompt), num_tokens, salt, session))
        self._turn(10)
        return rids

    def finish(self, rids: Sequence[str]) -> list[Answer]:
        """Wait for the answers of these requests, in order."""
        tasks = [self._started.pop(rid) for rid in rids]
        return list(self.engine.loop.run_until_complete(asyncio.gather(*tasks)))

    def abort(self, rids: Sequence[str]) -> None:
        """Their clients go away."""
        for rid in rids:
            self.engine.tokenizer_manager.abort_request(rid)
        self._turn(1)

    def reset(self) -> None:
        """Flush SGLang's cache, and with it ours."""
        flush = self.engine.tokenizer_manager.flush_cache(timeout_s=30.0)  # once the last answer's step is over
        assert self.engine.loop.run_until_complete(flush).success

    def break_loads(self, broken: bool) -> None:
        """Loads of the last rank fail from now on, or do so no more."""
        self.tell("answer_break_loads", broken)

    def limit_host(self, num_blocks: int | None) -> None:
        """Give us so many host blocks only."""
        self.tell("answer_limit_host", num_blocks)

    def retract_every(self, num_steps: int) -> None:
        """SGLang takes a request its pages every so many steps, whatever room there is."""
        self.tell("answer_retract", num_steps)

    def stats(self) -> dict[str, float]:
        """Our counters since the start; those of rank 0."""
        stats: dict[str, float] = self.tell("answer_stats")[0]
        return stats

    def check_idle(self) -> None:
        """Nothing is held for a request, and every invariant holds. Several ranks have decided and counted alike by the
        same round; what is under way there ends when all of them look, which a rank that is told to wait would keep the
        others from."""
        if len(self.controls) == 1:
            self.tell("answer_check")
            return
        decided: list[dict[str, float]] = []

        def are_in_one_round() -> bool:
            decided[:] = self.tell("answer_decided")
            return len({each["rounds"] for each in decided}) == 1  # else one was a round ahead

        until(are_in_one_round, told=lambda: decided)
        assert decided == decided[:1] * len(decided)

    def tell(self, name: str, *args: object) -> list[Any]:
        """Call a method of the linker on every rank; the answers of all. Raises what one of them has raised."""
        for control in self.controls:
            control.send((name, args))
        answers = [control.recv() for control in self.controls]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _turn(self, num_turns: int) -> None:
        """Let requests that were started be sent off."""

        async def turn() -> None:
            for _ in range(num_turns):
                await asyncio.sleep(0)

        self.engine.loop.run_until_complete(turn())

    async def _ask(
        self, rid: str, prompt: list[int], num_tokens: int, salt: str, session: Mapping[str, Any] | None
    ) -> Answer:
        from fastapi import HTTPException

        params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        try:
            output = await self.engine.async_generate(
                input_ids=prompt,
                sampling_params=params,
                rid=rid,
                cache_salt=salt or None,
                session_params=None if session is None else dict(session),
            )
        except (ValueError, HTTPException) as error:  # a request that SGLang has given up
            return Answer(None, error=str(error))
        meta = output["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        if meta["finish_reason"]["type"] == "abort":
            return Answer(None, error=str(meta["finish_reason"].get("message", "")))
        return Answer(
            list(output["output_ids"]),
            num_loaded=int(details.get("host", 0)),
            num_hit=int(meta["cached_tokens"]),
            num_preempted=int(meta["num_retractions"]),
        )


@contextmanager
def running(
    folder: Path, settings: dict[str, Any] | None = None, model: str = "dense", **options: Any
) -> Iterator[SglangEngine]:
    """An engine with our linker and these settings."""
    control = f"{tempfile.mkdtemp()}/control"
    linker = {
        "linker": "WatchedLinker",
        "linker_module_path": "integration.sglang_watched",
        "linker_extra_config": SETTINGS | {"control": control} | (settings or {}),
    }
    with Listener(control, "AF_UNIX") as listener:
        options = {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": linker,
        } | options
        with running_alone(folder, model, **options) as engine:
            engine.controls = [listener.accept() for _ in range(int(options.get("tp_size", 1)))]
            yield engine
        for connection in engine.controls:
            connection.close()


@contextmanager
def answers_alone(folder: Path, **options: Any) -> Iterator[Expected]:
    """What SGLang answers without us to each prompt alone."""
    with running_alone(folder, max_total_tokens=8192, sleep_on_idle=True, **options) as engine:

        def answer(prompt: Sequence[int], num_tokens: int) -> Sequence[int]:
            (said,) = engine.generate([prompt], num_tokens)
            assert said.token_ids is not None, said.error
            return said.token_ids

        yield engine_contract.answered_once(answer)


@contextmanager
def running_alone(folder: Path, model: str = "dense", **options: Any) -> Iterator[SglangEngine]:
    """An engine as SGLang has it."""
    folder.mkdir(parents=True, exist_ok=True)
    import psutil
    import sglang

    options = OPTIONS | options
    with nullcontext() if ON_GPU else forking_sglang():
        others = set(psutil.Process().children(recursive=True))
        engine = sglang.Engine(model_path=str(tiny.write_weights(model, folder)), **options)
    atexit.unregister(engine.shutdown)  # it ends the processes of other engines too, and then this one for their sake
    own = set(psutil.Process().children(recursive=True)) - others
    try:
        yield SglangEngine(engine, int(options["page_size"]), int(options["max_total_tokens"]))
    finally:
        # As `shutdown` does it, but for this engine alone.
        engine.tokenizer_manager._subprocess_watchdog.stop()
        for process in own:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(own)
