"""Answers in the form of the OpenAI protocol: whole, or as the chunks of a stream.

ChatForm("first", tokens).part(0, AnswerPiece("Hel"))
-> {"id": "chatcmpl-…", "object": "chat.completion.chunk", …, "choices": [{"index": 0, "delta": {"content": "Hel"}, …}]}
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trillora.serving.job import AnswerPiece, SampledToken

TokenText = Callable[[int], str]
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Usage:
    num_prompt: int
    num_written: int

    def to_dict(self) -> dict[str, int]:
        total = self.num_prompt + self.num_written
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_written, "total_tokens": total}


def joined(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    """Pieces of one answer as one."""
    last = pieces[-1]
    chosen = tuple(one for piece in pieces for one in piece.chosen)
    text, prompt = "".join(piece.text for piece in pieces), pieces[0].prompt
    return AnswerPiece(text, chosen, prompt, last.num_tokens, last.finish, last.error)


class ChatForm:
    """`/v1/chat/completions`"""

    def __init__(self, model: str, token_text: TokenText, *, with_logprobs: bool) -> None:
        self._token_text, self.with_logprobs = token_text, with_logprobs
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[AnswerPiece], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.chosen),
                "finish_reason": answer.finish,
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage.to_dict()}

    def opening(self, index: int) -> dict[str, object] | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def parts(self, index: int, piece: AnswerPiece) -> list[dict[str, object]]:
        chunks = []
        if piece.text or piece.chosen:
            chunks.append(self._chunk(index, {"content": piece.text}, self._logprobs(piece.chosen), None))
        if piece.finish is not None:
            chunks.append(self._chunk(index, {}, None, piece.finish))
        return chunks

    def usage(self, usage: Usage) -> dict[str, object]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.to_dict()}

    def _chunk(self, index: int, delta: dict[str, object], logprobs: object, finish: str | None) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, chosen: Sequence[SampledToken]) -> dict[str, object] | None:
        if not self.with_logprobs:
            return None
        content = [
            {**self._one(one.token, one.logprob), "top_logprobs": [self._one(*top) for top in one.top]}
            for one in chosen
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float | None) -> dict[str, object]:
        text = self._token_text(token)
        return {
            "token": text,
            "logprob": logprob,
            # A token that is only a part of a character has no text of its own.
            "bytes": None if _INCOMPLETE in text else list(text.encode()),
        }


class CompletionForm:
    """`/v1/completions`. Answers begin with their prompts if `echo` gives them."""

    def __init__(
        self, model: str, token_text: TokenText, *, with_logprobs: bool, echo: Sequence[str] | None = None
    ) -> None:
        self._token_text, self.with_logprobs, self._echo = token_text, with_logprobs, echo
        self._offsets: dict[int, int] = {}
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[AnswerPiece], usage: Usage) -> dict[str, Any]:
        choices = [
            self._choice(index, (self._echo[index] if self._echo else "") + answer.text, answer)
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": "text_completion", "choices": choices, "usage": usage.to_dict()}

    def opening(self, index: int) -> dict[str, object] | None:
        return self._chunk(index, self._echo[index], AnswerPiece()) if self._echo else None

    def parts(self, index: int, piece: AnswerPiece) -> list[dict[str, object]]:
        return [self._chunk(index, piece.text, piece)]

    def usage(self, usage: Usage) -> dict[str, object]:
        return {**self._head, "object": "text_completion", "choices": [], "usage": usage.to_dict()}

    def _chunk(self, index: int, text: str, piece: AnswerPiece) -> dict[str, object]:
        return {**self._head, "object": "text_completion", "choices": [self._choice(index, text, piece)]}

    def _choice(self, index: int, text: str, piece: AnswerPiece) -> dict[str, object]:
        logprobs = self._logprobs(index, piece.prompt + piece.chosen) if self.with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, index: int, chosen: Sequence[SampledToken]) -> dict[str, object]:
        texts = [self._token_text(one.token) for one in chosen]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": [
                {self._token_text(token): value for token, value in one.top} if one.logprob is not None else None
                for one in chosen
            ],
            "text_offset": offsets,
        }
