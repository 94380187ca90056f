"""The costs of copies that a start uses: measured, remembered, built in, or from a file."""

from __future__ import annotations

import os
import stat

from ...config import Config
from ...errors import ConfigError
from ...values import path_of, shortened, shown
from ..memory.host_form import HostForm
from .curves import BUILT_IN, NUM_BYTES, LinkCosts, decode

_MOST_BYTES = 1 << 20
"""Of a file: hundreds of times what is written."""


def link_costs(form: HostForm, config: Config) -> LinkCosts:
    """What `config.calibration` says: measured, now or at an earlier start, built in, or from a file.

    The coder is measured where `form` codes. Raises ConfigError for a file that cannot be read.
    """
    if config.calibration not in ("auto", "off"):
        try:
            return decode(_text_of(config.calibration), config.calibration)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"calibration={shown(config.calibration)} cannot be read: {shortened(str(error))}; give a file that "
                "`kv-connector calibrate --json` wrote, or leave it out"
            ) from error
    is_worth_it = form.layout.device.type == "cuda" and config.pin_memory and config.host_memory >= NUM_BYTES
    if config.calibration == "off" or not is_worth_it:
        return BUILT_IN
    from .calibration import remembered_costs  # only this needs Triton

    return remembered_costs(form, config.numa_bind)


def _text_of(file: str) -> str:
    """Waits for no pipe, and reads nothing without an end."""
    with open(path_of("calibration", file), opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise ConfigError(
                f"calibration={shown(file)} is no file of at most {_MOST_BYTES} bytes: give one that `kv-connector "
                "calibrate --json` wrote, or leave it out"
            )
        return opened.read()
