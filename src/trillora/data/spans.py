"""Where the assistant speaks in a rendered conversation: from the end of its header through its stop token.

Found by the template's own `{% generation %}` marks where it has them around every answer and its stop token, else by
rendering prefixes of the conversation. Either way the finding is verified against the full rendering, character by
character; what cannot be verified is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from trillora.data.encode import ControlTokens, Span
from trillora.errors import TrilloraError

Message = dict[str, Any]
# (messages, add_generation_prompt, chat_template or None for the tokenizer's own) -> rendered string
Render = Callable[[Sequence[Message], bool, str | None], str]

# Two of Unicode's noncharacters, which no text for interchange contains.
_OPEN, _CLOSE = "\ufdd2", "\ufdd3"
_OPENING = re.compile(r"(\{%[-+]?\s*generation\s*)(-%\}|\+%\}|%\}\n?)")
_CLOSING = re.compile(r"(?:(?m:^)[ \t]*(?=\{%[^-+]))?(\{%)([-+]?)(\s*endgeneration\s*[-+]?%\})")


def assistant_spans(
    messages: Sequence[Message],
    text: str,
    planted: Sequence[Span],
    template: str,
    render: Render,
    control: ControlTokens,
    where: str,
) -> tuple[Span, ...]:
    """One span of `text`, the full rendering, for each assistant turn."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if _OPENING.search(template):
        marked = _marked_spans(render(messages, False, _show_marks(template)), text)
        ended = tuple(_through_stop(text, span, planted, control) for span in marked)
        if len(marked) == len(turns) and None not in ended:
            return tuple(span for span in ended if span is not None)
    return tuple(_span_by_prefix(messages, turn, text, planted, render, control, where) for turn in turns)


def _show_marks(template: str) -> str:
    """The template with its generation marks made visible as characters.

    Jinja removes whitespace around block tags (`-`, and transformers' trim_blocks and lstrip_blocks); a character put
    next to the tag would shield that whitespace, so it is removed here in the same cases.
    """

    def opened(match: re.Match[str]) -> str:
        tag, end = match.groups()
        return tag + end.rstrip("\n") + (f"{{{{ '{_OPEN}' -}}}}" if end == "-%}" else f"{{{{ '{_OPEN}' }}}}")

    def closed(match: re.Match[str]) -> str:
        tag, strip, rest = match.groups()
        return (f"{{{{- '{_CLOSE}' }}}}" if strip == "-" else f"{{{{ '{_CLOSE}' }}}}") + tag + strip + rest

    return _CLOSING.sub(closed, _OPENING.sub(opened, template))


def _marked_spans(marked: str, text: str) -> list[Span]:
    """The spans between visible marks; none if the marked rendering without its marks is not the real one."""
    parts = re.split(f"[{_OPEN}{_CLOSE}]", marked)
    marks = re.sub(f"[^{_OPEN}{_CLOSE}]", "", marked)
    if "".join(parts) != text or marks != (_OPEN + _CLOSE) * (len(marks) // 2):
        return []
    spans, position = [], 0
    for number, part in enumerate(parts):
        if number % 2:
            spans.append((position, position + len(part)))
        position += len(part)
    return spans


def _span_by_prefix(
    messages: Sequence[Message],
    turn: int,
    text: str,
    planted: Sequence[Span],
    render: Render,
    control: ControlTokens,
    where: str,
) -> Span:
    """From where the conversation before this turn asks for an answer to the stop token that closes it."""
    if turn == 0:
        raise TrilloraError(
            "The conversation begins with the assistant, and the chat template does not mark where answers begin.",
            where=where,
            do="begin with a user turn, or use a chat template with {% generation %} marks",
        )
    before = render(messages[:turn], True, None)
    as_last_turn = render(messages[: turn + 1], False, None)
    if text.startswith(before) and as_last_turn.startswith(before):
        # A template may write an answer without the thinking in front of it.
        whole = str(messages[turn]["content"])
        for answer in dict.fromkeys((whole.strip(), whole.rpartition("</think>")[2].strip())):
            span = _from_header_through_stop(text, as_last_turn, len(before), answer, planted, control)
            if span is not None:
                return span
    raise TrilloraError(
        f"The answer of turn {turn + 1} and a stop token behind it cannot be found in what the chat template writes.",
        where=where,
        do="use a chat template that writes each answer as it is and then the end-of-turn token, "
        "inside {% generation %} marks",
    )


def _from_header_through_stop(
    text: str, as_last_turn: str, start: int, answer: str, planted: Sequence[Span], control: ControlTokens
) -> Span | None:
    """The turn that begins at `start` in both renderings, whose stop token must be the same in both.

    The second rendering has nothing behind this turn: without it the header of a next turn could pass for a stop token.
    """
    spoken, alone = (_find_answer(rendering, start, answer, control) for rendering in (text, as_last_turn))
    if spoken is None or alone is None or spoken[1][1] != alone[1][1]:
        return None
    begin, stop = spoken
    words = [word for word in control.special.finditer(text, start, begin) if not _inside(word.start(), planted)]
    if _inside(stop.start(1), planted) or any(word[0] == stop[1] for word in words):
        return None
    # Templates that ignore add_generation_prompt write the header inside the turn; it is not the assistant's.
    return (begin if words else start), stop.end(1)


def _find_answer(rendering: str, start: int, answer: str, control: ControlTokens) -> tuple[int, re.Match[str]] | None:
    """Where the answer stands with a token of the template's directly behind it, and the match of that token."""
    begin = rendering.find(answer, start) if answer else -1
    while begin >= 0:
        if stop := control.added_next.match(rendering, begin + len(answer)):
            return begin, stop
        begin = rendering.find(answer, begin + 1)
    return None


def _through_stop(text: str, span: Span, planted: Sequence[Span], control: ControlTokens) -> Span | None:
    """The span without the whitespace behind its stop token; None if it does not end with one."""
    start, end = span[0], span[0] + len(text[slice(*span)].rstrip())
    stop = control.added_at_end.search(text, start, end)
    return None if stop is None or _inside(stop.start(), planted) else (start, end)


def _inside(position: int, spans: Sequence[Span]) -> bool:
    return any(start <= position < end for start, end in spans)
