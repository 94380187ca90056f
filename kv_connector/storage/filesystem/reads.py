"""Blocks of packs into the caller's memory, each compared with its checksum by the thread that has just read it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..base import ThreadedStorage
from ..checksums import BlockCheck
from .catalog import Pack
from .folder import PackFolder
from .packs import checksum_of, offset_of
from .transfers import are_aligned, blocks_per_piece, move

_Run = list[tuple[int, int]]  # neighbouring blocks: places in a pack, each with its number in the batch


@dataclass(slots=True)
class ReadBatch:
    """What is to be read: `calls`, in any order and on any threads, fill `buffers[i]` and set `found[i]`."""

    keys: list[bytes]
    buffers: list[memoryview]
    found: list[bool]
    packs: list[Pack] = field(default_factory=list)
    calls: list[Callable[[], None]] = field(default_factory=list)
    num_missed: int = 0


class PackReader:
    """See the module. Any thread may call."""

    def __init__(
        self, folder: PackFolder, storage: ThreadedStorage, block_bytes: int, is_direct: bool, check: BlockCheck
    ) -> None:
        """`storage` counts, and logs, what becomes of blocks; `is_direct` says whether the file system allows to pass
        by the page cache; `check` compares their checksums."""
        self._folder = folder
        self._check = check
        self._storage = storage
        self._length = blocks_per_piece(block_bytes)
        self._is_direct = is_direct

    def plan(self, keys: list[bytes], buffers: list[memoryview]) -> ReadBatch:
        """What reads these blocks, as far as it is known where they lie."""
        batch = ReadBatch(keys, buffers, [False] * len(keys))
        by_pack: dict[str, tuple[Pack, _Run]] = {}
        for i, slot in enumerate(self._folder.catalog.slots(keys)):
            if slot is None:
                batch.num_missed += 1
            else:
                by_pack.setdefault(slot.pack.name, (slot.pack, []))[1].append((slot.place, i))
        flags = os.O_DIRECT if self._is_direct and are_aligned(buffers) else 0
        for pack, wanted in by_pack.values():
            batch.packs.append(pack)
            batch.calls += [partial(self._read, pack, run, batch, flags) for run in _runs(wanted, self._length)]
        return batch

    def _read(self, pack: Pack, run: _Run, batch: ReadBatch, flags: int) -> None:
        text = self._folder.catalog.text(pack)
        if text is None:  # it was found gone, unreadable or damaged meanwhile: it is not asked for again
            self._storage.count(missed_blocks=len(run))
            return
        places, targets = [place for place, _ in run], [batch.buffers[i] for _, i in run]
        try:
            opened = self._folder.opened.borrow(pack.name, flags)
            try:
                move(os.preadv, opened.descriptor, targets, offset_of(text, places[0]))
            finally:
                self._folder.opened.give_back(opened)
        except FileNotFoundError:  # another process made room
            self._folder.missed(pack.name)
            self._storage.count(missed_blocks=len(run))
            return
        except EOFError:
            self._note_damage(pack, places)
            return
        except OSError as error:
            self._cannot_read(pack, places, error)
            return
        for (place, i), target in zip(run, targets, strict=True):
            batch.found[i] = self._check.fits(batch.keys[i], target, checksum_of(text, place))
        damaged = [place for place, i in run if not batch.found[i]]
        if damaged:
            self._note_damage(pack, damaged)
        else:
            self._storage.note_success()

    def _note_damage(self, pack: Pack, places: list[int]) -> None:
        """These blocks are not what the pack's header says. Where it is also the header in its file, and so the one
        that the file's name covers, they are damaged and the others are not; else the file is no pack of this name."""
        self._folder.opened.drop(pack.name)
        try:
            header = self._folder.contents.read_anew(pack.name)
        except FileNotFoundError:
            self._folder.missed(pack.name)
            self._storage.count(missed_blocks=len(places))
            return
        except OSError as error:
            self._cannot_read(pack, places, error)
            return
        self._storage.count(corrupt_blocks=len(places))
        if self._folder.catalog.text(pack) is None:  # another reader was first: this file may have been stored since
            return
        if header is not None and self._folder.catalog.drop(pack, places):
            damage = ValueError("checksums differ")
            self._storage.note_fault(f"blocks {places} of {pack.name} are not read any more", damage)
        else:
            self._storage.note_fault(f"{pack.name} was deleted", ValueError("it is damaged as a whole"))
            self._folder.remove(pack)

    def _cannot_read(self, pack: Pack, places: list[int], error: OSError) -> None:
        """Whether the disk is away for now or a sector for ever is not known: the pack counts as missed until it is
        looked for again, so its blocks are stored once more by whoever computes them."""
        self._folder.missed(pack.name)
        self._storage.note_fault(f"cannot read {pack.name}", error)
        self._storage.count(failed_reads_blocks=len(places))


def _runs(wanted: _Run, length: int) -> list[_Run]:
    """Those of neighbouring places together, each run no longer than `length`."""
    runs: list[_Run] = []
    for entry in sorted(wanted):
        if runs and entry[0] == runs[-1][-1][0] + 1 and len(runs[-1]) < length:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs
