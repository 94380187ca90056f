"""Imported by each worker of vLLM that is told so by `worker_extension_cls`: one that was spawned knows nothing of what
the process of the test has registered."""

from __future__ import annotations

from integration.bench.vllm_engine import register_weights

register_weights()


class KnowsWeights:
    """Adds nothing to the worker."""
