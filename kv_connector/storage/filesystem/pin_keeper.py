"""Keeps an engine's pins in its storage folder.

Threading: `kept` and `ended` are the scheduler's, and note what has changed in a dictionary; a daemon thread of the
keeper's own, which begins with the first change, writes all of them a second behind it, and at the end.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ...types import BlockHash, KeptPin
from ...values import shortened
from ..checksums import BlockCheck
from .layout import PINS, FolderLayout
from .pin_file import PinFile, TimedPin, most_lasting

_PAUSE_SECONDS = 1.0
"""Changes within it are written at once: what a kill takes is no older."""
_CLOSE_SECONDS = 10.0
"""How long an engine that ends waits for a disk."""

logger = logging.getLogger("kv_connector.storage")
_Name = tuple[int, BlockHash, bool]


class FolderPinKeeper:
    """See `scheduler.control.keeping.PinKeeper`. Closed when it is dropped, and at exit."""

    def __init__(self, root: Path, identity: bytes, check: BlockCheck, clock: Callable[[], float] = time.time) -> None:
        """`root` is made storage's where it is not yet, `clock` is in seconds since 1970, `check` that of this
        identity. Raises OSError where no file can be had."""
        FolderLayout(root).claim()
        self._desk = _Desk(PinFile(root / PINS, identity, check), root, clock)
        self._clock = clock
        self.close = weakref.finalize(self, self._desk.close)
        """Returns when all is written; idempotent."""

    def take(self) -> list[KeptPin]:
        """See `PinKeeper.take`. What cannot be read or believed is no pin, and a line of the log."""
        now = self._clock()
        kept = []
        for pin in self._desk.read(now):
            seconds = pin.ends - now if pin.ends < float("inf") else None
            kept.append(KeptPin(pin.block_hashes, pin.tenant, seconds, pin.is_of_request))
        return kept

    def kept(self, pin: KeptPin) -> None:
        """See `PinKeeper.kept`."""
        ends = float("inf") if pin.seconds is None else self._clock() + pin.seconds
        self._desk.put(pin.name, TimedPin(pin.block_hashes, pin.tenant, ends, pin.is_of_request))

    def ended(self, name: _Name) -> None:
        """See `PinKeeper.ended`."""
        self._desk.drop(name)


class _Desk:
    """What is shared with the thread; it knows nothing of the keeper, which may be dropped."""

    def __init__(self, file: PinFile, root: Path, clock: Callable[[], float]) -> None:
        self._file = file
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()  # held for moments
        self._pins: dict[_Name, TimedPin] = {}
        self._changed, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = self._was_full = False

    def read(self, now: float) -> list[TimedPin]:
        """Those of before that have not ended."""
        try:
            found = self._file.read()
        except (OSError, ValueError) as error:
            logger.warning("%s: the pins of the last start are lost: %s", self._root / PINS, shortened(str(error)))
            return []
        pins = [pin for pin in found if pin.ends > now]
        self._pins = {(len(pin.block_hashes), pin.block_hashes[-1], pin.is_of_request): pin for pin in pins}
        return pins

    def put(self, name: _Name, pin: TimedPin) -> None:
        with self._lock:
            self._pins[name] = pin
        self._note()

    def drop(self, name: _Name) -> None:
        with self._lock:
            known = self._pins.pop(name, None)
        if known is not None:
            self._note()

    def _note(self) -> None:
        self._changed.set()
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._work, name="kv-connector-pins", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._changed.wait()
            is_last = self._closing.wait(_PAUSE_SECONDS)  # nothing changes any more
            self._write_changes()

    def _write_changes(self) -> None:
        if not self._changed.is_set():
            return
        self._changed.clear()
        now = self._clock()
        with self._lock:
            pins = list(self._pins.values())
        try:
            num_left_out = self._file.write(most_lasting([pin for pin in pins if pin.ends > now]))
        except Exception as error:  # noqa: BLE001 - a thread's top: pins are worth no engine
            if not self._has_failed:
                text = "%s: pins cannot be written, and may end with this engine: %s"
                logger.warning(text, self._root / PINS, shortened(str(error)))
            self._has_failed = True
            return
        self._has_failed = False
        if num_left_out and not self._was_full:
            text = "%s: a file has no room for %d of the pins, which end with this engine"
            logger.warning(text, self._root / PINS, num_left_out)
        self._was_full = num_left_out > 0

    def close(self) -> None:
        """Write what has changed. A disk that hangs is not waited for long."""
        self._closing.set()
        if self._thread is not None:
            self._changed.set()  # wakes it
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return
        self._file.close()
