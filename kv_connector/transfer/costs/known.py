"""What copies take, as far as it is known: measured, remembered, built in, or from a file."""

from __future__ import annotations

from pathlib import Path

from ...config import Config
from ...errors import ConfigError
from ...values import shortened, shown
from ..memory.host_pool import HostPool
from ..memory.layout import CacheLayout
from .curves import BUILT_IN, LinkCosts, decode


def link_costs(layout: CacheLayout, host: HostPool, config: Config) -> LinkCosts:
    """What `config.calibration` says: measured, now or at an earlier start, built in, or from a file.

    Measuring writes to the first blocks of `host`: for start-up. Raises ConfigError for a file that cannot be read.
    """
    if config.calibration not in ("auto", "off"):
        try:
            return decode(Path(config.calibration).read_text(), config.calibration)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"calibration={shown(config.calibration)} cannot be read: {shortened(str(error))}"
            ) from error
    if config.calibration == "off" or layout.device.type != "cuda" or not host.is_pinned:
        return BUILT_IN
    from .calibration import remembered_costs  # only this needs Triton

    return remembered_costs(layout, host)
