"""What hosts of several sizes would bring, under several write policies: replays side by side, in processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .host import POLICIES
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay. `hit_blocks` are the host's hits, over all requests; `saved_tokens` those of prompts that need no
    prefill because of them."""

    policy: str
    host_blocks: int
    hit_blocks: int
    saved_tokens: int


def sweep(trace: Trace, sizes: Sequence[int], policies: Sequence[str]) -> Iterator[Replayed]:
    """Every policy of `POLICIES` in `policies` at every size, in blocks of the trace, in this order."""
    cases = [(policy, size) for size in sizes for policy in policies]
    processes = min(len(cases), len(os.sched_getaffinity(0)))
    if processes == 1:
        yield from (_replay(trace, *case) for case in cases)
        return
    # Forked, so that no process reads the trace again.
    with multiprocessing.get_context("fork").Pool(processes, _keep, (trace,)) as pool:
        yield from pool.imap(_replay_kept, cases)


def _replay(trace: Trace, policy: str, size: int) -> Replayed:
    hits, saved = 0, 0
    found = trace.host_hits(POLICIES[policy](size))
    for num_hits, first, num_tokens in zip(found, trace.device_hits, trace.input_tokens, strict=True):
        hits += num_hits
        # One token is left to compute, and the last block of a prompt may be a part of one.
        end = min((first + num_hits) * trace.block_tokens, num_tokens - 1)
        saved += max(0, end - first * trace.block_tokens)
    return Replayed(policy, size, hits, saved)


_kept: list[Trace] = []  # of a process of `sweep`


def _keep(trace: Trace) -> None:
    _kept[:] = [trace]


def _replay_kept(case: tuple[str, int]) -> Replayed:
    return _replay(_kept[0], *case)
