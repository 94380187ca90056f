"""`kv-connector size`: how many tokens and chats fit into so much host memory."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import HostFormName
from ...engines.heads import HEADS_ALIKE
from ...errors import ConfigError
from ...values import check_integer, parse_size
from ..outputs import check_outputs
from ..text import Parsers, columns, size_text

if TYPE_CHECKING:
    from .blocks import Blocks
    from .layers import Layer
    from .model import ModelConfig

_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_MOST_TOKENS = 1 << 40


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "how many tokens and chats of a model fit into host memory"
    parser = parsers.add_parser("size", help=text, description=f"{text}, by its config.json alone.")
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a config.json, or a name in Hugging Face's local cache"
    )
    parser.add_argument(
        "--host-memory", default="64GiB", metavar="SIZE", help="host memory of all ranks together (64GiB)"
    )
    parser.add_argument("--dtype", default="auto", choices=_DTYPES, help="of the model")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=_CACHE_DTYPES, help="as vLLM's option")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (16)")
    parser.add_argument("--chat-tokens", type=int, default=8000, metavar="N", help="tokens of a chat (8000)")
    parser.add_argument("--host-form", default="raw", choices=("raw", "lossless"), help="as the setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from .blocks import block_tokens_beside_states, to_blocks
    from .layers import Engine, read_layers
    from .model import BYTES, read_model

    host_memory = parse_size(options.host_memory, "--host-memory")
    for name in ("tp", "block_size", "chat_tokens"):
        check_integer(f"--{name.replace('_', '-')}", getattr(options, name), 1, _MOST_TOKENS)
    check_outputs(json=options.json)
    model = read_model(options.model)
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    if dtype not in BYTES:
        raise ConfigError(f"{model.path} has dtype {dtype!r}: give --dtype, one of {', '.join(_DTYPES[1:])}")
    cache_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    layers = read_layers(model, Engine(dtype, cache_dtype, options.tp))
    _check_ranks(model, layers, options.tp)
    block_tokens = block_tokens_beside_states(layers, options.block_size)
    blocks = to_blocks(layers, block_tokens)
    copies = num_copies(model, layers, options.tp)
    host_block = _host_block_bytes(layers, blocks, block_tokens, cache_dtype, options.host_form)
    figures = _figures(blocks, layers, host_block, options, host_memory, copies)
    figures |= {"model": model.path, "dtype": dtype, "kv_cache_dtype": cache_dtype, "host_form": options.host_form}
    print(_text(figures, layers, blocks, options))
    for note in _notes(model, layers, blocks, options, copies):
        print(f"note: {note}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _check_ranks(model: ModelConfig, layers: Sequence[Layer], tp_size: int) -> None:
    """Raises ConfigError where heads do not divide by the ranks as vLLM has them: it would not start."""
    from .layers import Kind

    queries = model.optional("num_attention_heads", "n_head") or tp_size
    heads = model.optional("num_key_value_heads", "num_kv_heads") or queries
    is_latent = any(layer.kind is Kind.LATENT for layer in layers)  # which every rank keeps whole
    if queries % tp_size or not (is_latent or heads % tp_size == 0 or tp_size % heads == 0):
        raise ConfigError(
            f"--tp={tp_size} with {queries} heads of queries and {heads} of keys and values: give a divisor of the "
            "first, which divides the second or is a multiple of it"
        )


def num_copies(model: ModelConfig, layers: Sequence[Layer], tp_size: int) -> int:
    """Ranks, one behind the other, that cache the same bytes, of which the host's memory keeps one copy."""
    from .layers import Kind

    kinds = {layer.kind for layer in layers}
    if kinds == {Kind.LATENT}:
        return tp_size
    heads = model.optional("num_key_value_heads")
    if kinds <= {Kind.FULL, Kind.WINDOW} and heads and set(model.architectures) <= HEADS_ALIKE and model.architectures:
        return max(1, tp_size // heads)
    return 1


def _host_block_bytes(
    layers: Sequence[Layer], blocks: Blocks, block_tokens: int, cache_dtype: str, host_form: str
) -> int:
    """One rank's part of a block, as the host keeps it, in whole pages of memory."""
    from .layers import Kind

    num_bytes = blocks.block_bytes
    if host_form == HostFormName.LOSSLESS.value:
        if cache_dtype != "bfloat16" or any(layer.kind is Kind.STATE for layer in layers):
            raise ConfigError("--host-form lossless is known here for bf16 caches of attention alone: give raw")
        from ...triton_kernels.coded_rows import coded_bytes

        num_bytes = num_bytes * coded_bytes(blocks.page_bytes) // blocks.page_bytes
    return -(-num_bytes // 4096) * 4096


def _figures(
    blocks: Blocks,
    layers: Sequence[Layer],
    host_block: int,
    options: argparse.Namespace,
    host_memory: int,
    copies: int,
) -> dict[str, Any]:
    # Each rank has its share of the memory; ranks with the same bytes put theirs together for one copy.
    per_rank = host_memory // options.tp
    num_host_blocks = per_rank * copies // host_block
    chat_blocks = max(1, blocks.num_blocks(options.chat_tokens))
    num_chats = num_host_blocks // chat_blocks
    token_bytes = sum(layer.token_bytes for layer in layers if not layer.span)
    return {
        "layers": len(layers),
        "block_tokens": min(group.block_tokens for group in blocks.groups),
        "device_block_bytes_per_rank": blocks.block_bytes,
        "host_block_bytes_per_rank": host_block,
        "copies": copies,
        "growing_bytes_per_token_per_rank": token_bytes,
        "host_memory": host_memory,
        "host_blocks": num_host_blocks,
        "chat_tokens": options.chat_tokens,
        "chat_blocks": chat_blocks,
        "chat_bytes": chat_blocks * host_block * options.tp // copies,
        "bytes_per_token": chat_blocks * host_block * options.tp / copies / options.chat_tokens,
        "chats": num_chats,
        "tokens": num_host_blocks * options.chat_tokens // chat_blocks,
    }


def _text(figures: dict[str, Any], layers: Sequence[Layer], blocks: Blocks, options: argparse.Namespace) -> str:
    rows = [["layers", "", "per token", "per state", "kept of a chat"]]
    for layer, count in Counter(layers).items():
        kept = f"last {layer.span:,} tokens" if layer.span else "all" if layer.token_bytes else "state at its end"
        token = f"{layer.token_bytes:,} B" if layer.token_bytes else "-"
        state = f"{layer.state_bytes:,} B" if layer.state_bytes else "-"
        rows.append([str(count), layer.kind.value, token, state, kept])
    ranks = "" if options.tp == 1 else f" (a rank of {options.tp})"
    kinds = f" in {len(blocks.groups)} groups" if len(blocks.groups) > 1 else ""
    fits = [
        [
            "a block",
            f"{figures['block_tokens']} tokens{kinds}, {size_text(figures['host_block_bytes_per_rank'])}{ranks}",
        ],
        [f"a chat of {figures['chat_tokens']:,} tokens", f"{figures['chat_blocks']:,} blocks, {_all(figures)}"],
        ["a token of it", f"{figures['bytes_per_token']:,.0f} bytes, all ranks"],
        [
            f"into {size_text(figures['host_memory'])} go",
            f"{figures['chats']:,} such chats, {figures['tokens']:,} tokens",
        ],
    ]
    head = (
        f"{figures['model']}: {figures['dtype']}, cache {figures['kv_cache_dtype']}, {figures['host_form']} on the host"
    )
    return f"{head}\n{columns(rows, left=(0, 1, 4))}\n\n{columns(fits, left=(0, 1))}"


def _all(figures: dict[str, Any]) -> str:
    return f"{size_text(figures['chat_bytes'])} over all ranks"


def _notes(
    model: ModelConfig, layers: Sequence[Layer], blocks: Blocks, options: argparse.Namespace, copies: int
) -> list[str]:
    from .layers import Kind
    from .states import NOT_COMPARED

    notes = []
    kinds = {layer.kind for layer in layers}
    if model.model_type in NOT_COMPARED:
        notes.append(f"{model.model_type}: as in vLLM's source, but not compared with what vLLM computes")
    if copies > 1:
        notes.append(f"{copies} ranks cache the same bytes: the host keeps one copy for them")
    elif options.tp > 1 and (model.optional("num_key_value_heads") or options.tp) < options.tp:
        notes.append(
            "several ranks have the same heads, and each keeps its own copy: this model is not known well enough"
        )
    if Kind.STATE in kinds and len(kinds) > 1:
        notes.append(
            "vLLM sets the block size of models with states itself, by its attention backend; --block-size is the least"
        )
    if len(blocks.groups) > 1:
        notes.append(
            "the host also keeps blocks of windows and states that are further in front, until others need their place"
        )
    if model.get("index_topk"):
        notes.append("sparse attention: some backends keep another form (656 bytes a token under fp8), unknown here")
    if model.get("num_nextn_predict_layers"):
        notes.append("layers of a draft model (MTP) are not counted: each is as one more layer")
    notes.append("scales of quantised caches and padding by attention backends are not in that file")
    return notes
