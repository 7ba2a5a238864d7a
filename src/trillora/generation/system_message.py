"""The system message that all rows of a training had.

A model that never saw a prompt without it answers worse without it. If rows have different ones, or some have none,
then nothing is added to a prompt.

    with_system("Which planet is red?", "Answer in one word.")
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Which planet is red?"}]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trillora.data.rendering.json_values import shortened

if TYPE_CHECKING:
    from trillora.generation.prompts import Prompt

MAX_SHOWN = 200  # characters


def with_system(prompt: str, system: str) -> Prompt:
    """A text as a conversation with this system message; as it is, if the message is empty."""
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}] if system else prompt


def trained_with(system: str) -> str:
    """The first sentence about it; the next one says what happens to the message."""
    shown = shortened(" ".join(system.split()), MAX_SHOWN)
    return f"All rows of the training had the same system message (“{shown}”)."
