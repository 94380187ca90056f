"""Imported by the process that vLLM's are forked from: what each of them would do for itself is done by then."""

from __future__ import annotations

import multiprocessing

import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn  # noqa: F401
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor

from integration.tests.vllm_starts import prepare_start

prepare_start()
# Of the forks' own ranks: a fork server that a fork starts would be another one, and would have imported nothing.
utils.get_mp_context = multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
