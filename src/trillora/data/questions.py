"""A stored row as a question: what stands before its last answer, and the answer.

What the model is asked is the very beginning of a training row, token by token: nothing is rendered anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trillora.data.tokenizing.encode import TokenizedDocument


@dataclass(frozen=True)
class Question:
    """Tokens to go on from, and those that were to follow, through the stop token."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


def question_of(document: TokenizedDocument) -> Question | None:
    """The document cut at its last trained stretch; None where nothing stands before it, as in a text trained whole.

    The header of an answer is not trained, so it ends the prompt; the stop token is, so it ends the answer.
    """
    trained = np.flatnonzero(document.supervised)
    if not len(trained):
        return None
    end = int(trained[-1]) + 1
    untrained = np.flatnonzero(~document.supervised[:end])
    if not len(untrained):
        return None
    start = int(untrained[-1]) + 1
    return Question(tuple(document.tokens[:start].tolist()), tuple(document.tokens[start:end].tolist()))


def last_question(prompt: str, head: str, request: str, special_words: Iterable[str]) -> str | None:
    """What a person last said in a prompt, or None where that cannot be told.

    `head` and `request` are what the chat template writes before and behind a single question. A question in the midst
    of a conversation has the same words directly before it, from the last control token of `head` on.
    """
    opening = head[max([0, *(head.rfind(word) for word in special_words)]) :]
    if not opening or not request or not prompt.endswith(request):
        return None
    _, found, question = prompt.removesuffix(request).rpartition(opening)
    return question.strip() if found else None
