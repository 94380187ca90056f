"""Requests as they came, and what the engine's device cache found of each.

Two formats are read, a line of JSON for each request in both. Mooncake's has `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and `hash_ids`, the names of the prompt's blocks of 512 tokens, the last
of which may be shorter. Ours, which `record_trace` writes, has the same keys behind a header that names the tokens of
a block, and only whole blocks; it may hold several starts of engines, each behind a header of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..types import BlockHash
from ..values import shown
from .host import HostTier, write_through_lru

FORMAT = "kv-connector trace"
VERSION = 1
MOONCAKE_BLOCK_TOKENS = 512
_MOST = 10**15
"""Of a length in tokens and of milliseconds."""
DEVICE_SHARE = 0.01
"""Device cache for a trace, as a share of its distinct blocks; at least `LEAST_DEVICE_BLOCKS`."""
LEAST_DEVICE_BLOCKS = 100


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. A request is the hashes of its blocks, first block first.

    What the device finds of each is the same for every policy of the host, and is played once: leaf-first LRU,
    `device_blocks` large. `input_tokens` are those of each prompt, and `block_tokens` those of a block.
    """

    name: str
    requests: Sequence[Sequence[BlockHash]]
    device_hits: Sequence[int]  # by request: its leading blocks that the device has
    device_blocks: int
    num_distinct: int
    input_tokens: Sequence[int]
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests, each as often as it is asked for."""
        return sum(map(len, self.requests))

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(self.input_tokens)

    @classmethod
    def of(
        cls,
        name: str,
        blocks: Iterable[Sequence[Hashable]],
        device_blocks: int | None = None,
        input_tokens: Sequence[int] = (),
        block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    ) -> Trace:
        """Requests whose blocks have names of any kind; without `device_blocks` the device has its share of them, and
        without `input_tokens` prompts are whole blocks.

        Hashes are numbers in order of first appearance, so that a run is the same in every process. Raises ConfigError
        where a block follows two different ones: a name stands for its whole prefix.
        """
        numbers: dict[Hashable, BlockHash] = {}
        parents: dict[Hashable, Hashable] = {}
        requests = []
        for number, request in enumerate(blocks):
            parent: Hashable = None
            for block in request:
                if parents.setdefault(block, parent) != parent:
                    raise ConfigError(
                        f"{name}, request {number}: block {block!r} follows {parent!r} and elsewhere "
                        f"{parents[block]!r}: a block's name stands for its whole prefix"
                    )
                numbers.setdefault(block, BlockHash(len(numbers).to_bytes(8, "big")))
                parent = block
            requests.append([numbers[block] for block in request])
        if device_blocks is None:
            device_blocks = max(LEAST_DEVICE_BLOCKS, int(DEVICE_SHARE * len(numbers)))
        tokens = input_tokens or [len(request) * block_tokens for request in requests]
        trace = cls(name, requests, [0] * len(requests), device_blocks, len(numbers), tokens, block_tokens)
        return trace.on_device(device_blocks)

    def on_device(self, device_blocks: int) -> Trace:
        """The same requests behind a device cache of so many blocks."""
        device = write_through_lru(device_blocks)
        hits = [device.request(hashes, 0, now) for now, hashes in enumerate(self.requests)]
        return Trace(
            self.name, self.requests, hits, device_blocks, self.num_distinct, self.input_tokens, self.block_tokens
        )

    def host_hits(self, host: HostTier) -> Iterator[int]:
        """By request, in their order: the blocks behind those of the device that this host finds."""
        for now, (hashes, first) in enumerate(zip(self.requests, self.device_hits, strict=True)):
            yield host.request(hashes, first, now)


def read_trace(path: Path, share: float = 1.0) -> Trace:
    """The first `share` of a trace of either format, in the order of its timestamps.

    A name of a block is one within a start: what begins behind another header shares no blocks with what is in front of
    it. A last line that an engine is still writing, or was killed in, is left out. Raises ConfigError, with the line,
    for what is no trace.
    """
    start, block_tokens = 0, MOONCAKE_BLOCK_TOKENS
    found: list[tuple[int, float, list[Hashable], int]] = []
    *lines, rest = _text(path).split("\n")
    if rest and not (lines and _is_torn(rest)):
        lines.append(rest)
    for number, line in enumerate(lines, 1):
        entry = _entry(path, number, line)
        if "format" in entry:
            tokens = _header_tokens(path, number, entry)
            if found and tokens != block_tokens:
                raise ConfigError(
                    f"{path}, line {number}: blocks of {tokens} tokens behind ones of {block_tokens}: split the file"
                )
            start, block_tokens = number, tokens
            continue
        blocks = entry.get("hash_ids")
        if not isinstance(blocks, list) or not all(isinstance(block, int | str) for block in blocks):
            raise ConfigError(f"{path}, line {number}: give one JSON object a line, with hash_ids, a list of names")
        ids: list[Hashable] = [(start, block) for block in blocks] if start else blocks
        num_tokens = int(_number(path, number, entry, "input_length", len(ids) * block_tokens, 0))
        found.append((start, _number(path, number, entry, "timestamp", 0, -math.inf), ids, num_tokens))
    if not any(ids for *_, ids, _ in found):
        raise ConfigError(f"{path}: there are no requests in it{', or none that has a block' if found else ''}")
    found.sort(key=lambda entry: entry[:2])  # ours are written as requests end
    found = found[: max(1, round(share * len(found)))]
    requests = [ids for _, _, ids, _ in found]
    return Trace.of(path.stem, requests, input_tokens=[n for *_, n in found], block_tokens=block_tokens)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: give a trace, with one JSON object a line") from error


def _is_torn(line: str) -> bool:
    """Whether a line without its end may be the beginning of one: a whole one has one closing brace, at its end."""
    return line.startswith("{") and "}" not in line


def _number(path: Path, number: int, entry: dict[str, Any], name: str, default: int, least: float) -> float:
    """Timestamps may be negative: who was admitted first may end last, and ours count from who ended first."""
    value = entry.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not max(least, -_MOST) <= value <= _MOST:
        least_told = " of at least 0 and" if least == 0 else ""
        raise ConfigError(f"{path}, line {number}: {name}={shown(value)}: give a number{least_told} up to {_MOST}")
    return float(value)


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: give one JSON object a line, with hash_ids") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}, line {number}: give one JSON object a line, with hash_ids")
    return entry


def _header_tokens(path: Path, number: int, header: dict[str, Any]) -> int:
    tokens = header.get("block_tokens")
    if header["format"] != FORMAT or header.get("version") != VERSION or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(
            f"{path}, line {number}: {shown(header)} is no header of {FORMAT!r}, version {VERSION}: record it anew"
        )
    return tokens
