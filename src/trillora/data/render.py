"""From rows to tokenised documents that say which of their tokens are trained.

A conversation is rendered once, whole, by the tokenizer's own chat template. Trained are the assistant's tokens with
their stop token, or everything. Plain text gets the tokenizer's BOS, an EOS at its end, and is trained whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trillora.data.encode import ControlTokens, Rendered, Script, Span, Tokenizer, encode
from trillora.data.sources import Row, check_format
from trillora.data.spans import Message, assistant_spans
from trillora.errors import TrilloraError, nearest

ROLES = ("system", "user", "assistant", "tool")
TRAIN_ON = ("assistant", "everything")
_NUM_ROWS_PER_CALL = 512  # rows tokenised at once: enough to keep the tokenizer's threads busy, little memory
# Two of Unicode's noncharacters around a number stand for content that spells a special token.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


def render_chat(messages: object, tokenizer: Tokenizer, train_on: str = "assistant", where: str = "") -> Rendered:
    """One conversation as tokens; `where` is the place an error names."""
    chat = ChatRenderer(tokenizer, train_on)
    return encode([chat.script(messages, where)], tokenizer, chat.control)[0]


def render_text(text: object, tokenizer: Tokenizer, where: str = "") -> Rendered:
    """One document of plain text as tokens: BOS if the tokenizer adds one, EOS at the end, everything supervised."""
    control = ControlTokens.of(tokenizer)
    script = _text_script(text, where, control, *_text_ends(tokenizer))
    return encode([script], tokenizer, control)[0]


def render_rows(rows: Iterable[Row], tokenizer: Tokenizer, *, format: str, train_on: str) -> Iterator[Rendered]:
    """All rows in order, tokenised many at a time. A row that would train nothing is refused."""
    script_of, control = _row_renderer(tokenizer, format, train_on)
    remaining = iter(rows)
    while some := list(itertools.islice(remaining, _NUM_ROWS_PER_CALL)):
        for row in some:
            check_format(row, format)
        for document in encode([script_of(row) for row in some], tokenizer, control):
            if not document.num_supervised:
                raise TrilloraError(
                    "This row has no token to train on.",
                    where=document.where,
                    do="remove the row, or give it an answer",
                )
            yield document


class ChatRenderer:
    """A tokenizer's chat template, and what to train on in the conversations it renders."""

    def __init__(self, tokenizer: Tokenizer, train_on: str) -> None:
        if train_on not in TRAIN_ON:
            guess = nearest(train_on, TRAIN_ON)
            hint = f"did you mean {guess!r}? " if guess else ""
            raise TrilloraError(
                f"There is no train_on {train_on!r}.", where="data.train_on", do=f"{hint}choices: {' '.join(TRAIN_ON)}"
            )
        if not tokenizer.chat_template:
            raise TrilloraError(
                "The model's tokenizer has no chat template, so conversations cannot be rendered the way it expects.",
                do='use the chat ("instruct") version of the model, or train on "text" rows',
            )
        self.control = ControlTokens.of(tokenizer)
        self._tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        self._train_on = train_on

    def script(self, messages: object, where: str) -> Script:
        """The rendered conversation with its trained spans and the content that spells special tokens."""
        checked = _checked(messages, where, needs_answer=self._train_on == "assistant")
        render = self._renderer(where)
        text = render(checked, False, None)
        planted = _planted(checked, text, render, self.control, where)
        if self._train_on == "everything":
            supervised: tuple[Span, ...] = ((0, len(text)),)
        else:
            supervised = assistant_spans(checked, text, planted, self._template, render, self.control, where)
        return Script(text, supervised, planted, where)

    def _renderer(self, where: str) -> Callable[[Sequence[Message], bool, str | None], str]:
        def render(messages: Sequence[Message], add_generation_prompt: bool, template: str | None) -> str:
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        list(messages),
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        chat_template=template or self._template,
                    )
                )
            except Exception as error:  # templates are programs of others and raise what they like
                raise TrilloraError(
                    f"The model's chat template refuses this conversation: {error}",
                    where=where,
                    do="use the roles and the order of turns the template accepts",
                ) from error

        return render


def _row_renderer(tokenizer: Tokenizer, format: str, train_on: str) -> tuple[Callable[[Row], Script], ControlTokens]:
    """How a row of this format becomes a script."""
    if format == "messages":
        chat = ChatRenderer(tokenizer, train_on)
        return lambda row: _chat_row(row, chat), chat.control
    control = ControlTokens.of(tokenizer)
    head, tail = _text_ends(tokenizer)
    return lambda row: _text_script(row.value["text"], row.where, control, head, tail), control


def _chat_row(row: Row, chat: ChatRenderer) -> Script:
    if row.value.get("tools"):
        raise TrilloraError(
            'This row declares "tools", which are not rendered yet; without them the prompt would be wrong.',
            where=row.where,
            do='remove the row, or put the tool descriptions into its system turn and drop "tools"',
        )
    return chat.script(row.value["messages"], row.where)


def _checked(messages: object, where: str, *, needs_answer: bool) -> list[Message]:
    """The messages, known to be a non-empty list of turns with a role we know and text."""

    def refuse(what: str, do: str) -> TrilloraError:
        return TrilloraError(what, where=where, do=do)

    turn_form = 'write each turn as {"role": "user", "content": "..."}'
    if not isinstance(messages, list):
        raise refuse('"messages" is not a list.', f"{turn_form}, in a list")
    if not messages:
        raise refuse('"messages" is empty.', "remove the row, or give it a question and an answer")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise refuse(f"Turn {number} is not an object.", turn_form)
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise refuse(f'Turn {number} has no "role".', turn_form)
        if role not in ROLES:
            guess = nearest(role, ROLES) if isinstance(role, str) else None
            hint = f"did you mean {guess!r}? " if guess else ""
            raise refuse(f"Turn {number} has the unknown role {role!r}.", f"{hint}roles: {' '.join(ROLES)}")
        if not isinstance(content, str):
            raise refuse(f'The "content" of turn {number} is {_kind(content)}, not text.', turn_form)
        if role == "assistant" and not content.strip():
            raise refuse(f"The answer in turn {number} is empty.", "write the answer, or remove the row")
    if needs_answer and all(message["role"] != "assistant" for message in messages):
        raise refuse("The conversation has no assistant turn, so there is nothing to learn.", "add the answer")
    return messages


def _planted(
    messages: Sequence[Message],
    text: str,
    render: Callable[[Sequence[Message], bool, str | None], str],
    control: ControlTokens,
    where: str,
) -> tuple[Span, ...]:
    """Where content spells a special token, found by rendering with stand-ins and verified by putting them back."""
    spellings: list[str] = []

    def stand_in(match: re.Match[str]) -> str:
        spellings.append(match[0])
        return f"{_OPEN}{len(spellings) - 1}{_CLOSE}"

    hidden = [
        {
            key: value if key == "role" else _map_text(value, lambda t: control.special.sub(stand_in, t))
            for key, value in m.items()
        }
        for m in messages
    ]
    if not spellings:
        return ()
    spans, position, restored = [], 0, []
    for number, part in enumerate(re.split(f"{_OPEN}([0-9]{{1,9}}){_CLOSE}", render(hidden, False, None))):
        if number % 2:
            part = spellings[int(part)] if int(part) < len(spellings) else ""  # content with noncharacters of its own
            spans.append((position, position + len(part)))
        restored.append(part)
        position += len(part)
    if "".join(restored) != text:
        raise TrilloraError(
            f"Content spells the special token {spellings[0]!r}, and the chat template changes that content, so "
            "the two cannot be told apart.",
            where=where,
            do="remove that text from the row",
        )
    return tuple(spans)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_text(item, change) for key, item in value.items()}
    return value


def _text_script(
    text: object, where: str, control: ControlTokens, head: tuple[int, ...], tail: tuple[int, ...]
) -> Script:
    if not isinstance(text, str):
        raise TrilloraError(f'"text" is {_kind(text)}, not text.', where=where, do='write {"text": "..."}')
    if not text.strip():
        raise TrilloraError('"text" is empty.', where=where, do="remove the row")
    planted = tuple(match.span() for match in control.special.finditer(text))
    return Script(text, ((0, len(text)),), planted, where, head, tail)


def _text_ends(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """BOS in front of a text if the tokenizer itself would put it there; EOS behind it."""
    if tokenizer.eos_token_id is None:
        raise TrilloraError(
            "The tokenizer has no EOS token, so the model could not learn where a text ends.",
            do="use a model whose tokenizer names its eos_token",
        )
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    return ((bos,) if adds_bos else ()), (tokenizer.eos_token_id,)


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
