"""Blocks that are coded on the host: a model in bf16 says the same, and its blocks take three quarters of the bytes."""

from __future__ import annotations

import pytest
import torch

from integration.mini_engine.model import ModelConfig, PagedLlama
from integration.mini_engine.runner import LlamaModel
from kv_connector.config import Config
from tests.fakes import check_engine, make_engine

BLOCK_SIZE = 16
PROMPTS = [[(7 * i + 31 * p) % 509 for i in range(80 + 16 * p)] for p in range(4)]


def llama(dtype: torch.dtype = torch.bfloat16, **variants: object) -> LlamaModel:
    config = ModelConfig(head_dim=64, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, **variants)
    return LlamaModel(PagedLlama.random(config, seed=3, dtype=dtype))


def answers(model: LlamaModel, **settings: object) -> tuple[list[list[int]], dict[str, float], int]:
    """What the prompts are answered with the second time, statistics, and bytes of a host block."""
    config = Config(host_memory=8 << 20, write_policy="write_through", load_choice="sync", **settings)  # type: ignore[arg-type]
    engine = make_engine(config, 14, BLOCK_SIZE, model, max_step_tokens=64, max_running=1)  # type: ignore[arg-type]
    for _ in range(2):
        asked = engine.generate(PROMPTS, 6)
    check_engine(engine)
    assert engine.connector is not None
    block_bytes = engine.connector._ranks.block_bytes
    stats = dict(engine.connector.get_kv_connector_stats())
    engine.shutdown()
    return [request.output_token_ids for request in asked], stats, block_bytes


@pytest.mark.parametrize(
    "variants",
    [{}, {"kv_layout": "split"}, {"kv_layout": "HND", "num_draft_layers": 1}, {"tp_size": 2}],
    ids=["plain", "split", "HND with a draft", "two ranks"],
)
def test_a_model_says_the_same_from_coded_blocks(variants: dict[str, object]) -> None:
    raw, raw_stats, raw_bytes = answers(llama(**variants))
    coded, stats, coded_bytes = answers(llama(**variants), host_form="lossless")
    assert coded == raw
    assert stats["host_hit_tokens"] == raw_stats["host_hit_tokens"] > 100
    assert stats["refused_blocks"] == stats["failed_load_jobs"] == 0
    assert stats["saved_bytes"] / stats["saved_blocks"] < 0.78 * raw_stats["saved_bytes"] / raw_stats["saved_blocks"]
    assert coded_bytes <= raw_bytes
