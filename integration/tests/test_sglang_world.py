"""The linker under random requests, streams that run late, ranks that drift apart, and faults."""

from __future__ import annotations

from collections import Counter

from integration.tests.sglang_world import run

SEEDS = range(60)


def test_worlds() -> None:
    """No forward pass reads what does not belong there, ranks agree, and nothing is held at the end."""
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total.update(run(seed))
    assert total["loads"] > 100
    assert total["failed"] > 5
    assert total["flushes"] > 10
    assert total["retracted"] > 20
