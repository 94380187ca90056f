"""vLLM's server as a command, but what it would start as processes of their own are forks, which have imported vLLM.

On GPUs vLLM forks by itself. For the CPU it starts each anew, to give it other threads than its parent has.
"""

from __future__ import annotations

import gc
import multiprocessing
import runpy

import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

if __name__ == "__main__":
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
    gc.collect()
    gc.freeze()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
