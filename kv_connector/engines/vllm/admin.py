"""The scheduler's role with an endpoint beside it: commands are carried out between two of vLLM's steps.

A busy engine calls `take_events` at the end of every step. One without requests rests until something is in its input
queue, and asks `has_pending_push_work` before it rests again: so whoever sends a command puts a wake-up there.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request

from ...admin.base import Refusal
from ...admin.endpoint import Endpoint
from ...config import AdminConfig
from ...types import BlockHash
from .scheduler import SchedulerRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent

_SLICE_BLOCKS = 128
_PAUSE_SECONDS = 5e-4


class SteeredRole(SchedulerRole):
    """See `SchedulerRole`; `admin` says where the endpoint is."""

    def __init__(self, admin: AdminConfig, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(*args)
        prefixes = RequestPrefixes(vllm_config, self.shape.block_size)
        replica = vllm_config.parallel_config.data_parallel_index
        self._endpoint = Endpoint(admin, replica, self.half, self.host_memory, prefixes, find_wake())

    def take_events(self) -> Iterable[KVCacheEvent]:
        self._endpoint.serve()
        return super().take_events()

    def has_pending_push_work(self) -> bool:
        self._endpoint.serve()
        return self._endpoint.has_waiting or super().has_pending_push_work()

    def shutdown(self) -> None:
        self._endpoint.close()
        super().shutdown()


class RequestPrefixes:
    """Names blocks as vLLM does: it makes a request and asks vLLM for its hashes."""

    def __init__(self, vllm_config: VllmConfig, block_size: int) -> None:
        self._model_config = vllm_config.model_config
        self._block_size = block_size
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)

    def token_ids(self, text: str) -> Sequence[int]:
        """Token ids of `text` as a completion's prompt, by the tokenizer that the engine has for structured outputs."""
        if self._model_config.skip_tokenizer_init:
            raise Refusal(400, "text: this engine runs without a tokenizer (--skip-tokenizer-init): send token_ids")
        from vllm.tokenizers import cached_tokenizer_from_config

        # Of a list it reads without holding the interpreter up.
        found: list[list[int]] = cached_tokenizer_from_config(self._model_config)([text])["input_ids"]
        return found[0]

    def hashes(self, token_ids: Sequence[int], cache_salt: str) -> list[BlockHash]:
        """Hashes of the full blocks. Computed in slices with a pause after each, so that the engine's thread never
        waits for longer than one slice takes."""
        if getattr(kv_cache_utils, "NONE_HASH", None) is None:
            raise Refusal(503, "the engine is starting: ask again when it serves requests")
        num_tokens = _SLICE_BLOCKS * self._block_size
        request = Request(
            request_id="admin",
            prompt_token_ids=list(token_ids[:num_tokens]),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=cache_salt or None,
            block_hasher=self._hasher,
        )
        for start in range(num_tokens, len(token_ids), num_tokens):
            time.sleep(_PAUSE_SECONDS)
            request.append_output_token_ids(list(token_ids[start : start + num_tokens]))
        return [BlockHash(bytes(block_hash)) for block_hash in request.block_hashes]


def find_wake() -> Callable[[], None]:
    """A function that wakes the engine core that is being made around this call, callable from any thread. vLLM gives
    connectors none. An engine in its caller's process waits in no queue and is stepped by its caller alone: then the
    function does nothing."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCoreProc):
            return _wake_of(weakref.ref(core))
    return lambda: None


def _wake_of(core_of: weakref.ref[Any]) -> Callable[[], None]:
    wake_up = getattr(EngineCoreRequestType, "WAKEUP", None)  # older versions have none

    def wake() -> None:
        core = core_of()
        if core is not None and wake_up is not None:
            core.input_queue.put_nowait((wake_up, None))

    return wake
