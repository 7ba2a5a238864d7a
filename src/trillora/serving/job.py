"""One answer to generate, as the server asks for it, and the pieces in which the engine delivers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError

Finish = Literal["stop", "length"]


class NotFinite(TrilloraError):
    """The logits of an answer have overflowed."""


@dataclass(frozen=True)
class SampledToken:
    """One generated token with its probability."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...]  # the most likely tokens and their log-probabilities, if they were asked for


@dataclass(frozen=True)
class AnswerPiece:
    """Some more of an answer. The last piece has `finish`, or `error` if the answer failed."""

    text: str = ""
    chosen: tuple[SampledToken, ...] = ()
    prompt: tuple[SampledToken, ...] = ()  # in the first piece, if the prompt is to be scored
    num_tokens: int = 0  # generated so far, without a stop token
    finish: Finish | None = None
    error: TrilloraError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """`receive` is called in the engine's thread with every piece; it must return at once."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    receive: Callable[[AnswerPiece], None]
    sampling: Sampling = field(default_factory=Sampling)
    number: int = 0  # of several answers to one prompt: each draws its own tokens
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    num_top: int = 0
    scores_prompt: bool = False  # then `max_tokens` may be 0
    is_cancelled: bool = False  # may be set by any thread: the row becomes free

    @property
    def num_reserved(self) -> int:
        """Cache slots that the whole answer needs."""
        return len(self.prompt) + self.max_tokens
