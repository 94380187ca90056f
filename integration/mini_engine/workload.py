"""Multi-turn chats over documents, the same for the same arguments: the load that a KV cache is for.

All users share the system prompt; each has a document of its own and asks about it turn by turn. The prompt of a turn
starts with exactly the tokens of the turn before it and of the answer to it: text is tokenised once and only appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from .documents import Document, write_document

SYSTEM_PROMPT = (
    "You are the reading assistant of a small company. Every conversation begins with one document, followed by "
    "questions about it. Answer from the document alone, in one or two short sentences, and keep names, dates and "
    "figures exactly as they are written. Where two passages disagree, quote both and say which section each comes "
    "from. If the document does not contain the answer, say so and do not guess. Do not repeat the question, do not "
    "add headings, and do not comment on the style of the document."
)
_LEAD_IN = "Here is a document:"
_REQUEST = "Answer this question about the document in one sentence."
_ANSWER = "ANSWER-OF-THE-ASSISTANT"


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that chats need."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """The conversation as text when `tokenize` is False."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One user's conversation. Token ids are those of the template around it and end where the answer begins.

    opening: system prompt, document and first question. follow_ups: per later turn, what comes behind the answer,
    beginning with the end of that answer and ending where the next answer begins.
    """

    user: str
    document: Document
    questions: tuple[str, ...]
    opening: tuple[int, ...]
    follow_ups: tuple[tuple[int, ...], ...]

    @property
    def num_turns(self) -> int:
        """How many questions the user asks."""
        return len(self.questions)

    def prompt(self, turn: int, previous_prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> list[int]:
        """Prompt of `turn`, counted from 0; later turns extend the previous turn's prompt and generated tokens.

        The answer may end with the end-of-turn token or, cut short, without it.
        """
        if turn == 0:
            return list(self.opening)
        follow_up = self.follow_ups[turn - 1]
        ended = bool(answer) and answer[-1] == follow_up[0]
        return [*previous_prompt, *answer, *follow_up[ended:]]


def make_chats(
    num_users: int, num_turns: int, document_tokens: int, tokenizer: ChatTokenizer, seed: int = 0
) -> list[Chat]:
    """One chat per user, with documents of about `document_tokens` tokens that share no beginning.

    A user's chat depends on the seed and the user's number only, not on how many users there are.
    """
    return [_make_chat(user, num_turns, document_tokens, tokenizer, seed) for user in range(num_users)]


def _make_chat(user: int, num_turns: int, document_tokens: int, tokenizer: ChatTokenizer, seed: int) -> Chat:
    rng = Random(f"{seed}/{user}")

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    document = write_document(rng, user, document_tokens, count_tokens)
    questions = _questions(document, num_turns, rng)
    opening = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"{_LEAD_IN}\n\n{document.text}\n\n{_REQUEST} {questions[0]}"},
    ]
    follow_ups = (_follow_up(opening, question, tokenizer) for question in questions[1:])
    return Chat(
        user=f"user-{user}",
        document=document,
        questions=questions,
        opening=tuple(_encode(_render(opening, tokenizer), tokenizer)),
        follow_ups=tuple(follow_ups),
    )


def _questions(document: Document, num_turns: int, rng: Random) -> tuple[str, ...]:
    """A fresh order for every round through the document's questions."""
    questions: list[str] = []
    while len(questions) < num_turns:
        questions += rng.sample(document.questions, len(document.questions))
    return tuple(questions[:num_turns])


def _follow_up(opening: list[dict[str, str]], question: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """What the template puts between an answer and the next one, found by rendering it around a marker."""
    messages = [*opening, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": question}]
    _, _, behind = _render(messages, tokenizer).rpartition(_ANSWER)
    return tuple(_encode(behind, tokenizer))


def _render(messages: list[dict[str, str]], tokenizer: ChatTokenizer) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _encode(text: str, tokenizer: ChatTokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
