"""What this engine offers: prompts that another engine is to continue, and until when their blocks are held.

admitted --SEND jobs, step by step, as the prompt is computed--> held until they were sent, nobody wants them, or the
deadline has passed; a request that is preempted has its blocks let go, and they are offered anew. What will not be
offered is withdrawn, so that no other engine waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...base import Request, ScheduledRequest, StateBlock
from ...config import PeerConfig
from ...index import adopt_hashes
from ...log_limiter import LogLimiter
from ...types import NO_BLOCK, PeerAction, PeerJob, StepPlan
from ..ledger import EndedJob, JobOwner
from ..names import Roots
from ..shared import Shared
from ..tables import BlockTable
from .params import MOST_TEXT, params_of, passed_on, text, transfer_end


@dataclass(slots=True)
class _Part:
    """What is offered of a block group: these blocks of its table. Those from `next_block` on are still to be
    computed."""

    group: int
    blocks: range
    names: bytes
    next_block: int


@dataclass(slots=True)
class _Transfer:
    """What is offered of a request's prompt, up to the block hash `end`."""

    transfer_id: str
    request_id: str
    end: int
    parts: list[_Part]
    has_begun: bool = False
    jobs: set[int] = field(default_factory=set)  # under way
    deadline: float | None = None  # once the request has ended

    @property
    def num_blocks(self) -> int:
        return sum(len(part.blocks) for part in self.parts)

    @property
    def is_complete(self) -> bool:
        return all(part.next_block == part.blocks.stop for part in self.parts)


class Outgoing:
    """`engine_id` names this start of the engine, `roots` what its own hashes leave out; `owner` opens the jobs."""

    def __init__(self, config: PeerConfig, shared: Shared, roots: Roots, engine_id: str, owner: JobOwner) -> None:
        self.is_stopped = False
        """Whether nothing can be sent any more, and nothing is offered."""
        self._config = config
        self._shared = shared
        self._roots = roots
        self._engine_id = engine_id
        self._owner = owner
        self._transfers: dict[str, _Transfer] = {}  # by transfer id
        self._sending: dict[str, _Transfer] = {}  # by request that computes its prompt
        self._begun: list[PeerJob] = []  # to be planned
        self._suspended: list[str] = []  # to be told
        self._withdrawn: list[str] = []  # likewise
        self._open: set[int] = set()  # jobs that some rank has not reported
        self._log_limiter = LogLimiter(shared.clock)

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return bool(self._begun or self._suspended or self._withdrawn)

    def admitted(self, request: Request) -> None:
        """A request has its device blocks, for the first time or again: what another engine is to continue is offered
        from now on."""
        transfer_id, end = self._asked_for(request)
        if not transfer_id or request.request_id in self._sending:
            return
        transfer = _Transfer(transfer_id, request.request_id, end, self._parts(request, end))
        self._transfers[transfer_id] = self._sending[request.request_id] = transfer

    def scheduled(self, item: ScheduledRequest, tables: Sequence[BlockTable], states: Sequence[StateBlock]) -> None:
        """This step computes a part of a request: offer the blocks that it completes, and those in front of them. What
        leaves a window later on is pinned from here on, by its job. Where it turns out that the engine does not hold
        all that a consumer needs at the end, a state or a window's block, nothing is offered any more."""
        transfer = self._sending.get(item.request_id)
        if transfer is None:
            return
        num_hashes = (item.num_computed_tokens + item.num_scheduled_tokens) // self._shared.block_size
        num_hashes = min(num_hashes, transfer.end)
        new: dict[int, list[int]] = {}
        for part in transfer.parts:
            group, table = self._shared.grouped.groups[part.group], tables[part.group].block_ids
            if group.states_are_told:
                new[part.group] = self._state(transfer, part, item, table, states)
            else:
                new[part.group] = table[part.next_block : num_hashes // group.hashes_per_block]
        is_short = any(part.next_block + len(new[part.group]) < part.blocks.stop for part in transfer.parts)
        if any(NO_BLOCK in device_ids for device_ids in new.values()) or (num_hashes == transfer.end and is_short):
            self._withdraw(transfer)
            return
        if not any(new.values()):
            return
        for part in transfer.parts:
            if new[part.group] or not transfer.has_begun:
                self._offer(transfer, part, new[part.group])
        transfer.has_begun = True

    def suspend(self, request_id: str) -> None:
        """The request was preempted: its blocks are let go of, and offered anew when it is admitted again."""
        transfer = self._sending.get(request_id)
        if transfer is not None:
            self._forget(transfer)
            self._suspended.append(transfer.transfer_id)

    def withdraw(self, request_id: str) -> None:
        """Nobody is to continue the request: its blocks are let go of."""
        transfer = self._sending.get(request_id)
        if transfer is not None:
            self._withdraw(transfer)

    def finished(self, request: Request, host: str, ports: Sequence[int], tp_size: int) -> dict[str, Any] | None:
        """The request has ended; what another engine has to be told to continue it, if one is to. `host` and `ports`
        are where it finds each rank, `tp_size` of each stage."""
        transfer = self._sending.get(request.request_id)
        if transfer is None:
            transfer_id, _ = self._asked_for(request)
            if transfer_id:
                self._withdrawn.append(transfer_id)  # it was not admitted, or not again
            return None
        if not transfer.is_complete:
            self._withdraw(transfer)  # it was given up before its prompt was computed
            return None
        del self._sending[request.request_id]
        transfer.deadline = self._shared.clock() + self._config.deadline_ms / 1e3
        if not transfer.jobs:
            del self._transfers[transfer.transfer_id]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer.transfer_id,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": ports[0],
            "remote_ports": list(ports),
            "remote_block_ids": [list(part.blocks) for part in transfer.parts],  # proxies ask only if there are any
            "remote_num_tokens": transfer.end * self._shared.block_size,
            "tp_size": tp_size,
            **passed_on(request),
        }

    def plan(self, plan: StepPlan) -> StepPlan:
        """Jobs that begin in this step, and transfers that are suspended or withdrawn."""
        now = self._shared.clock()
        for transfer in [t for t in self._transfers.values() if t.deadline is not None and t.deadline <= now]:
            self._shared.metrics.expired_transfers += 1
            reason = "nobody asked for KV transfers in time, their blocks are freed"
            self._log_limiter.fault("unknown", reason, f"{transfer.transfer_id!r}, {transfer.num_blocks} blocks")
            self._withdraw(transfer)
        begun, self._begun = self._begun, []
        suspended, self._suspended = self._suspended, []
        withdrawn, self._withdrawn = self._withdrawn, []
        return replace(plan, peer=tuple(begun), suspended=tuple(suspended), withdrawn=tuple(withdrawn))

    def end(self, ended: EndedJob) -> None:
        """A SEND was reported by every rank. One that failed offered what was not computed after all: an engine may
        have some of it already on one rank, so nothing of the prompt is offered any more."""
        job = ended.job
        assert isinstance(job, PeerJob)
        self._open.discard(job.job_id)
        transfer = self._transfers.get(job.transfer_id)
        if transfer is None or job.job_id not in transfer.jobs:
            return  # withdrawn
        transfer.jobs.discard(job.job_id)
        if not ended.ok:
            self._withdraw(transfer)
        elif transfer.deadline is not None and not transfer.jobs:
            del self._transfers[job.transfer_id]

    def reset(self) -> bool:
        """Nothing that was computed until now may be used any more; returns whether that is so already. A rank hears of
        it with the next plan, and sends what was offered until then."""
        for transfer in list(self._transfers.values()):
            self._withdraw(transfer)
        return not self._open

    def _asked_for(self, request: Request) -> tuple[str, int]:
        """The KV transfer that is to be offered of a request, and the block hash that it ends with; no name where none
        is, or it is another request's."""
        params = params_of(request)
        if self.is_stopped or not self._config.produces or not params.get("do_remote_decode"):
            return "", 0
        transfer_id = text(params, "transfer_id") or request.request_id[:MOST_TEXT]
        end = 0 if transfer_id in self._transfers else transfer_end(request, self._shared)
        return (transfer_id, end) if end else ("", 0)

    def _parts(self, request: Request, end: int) -> list[_Part]:
        """What a hit needs that ends at this block hash, of each group that it needs anything of."""
        grouped, root = self._shared.grouped, self._roots.of(request)
        parts = []
        for group, blocks in enumerate(grouped.needed(0, end)):
            if blocks:
                keys = grouped.keys(request.block_hashes, group)[blocks.start : blocks.stop]
                parts.append(_Part(group, blocks, adopt_hashes(root, keys), blocks.start))
        return parts

    def _state(
        self,
        transfer: _Transfer,
        part: _Part,
        item: ScheduledRequest,
        table: Sequence[int],
        states: Sequence[StateBlock],
    ) -> list[int]:
        """The device block with the state at the end, in the step in which the engine tells of it, or begins with it:
        in the first step behind its admission a table has the state of the hit in the last block of that."""
        if part.next_block == part.blocks.stop:
            return []
        num_tokens = transfer.end * self._shared.block_size
        told = [state.block_id for state in states if (state.group, state.num_tokens) == (part.group, num_tokens)]
        if not told and not transfer.has_begun and item.num_computed_tokens == num_tokens:
            told = list(table[part.blocks.start : part.blocks.stop])
        return told[:1]

    def _offer(self, transfer: _Transfer, part: _Part, device_ids: list[int]) -> None:
        """Open the job of these blocks, which come next of their group; where it has none yet, only what will come."""
        self._shared.pool.touch(device_ids)
        job = PeerJob(
            self._shared.ledger.next_id(),
            PeerAction.SEND,
            transfer.transfer_id,
            part.next_block,
            np.array(device_ids, dtype=np.int64),
            names=b"" if transfer.has_begun else part.names,
            group=part.group,
        )
        self._shared.ledger.open(job, self._owner, (transfer.request_id,))
        part.next_block += len(device_ids)
        transfer.jobs.add(job.job_id)
        self._open.add(job.job_id)
        self._begun.append(job)
        self._shared.metrics.offered_blocks += job.num_blocks

    def _withdraw(self, transfer: _Transfer) -> None:
        """Offer nothing of it any more, whatever the request computes until it is admitted again."""
        self._forget(transfer)
        self._withdrawn.append(transfer.transfer_id)

    def _forget(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        self._sending = {request_id: other for request_id, other in self._sending.items() if other is not transfer}
