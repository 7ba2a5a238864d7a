"""A stored document as a prompt and the expected answer.

The prompt is the start of the training document, token by token: nothing is rendered again. Example, with trained
tokens in brackets:  <user> 1+1? <assistant> [2 <end>]  ->  prompt "<user> 1+1? <assistant>", expected "2 <end>".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trillora.data.tokenizing.encode import TokenizedDocument


@dataclass(frozen=True)
class Question:
    """Prompt tokens, and the expected continuation including the stop token."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


def question_of(document: TokenizedDocument) -> Question | None:
    """Splits a document before its last trained span; None if nothing precedes it, as in a text trained whole.

    The header of an answer is not trained, so the prompt ends with it; the stop token is, so the answer ends with it.
    Of a pair, the chosen answer is the expected one.
    """
    document = document.parts[0]
    trained = np.flatnonzero(document.supervised)
    end = int(trained[-1]) + 1 if len(trained) else 0
    untrained = np.flatnonzero(~document.supervised[:end])
    if not len(untrained):
        return None
    start = int(untrained[-1]) + 1
    if document.prompt and not document.supervised[document.prompt : start].any():
        start = min(start, document.prompt)  # a block of thinking that is not trained on belongs to the answer
    return Question(tuple(document.tokens[:start].tolist()), tuple(document.tokens[start:end].tolist()))


def last_question(prompt: str, head: str, request: str, control_words: Iterable[str]) -> str | None:
    """The last user message of a rendered prompt, or None if it cannot be found.

    `head` and `request` are the texts that the chat template writes before and after a single user message. Within a
    conversation, the same text precedes a user message from the last control token of `head` on. Whitespace at the
    end is not compared: if an answer begins with spaces, a token may join them to the line break of `request`.
    """
    opening = head[max([0, *(head.rfind(word) for word in control_words)]) :]
    asked, ending = prompt.rstrip(), request.rstrip()
    if not opening or not request or not asked.endswith(ending):
        return None
    _, found, question = asked.removesuffix(ending).rpartition(opening)
    return question.strip() if found else None
