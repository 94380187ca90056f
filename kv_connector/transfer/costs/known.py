"""The costs of copies that a start uses: measured, remembered, built in, or from a file."""

from __future__ import annotations

from ...config import Config
from ...errors import ConfigError
from ...values import path_of, shortened, shown
from ..memory.host_form import HostForm
from .curves import BUILT_IN, NUM_BYTES, LinkCosts, decode


def link_costs(form: HostForm, config: Config) -> LinkCosts:
    """What `config.calibration` says: measured, now or at an earlier start, built in, or from a file.

    The coder is measured where `form` codes. Raises ConfigError for a file that cannot be read.
    """
    if config.calibration not in ("auto", "off"):
        try:
            return decode(path_of("calibration", config.calibration).read_text(), config.calibration)
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
