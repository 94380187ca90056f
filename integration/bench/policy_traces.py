"""Requests that `integration/bench/policies.py` replays: a recorded trace, chats with one-off scans among them, and
prompts that come again for as long as a trace is.

A request is the hashes of its blocks, first block first. A trace also knows what the engine's device cache finds of
each request, which is the same for every policy of the host and is played once: leaf-first LRU, `device_blocks` large.
"""

from __future__ import annotations

import json
import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from integration.bench.policy_baselines import LRU, PrefixCache
from kv_connector.types import BlockHash

SYNTHETIC = {"chats": 0.0, "chats_scans_15": 0.15, "chats_scans_40": 0.4}
"""By name: the share of requests that are scans."""
NUM_REQUESTS = 4000
"""Of each synthetic trace, whole: 0.7, 1.2 and 2.0 million block touches."""
CHATS = 400
ZIPF = 0.9
"""Popularity of the n-th chat is `n ** -ZIPF`."""
CHAT_BLOCKS = 400
"""A chat that is longer than so many blocks starts again under a new prefix."""
TURN_BLOCKS = (8, 40)
SCAN_BLOCKS = (500, 1500)
SYSTEM_PROMPTS = 5
SYSTEM_PROMPT_BLOCKS = 16
SYNTHETIC_DEVICE_BLOCKS = 8000
PROMPTS = {"prompts": 0, "prompts_drift": 2000}
"""By name: after so many requests others of the prompts are the popular ones; 0 is never."""
NUM_PROMPT_REQUESTS = 40_000
NUM_PROMPTS = 300
PROMPT_BLOCKS = 8
PROMPTS_DEVICE_BLOCKS = 100
FILE_DEVICE_SHARE = 0.01
"""Device cache for a trace from a file, as a share of its distinct blocks; at least `LEAST_DEVICE_BLOCKS`."""
LEAST_DEVICE_BLOCKS = 100


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, and what the device cache finds of each."""

    name: str
    requests: Sequence[Sequence[BlockHash]]
    device_hits: Sequence[int]  # by request: its leading blocks that the device has
    device_blocks: int
    num_distinct: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests, each as often as it is asked for."""
        return sum(map(len, self.requests))

    @classmethod
    def of(cls, name: str, blocks: Iterable[Sequence[Hashable]], device_blocks: int | None = None) -> Trace:
        """Requests whose blocks have names of any kind; without `device_blocks` the device has its share of them.

        Hashes are numbers in order of first appearance, so that a run is the same in every process. Raises ValueError
        where a block follows two different ones: a name stands for its whole prefix.
        """
        numbers: dict[Hashable, BlockHash] = {}
        parents: dict[Hashable, Hashable] = {}
        requests = []
        for number, request in enumerate(blocks):
            parent: Hashable = None
            for block in request:
                if parents.setdefault(block, parent) != parent:
                    raise ValueError(
                        f"{name}, request {number}: block {block!r} follows {parent!r} and elsewhere "
                        f"{parents[block]!r}: a block's name stands for its whole prefix"
                    )
                numbers.setdefault(block, BlockHash(len(numbers).to_bytes(8, "big")))
                parent = block
            requests.append([numbers[block] for block in request])
        if device_blocks is None:
            device_blocks = max(LEAST_DEVICE_BLOCKS, int(FILE_DEVICE_SHARE * len(numbers)))
        device = PrefixCache(LRU(device_blocks))
        hits = [device.request(hashes, 0, now) for now, hashes in enumerate(requests)]
        return cls(name, requests, hits, device_blocks, len(numbers))


def read_trace(path: Path, share: float = 1.0) -> Trace:
    """The first `share` of a trace in Mooncake's format: a line of JSON for each request, with `hash_ids`, the names of
    its blocks, each of which stands for its whole prefix. Raises ValueError where that is not so."""
    lines = path.read_text().splitlines()
    requests: list[list[int]] = []
    for number, line in enumerate(lines[: _share_of(len(lines), share)], 1):
        try:
            requests.append(json.loads(line)["hash_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: give one JSON object a line, with hash_ids") from error
    return Trace.of(path.stem, requests)


def synthetic_traces(share: float = 1.0) -> list[Trace]:
    """The fixed set, or its first `share` on a device cache of that share."""
    device_blocks = _share_of(SYNTHETIC_DEVICE_BLOCKS, share)
    traces = [
        Trace.of(name, chats(_share_of(NUM_REQUESTS, share), scans), device_blocks) for name, scans in SYNTHETIC.items()
    ]
    num_requests = _share_of(NUM_PROMPT_REQUESTS, share)
    return traces + [
        Trace.of(name, prompts(num_requests, lasting), PROMPTS_DEVICE_BLOCKS) for name, lasting in PROMPTS.items()
    ]


def chats(num_requests: int, scans: float, seed: int = 3) -> list[list[Hashable]]:
    """Turns of chats whose popularity is Zipf's, each with the whole conversation before it, behind one of a few system
    prompts; a share `scans` of requests are long prompts that nobody asks for again."""
    rng = random.Random(seed)
    popularity = list(accumulate((rank + 1) ** -ZIPF for rank in range(CHATS)))
    conversations: dict[int, list[Hashable]] = {}
    generations = [0] * CHATS
    requests: list[list[Hashable]] = []
    for number in range(num_requests):
        if rng.random() < scans:
            requests.append([("scan", number, index) for index in range(rng.randint(*SCAN_BLOCKS))])
            continue
        chat = rng.choices(range(CHATS), cum_weights=popularity)[0]
        conversation = conversations.get(chat)
        if conversation is None or len(conversation) > CHAT_BLOCKS:
            generations[chat] += 1
            conversation = [("system", chat % SYSTEM_PROMPTS, index) for index in range(SYSTEM_PROMPT_BLOCKS)]
            conversations[chat] = conversation
        turn = range(len(conversation), len(conversation) + rng.randint(*TURN_BLOCKS))
        conversation += [("chat", chat, generations[chat], index) for index in turn]
        requests.append(list(conversation))
    return requests


def prompts(num_requests: int, lasting: int, seed: int = 3) -> list[list[Hashable]]:
    """Whole prompts whose popularity is Zipf's, for `lasting` requests: then it is dealt out anew."""
    rng = random.Random(seed)
    popularity = list(accumulate((rank + 1) ** -ZIPF for rank in range(NUM_PROMPTS)))
    by_rank = list(range(NUM_PROMPTS))
    requests: list[list[Hashable]] = []
    for number in range(num_requests):
        if lasting and number % lasting == 0:
            rng.shuffle(by_rank)
        prompt = rng.choices(by_rank, cum_weights=popularity)[0]
        requests.append([(prompt, index) for index in range(PROMPT_BLOCKS)])
    return requests


def _share_of(whole: int, share: float) -> int:
    return max(1, round(share * whole))
