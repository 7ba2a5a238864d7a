"""Multiple choice: the answer is the choice that the model finds most likely after the question.

    {"question": "What is the capital of France?", "choices": ["Paris", "Lyon", "Nice"], "answer": 0}

`answer` is the index of the right choice (counted from 0), its letter ("A") or its text; a text that is one of the
choices is never read as a letter. `question` may also be called `prompt`. Each choice becomes a row with the question,
rendered and tokenized as the run's rows were. Two accuracies: of the choice with the highest log-probability in total,
and per token, which does not favor short choices. The stop token is not counted.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trillora.data.open import chat_template, open_dataset
from trillora.data.questions import question_of
from trillora.data.reading.files import expand
from trillora.data.rendering.render import parse
from trillora.data.rows import BadRow, Fault
from trillora.errors import TrilloraError
from trillora.evaluation.bootstrap import Sums, shares
from trillora.evaluation.likelihood import Continuation, Likelihood
from trillora.evaluation.result import Example
from trillora.evaluation.rows import raw_rows
from trillora.events import Event, Listener, Note
from trillora.recipe.schema import StageRecipe

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

NUM_EXAMPLES = 20
MAX_CHOICES = 26  # each has a letter
MAX_QUESTIONS = 1_000_000
_FORM = 'write {"question": "...", "choices": ["...", "..."], "answer": 0}; answer is an index, a letter or a text'


@dataclass(frozen=True)
class ChoiceQuestion:
    question: str
    choices: tuple[str, ...]
    right: int  # index


def read_choices(path: str, row_path: str | None = None) -> list[ChoiceQuestion] | None:
    """The questions of a data file, or None if its first row has no choices: then it is not multiple choice."""
    rows = _rows(path, row_path)
    try:
        first = next(rows, None)
    except TrilloraError:
        return None  # the reader of other rows says what is wrong, or skips the row if the recipe allows it
    if first is None or "choices" not in first[1]:
        return None
    limited = itertools.islice(itertools.chain([first], rows), MAX_QUESTIONS + 1)
    found = [_question(row, where) for where, row in limited]
    if len(found) > MAX_QUESTIONS:
        what = f"This file has more than {MAX_QUESTIONS:,} questions."
        raise TrilloraError(what, where=path, do="use a smaller file")
    return found


def some_of(questions: Sequence[ChoiceQuestion], max_rows: int | None) -> list[ChoiceQuestion]:
    """Evenly spaced ones if there are more than `max_rows`."""
    if max_rows is None or max_rows >= len(questions):
        return list(questions)
    return [questions[i] for i in np.linspace(0, len(questions) - 1, max_rows).round().astype(int)]


def continuations(
    questions: Sequence[ChoiceQuestion],
    recipe: StageRecipe,
    tokenizer: Tokenizer,
    stops: Sequence[int],
    listener: Listener,
) -> list[Continuation]:
    """Each choice of each question as tokens after the question's tokens, as in training, without its stop token."""
    has_template = chat_template(recipe.data, tokenizer) is not None
    rows = [_row(q.question, choice, has_template) for q in questions for choice in q.choices]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "choices.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        changes: dict[str, Any] = {"columns": {}, "drop_keys": (), "weight_key": None}  # these are of other rows
        changes |= {"path": str(file), "format": "auto", "template": None, "row_path": None, "json_schema": None}
        changes |= {"split": None, "train_on": "auto", "on_too_long": "split", "on_bad_row": "refuse"}
        data = recipe.data.model_copy(update=changes)
        # A run on preferences is asked as any other: each choice is one answer.
        changed = {"data": data, "train": recipe.train.model_copy(update={"loss": "sft"})}
        dataset = open_dataset(recipe.model_copy(update=changed), tokenizer, _without_notes(listener))
        documents = dataset.documents()
        if len(documents) != len(rows):
            raise TrilloraError("A choice has no tokens.", do="write at least one word in every choice")
        return [_continuation(documents[index], stops) for index in range(len(documents))]


def answers_of(questions: Sequence[ChoiceQuestion], likelihoods: Sequence[Likelihood]) -> list[tuple[int, int]]:
    """For each question the index of the most likely choice, in total and per token. `likelihoods` has all choices of
    all questions in a row."""
    each = iter(likelihoods)
    return [_most_likely(list(itertools.islice(each, len(q.choices)))) for q in questions]


def _most_likely(likelihoods: Sequence[Likelihood]) -> tuple[int, int]:
    """The first of several equal ones."""
    total = [one.log_probability for one in likelihoods]
    per_token = [one.log_probability / one.num_tokens for one in likelihoods]
    return total.index(max(total)), per_token.index(max(per_token))


def accuracies(questions: Sequence[ChoiceQuestion], answers: Sequence[tuple[int, int]]) -> dict[str, Sums]:
    return {
        name: shares(answer[which] == q.right for q, answer in zip(questions, answers, strict=True))
        for which, name in enumerate(("choice_accuracy", "choice_accuracy_norm"))
    }


def examples(questions: Sequence[ChoiceQuestion], answers: dict[str, list[tuple[int, int]]]) -> tuple[Example, ...]:
    """The first questions with the choices of base and adapter."""
    shown = []
    for number, q in enumerate(questions[:NUM_EXAMPLES]):
        said = {which: q.choices[found[number][0]] for which, found in answers.items()}
        prompt = "\n".join([q.question, *(f"{chr(65 + i)}. {choice}" for i, choice in enumerate(q.choices))])
        shown.append(Example(prompt, q.choices[q.right], said.get("base"), said["adapter"]))
    return tuple(shown)


def chance(questions: Sequence[ChoiceQuestion]) -> float:
    """The expected accuracy of guessing."""
    return float(np.mean([1 / len(q.choices) for q in questions]))


def _rows(path: str, row_path: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of all files of a path, and where each is."""
    for where, row in raw_rows(expand([path]), row_path):
        if isinstance(row, Fault):
            raise TrilloraError(row.what, where=where, do=row.do)
        try:
            yield where, parse(row.raw)
        except BadRow as error:
            raise TrilloraError(error.what, where=where, do=error.do) from None


def _question(row: dict[str, Any], where: str) -> ChoiceQuestion:
    question, choices = row.get("question", row.get("prompt")), row.get("choices")
    if not isinstance(question, str) or not question.strip():
        raise TrilloraError("This row has no question.", where=where, do=_FORM)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise TrilloraError("The choices of this row are not a list of texts.", where=where, do=_FORM)
    if not 2 <= len(choices) <= MAX_CHOICES or len(set(choices)) < len(choices):
        what = f"This row has {len(choices)} choices, or the same one twice."
        raise TrilloraError(what, where=where, do=f"give 2 to {MAX_CHOICES} different choices")
    right = _index(row.get("answer"), choices)
    if right is None:
        what = f"The answer of this row is none of its {len(choices)} choices."
        do = f"use an index from 0 to {len(choices) - 1}, a letter from A to {chr(64 + len(choices))}, or the text"
        raise TrilloraError(what, where=where, do=do)
    return ChoiceQuestion(question, tuple(choices), right)


def _index(answer: Any, choices: list[str]) -> int | None:
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        letter = answer.strip().upper()
        answer = ord(letter) - ord("A") if len(letter) == 1 and "A" <= letter <= "Z" else None
    is_index = isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices)
    return answer if is_index else None


def _row(question: str, choice: str, has_template: bool) -> dict[str, Any]:
    """A chat; or, if the model has no chat template, plain text in the usual form."""
    if not has_template:
        return {"prompt": f"Question: {question}\nAnswer:", "completion": f" {choice}"}
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": choice}]
    return {"messages": turns}


def _continuation(document: Any, stops: Sequence[int]) -> Continuation:
    """The document without its last stop token, in two parts."""
    asked = question_of(document)
    assert asked is not None, "a row with a question has a prompt"
    tokens = asked.expected[:-1] if len(asked.expected) > 1 and asked.expected[-1] in stops else asked.expected
    return Continuation(asked.prompt, tokens)


def _without_notes(listener: Listener) -> Listener:
    """Notes would name the temporary file."""

    def listen(event: Event) -> None:
        if not isinstance(event, Note):
            listener(event)

    return listen
