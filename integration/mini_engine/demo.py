"""`make demo`: users chat about documents whose KV cache does not fit on the device, with and without the connector.

A real model (SmolLM2-135M-Instruct) answers the same chats under each way of caching. Users take turns, so by the time
one asks again, the others have pushed its blocks off the device. All ways must give the same tokens; what differs is
the time to the first one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from integration.models.smollm2 import load_smollm2
from integration.report import Report, hardware
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import Config, WritePolicy
from kv_connector.index import CacheIdentity

from .engine import MiniEngine
from .model import PagedLlama
from .page import Page, Show, show_nobody
from .plot import plot_ttft
from .runner import LlamaModel, LocalRunner
from .scheduler import Scheduler
from .turns import ABOUT, DEVICE_ONLY, NO_CACHE, Turn, print_progress, print_statistics, print_turn, tiers_of
from .workload import Chat, ChatTokenizer, make_chats


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo ARGS=...", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=[p.value for p in WritePolicy], help="only this one (default: all)")
    parser.add_argument("--users", type=int, default=4, help="chats side by side (default 4)")
    parser.add_argument("--turns", type=int, default=5, help="questions per user (default 5)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--document-tokens", type=int, help="of each user's document (1000; on a GPU 6500)")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens generated per answer (16)")
    parser.add_argument("--device-blocks", type=int, help="KV blocks on the device (128; on a GPU 700)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (16)")
    parser.add_argument("--host-memory", default="4GiB", help='host tier, such as "4GiB" (the default)')
    parser.add_argument(
        "--storage",
        type=Path,
        metavar="DIR",
        help="keep blocks in this folder too, and start every engine with a connector anew halfway",
    )
    parser.add_argument("--model", type=Path, help="folder of the converted model (default: the cache folder)")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--png", type=Path, default=Path("demo.png"), help="write the picture here (demo.png)")
    parser.add_argument("--web", action="store_true", help="show it live on a page of this machine, too")
    parser.add_argument("--port", type=int, default=8765, help="of that page (8765; 0 takes a free one)")
    parser.add_argument("--stay", action="store_true", help="serve that page until Ctrl-C, not only until the end")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port} is impossible: give 0 to 65535")
    if options.stay and not options.web:
        parser.error("--stay keeps the page of --web: give both")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no GPU here; leave it out, or give cpu")
    # A GPU computes 1,000 tokens of this small model in the time that it takes to launch its layers.
    on_gpu = options.device.startswith("cuda")
    options.document_tokens = (6500 if on_gpu else 1000) if options.document_tokens is None else options.document_tokens
    options.device_blocks = (700 if on_gpu else 128) if options.device_blocks is None else options.device_blocks
    for name in ("users", "turns", "document_tokens", "answer_tokens", "device_blocks", "block_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is impossible: give at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all ways gave identical tokens, 1 where they did not, 2 where the options cannot work."""
    options = parse_arguments(arguments)
    try:
        if not options.web:
            return run(options, show_nobody)
        with Page(options.port, options.stay) as page:
            return run(options, page.show)
    except (ValueError, OSError, ImportError) as error:  # what a wrong size, folder or missing package raises
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, show: Show) -> int:
    """Ask every turn under every way of caching, and compare. What happens is told to `show`, too."""
    torch.backends.cuda.matmul.allow_tf32 = False  # tokens are compared, so fp32 is to be fp32
    model, tokenizer = load_smollm2(options.model, options.device)
    chats = make_chats(options.users, options.turns, options.document_tokens, tokenizer)
    policies = [options.policy] if options.policy else [policy.value for policy in WritePolicy]
    print(f"SmolLM2-135M-Instruct (fp32) on {hardware()['gpu'] or hardware()['cpu']}")
    print(f"{options.users} users, documents of about {options.document_tokens} tokens; {_fit(options, model)}\n")
    print("medians over the users; in brackets the soonest first token and the latest")
    print("turn  cache                    prompt  device hit  host hit  computed   TTFT ms (min..max)     vs no cache")
    ways = (NO_CACHE, DEVICE_ONLY, *policies)
    engines = {way: make_engine(options, model, way) for way in ways}
    show_beginning(options, model, ways, show)
    for way, engine in engines.items():
        print_progress(f"      {way}: a first request, which does not count")
        warm_up(engine, forget=not options.storage)
    turns: list[Turn] = []
    for number in range(options.turns):
        if options.storage and number == (options.turns + 1) // 2:
            restart(options, model, engines)
            show("restart")
        for turn in ask_all(engines, chats, number, tuple(turns), options.answer_tokens):
            turns.append(turn)
            show_turn(turn, chats[turn.user], tokenizer, engines[turn.way], model, show)
        print_progress()
        print_turn([turn for turn in turns if turn.turn == number])
    for way, engine in engines.items():
        print_statistics(way, engine)
        engine.shutdown()
    return conclude(options, turns, show)


def show_beginning(options: argparse.Namespace, model: PagedLlama, ways: Sequence[str], show: Show) -> None:
    """Tell what is going to be asked, and how large the tiers are."""
    show(
        "begin",
        machine=hardware()["gpu"] or hardware()["cpu"],
        users=options.users,
        turns=options.turns,
        needed_bytes=_needed_tokens(options) * model.block_bytes(options.block_size) // options.block_size,
        has_storage=bool(options.storage),
        default=Config().write_policy.value,
        ways=[{"name": way, "about": ABOUT[way]} for way in ways],
    )


def show_turn(
    turn: Turn, chat: Chat, tokenizer: ChatTokenizer, engine: MiniEngine, model: PagedLlama, show: Show
) -> None:
    """Tell a turn with its words, and what each tier holds behind it."""
    show(
        "turn",
        **turn.row(),
        question=chat.questions[turn.turn],
        answer=tokenizer.decode(turn.answer, skip_special_tokens=True),
        tiers=tiers_of(engine, model.block_bytes(engine.scheduler.block_size)),
    )


def make_engine(options: argparse.Namespace, model: PagedLlama, way: str) -> MiniEngine:
    """An engine that caches in the given way."""
    blocks, size = options.device_blocks, options.block_size
    scheduler = Scheduler(blocks, size, max_step_tokens=2048, prefix_caching=way != NO_CACHE)
    identity = CacheIdentity("SmolLM2-135M-Instruct", str(model.dtype), "NHD", size)
    if way in (NO_CACHE, DEVICE_ONLY):
        return MiniEngine(scheduler, LocalRunner(LlamaModel(model), blocks, size), identity)
    settings: dict[str, object] = {"host_memory": options.host_memory, "write_policy": way}
    if options.storage:
        settings["storage"] = {"path": str(options.storage / way), "capacity": "4GiB", "prefetch": "wait_complete"}
    config = Config.from_mapping(settings)
    runner = LocalRunner(
        LlamaModel(model), blocks, size, lambda rank, ranks: build_worker(config, rank, ranks, identity)
    )
    connector = build_scheduler(config, size, runner.world_size, tree=scheduler.tree, identity=identity)
    return MiniEngine(scheduler, runner, identity, connector)


def restart(options: argparse.Namespace, model: PagedLlama, engines: dict[str, MiniEngine]) -> None:
    """Every engine with a connector ends and a new one takes its place: only what lies in storage is left."""
    print("\n-- all engines are started anew: device and host are empty, storage is not --\n")
    for way, engine in engines.items():
        engine.run()
        engine.shutdown()
        engines[way] = make_engine(options, model, way)


def warm_up(engine: MiniEngine, forget: bool) -> None:
    """Whatever happens once (allocations, kernels) happens here. With `forget` nothing of it stays cached: a reset
    hides from an engine all that is in its storage."""
    for _ in range(2):
        engine.generate([list(range(1, 1 + 8 * engine.scheduler.block_size))], 2)
    if forget:
        engine.scheduler.reset_cache()


def ask_all(
    engines: Mapping[str, MiniEngine], chats: Sequence[Chat], number: int, before: Sequence[Turn], answer_tokens: int
) -> Iterator[Turn]:
    """Every user's question of this turn, one user after the other; each is put to all engines before the next, so
    that whatever else the machine does falls on all of them."""
    previous = {(turn.way, turn.user): turn for turn in before if turn.turn == number - 1}
    for user, chat in enumerate(chats):
        for way, engine in engines.items():
            print_progress(f"{number + 1:4}  {way}: user {user + 1} of {len(chats)} asks")
            last = previous.get((way, user))
            prompt = chat.prompt(number, last.prompt, last.answer) if last else chat.prompt(number)
            (request,) = engine.generate([prompt], answer_tokens)
            yield Turn(
                way=way,
                user=user,
                turn=number,
                prompt=tuple(prompt),
                device_hit_tokens=request.device_hit_tokens,
                host_hit_tokens=request.host_hit_tokens,
                ttft=request.ttft,
                answer=tuple(request.output_token_ids),
            )


def conclude(options: argparse.Namespace, turns: Sequence[Turn], show: Show) -> int:
    """Compare tokens, state the claims, write JSON and picture."""
    report = Report("demo", rows=[turn.row() for turn in turns])
    reference = {(t.user, t.turn): t for t in turns if t.way == NO_CACHE}
    different = [t for t in turns if t.answer != reference[t.user, t.turn].answer]
    print()
    report.claim("different_answers", len(different), 0, "answers", "lower")
    ratios = [reference[t.user, t.turn].ttft / t.ttft for t in turns if t.host_hit_tokens >= 1000]
    if ratios:
        spread = f"{min(ratios):.1f} to {max(ratios):.1f} x sooner"
        print(f"{len(ratios)} turns hit 1,000 tokens or more on the host: {spread}")
        report.claim("ttft_speedup_of_1000_token_host_hit", median(ratios), 5, "x", "higher")
    default = Config().write_policy.value
    # But for the system prompt, which the device has, unless chats fit on it.
    second = [t for t in turns if t.turn == 1 and t.way == default and 2 * t.device_hit_tokens < len(t.prompt)]
    if second:
        num_hits = sum(2 * t.host_hit_tokens > len(t.prompt) for t in second)
        report.claim("second_turns_on_the_host", num_hits, len(second), f"chats under {default}, the default", "higher")
    report.write(options.json)
    title = f"{options.users} chats that do not fit on the device together, {hardware()['gpu'] or hardware()['cpu']}"
    plot_ttft(options.png, title, [(t.way, t.turn, 1e3 * t.ttft) for t in turns])
    for t in different:
        print(f"user {t.user}, turn {t.turn + 1}, {t.way}: tokens differ from those without a cache", file=sys.stderr)
    show("end", claims=report.claims)
    return 1 if different else 0


def _fit(options: argparse.Namespace, model: PagedLlama) -> str:
    device_mb = options.device_blocks * model.block_bytes(options.block_size) / 1e6
    tokens = options.device_blocks * options.block_size
    return f"the device holds {tokens} tokens ({device_mb:.0f} MB), the chats grow to about {_needed_tokens(options)}"


def _needed_tokens(options: argparse.Namespace) -> int:
    return int(options.users * (options.document_tokens + options.turns * (options.answer_tokens + 40)))


if __name__ == "__main__":
    sys.exit(main())
