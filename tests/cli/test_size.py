"""How many chats fit, by hand; what vLLM makes of the same files is in integration/tests/test_vllm_sizes.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.models import tiny_configs
from kv_connector.cli import main

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def size(folder: Path, config: dict[str, Any], *arguments: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    found = folder / "found.json"
    assert main(["size", str(folder), "--json", str(found), *arguments]) == 0
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def test_eight_billion_parameters_take_128_kib_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """32 layers of 8 heads of 128 numbers of two bytes, keys and values."""
    found = size(tmp_path, LLAMA_8B, "--host-memory", "64GiB", "--chat-tokens", "8192")
    assert found["bytes_per_token"] == 32 * 8 * 128 * 2 * 2 == 128 << 10
    assert (found["chats"], found["tokens"]) == (64, 64 * 8192)
    assert "64 such chats, 524,288 tokens" in capsys.readouterr().out


def test_halves_and_ranks(tmp_path: Path) -> None:
    """fp8 halves a token; ranks share out heads, and with more ranks than heads the host keeps one copy of each."""
    whole = size(tmp_path, LLAMA_8B)["bytes_per_token"]
    assert size(tmp_path, LLAMA_8B, "--kv-cache-dtype", "fp8")["bytes_per_token"] == whole / 2
    assert size(tmp_path, LLAMA_8B, "--tp", "4")["bytes_per_token"] == whole
    wide = size(tmp_path, LLAMA_8B, "--tp", "16")
    assert (wide["bytes_per_token"], wide["copies"]) == (whole, 2)
    unknown = size(tmp_path, LLAMA_8B | {"architectures": ["OtherForCausalLM"]}, "--tp", "16")
    assert (unknown["bytes_per_token"], unknown["copies"]) == (2 * whole, 1)


def test_a_latent_cache_is_one_copy_for_all_ranks(tmp_path: Path) -> None:
    """DeepSeek V3: 576 numbers a token and layer, on each of eight ranks."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    found = size(tmp_path, config, "--tp", "8", "--block-size", "64")
    assert found["copies"] == 8
    assert found["growing_bytes_per_token_per_rank"] == 61 * 576 * 2
    assert found["bytes_per_token"] == pytest.approx(61 * 576 * 2, rel=0.01)


def test_lossless_keeps_bf16_in_three_quarters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = size(tmp_path, LLAMA_8B)["bytes_per_token"]
    assert 0.75 < size(tmp_path, LLAMA_8B, "--host-form", "lossless")["bytes_per_token"] / raw < 0.78
    arguments = ["size", str(tmp_path), "--host-form", "lossless", "--kv-cache-dtype", "fp8"]
    assert main(arguments) == 2 and "give raw" in capsys.readouterr().err


def test_windows_and_states_do_not_grow_with_a_chat(tmp_path: Path) -> None:
    for name in ("windows_alone", "states_only"):
        short, long = (size(tmp_path, tiny_configs.CONFIGS[name], "--chat-tokens", n) for n in ("4000", "40000"))
        assert short["chat_bytes"] == long["chat_bytes"] and short["growing_bytes_per_token_per_rank"] == 0, name
    windows = size(tmp_path, tiny_configs.CONFIGS["windows"], "--chat-tokens", "32000", "--block-size", "32")
    assert windows["chat_blocks"] == 1000 + 2 * 3, "one group of full attention, two of windows of three blocks"


def test_layers_that_read_what_others_keep_take_nothing(tmp_path: Path) -> None:
    config = LLAMA_8B | {"num_kv_shared_layers": 8}
    assert size(tmp_path, config)["bytes_per_token"] == 24 * 8 * 128 * 2 * 2


def test_a_name_is_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models--me--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"text_config": LLAMA_8B, "model_type": "sees"}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["size", "me/model"]) == 0
    assert "131,072 bytes, all ranks" in capsys.readouterr().out
    assert main(["size", "me/other"]) == 2
    assert "download its config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 2}, "has no num_attention_heads or n_head or num_heads: write a number from 1"),
        (
            LLAMA_8B | {"num_attention_heads": 0},
            "has 0 for num_attention_heads or n_head or num_heads: write a number from 1",
        ),
        (LLAMA_8B | {"num_hidden_layers": "many"}, "has 'many' for num_hidden_layers"),
        (LLAMA_8B | {"compress_ratios": [4]}, "caches of models with compress_ratios"),
        (LLAMA_8B | {"layer_types": ["linear_attention"] * 32}, "recurrent states of model_type 'llama' are not known"),
        (LLAMA_8B | {"model_type": "new", "sliding_window": 4096}, "has sliding_window=4096 and does not say which"),
        (LLAMA_8B | {"is_encoder_decoder": True}, "the caches of encoders are not kept"),
        (LLAMA_8B | {"torch_dtype": "int3"}, "has dtype 'int3': give --dtype"),
    ],
)
def test_what_is_not_known_is_not_guessed(
    config: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["size", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("change", "tp_size"),
    [
        ({}, 3),
        ({}, 64),
        ({}, 5),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, 12),
        ({"num_attention_heads": 8, "num_key_value_heads": None}, 3),  # as many of keys as of queries
    ],
)
def test_heads_that_do_not_divide_by_the_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int | None], tp_size: int
) -> None:
    """vLLM does not start with them."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
    assert main(["size", str(tmp_path), "--tp", str(tp_size)]) == 2
    heads = (LLAMA_8B | change)["num_attention_heads"]
    assert capsys.readouterr().err.startswith(f"error: --tp={tp_size} with {heads} heads of queries and 8 of keys")


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": "8"},
        {"num_key_value_heads": [8, 4]},
        {"head_dim": "128"},
        {"head_dim": -4},
        {"layer_types": 5},
        {"layer_types": [1, 2]},
        {"num_hidden_layers": 10**11},
        {"sliding_window": "all", "model_type": "mistral"},
        {"kv_lora_rank": True},
        {"architectures": "LlamaForCausalLM"},
        {"num_kv_shared_layers": 1.5},
    ],
)
def test_odd_values_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
    assert main(["size", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and next(iter(change)) in error and "into a copy of the file" in error


def test_a_file_of_brackets_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert main(["size", str(tmp_path)]) == 2
    assert "is no JSON" in capsys.readouterr().err
