"""How close an answer is to the expected text: token F1, ROUGE, chrF and BLEU. All are between 0 and 1.

    >>> f1("The cat sat.", "a cat sat down"), rouge("the cat sat", "the cat ran")["rouge_1"]
    (0.8, 0.6666666666666666)

- F1, as SQuAD defines it: lower case, without punctuation and the articles a, an, the; then the F1 of the two bags of
  words.
- ROUGE-1 and ROUGE-2: the F1 of the bags of words and of word pairs; ROUGE-L: the F1 of the longest common subsequence
  of words (Lin, 2004). Words are runs of letters and digits in lower case, without stemming, and the text is one
  sequence, as in Google's rouge_score with `rougeL`.
- chrF and BLEU come from sacrebleu (extra `eval`), with its default options. chrF is the mean over the answers; BLEU is
  the whole corpus's score, computed from the answers' n-gram counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TEXT_METRICS = ("f1", "rouge_1", "rouge_2", "rouge_l", "chrf", "bleu")
NO_SACREBLEU = "chrF and BLEU are left out: they need the package sacrebleu. To install it:"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[^\W_]+")
BLEU_COUNTS = 10  # matching and all n-grams of 1 to 4 words, and the lengths of answer and expected text


class TextScore(NamedTuple):
    """One answer."""

    scores: dict[str, float]  # by the names of TEXT_METRICS
    bleu_counts: tuple[int, ...] | None  # what BLEU adds up over the answers


def f1(expected: str, answer: str) -> float:
    wanted, found = _squad_words(expected), _squad_words(answer)
    if not wanted or not found:
        return float(wanted == found)
    return _f1(Counter(wanted), Counter(found))


def rouge(expected: str, answer: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L as F1."""
    wanted, found = (_WORD.findall(text.lower()) for text in (expected, answer))
    common = common_subsequence(wanted, found)
    return {
        "rouge_1": _f1(Counter(wanted), Counter(found)),
        "rouge_2": _f1(Counter(pairwise(wanted)), Counter(pairwise(found))),
        "rouge_l": 2 * common / (len(wanted) + len(found)) if common else 0.0,
    }


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    A row of the usual table is one integer, whose bit i is 0 where the table rises at word i of `first`; one addition
    computes the next row (Hyyrö, 2004). So 500 words against 500 take 500 additions, not 250,000 steps.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    every = (1 << len(first)) - 1
    row = every
    for word in second:
        rises = row & places.get(word, 0)
        row = ((row + rises) | (row - rises)) & every
    return len(first) - row.bit_count()


class Comparison:
    """Compares answers with the expected texts. `has_sacrebleu` says whether chrF and BLEU are among the scores."""

    def __init__(self) -> None:
        self._chrf: Any = None
        self._bleu: Any = None
        try:
            from sacrebleu.metrics import BLEU, CHRF
        except ImportError:
            return
        self._chrf, self._bleu = CHRF(), BLEU(force=True)  # force: no warning about texts that look tokenized

    @property
    def has_sacrebleu(self) -> bool:
        return self._chrf is not None

    def score(self, expected: str, answer: str) -> TextScore:
        scores = {"f1": f1(expected, answer), **rouge(expected, answer)}
        if not self.has_sacrebleu:
            return TextScore(scores, None)
        scores["chrf"] = self._chrf.sentence_score(answer, [expected]).score / 100
        found = self._bleu.corpus_score([answer], [[expected]])
        counts = (*found.counts, *found.totals, found.sys_len, found.ref_len)
        # Of one answer, BLEU is usual with the orders of n-grams that the answer has.
        scores["bleu"] = self._bleu.compute_bleu(*_parts(counts), "exp", effective_order=True).score / 100
        return TextScore(scores, tuple(map(int, counts)))

    def bleu(self, sums_RK: NDArray[np.float64]) -> NDArray[np.float64]:
        """BLEU from sums of `TextScore.bleu_counts` [R, BLEU_COUNTS]."""
        rows = sums_RK.astype(np.int64).tolist()
        return np.array([self._bleu.compute_bleu(*_parts(counts), "exp").score / 100 for counts in rows])


def _parts(counts: Sequence[int]) -> tuple[list[int], list[int], int, int]:
    return list(counts[:4]), list(counts[4:8]), counts[8], counts[9]


def _squad_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(wanted: Counter[Any], found: Counter[Any]) -> float:
    common = (wanted & found).total()
    return 2 * common / (wanted.total() + found.total()) if common else 0.0
