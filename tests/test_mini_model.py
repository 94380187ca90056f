"""The mini engine's model: paging, chunking, batching and loading change no token; and its workload."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from integration.mini_engine.model import LayerHooks, ModelConfig, PagedLlama, SequenceChunk
from integration.mini_engine.workload import make_chats

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MLA: dict[str, Any] = {"key_only": True, "num_key_value_heads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"kv_layout": "split"},
    "HND": {"kv_layout": "HND"},
    "tied": {"tie_word_embeddings": True},
    "tp2": {"tp_size": 2},
    "draft": {"num_draft_layers": 2},
    "fp8": {"kv_dtype": "fp8"},
    "fp8-split": {"kv_dtype": "fp8", "kv_layout": "split"},
    "fp8-HND-tp2-draft": {"kv_dtype": "fp8", "kv_layout": "HND", "tp_size": 2, "num_draft_layers": 1},
    "key-only": MLA,
    "key-only-fp8-tp2-draft": {**MLA, "kv_dtype": "fp8", "tp_size": 2, "num_draft_layers": 1},
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring on tensors this small: a factor of 15 where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> PagedLlama:
    return PagedLlama.random(ModelConfig(**VARIANTS[request.param]), seed=1)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def table(seed: int = 0) -> list[int]:
    return torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()


class Runner:
    """A model with caches of its own."""

    def __init__(self, model: PagedLlama) -> None:
        self.model = model
        self.caches = model.allocate_kv_caches(NUM_BLOCKS, BLOCK_SIZE)

    def step(self, *chunks: SequenceChunk, hooks: Sequence[LayerHooks] = ()) -> tuple[Tensor, Tensor | None]:
        return self.model.forward(list(chunks), self.caches, BLOCK_SIZE, hooks)

    def prefill(self, ids: list[int], block_ids: list[int], chunk: int) -> Tensor:
        for start in range(0, len(ids), chunk):
            logits, _ = self.step(SequenceChunk(ids[start : start + chunk], start, block_ids))
        return logits[0]


def pieces(cache: Tensor | list[Tensor]) -> list[Tensor]:
    """A layer's tensors with the block in front, as bytes."""
    tensors = [cache] if isinstance(cache, Tensor) else cache
    return [(t if t.shape[0] == NUM_BLOCKS else t.transpose(0, 1)).view(torch.uint8) for t in tensors]


def naive(model: PagedLlama, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits (length, vocab) and draft logits (drafts, length, vocab), without a cache, head by head."""
    config, weights, outputs = model.config, model.weights, []
    x = weights.embedding[torch.tensor(ids)]
    for index, layer in enumerate(weights.layers, start=1):
        qkv = torch.split(rms(x, layer.input_norm) @ layer.qkv.T, config.head_dim, dim=-1)
        heads = []
        for head in range(config.num_attention_heads):
            kv_head = config.num_attention_heads + head // (config.num_attention_heads // config.num_key_value_heads)
            key = stored(rotate(qkv[kv_head], config.rope_theta), config)
            value = key if config.key_only else stored(qkv[kv_head + config.num_key_value_heads], config)
            scores = rotate(qkv[head], config.rope_theta) @ key.T / config.head_dim**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
        x = x + torch.cat(heads, dim=-1) @ layer.out.T
        gate, up = (rms(x, layer.mlp_norm) @ layer.gate_up.T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ layer.down.T
        if index >= config.num_hidden_layers:
            outputs.append(rms(x, weights.norm) @ weights.lm_head.T)
    return outputs[0], torch.stack(outputs)[1:]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding as multiplication of complex numbers."""
    length, dim = x.shape
    angles = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, dim, 2) / dim))
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def stored(x: Tensor, config: ModelConfig) -> Tensor:
    if config.kv_dtype == "auto":
        return x
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def test_paged_equals_naive(model: PagedLlama) -> None:
    ids = tokens(39)
    logits, drafts = Runner(model).step(SequenceChunk(ids, 0, table()))
    expected, expected_drafts = naive(model, ids)
    torch.testing.assert_close(logits[0], expected[-1], rtol=1e-4, atol=1e-4)
    assert (drafts is None) == (model.config.num_draft_layers == 0)
    if drafts is not None:
        torch.testing.assert_close(drafts[:, 0], expected_drafts[:, -1], rtol=1e-4, atol=1e-4)


def test_batched_decode_equals_naive(model: PagedLlama) -> None:
    """Three sequences of different lengths grow together, their blocks interleaved."""
    runner, blocks = Runner(model), table()
    tables = [blocks[i::3] for i in range(3)]
    sequences = [tokens(length, seed=length) for length in (5, 16, 31)]
    prompts = [len(ids) for ids in sequences]
    starts = [0, 0, 0]
    for _ in range(8):
        chunks = [SequenceChunk(ids[s:], s, t) for ids, s, t in zip(sequences, starts, tables, strict=True)]
        starts = [len(ids) for ids in sequences]
        for ids, token in zip(sequences, runner.step(*chunks)[0].argmax(-1).tolist(), strict=True):
            ids.append(token)
    for ids, prompt in zip(sequences, prompts, strict=True):
        logits, _ = naive(model, ids)
        assert ids[prompt:] == logits[prompt - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1, 3, 4, 17])
def test_chunked_prefill_equals_whole(model: PagedLlama, chunk: int) -> None:
    ids = tokens(35)
    whole, chunked = (Runner(model).prefill(ids, table(), size) for size in (len(ids), chunk))
    assert whole.argmax() == chunked.argmax()
    if model.config.kv_dtype == "auto":  # in fp8 the noise of fp32 may cross a rounding step
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)


def test_block_ids_change_no_bit(model: PagedLlama) -> None:
    ids = tokens(35)
    first, second = (Runner(model).prefill(ids, table(seed), chunk=13) for seed in (1, 2))
    assert torch.equal(first, second)


@dataclass
class Loader:
    """Copies a layer's blocks from another cache when the layer asks for them, as a connector does."""

    source: Mapping[str, Any]
    target: Mapping[str, Any]
    source_blocks: list[int]
    target_blocks: list[int]

    def wait_for_layer_load(self, layer_name: str) -> None:
        for source, target in zip(pieces(self.source[layer_name]), pieces(self.target[layer_name]), strict=True):
            target[self.target_blocks] = source[self.source_blocks]

    def save_kv_layer(self, layer_name: str) -> None:
        pass


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loaded_blocks_change_no_bit(variant: str, dtype: torch.dtype, device: str) -> None:
    """A prefix that is copied in while the step runs, to other blocks, is as good as the one that was computed."""
    model = PagedLlama.random(ModelConfig(**VARIANTS[variant]), 1, device, dtype)
    ids, computed, loaded = tokens(30), table(1), table(2)
    first, second = Runner(model), Runner(model)
    first.prefill(ids[:24], computed, chunk=24)
    blocks = slice(0, 24 // BLOCK_SIZE)
    hooks = [Loader(a, b, computed[blocks], loaded[blocks]) for a, b in zip(first.caches, second.caches, strict=True)]
    expected, expected_drafts = first.step(SequenceChunk(ids[24:], 24, computed))
    actual, actual_drafts = second.step(SequenceChunk(ids[24:], 24, loaded), hooks=hooks)
    assert torch.equal(actual, expected)
    if actual_drafts is not None and expected_drafts is not None:
        assert torch.equal(actual_drafts, expected_drafts)


def test_a_wrong_block_shows(model: PagedLlama) -> None:
    """What the connector's tests rely on: bytes of another block, in one layer only, change the logits."""
    ids, blocks = tokens(30), table()
    last = SequenceChunk(ids[-1:], len(ids) - 1, blocks)
    for name in model.config.layer_names[: model.config.num_hidden_layers]:
        runner = Runner(model)
        before = runner.prefill(ids, blocks, chunk=len(ids))
        for piece in pieces(runner.caches[-1][name]):
            piece[blocks[2]] = piece[blocks[4]].clone()
        assert (runner.step(last)[0][0] - before).abs().max() > 1e-2


@dataclass
class Recorder:
    """Notes the calls of one rank, and whether the step's keys were in the cache by then."""

    rank: int
    cache: Mapping[str, Any]
    block_id: int
    calls: list[tuple[str, int, str]] = field(default_factory=list)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert pieces(self.cache[layer_name])[0][self.block_id].any(), "asked to wait before keys were written"
        self.calls.append(("wait", self.rank, layer_name))

    def save_kv_layer(self, layer_name: str) -> None:
        self.calls.append(("save", self.rank, layer_name))


def test_hooks_of_all_ranks_surround_each_layer(model: PagedLlama) -> None:
    runner, ranks = Runner(model), range(model.config.tp_size)
    calls: list[tuple[str, int, str]] = []
    hooks = [Recorder(rank, cache, 7, calls) for rank, cache in enumerate(runner.caches)]
    runner.step(SequenceChunk(tokens(3), 0, [7]), hooks=hooks)
    expected = [(call, rank, name) for name in runner.caches[0] for call in ("wait", "save") for rank in ranks]
    assert calls == expected
    assert tuple(runner.caches[0]) == model.config.layer_names


def test_block_bytes(model: PagedLlama) -> None:
    for cache in model.allocate_kv_caches(NUM_BLOCKS, BLOCK_SIZE):
        total = sum(piece.nbytes for tensors in cache.values() for piece in pieces(tensors))
        assert total == NUM_BLOCKS * model.block_bytes(BLOCK_SIZE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"tp_size": 4}, "2 KV heads do not divide among 4 ranks"),
        ({"key_only": True}, "key_only needs num_key_value_heads=1"),
    ],
)
def test_impossible_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_from_folder(tmp_path: Path) -> None:
    """A folder in Hugging Face's format gives the model back, with another KV cache where one is asked for."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = PagedLlama.random(ModelConfig(), seed=3)
    tensors = {"model.embed_tokens.weight": model.weights.embedding, "model.norm.weight": model.weights.norm}
    tensors["lm_head.weight"] = model.weights.lm_head
    for i, layer in enumerate(model.weights.layers):
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
        parts = [*torch.split(layer.qkv, [64, 32, 32]), layer.out, *layer.gate_up.chunk(2), layer.down]
        parts += [layer.input_norm, layer.mlp_norm]
        tensors |= {f"model.layers.{i}.{name}.weight": part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {name: getattr(model.config, name) for name in ModelConfig.__dataclass_fields__}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = PagedLlama.from_folder(tmp_path, kv_layout="HND", tp_size=2)
    torch.testing.assert_close(*(Runner(m).prefill(tokens(20), table(), 20) for m in (loaded, model)))


class LetterTokenizer:
    """One token per letter; `<eot>` is token 0."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(f"[{m['role']}]{m['content']}<eot>" for m in conversation) + "[assistant]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text.replace("<eot>", "\0")]


def test_chats() -> None:
    first, second, third = chats = make_chats(3, 20, 5000, LetterTokenizer(), seed=1)
    assert chats[:2] == make_chats(2, 20, 5000, LetterTokenizer(), seed=1)
    assert chats != make_chats(3, 20, 5000, LetterTokenizer(), seed=2)
    for chat in chats:
        assert abs(len(chat.document.text) - 5000) < 200
        assert set(chat.questions) == set(chat.document.questions)
    prompt = first.prompt(0)
    assert bytes(prompt).endswith(f" {first.questions[0]}\0[assistant]".encode())
    for answer in ([65, 66], [65, 66, 0]):
        later = first.prompt(1, prompt, answer)
        assert bytes(later) == bytes(prompt) + f"AB\0[user]{first.questions[1]}\0[assistant]".encode()
    shared = next(i for i, pair in enumerate(zip(second.prompt(0), third.prompt(0), strict=False)) if len({*pair}) > 1)
    assert bytes(prompt[:shared]).endswith(b"[user]Here is a document:\n\nNo. ")
