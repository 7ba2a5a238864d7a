"""Prompts to tokens, and tokens to answers.

A prompt is a text or a conversation. With a chat template, a text becomes a conversation with one user message,
rendered as in training, in a worker process with its limits. Without one, it is the beginning of a document. Text in a
prompt never becomes a control token.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillora.data.questions import last_question
from trillora.data.rendering.pool import Outcome, Worker
from trillora.data.rendering.render import RenderedRow, RenderSettings
from trillora.data.rendering.worker import PROMPT
from trillora.data.rows import BadRow
from trillora.data.tokenizing.encode import Encoder
from trillora.errors import TrilloraError
from trillora.model.loading.description import stop_tokens
from trillora.model.loading.source import tokenizer_errors

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig, Tokenizer

Message = dict[str, Any]
Prompt = str | Sequence[Message]
_QUESTION = "QUESTION"  # placeholder, to find what the template writes around a question
_ANSWER = "ANSWER"  # placeholder, to find what the template writes after an answer
_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a multi-byte character


class PromptTooLong(TrilloraError):
    """The prompt has more tokens than the caller can use."""


class Prompts:
    """Encodes prompts and decodes answers for one tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        template_date: str | None = None,
        arguments: Mapping[str, object] | None = None,
        stops: Iterable[int] = (),
    ) -> None:
        """`arguments` go to the chat template; a prompt may add its own."""
        self._tokenizer, self.template, self._date = tokenizer, template, template_date
        self._arguments = dict(arguments or {})
        self._encoder = Encoder(tokenizer, template)
        date = datetime.date.fromisoformat(template_date) if template_date else datetime.date.today()
        settings = RenderSettings(
            special_words=self._encoder.special_words,
            added_words=self._encoder.added_words,
            train_on="everything",
            chat_template=template or None,
            chat_words=dict(tokenizer.special_tokens_map),
            template_date=date.isoformat(),
            arguments=self._arguments,
        )
        self.has_template = bool(template)
        self._new_worker = partial(Worker, settings)  # templates are untrusted: they run in a process with limits
        self._workers = [self._new_worker()]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # a process starts when all others are busy
        self._idle.put(self._workers[0])
        self._tokenizing = threading.Lock()
        weakref.finalize(self, _close, self._workers)
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.template_stops = self._stop_of_template()
        self.stops = tuple(sorted({*stops, *own, *self.template_stops}))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def with_template(self, template: str | None) -> Prompts:
        """The same tokenizer and stop tokens with another chat template."""
        return self.with_options(template, self._date, self._arguments)

    def with_options(
        self, template: str | None, template_date: str | None, arguments: Mapping[str, object] | None
    ) -> Prompts:
        """The same tokenizer and stop tokens, with all that a run may say about its chat template."""
        given = dict(arguments or {})
        if (template, template_date, given) == (self.template, self._date, self._arguments):
            return self
        return Prompts(
            self._tokenizer, template=template, template_date=template_date, arguments=given, stops=self.stops
        )

    def serve_strangers(self, num_at_once: int) -> None:
        """Encodes this many prompts at once, and those that use up their limits do not stop the others."""
        while len(self._workers) < num_at_once:
            self._workers.append(self._new_worker())
            self._idle.put(self._workers[-1])
        for worker in self._workers:
            worker.max_past_limit = None

    def close(self) -> None:
        """Ends the processes, also those that are rendering a prompt. Nothing can be rendered afterwards."""
        for worker in self._workers:
            worker.stop()
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def encode(
        self, prompt: Prompt, arguments: Mapping[str, object] | None = None, *, max_tokens: int | None = None
    ) -> list[int]:
        """The tokens that the answer follows. `arguments` are for the chat template, in this prompt only. A text that
        cannot have at most `max_tokens` is refused before it is tokenized."""
        if isinstance(prompt, str) and not self.has_template:
            return self.encode_text(prompt, max_tokens=max_tokens)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not self.has_template:
            raise TrilloraError(
                "This model has no chat template, so it cannot answer a conversation.",
                do='use the chat ("instruct") version of the model, or give plain text to continue',
            )
        rendered = self._rendered({"messages": messages, "arguments": dict(arguments or {})}, PROMPT)
        return self._encode_script(rendered, max_tokens)

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """The tokens of a text to continue, without a chat template."""
        self._check_length(text, max_tokens)
        return self._encode_script(self._rendered({"text": text}, "text"), max_tokens)[:-1]  # without the final EOS

    def text(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation, as the chat template writes it."""
        return self._rendered({"messages": list(messages)}, PROMPT).text

    def _rendered(self, row: dict[str, Any], format: str) -> RenderedRow:
        outcome = self._outcome(row, format)
        if isinstance(outcome, BadRow):
            raise TrilloraError(outcome.what, where="the chat template" if self.has_template else None, do=outcome.do)
        return outcome

    def _outcome(self, row: dict[str, Any], format: str) -> Outcome:
        try:
            raw = json.dumps(row).encode()
        except (TypeError, ValueError, RecursionError) as error:
            do = 'write each message as {"role": "user", "content": "..."}'
            raise TrilloraError(f"A prompt must be plain JSON: {error}.", where="messages", do=do) from None
        worker = self._idle.get()
        try:
            return worker.render([raw], format)[0]
        finally:
            self._idle.put(worker)

    def _encode_script(self, script: RenderedRow, max_tokens: int | None) -> list[int]:
        self._check_length(script.text, max_tokens)
        with self._tokenizing:
            encoded = self._encoder.encode([script])[0]
        if isinstance(encoded, BadRow):
            raise TrilloraError(encoded.what, do=encoded.do)
        return [int(token) for token in encoded.tokens]

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            what = f"The prompt has {len(text):,} characters, more than {max_tokens} tokens can have."
            raise PromptTooLong(what, do="shorten it")

    @cached_property
    def _longest_token(self) -> int:
        """Characters, or bytes where the vocabulary is in bytes."""
        return max(map(len, self._tokenizer.get_vocab()))

    @tokenizer_errors()
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer. Spaces are not cleaned up: that would change text that was already streamed."""
        if not tokens:  # some decoders panic
            return ""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_text(self, token: int) -> str:
        """The text of one token, also of a control token."""
        return self._with_words([token])

    def shown_question(self, tokens: Sequence[int]) -> str:
        """A prompt for display: the last message, without the text of the chat template around it."""

        found = None
        if self.has_template:
            head, request = self._around_question
            found = last_question(self._with_words(tokens), head, request, self._encoder.control_words)
        return found if found is not None else self.decode(tokens)

    @cached_property
    def _around_question(self) -> tuple[str, str]:
        """What the template writes before and after a question."""
        head, _, request = self._with_words(self.encode(_QUESTION)).partition(_QUESTION)
        return head, request

    @tokenizer_errors()
    def _with_words(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

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
        if not self.has_template:
            return []
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        outcome = self._outcome({"messages": turns}, "messages")
        if isinstance(outcome, BadRow):
            if outcome.past_limit:
                raise TrilloraError(outcome.what, where="the chat template", do=outcome.do)
            return []  # the template needs other messages than these
        after = outcome.text.rpartition(_ANSWER)[2]
        tokens = self._tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
        return [t for t in tokens[:1] if t in self._tokenizer.added_tokens_decoder]


def _close(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.close()


def configured_stops(folder: Path, config: PretrainedConfig) -> set[int]:
    """The stop tokens in the model's own files."""
    return stop_tokens(folder, config)
