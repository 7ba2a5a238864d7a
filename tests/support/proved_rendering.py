"""Rendering in this process with a kept renderer, and proofs that it is right."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from chat_tokenizers import Family, Messages, own_tokens, some_conversation, some_tool

from trillora.data.prepare import DataOptions, render_settings
from trillora.data.rendering.render import Renderer
from trillora.data.rows import BadRow
from trillora.data.tokenizing.encode import Encoder, TokenizedDocument
from trillora.errors import TrilloraError

Row = dict[str, Any]


@functools.cache
def encoder_of(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer)


@functools.cache
def renderer_of(tokenizer: Any, train_on: str) -> Renderer:
    return Renderer(render_settings(DataOptions(sources=(), train_on=train_on), tokenizer, encoder_of(tokenizer)))


def render_rows(
    rows: list[Row], tokenizer: Any, train_on: str = "assistant", format: str = "messages"
) -> list[TokenizedDocument | BadRow]:
    """Render all rows in this process with one renderer, as a worker does."""
    renderer, rendered, refused = renderer_of(tokenizer, train_on), [], {}
    for number, row in enumerate(rows):
        try:
            rendered.append(renderer.render(json.dumps(row).encode(), format))
        except BadRow as error:
            refused[number] = error
    encoded = iter(encoder_of(tokenizer).encode(rendered))
    return [refused[number] if number in refused else next(encoded) for number in range(len(rows))]


def render_one(row: Row, tokenizer: Any, train_on: str, format: str) -> TokenizedDocument:
    """A bad row raises the error that users would see."""
    try:
        (document,) = render_rows([row], tokenizer, train_on, format)
    except BadRow as error:  # raised by the template itself
        document = error
    if isinstance(document, BadRow):
        raise TrilloraError(document.what, do=document.do)
    return document


def render_chat(messages: Any, tokenizer: Any, train_on: str = "assistant") -> TokenizedDocument:
    return render_one({"messages": messages}, tokenizer, train_on, "messages")


def render_text(text: str, tokenizer: Any) -> TokenizedDocument:
    return render_one({"text": text}, tokenizer, "auto", "text")


def trained_runs(rendered: TokenizedDocument, tokenizer: Any) -> list[str]:
    """The text of each stretch of trained tokens."""
    pairs = zip(rendered.tokens.tolist(), rendered.supervised.tolist(), strict=True)
    return [
        str(tokenizer.decode([token for token, _ in run]))
        for is_trained, run in groupby(pairs, key=lambda pair: pair[1])
        if is_trained
    ]


def spoken(messages: Messages, family: Family) -> list[str]:
    """What should be trained, in the form that decoding gives: sentencepiece drops the very first space."""
    speech = family.speech(messages)
    return [text.removeprefix(" ") for text in speech] if family.spaces == "mistral" else speech


def prove_conversations(tokenizer: Any, family: Family, num: int, seed: int = 0) -> None:
    """Random conversations have the tokenizer's own tokens, and exactly the assistant's text is trained."""
    rng = random.Random(seed)
    rows = [some_conversation(rng, family) for _ in range(num)]
    for row, rendered in zip(rows, render_rows(rows, tokenizer), strict=True):
        assert isinstance(rendered, TokenizedDocument), (rendered, row)
        assert rendered.tokens.tolist() == own_tokens(tokenizer, **row)
        assert trained_runs(rendered, tokenizer) == spoken(row["messages"], family)
    kinds = {message["role"] for row in rows for message in row["messages"]}
    assert ("tool" in kinds) == (family.num_calls > 0) and ("system" in kinds) == family.has_system
    for row, rendered in zip(rows[:20], render_rows(rows[:20], tokenizer, "everything"), strict=True):
        assert isinstance(rendered, TokenizedDocument)
        assert rendered.tokens.tolist() == own_tokens(tokenizer, **row)
        assert rendered.supervised.all()


def row_with_everything(family: Family) -> Row:
    """A conversation with every field of the family; all texts are different."""
    answer = {"role": "assistant", "content": "Paris."} | (
        {"reasoning_content": "hm"} if family.thinks and not family.drops_thinking else {}
    )
    messages: Messages = [{"role": "system", "content": "be kind"}] if family.has_system else []
    messages.append({"role": "user", "content": "where?"})
    if family.num_calls:
        function = {"name": "weather", "arguments": {"city": "Rome", "where": ["south", {"by": "sea"}]}}
        call = {"id": "abc012abc", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "let me look", "tool_calls": [call]})
        messages.append({"role": "tool", "content": "sunny", "tool_call_id": "abc012abc"})
    messages += [answer, {"role": "user", "content": "sure?"}, {**answer, "content": "Yes."}]
    return {"messages": messages, "tools": [some_tool("weather")]} if family.num_calls else {"messages": messages}


def planted_rows(row: Row, text: str) -> Iterator[tuple[str, Row]]:
    """The row with `text` in place of each of its texts and of each user-chosen key, one at a time."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict | list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if path[-1:] in (("arguments",), ("properties",)):
                    yield (*path, key, None)
                if key not in ("role", "type", "id"):
                    yield from walk(item, (*path, key))
        else:
            yield path

    for path in walk(row, ()):
        changed = copy.deepcopy(row)
        *parents, last = path if path[-1] is not None else path[:-1]
        holder: Any = functools.reduce(lambda value, key: value[key], parents, changed)
        if path[-1] is None:
            holder[text] = holder.pop(last)
        else:
            holder[last] = text
        yield ".".join(map(str, path)), changed


def prove_planted_is_text(
    tokenizer: Any, family: Family, words: tuple[str, ...], places: tuple[str, ...], read: Callable[[str], str] = str
) -> int:
    """Control tokens spelled in any text stay text: the control ids are the same as with harmless text.

    In the texts of the assistant, the model's own marks are tokens, as in the tokenizer's own rendering. Only names and
    keys may be refused, with the token named: templates depend on those. Returns how many were not refused. Texts are
    compared after `read`.
    """
    control = control_ids(tokenizer, family)
    row, num_text = row_with_everything(family), 0
    for place in places:
        fields = list(planted_rows(row, place.format("harmless")))
        harmless = render_rows([planted for _, planted in fields], tokenizer)
        for word in words:
            rows = [planted for _, planted in planted_rows(row, place.format(word))]
            for (field, _), plain, planted, rendered in zip(
                fields, harmless, rows, render_rows(rows, tokenizer), strict=True
            ):
                assert isinstance(plain, TokenizedDocument), (field, plain)
                is_own = word in family.own and is_written(field, planted)
                is_last = place.endswith(("{}", "{0}"))  # nothing after the thinking
                if isinstance(rendered, BadRow) and not (is_own and is_last):
                    assert word in rendered.what and not field.endswith("content"), (field, rendered)
                    continue
                num_text += 1
                if isinstance(rendered, BadRow) or is_own:
                    written = None if isinstance(rendered, BadRow) else rendered.tokens.tolist()
                    assert written in (None, own_tokens(tokenizer, **planted)), (field, word)
                    continue
                found, expected = ([t for t in r.tokens.tolist() if t in control] for r in (rendered, plain))
                assert found == expected, (field, word)
                written = tokenizer.decode(plain.tokens.tolist()).replace("harmless", word)
                assert read(tokenizer.decode(rendered.tokens.tolist())) == read(written), (field, word)
                runs, expected_runs = trained_runs(rendered, tokenizer), spoken(planted["messages"], family)
                assert list(map(read, runs)) == list(map(read, expected_runs)), (field, word)
    return num_text


def control_ids(tokenizer: Any, family: Family) -> set[int]:
    flagged = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *flagged, *tokenizer.convert_tokens_to_ids(list(family.control))}


def is_written(field: str, row: Row) -> bool:
    """Whether the model writes this text: the content or the thinking of an assistant turn."""
    key, number, *rest = field.split(".")
    return (
        key == "messages"
        and rest in (["content"], ["reasoning_content"])
        and row[key][int(number)]["role"] == "assistant"
    )
