"""The costs of copies that a start uses: measured, remembered, built in, or from a file."""

from __future__ import annotations

from ...config import Config
from ..memory.host_form import HostForm
from .curves import BUILT_IN, NUM_BYTES, LinkCosts, costs_of_file


def link_costs(form: HostForm, config: Config) -> LinkCosts:
    """What `config.calibration` says: measured, now or at an earlier start, built in, or from a file.

    The coder is measured where `form` codes. Raises ConfigError for a file that cannot be read.
    """
    if config.calibration not in ("auto", "off"):
        return costs_of_file("calibration", config.calibration)
    is_worth_it = form.layout.device.type == "cuda" and config.pin_memory and config.host_memory >= NUM_BYTES
    if config.calibration == "off" or not is_worth_it:
        return BUILT_IN
    from .calibration import remembered_costs  # only this needs Triton

    return remembered_costs(form, config.numa_bind)
