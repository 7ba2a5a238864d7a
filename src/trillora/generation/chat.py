"""A chat in the terminal: reads one line at a time and streams each answer."""

from __future__ import annotations

from collections.abc import Callable

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.generation.prompts import Message

GREETING = "Type a message. /reset clears the conversation, /quit exits."


def converse(
    generator: Generator,
    ask: Callable[[], str],
    say: Callable[[str], None],
    *,
    max_tokens: int,
    sampling: Sampling,
) -> None:
    """Chats until `/quit`, the end of input or an interrupt. Each answer sees all messages before it.

    A line that `ask` refuses with a `TrilloraError` is not sent."""
    if not generator.prompts.has_template:
        raise TrilloraError(
            "This model has no chat template: it can continue texts, but not chat.",
            do="use trillora generate, or the chat (“instruct”) version of the model",
        )
    turns: list[Message] = []
    say(GREETING + "\n")
    try:
        while (line := _asked(ask, say)) != "/quit":
            if line == "/reset":
                turns = []
                say("Conversation cleared.\n")
            elif line:
                turns = _exchange(generator, turns, line, say, max_tokens, sampling)
    except (EOFError, KeyboardInterrupt):
        say("\n")
    say("Bye.\n")


def _asked(ask: Callable[[], str], say: Callable[[str], None]) -> str:
    try:
        return ask().strip()
    except TrilloraError as error:
        say(f"{error}\n")
        return ""


def _exchange(
    generator: Generator,
    turns: list[Message],
    line: str,
    say: Callable[[str], None],
    max_tokens: int,
    sampling: Sampling,
) -> list[Message]:
    """The messages with this question and its answer, or unchanged if the question does not fit."""
    messages = [*turns, {"role": "user", "content": line}]
    answer = ""
    try:
        for piece in generator.stream(messages, max_tokens=max_tokens, sampling=sampling):
            answer += piece
            say(piece)
    except TrilloraError as error:
        say(f"{error}\n")
        return turns
    say("\n")
    return [*messages, {"role": "assistant", "content": answer}]
