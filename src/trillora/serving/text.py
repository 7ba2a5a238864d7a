"""Generated tokens to text, piece by piece, up to a stop string.

    text = AnswerText(prompts.decode, stops=("END",))
    text.add(chosen)     # "Hel"          -> "Hel"
    text.add(chosen)     # "lo E"         -> "lo "     "E" may be the start of "END"
    text.add(chosen)     # "ND"           -> ""        text.is_stopped
    text.rest()          # nothing that was held back belongs to the answer

A character of several tokens comes with its last token, and each token's probability with the token's text.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from trillora.serving.job import SampledToken

_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character
_MOST_PENDING = 16  # tokens without whole characters, after which they are shown as they are: not UTF-8


class AnswerText:
    """The text of one answer. Decodes only the last few tokens for each new one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._context = 0  # the first token that the tokenizer sees, so that it joins words as in the whole answer
        self._decoded = 0  # tokens that are text already
        self._held = ""  # decoded but not shown: may be the start of a stop string
        self._num_shown = 0  # characters
        self._waiting: collections.deque[tuple[int, SampledToken]] = collections.deque()  # with the place of the text
        self.is_stopped = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, chosen: SampledToken) -> str:
        """The text that can be shown after this token."""
        self._waiting.append((self._num_shown + len(self._held), chosen))
        self._tokens.append(chosen.token)
        before = self._decode(self._tokens[self._context : self._decoded])
        after = self._decode(self._tokens[self._context :])
        if after.endswith(_INCOMPLETE) and len(self._tokens) - self._decoded < _MOST_PENDING:
            return ""
        new = after[len(before) :]
        self._held += new
        # A word after a token without text, such as a control token, needs the word before it: many tokenizers remove
        # the first space.
        if new or len(self._tokens) - self._context > _MOST_PENDING:
            self._context = self._decoded
        self._decoded = len(self._tokens)
        return self._show()

    def rest(self) -> str:
        """At the end of the answer: what was held back, unless it is a stop string."""
        if not self.is_stopped:
            before = self._decode(self._tokens[self._context : self._decoded])
            self._held += self._decode(self._tokens[self._context :])[len(before) :]
            self._context, self._decoded = self._decoded, len(self._tokens)
            text = self._show()
            if not self.is_stopped:
                return text + self._shown(len(self._held))
            return text
        return ""

    def chosen(self, *, at_end: bool = False) -> tuple[SampledToken, ...]:
        """The tokens whose text begins in what was shown, each once. At the end: all, up to a stop string."""
        found = []
        while self._waiting and (self._waiting[0][0] < self._num_shown or (at_end and not self.is_stopped)):
            found.append(self._waiting.popleft()[1])
        return tuple(found)

    def _show(self) -> str:
        """Moves text from `_held` to the reader: to the first stop string, or to what may become one."""
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            text, self._held = self._shown(min(places)), ""
            return text
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._shown(len(self._held) - kept)

    def _shown(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._num_shown += length
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
