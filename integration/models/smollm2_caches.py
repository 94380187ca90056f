"""Keys and values that SmolLM2 computes of a text, for benchmarks on machines that have no model.

    python -m integration.models.smollm2_caches [--tokens 512] [--text README.md] [--out build/smollm2_caches.npz]

The file holds `caches`: int16, the bits of bf16, of shape (layers, 2, tokens, heads, head_dim), keys first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from integration.models.smollm2 import convert

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "build" / "smollm2_caches.npz"


def compute(text: str, num_tokens: int) -> torch.Tensor:
    """The caches of the text's first tokens, bf16 of shape (layers, 2, tokens, heads, head_dim)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = convert()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :num_tokens]
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2) for layer in layers])


def load(path: Path) -> torch.Tensor:
    """What `main` has written, as bf16."""
    with np.load(path) as content:
        return torch.from_numpy(content["caches"]).view(torch.bfloat16)


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--text", type=Path, default=ROOT / "README.md")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    options = parser.parse_args()
    caches = compute(options.text.read_text(), options.tokens).contiguous()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, caches=caches.view(torch.int16).numpy())
    print(f"wrote {options.out}: {tuple(caches.shape)}, {options.out.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
