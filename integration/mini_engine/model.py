"""A small paged Llama in plain torch, with the calls that a KV connector needs around each layer's attention."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import SequenceChunk, StepInputs, attend
from .kv_layout import LayerCache
from .model_config import ModelConfig
from .model_weights import LayerWeights, ModelWeights, load_weights, random_weights

__all__ = ["LayerHooks", "ModelConfig", "PagedLlama", "SequenceChunk"]

RankCaches = dict[str, LayerCache]
"""One rank's cache tensors by layer name, in the order of the forward pass."""


class LayerHooks(Protocol):
    """What the model calls around each layer's attention, once per rank; a connector's worker half fits."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before the layer reads its cache."""

    def save_kv_layer(self, layer_name: str) -> None:
        """After the layer has written its cache."""


class PagedLlama:
    """Weights and forward pass; the KV cache belongs to the caller.

    Tensor parallelism is simulated: every rank has caches of its own for its heads, the rest is computed once.
    On CUDA the caller sets `torch.backends.cuda.matmul.allow_tf32 = False` where fp32 results are compared.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self._cos, self._sin = _rope_tables(config, self.device, self.dtype)

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> PagedLlama:
        """A model with random weights that depend on config and seed only."""
        return cls(config, random_weights(config, seed, device, dtype))

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **variants: Any,
    ) -> PagedLlama:
        """A Llama in Hugging Face's format; `variants` set fields of `ModelConfig`, such as kv_dtype or tp_size."""
        folder = Path(folder)
        config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), **variants)
        return cls(config, load_weights(folder, config, device, dtype))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the cache unless it is fp8."""
        return self.weights.embedding.dtype

    def allocate_kv_caches(self, num_blocks: int, block_size: int) -> list[RankCaches]:
        """Zeroed caches, one dict per rank."""
        return self._allocate(num_blocks, block_size, self.device)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block on one rank, over all layers and their scales."""
        (first, *_) = self._allocate(1, block_size, "meta")
        tensors = (t for cache in first.values() for t in ([cache] if isinstance(cache, Tensor) else cache))
        return sum(tensor.nbytes for tensor in tensors)

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        kv_caches: Sequence[Mapping[str, LayerCache]],
        block_size: int,
        hooks: Sequence[LayerHooks] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`compute` on what `prepare` gives; see there."""
        return self.compute(self.prepare(chunks, block_size), kv_caches, hooks)

    def prepare(self, chunks: Sequence[SequenceChunk], block_size: int) -> StepInputs:
        """The step's indices on the device. All host-to-device copies of a step are in here: called before a load is
        submitted they go first, called after it they would wait behind all of it on the copy engine."""
        return StepInputs.build(chunks, block_size, self.device)

    @torch.inference_mode()
    def compute(
        self, inputs: StepInputs, kv_caches: Sequence[Mapping[str, LayerCache]], hooks: Sequence[LayerHooks] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the chunks of one step and write their keys and values into the caches.

        `kv_caches` and `hooks` have one entry per rank; no hooks will do. Per layer: write the step's keys and
        values, let every rank wait for the layer's load, attend, let every rank save.
        Returns fp32 logits (num_chunks, vocab_size) for the last token of each chunk, and those of the draft layers,
        (num_draft_layers, num_chunks, vocab_size), or None. The host does not wait for the device.
        """
        tp_size = self.config.tp_size
        assert len(kv_caches) == tp_size, f"caches of {len(kv_caches)} ranks, tp_size {tp_size}"
        assert len(hooks) in (0, tp_size), f"hooks of {len(hooks)} ranks, tp_size {tp_size}"
        rope = self._cos[inputs.positions], self._sin[inputs.positions]
        hidden = F.embedding(inputs.token_ids, self.weights.embedding)
        logits = []
        for index, (name, layer) in enumerate(zip(self.config.layer_names, self.weights.layers, strict=True), start=1):
            hidden = hidden + self._attention(name, layer, hidden, rope, inputs, kv_caches, hooks)
            hidden = hidden + self._mlp(layer, hidden)
            if index >= self.config.num_hidden_layers:
                logits.append(self._logits(hidden[inputs.last_rows]))
        return logits[0], torch.stack(logits[1:]) if len(logits) > 1 else None

    def _attention(
        self,
        name: str,
        layer: LayerWeights,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        inputs: StepInputs,
        kv_caches: Sequence[Mapping[str, LayerCache]],
        hooks: Sequence[LayerHooks],
    ) -> Tensor:
        queries, keys, values = self._qkv(layer, self._norm(hidden, layer.input_norm), rope)
        shape = self.config.cache_shape
        pages = [shape.view(caches[name]) for caches in kv_caches]
        for rank, paged in enumerate(pages):
            # A key-only latent is whole on every rank.
            first = 0 if self.config.key_only else rank * shape.num_heads
            heads = slice(first, first + shape.num_heads)
            paged.write(inputs.slots, keys[:, heads], values[:, heads])
        for hook in hooks:
            hook.wait_for_layer_load(name)
        rank_queries = torch.split(queries, self.config.num_q_heads_per_rank, dim=1)
        attended = [attend(q, paged, inputs.spans) for q, paged in zip(rank_queries, pages, strict=True)]
        for hook in hooks:
            hook.save_kv_layer(name)
        return F.linear(attended[0] if len(attended) == 1 else torch.cat(attended, dim=-1), layer.out)

    def _qkv(self, layer: LayerWeights, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each (num_tokens, heads, head_dim); key-only: values are the keys."""
        config = self.config
        projected = F.linear(x, layer.qkv).view(len(x), -1, config.head_dim)
        num_q, num_kv = config.num_attention_heads, config.num_key_value_heads
        rotated = _rotate(projected[:, : num_q + num_kv], rope)
        queries, keys = torch.split(rotated, [num_q, num_kv], dim=1)
        return queries, keys, keys if config.key_only else projected[:, num_q + num_kv :]

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.lm_head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _allocate(self, num_blocks: int, block_size: int, device: torch.device | str) -> list[RankCaches]:
        shape, names = self.config.cache_shape, self.config.layer_names
        return [
            {name: shape.allocate(num_blocks, block_size, device, self.dtype) for name in names}
            for _ in range(self.config.tp_size)
        ]


def _rope_tables(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (max_position_embeddings, 1, head_dim)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x (num_tokens, heads, head_dim), halves paired as Hugging Face does."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
