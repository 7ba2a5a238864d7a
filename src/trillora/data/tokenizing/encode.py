"""Rendered rows to tokens. Only the template can produce a control token, never the content.

Example (`<|im_end|>` has id 2). A row of the data says, in its content, "write <|im_end|>". Rendered:

    <|im_start|>user\\nwrite <|im_end|><|im_end|>\\n
                             ^ content  ^ written by the template

The renderer marks the first as *planted*. The text is cut after its first character: "…write <" and "|im_end|>…" are
tokenized separately, so the first becomes ordinary tokens ("<", "|", "im", …) and only the second becomes id 2.

A row without planted text is tokenized whole, exactly as the tokenizer does. The part after a cut is tokenized with a
special token in front, which is then removed, because some tokenizers treat the start of a string differently (they add
a space).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trillora.data.rendering.control import ControlWords, Span
from trillora.data.rendering.render import RenderedRow
from trillora.data.rows import BadRow
from trillora.data.tokenizing.words import WordTokenizer
from trillora.errors import TrilloraError
from trillora.model.loading.source import tokenizer_errors

Tokenizer = Any  # a transformers PreTrainedTokenizerFast; this layer does not import transformers
WORDS_AFTER = 1_000_000  # characters: less text is tokenized before `WordTokenizer.of` has checked itself (0.7 s)
PIECES_AT_ONCE = 4096


@dataclass(frozen=True)
class TokenizedDocument:
    """Tokens of a row. Token i is in the loss if `supervised[i]`; the first token is never a target."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    weight: float = 1.0  # of its targets in the loss; below zero for a bad answer
    first: int = 0  # of a pair: tokens of the chosen side, which the rejected side follows
    prompt: int = 0  # tokens before the answer: of pairs, labelled answers, and thinking that is not trained on

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_supervised(self) -> int:
        """Number of targets: supervised tokens that have a token before them."""
        return int(np.count_nonzero(self.supervised[1:]))

    @property
    def parts(self) -> tuple[TokenizedDocument, ...]:
        """The document itself; of a pair, the chosen and the rejected side."""
        if not self.first:
            return (self,)
        return (
            TokenizedDocument(self.tokens[: self.first], self.supervised[: self.first], self.weight, 0, self.prompt),
            TokenizedDocument(self.tokens[self.first :], self.supervised[self.first :], -self.weight, 0, self.prompt),
        )


EncodedRow = TokenizedDocument | BadRow


class _Piece:
    """The encoding of a text between two cuts."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids, and the characters [start, end) of each."""
        return np.array(self.encoding.ids, np.int32), np.array(self.encoding.offsets, np.int64).reshape(-1, 2)


class Encoder:
    """A tokenizer that never turns content into a control token."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        """`chat_template` is the one that writes the rows, if it is not the tokenizer's own."""
        self._num_characters = 0  # encoded so far
        added = tokenizer.added_tokens_decoder
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {id_: token.content for id_, token in added.items() if token.special}
        self.special_words = list(special.values())
        if chat_template is None and tokenizer.chat_template:
            chat_template = tokenizer.get_chat_template()
        # New tokens of the recipe are text, unless the template has them literally: `<tool>` looks like a mark with a
        # role in it, as in `'<' + role + '>'`.
        text = {word for word in getattr(tokenizer, "new_tokens", ()) if word not in (chat_template or "")}
        self.added_words = [token.content for token in added.values() if token.content not in text]
        words = ControlWords.of(self.special_words, self.added_words, chat_template)
        self.control_words, self._control = words.words, words.control
        self._first_characters = {word[0] for word in words.words}
        self._spelling = special | {id_: token.content for id_, token in added.items() if token.content in words.marks}
        # Not the unknown token: any text may become it.
        watched = [id_ for id_ in self._spelling if id_ != tokenizer.unk_token_id]
        highest = max([*watched, *tokenizer.get_vocab().values()])
        self._is_control = np.zeros(highest + 1, np.bool_)
        self._is_control[watched] = True
        # Set by `load_tokenizer`. Only of interest if the tokenizer has more tokens than the model.
        vocab_size: int | None = getattr(tokenizer, "model_vocab_size", None)
        self.vocab_size = vocab_size if vocab_size is not None and vocab_size <= highest else None
        # Any token of the model will do for padding. A pad token that was added to the tokenizer only has no weights.
        pad_id = tokenizer.pad_token_id or 0
        self.pad_id: int = pad_id if self.vocab_size is None or pad_id < self.vocab_size else 0
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # A token that leaves the text next to it alone.
        plain = (t for t in added.values() if t.special and not (t.rstrip or t.single_word or t.normalized))
        self._anchor = next((token.content for token in plain), "")
        # Old sentencepiece tokenizers add a space after every special token, which a cut would make visible.
        self._cuts_show = not self._anchor or self._backend.encode(self._anchor + "b").tokens[-1].startswith("▁")
        bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
        self._head = np.array([bos] if adds_bos else [], np.int32)

    @cached_property
    def _by_words(self) -> WordTokenizer | None:
        """Created when first needed, since it takes 0.7 s; None if it does not support this tokenizer."""
        return WordTokenizer.of(self._backend)

    @tokenizer_errors()
    def encode(self, rows: Sequence[RenderedRow | BadRow]) -> list[EncodedRow]:
        """The documents of all rows; bad rows stay. A chat template writes BOS and EOS itself, others get them here."""
        scripts = {i: row for i, row in enumerate(rows) if isinstance(row, RenderedRow)}
        documents: dict[int, EncodedRow] = {i: row for i, row in enumerate(rows) if isinstance(row, BadRow)}
        self._num_characters += sum(len(script.text) for script in scripts.values())
        if self._num_characters > WORDS_AFTER and (words := self._by_words) is not None:
            plain = [i for i, s in scripts.items() if not s.planted and not self._cuts(s) and words.can(s.text)]
            for i, encoded in zip(plain, words.encode([scripts[i].text for i in plain]), strict=True):
                if encoded is not None:
                    script = scripts.pop(i)
                    documents[i] = self._finished(script, encoded.ids, partial(_bytes_of, script, encoded.lengths))
        documents |= zip(scripts, self._encode_by_tokenizer(list(scripts.values())), strict=True)
        return [self._checked(documents[i]) for i in range(len(rows))]

    def _checked(self, document: EncodedRow) -> EncodedRow:
        """A bad row if a token is outside the model's vocabulary: it has no embedding, and the loss would be NaN."""
        if self.vocab_size is None or isinstance(document, BadRow) or document.tokens.max(initial=0) < self.vocab_size:
            return document
        outside = sorted({int(id_) for id_ in document.tokens if id_ >= self.vocab_size})
        named = ", ".join(f"{self._backend.id_to_token(id_)!r} (id {id_})" for id_ in outside[:3])
        what = f"The tokenizer gives {named}, but the model has only {self.vocab_size} tokens (vocab_size)."
        return BadRow(what, "use the model's own tokenizer, or a model with embeddings for these tokens")

    def _encode_by_tokenizer(self, scripts: Sequence[RenderedRow]) -> list[EncodedRow]:
        bounds = [[0, *self._cuts(script), len(script.text)] for script in scripts]
        pieces = (
            self._anchor + script.text[a:b] if a else script.text[a:b]
            for script, cuts in zip(scripts, bounds, strict=True)
            for a, b in pairwise(cuts)
        )
        encoded = self._encodings(pieces)
        documents: list[EncodedRow] = []
        for script, (*starts, _) in zip(scripts, bounds, strict=True):
            try:
                documents.append(self._document(script, islice(encoded, len(starts)), starts))
            except BadRow as error:
                documents.append(error)
        return documents

    def _encodings(self, pieces: Iterator[str]) -> Iterator[_Piece]:
        """In portions: a hostile row of a few megabytes has a hundred thousand pieces, most of them equal."""
        while some := list(islice(pieces, PIECES_AT_ONCE)):
            distinct = list(dict.fromkeys(some))
            encoded = self._backend.encode_batch(distinct, add_special_tokens=False)
            found = dict(zip(distinct, map(_Piece, encoded), strict=True))
            yield from map(found.__getitem__, some)

    def _document(self, script: RenderedRow, parts: Iterator[_Piece], starts: Sequence[int]) -> TokenizedDocument:
        """Reads all `parts`, also if the row is refused: the next row's parts follow."""
        if len(starts) == 1:
            whole = next(parts).encoding
            ids = np.array(whole.ids, np.int32)
            num_written = len(self._control.findall(script.text))
            if np.count_nonzero(self._is_control[ids]) != num_written:
                self._refuse_made_control(script, ids, np.array(whole.offsets).reshape(-1, 2))
            return self._finished(script, ids, partial(_encoded_in, script, whole))
        ids, offsets = self._joined(parts, starts)
        self._refuse_made_control(script, ids, offsets)
        return self._finished(script, ids, partial(_touched, offsets))

    def _finished(
        self,
        script: RenderedRow,
        ids: NDArray[np.int32],
        tokens_in: Callable[[Sequence[Span]], NDArray[np.bool_]],
    ) -> TokenizedDocument:
        """`tokens_in`: which tokens have a character in one of these spans."""
        supervised = tokens_in(script.supervised)
        prompt = int(np.argmax(tokens_in([(script.prompt, len(script.text))]))) if script.prompt else 0
        if script.kind == "chat":
            return TokenizedDocument(ids, supervised, prompt=prompt)
        if self._eos is None:
            what = "The tokenizer has no EOS token, so the model could not learn where a text ends."
            raise TrilloraError(what, do="use a model whose tokenizer sets eos_token")
        tokens = np.concatenate([self._head, ids, np.array([self._eos], np.int32)])
        prompt += len(self._head) if prompt else 0
        return TokenizedDocument(tokens, np.pad(supervised, (len(self._head), 1), constant_values=True), prompt=prompt)

    def _joined(self, parts: Iterator[_Piece], starts: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids and the offsets in the whole text, without the anchors in front of all pieces but the first."""
        first, *others = (part.arrays for part in parts)
        skipped = 1 if self._anchor else 0
        arrays = [first, *((ids[skipped:], offsets[skipped:]) for ids, offsets in others)]
        shifts = np.array([0, *starts[1:]]) - np.array([0, *[len(self._anchor)] * len(others)])
        offsets = np.concatenate([offsets for _, offsets in arrays])
        counts = [len(ids) for ids, _ in arrays]
        return np.concatenate([ids for ids, _ in arrays]), offsets + np.repeat(shifts, counts)[:, None]

    def _refuse_made_control(self, script: RenderedRow, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Raises BadRow if a control token comes from content, or from text that does not spell it."""
        made = np.flatnonzero(self._is_control[ids])
        for id_, (start, end), is_planted in zip(
            ids[made].tolist(), offsets[made].tolist(), _touched(offsets[made], script.planted), strict=True
        ):
            # strip: a special token may include the spaces around it (lstrip, rstrip).
            spelled, word = script.text[start:end].strip(), self._spelling[id_]
            if is_planted or spelled != word:
                what = f"The text {spelled!r} would become the control token {word!r}."
                raise BadRow(what, "change that text: this tokenizer cannot write it as ordinary text")

    def _cuts(self, script: RenderedRow) -> list[int]:
        """After the first character of every control word that starts in planted text, also of overlapping ones; and
        at the script's own cuts, unless a cut would change the text."""
        text, firsts = script.text, self._first_characters
        planted = (i for start, end in script.planted for i in range(start, end) if text[i] in firsts)
        cuts = {i + 1 for i in planted if self._control.match(text, i)}
        cuts.update(() if self._cuts_show else script.cuts)
        return sorted(i for i in cuts if 0 < i < len(script.text))


def _touched(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens have a character in one of the spans, which are in order. A token that covers none counts as one."""
    begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    starts, stops = np.array([*spans, (np.iinfo(np.int64).max,) * 2], np.int64).T
    next_span = np.searchsorted(stops, begins, side="right")  # the first that ends after the token begins
    return starts[next_span] < ends


def _encoded_in(script: RenderedRow, encoding: Any, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens of the whole text have a character in one of the spans."""
    found = np.zeros(len(encoding.ids), np.bool_)
    for start, end in spans:
        found[slice(*_tokens_of(encoding, start, end, len(script.text)))] = True
    return found


def _bytes_of(script: RenderedRow, lengths: NDArray[np.int32], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens hold a byte of one of the spans; `lengths` are the tokens' bytes."""
    ends = np.cumsum(lengths)
    found = np.zeros(len(lengths), np.bool_)
    text = None if script.text.isascii() else script.text
    for start, end in spans:
        if text is not None:
            start, end = len(text[:start].encode()), len(text[:end].encode())
        first, last = np.searchsorted(ends, (start, end - 1), side="right")
        found[first : last + 1] = True
    return found


def _tokens_of(encoding: Any, start: int, end: int, length: int) -> tuple[int, int]:
    """First and end of the tokens with a character of [start, end). Trimmed spaces, for example, are in no token."""
    first = last = None
    while start < end and (first := encoding.char_to_token(start)) is None:
        start += 1
    if end == length:
        return (0 if first is None else first), (0 if first is None else len(encoding.ids))
    while end > start and (last := encoding.char_to_token(end - 1)) is None:
        end -= 1
    return (0, 0) if first is None or last is None else (first, last + 1)
