"""A conversation in a terminal: one line in, an answer word by word out."""

from __future__ import annotations

from collections.abc import Callable

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.generation.prompts import Message

GREETING = "Ask away. /reset starts over, /quit leaves."


def converse(
    generator: Generator,
    ask: Callable[[], str],
    say: Callable[[str], None],
    *,
    max_tokens: int,
    sampling: Sampling,
) -> None:
    """Until `/quit`, the end of input or an interrupt; every answer is given with all turns before it in view."""
    if not generator.prompts.has_template:
        raise TrilloraError(
            "This model has no chat template: it continues texts and holds no conversations.",
            do="use trillora generate, or the chat (“instruct”) version of the model",
        )
    turns: list[Message] = []
    say(GREETING + "\n")
    try:
        while (line := ask().strip()) != "/quit":
            if line == "/reset":
                turns = []
                say("Forgotten.\n")
            elif line:
                turns = _exchange(generator, turns, line, say, max_tokens, sampling)
    except (EOFError, KeyboardInterrupt):
        say("\n")
    say("Bye.\n")


def _exchange(
    generator: Generator,
    turns: list[Message],
    line: str,
    say: Callable[[str], None],
    max_tokens: int,
    sampling: Sampling,
) -> list[Message]:
    """The turns with this question and its answer; without both where it does not fit."""
    asked = [*turns, {"role": "user", "content": line}]
    answer = ""
    try:
        for piece in generator.stream(asked, max_tokens=max_tokens, sampling=sampling):
            answer += piece
            say(piece)
    except TrilloraError as error:
        say(f"{error}\n")
        return turns
    say("\n")
    return [*asked, {"role": "assistant", "content": answer}]
