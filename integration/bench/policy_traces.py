"""Requests that `integration/bench/policies.py` makes up: chats with one-off scans among them, prompts that come again
for as long as a trace is, documents that are read every night, and a load that becomes another one."""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import accumulate
from typing import NamedTuple

from kv_connector.replay import Trace

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
NUM_PHASE_REQUESTS = 10_000
"""In each of four phases."""
PHASES_ONE_OFFS = 0.6
"""Of the requests of the first and the third phase."""
BURST_CHATS = 1000
"""At a time, in the second and the fourth phase."""
BURST_TURNS = 4
BURST_TURN_BLOCKS = 3
PHASES_DEVICE_BLOCKS = 400


class Nights(NamedTuple):
    """Each behind a day of requests for prompts whose popularity is Zipf's: then each document is asked for once, in
    the order of every night."""

    num_nights: int
    day_requests: int
    num_documents: int
    document_blocks: int
    seed: int


NIGHTS = {
    "nightly": Nights(17, 2000, 400, PROMPT_BLOCKS, 3),
    "nightly_crowded": Nights(14, 1500, 500, 6, 11),
    "nightly_long": Nights(12, 2500, 300, 10, 23),
}
"""By name. The policy that the package has by default was chosen before the third one was there."""


def synthetic_traces(share: float = 1.0) -> list[Trace]:
    """The fixed set, or its first `share` on a device cache of that share."""
    device_blocks = _share_of(SYNTHETIC_DEVICE_BLOCKS, share)
    traces = [
        Trace.of(name, chats(_share_of(NUM_REQUESTS, share), scans), device_blocks) for name, scans in SYNTHETIC.items()
    ]
    num_requests = _share_of(NUM_PROMPT_REQUESTS, share)
    traces += [
        Trace.of(name, prompts(num_requests, lasting), PROMPTS_DEVICE_BLOCKS) for name, lasting in PROMPTS.items()
    ]
    for name, nights in NIGHTS.items():
        some = nights._replace(num_nights=_share_of(nights.num_nights, share))
        traces.append(Trace.of(name, nightly(some), PROMPTS_DEVICE_BLOCKS))
    traces.append(Trace.of("phases", phases(_share_of(NUM_PHASE_REQUESTS, share)), PHASES_DEVICE_BLOCKS))
    return traces


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


def nightly(nights: Nights) -> list[list[Hashable]]:
    """Days of prompts, and after each of them the same documents, one after the other."""
    blocks = range(nights.document_blocks)
    documents = [[("document", number, index) for index in blocks] for number in range(nights.num_documents)]
    days = prompts(nights.num_nights * nights.day_requests, 0, nights.seed)
    requests: list[list[Hashable]] = []
    for first in range(0, len(days), nights.day_requests):
        requests += [*days[first : first + nights.day_requests], *documents]
    return requests


def phases(num_requests: int) -> list[list[Hashable]]:
    """Prompts whose popularity is Zipf's among one-offs, then short chats that end, and both again with others: each
    phase of so many requests, and nothing of one comes back in another."""
    requests: list[list[Hashable]] = []
    for seed in (1, 3):
        rng = random.Random(seed)
        popular = iter(prompts(num_requests, 0, seed))
        for number in range(num_requests):
            is_one_off = rng.random() < PHASES_ONE_OFFS
            prompt = [("one-off", number, index) for index in range(PROMPT_BLOCKS)] if is_one_off else next(popular)
            requests.append([("phase", seed, block) for block in prompt])
        requests += _bursts(num_requests, seed + 1)
    return requests


def _bursts(num_requests: int, seed: int) -> list[list[Hashable]]:
    """Turns of so many chats at a time, in any order, each with the whole conversation before it; one that ends gives
    way to a new one."""
    rng = random.Random(seed)
    live: list[list[Hashable]] = []
    requests: list[list[Hashable]] = []
    for number in range(num_requests):
        if len(live) < BURST_CHATS:
            live.append([])
        chat = rng.randrange(len(live)) if live[-1] else len(live) - 1
        live[chat] += [("burst", seed, number, index) for index in range(BURST_TURN_BLOCKS)]
        requests.append(list(live[chat]))
        if len(live[chat]) == BURST_TURNS * BURST_TURN_BLOCKS:
            del live[chat]
    return requests


def _share_of(whole: int, share: float) -> int:
    return max(1, round(share * whole))
