"""Prompts to tokens, and tokens to answers.

A prompt is a text or a conversation. With a chat template, a text becomes a conversation with one user message,
rendered as in training. Without one, it is the beginning of a document. Text in a prompt never becomes a control token.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trillora.data.questions import last_question
from trillora.data.rendering.render import RenderedRow, Renderer, RenderSettings
from trillora.data.rendering.sandbox import ChatTemplate
from trillora.data.rows import BadRow, Text
from trillora.data.tokenizing.encode import Encoder
from trillora.errors import TrilloraError

Message = dict[str, Any]
Prompt = str | Sequence[Message]
_QUESTION = "QUESTION"  # placeholder, to find what the template writes around a question
_ANSWER = "ANSWER"  # placeholder, to find what the template writes after an answer
_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a multi-byte character


class Prompts:
    """Encodes prompts and decodes answers for one tokenizer and chat template."""

    def __init__(
        self, tokenizer: Any, *, template: str | None, template_date: str | None = None, stops: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, template)
        date = datetime.date.fromisoformat(template_date) if template_date else datetime.date.today()
        words = dict(tokenizer.special_tokens_map)
        settings = RenderSettings(
            special_words=self._encoder.special_words,
            added_words=self._encoder.added_words,
            chat_template=template,
            chat_words=words,
            template_date=date.isoformat(),
        )
        try:
            self._renderer = Renderer(settings)
            self._chat = ChatTemplate(template, words, date) if template else None
        except BadRow as error:
            raise TrilloraError(error.what, where="the chat template", do=error.do) from None
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.stops = tuple(sorted({*stops, *own, *self._stop_of_template()}))

    @property
    def has_template(self) -> bool:
        return self._chat is not None

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens that the answer follows."""
        if isinstance(prompt, str) and self._chat is None:
            return self._encode_script(self._renderer.write(Text(prompt)))[:-1]  # without the final EOS
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._chat is None:
            raise TrilloraError(
                "This model has no chat template, so it cannot answer a conversation.",
                do='use the chat ("instruct") version of the model, or give plain text to continue',
            )
        try:
            script = self._renderer.prompt(messages)
        except BadRow as error:
            raise TrilloraError(error.what, do=error.do) from None
        return self._encode_script(script)

    def _encode_script(self, script: RenderedRow) -> list[int]:
        encoded = self._encoder.encode([script])[0]
        if isinstance(encoded, BadRow):
            raise TrilloraError(encoded.what, do=encoded.do)
        return [int(token) for token in encoded.tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer. Spaces are not cleaned up: that would change text that was already streamed."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def shown_question(self, tokens: Sequence[int]) -> str:
        """A prompt for display: the last message, without the text of the chat template around it."""

        def with_words(tokens: Sequence[int]) -> str:
            ids = list(tokens)
            return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        found = None
        if self._chat is not None:
            head, _, request = with_words(self.encode(_QUESTION)).partition(_QUESTION)
            found = last_question(with_words(tokens), head, request, self._encoder.control_words)
        return found if found is not None else self.decode(tokens)

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text piece by piece. A character that spans several tokens is emitted with the last of them."""
        seen: list[int] = []
        shown = 0
        for token in tokens:
            seen.append(token)
            text = self.decode(seen)
            if not text.endswith(_INCOMPLETE):
                yield text[shown:]
                shown = len(text)
        yield self.decode(seen)[shown:]

    def _stop_of_template(self) -> list[int]:
        """The control token that the template writes after an answer, which ends the answers of a trained model."""
        if self._chat is None:
            return []
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            after = self._chat.render(turns, None).rpartition(_ANSWER)[2]
        except BadRow:  # the template needs other messages than these
            return []
        tokens = self._tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
        return [t for t in tokens[:1] if t in self._tokenizer.added_tokens_decoder]


def configured_stops(folder: Path, config: Any) -> set[int]:
    """The stop tokens in the model's own files: `generation_config.json`, or else `config.json`."""
    named: Any = getattr(config.get_text_config(), "eos_token_id", None)
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            named = json.loads(file.read_text("utf-8")).get("eos_token_id", named)
        except (ValueError, AttributeError):
            raise TrilloraError("This is not valid JSON.", where=str(file), do="download the file again") from None
    if named is None:
        return set()
    return {int(token) for token in (named if isinstance(named, list | tuple) else [named])}
