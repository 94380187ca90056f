"""Imported by each of vLLM's workers that is told so by `worker_extension_cls`: one that was spawned has nothing of what
the test's own process has registered."""

from __future__ import annotations

from integration.bench.vllm_engine import register_weights

register_weights()


class KnowsWeights:
    """Adds nothing to the worker."""
