"""Chooses the form of host blocks: the one that a user names, or under `auto` the better one here.

Under `auto` each rank says what speaks against `lossless` for its own cache. They take it where none has anything to
say, and `raw` where they cannot ask each other: a block of which one rank has no room is on no host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..config import Config, HostFormName, PathName
from ..errors import ConfigError
from .costs.curves import LinkCosts
from .costs.known import link_costs
from .costs.remembered import is_known, remember
from .memory.host_form import HostForm, coded_form, make_form, raw_form
from .memory.host_share import Exchange
from .memory.layout import CacheLayout

logger = logging.getLogger("kv_connector.transfer")

LARGEST_SHARE = 0.85
"""Of a host block's raw bytes; of bf16 alone it is 0.77. What is coded costs a busy model 0.5 ms more for each GB that
is loaded (H200, 2026-11-24), which a few more blocks in the same memory are not worth."""
_LOAD_BYTES = 256 << 20
"""Of the load by which forms are compared, in raw bytes: 2k tokens of a model with 8 billion weights."""


class FormChooser:
    """Chooses for one rank. `exchange` gathers values of all `world_size` ranks of the engine; None if they cannot.
    `name_of` maps an arrangement to the digest of the rank's identity with it; "" without an identity.
    """

    def __init__(
        self,
        config: Config,
        world_size: int = 1,
        exchange: Exchange | None = None,
        name_of: Callable[[str], str] = lambda arrangement: "",
    ) -> None:
        self._config = config
        self._world_size = world_size
        self._exchange = exchange
        self._name_of = name_of
        self._form: HostForm | None = None
        self._is_noted = False

    def choose(self, layout: CacheLayout) -> tuple[HostForm, LinkCosts]:
        """The form for these tensors, and what copies of its blocks take. Under `auto` it waits for the other ranks.
        Raises ConfigError where a form is named that gains nothing, and as `link_costs`."""
        if self._config.host_form is HostFormName.AUTO:
            form, costs = self._better(layout)
        else:
            form = make_form(layout, self._config.host_form)
            costs = link_costs(form, self._config)
        self._form = form
        return form, costs.coded if form.name else costs

    def note_unfit(self) -> None:
        """Most blocks did not fit into the lossless form: `auto` takes `raw` from the next start on. Idempotent."""
        form = self._form
        if self._is_noted or form is None or not form.name:
            return
        self._is_noted = True
        name = self._note_name(form)
        path = remember(name, f"too many blocks did not fit: {form.arrangement}\n") if name else None
        if path is not None:
            logger.info("host_form='auto' will be raw for this cache from the next start on, until %s is deleted", path)

    def _better(self, layout: CacheLayout) -> tuple[HostForm, LinkCosts]:
        raw, coded = raw_form(layout), coded_form(layout)
        objection = self._objection(coded, raw)
        try:
            costs = link_costs(raw if objection else coded, self._config)
        except ConfigError as error:  # the others must not wait for this rank
            self._agreed(str(error))
            raise
        share = load_share(coded, raw, costs)
        if not objection and share > 1:
            objection = f"coded loads are estimated to take {share:.2f} of raw ones' time ({costs.source})"
        objection = self._agreed(objection)
        if objection:
            logger.info("host_form='auto' is raw: %s", objection)
            return raw, costs
        logger.info(
            "host_form='auto' is lossless: host blocks have %.2f of raw ones' bytes, and loads are estimated to take "
            "%.2f of their time (%s)",
            coded.block_bytes / raw.block_bytes,
            share,
            costs.source,
        )
        return coded, costs

    def _objection(self, coded: HostForm, raw: HostForm) -> str:
        """What speaks against coding, but for what it takes; "" where nothing does."""
        config, share = self._config, coded.block_bytes / raw.block_bytes
        if raw.layout.device.type == "cpu":
            return "the cache is on the CPU, where no link is between it and the host, and the model's cores would code"
        if config.copy_path not in (PathName.AUTO, PathName.STAGED):
            return f"copy_path={config.copy_path.value!r} cannot copy coded blocks"
        if share > LARGEST_SHARE:
            return f"coded blocks would have {share:.2f} of raw ones' bytes, and gain from {LARGEST_SHARE} down"
        from .paths.staged import min_staging_memory  # only this needs Triton

        if config.staging_memory < (least := min_staging_memory(coded)):
            return f"staging_memory={config.staging_memory} is too small for coded blocks, which need {least}"
        name = self._note_name(coded)
        if name and is_known(name):
            return f"too much of this cache did not fit at an earlier start ({name})"
        return ""

    def _agreed(self, objection: str) -> str:
        """What speaks against coding on any rank."""
        if self._world_size == 1:
            return objection
        told = self._exchange(objection) if self._exchange is not None else ()
        if len(told) != self._world_size:
            return objection or f"its {self._world_size} ranks cannot ask each other"
        return next((f"on rank {rank}, {text}" for rank, text in enumerate(told) if text), "")

    def _note_name(self, form: HostForm) -> str:
        """The file that remembers that this cache does not fit; "" where the cache has no name."""
        name = self._name_of(form.arrangement)
        return f"unfit_{name[:16]}" if name else ""


def load_share(coded: HostForm, raw: HostForm, costs: LinkCosts) -> float:
    """What a long load of coded blocks is estimated to take, as a share of a raw one that need not be packed."""
    num_rows = max(1, _LOAD_BYTES // raw.moved_bytes)
    piece_bytes = max(coded.stored_bytes)
    took = costs.coded.load.microseconds(PathName.STAGED, piece_bytes, coded.moved_bytes, num_rows)
    return took / costs.load.microseconds(PathName.RUNS, raw.moved_bytes, raw.moved_bytes, num_rows)
