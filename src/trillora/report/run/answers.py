"""Answers to the sample prompts, before training and by the adapter that the run leaves.

Sampled(0, "chat", (Sample("1+1?", "Sure!", "2"),)), Sampled(16, ...("1+1?", "2", "2")), Sampled(32, ...)
->  with an adapter of step 16: "1+1?", before "Sure!", after step 16 "2", as expected
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trillora.evaluation.scores import is_right
from trillora.events import Sample, Sampled
from trillora.report.run.delivered import step_of_adapter
from trillora.report.run.read import RunRecord

MAX_SAMPLES = 12
MAX_CHARACTERS = 3000  # of one text; a longer one loses its middle


@dataclass(frozen=True)
class ShownAnswer:
    """One of the texts below a prompt."""

    kind: str  # before, after, expected: CSS class
    label: str
    text: str
    is_right: bool | None = None  # None if no answer is expected


@dataclass(frozen=True)
class Conversation:
    prompt: str
    answers: list[ShownAnswer]


@dataclass(frozen=True)
class ShownAnswers:
    """The conversations of a run, or of one adapter of several."""

    name: str  # of the adapter
    conversations: list[Conversation]
    num_hidden: int


@dataclass(frozen=True)
class _Prompt:
    """A prompt with its first answer and the adapter's. They are the same if there is only one."""

    text: str
    first: tuple[int, Sample]  # with its step
    last: tuple[int, Sample]

    @property
    def expected(self) -> str | None:
        return self.last[1].expected

    def is_right(self, answered: tuple[int, Sample]) -> bool:
        return self.expected is not None and is_right(self.expected, answered[1].answer)


def answers(run: RunRecord) -> list[ShownAnswers]:
    """For each prompt, its first answer and the adapter's. Each of several adapters has prompts of its own."""
    groups = _prompts_by_adapter(run)
    most = max(MAX_SAMPLES // max(len(groups), 1), 1)
    return [_answers(name, prompts, most) for name, prompts in list(groups.items())[: 2 * MAX_SAMPLES] if prompts]


def answers_in_words(run: RunRecord) -> str:
    """How many answers are as expected: "1 of 2 answers as expected, 0 before training." """
    groups = _prompts_by_adapter(run)
    steps = {name: step_of_adapter(run, name) for name in groups}
    rated = [
        prompt
        for name, prompts in groups.items()
        for prompt in prompts
        if prompt.expected is not None and prompt.last[0] > 0 and steps[name] in (None, prompt.last[0])
    ]
    if not rated:
        return ""
    before = sum(prompt.is_right(prompt.first) for prompt in rated)
    after = sum(prompt.is_right(prompt.last) for prompt in rated)
    compared = f", {before:,} before training" if all(prompt.first[0] < prompt.last[0] for prompt in rated) else ""
    return f"{after:,} of {len(rated):,} answers as expected{compared}."


def _prompts_by_adapter(run: RunRecord) -> dict[str, list[_Prompt]]:
    """The prompts by the name of their adapter; by "" in a run that trains a single one."""
    if not run.adapters:
        return {"": _prompts(run.samples, step_of_adapter(run))}
    events: dict[str, list[Sampled]] = {}
    for event in run.samples:
        events.setdefault(event.stage, []).append(event)
    return {name: _prompts(of_name, step_of_adapter(run, name)) for name, of_name in events.items()}


def _prompts(events: Iterable[Sampled], step: int | None) -> list[_Prompt]:
    """The prompts that were answered last come first. `step`: of the adapter, or None for the latest answers. A prompt
    that was not answered at that step is from an earlier stage: its last answer is shown."""
    by_prompt: dict[str, list[tuple[int, Sample]]] = {}
    for event in events:
        for sample in event.samples:
            by_prompt.setdefault(sample.prompt, []).append((event.step, sample))
    latest_first = sorted(by_prompt.items(), key=lambda item: -item[1][-1][0])
    return [
        _Prompt(prompt, found[0], next((one for one in reversed(found) if one[0] == step), found[-1]))
        for prompt, found in latest_first
    ]


def _answers(name: str, prompts: Sequence[_Prompt], most: int) -> ShownAnswers:
    return ShownAnswers(name, [_conversation(prompt) for prompt in prompts[:most]], max(len(prompts) - most, 0))


def _conversation(prompt: _Prompt) -> Conversation:
    (first_step, first), (last_step, last) = prompt.first, prompt.last
    kind = "after" if last_step else "before"
    shown = [answer(kind, f"{kind.capitalize()}, {_when(last_step)}", last.answer, prompt.expected)]
    if first_step != last_step:
        shown.insert(0, answer("before", f"Before, {_when(first_step)}", first.answer, prompt.expected))
    return conversation(prompt.text, shown, prompt.expected)


def _when(step: int) -> str:
    return f"step {step:,}" if step else "the base model"


def conversation(prompt: str, shown: list[ShownAnswer], expected: str | None) -> Conversation:
    """A prompt with its answers and the expected one, all of limited length."""
    if expected is not None:
        shown = [*shown, answer("expected", "Expected", expected, None)]
    return Conversation(shorter(prompt), shown)


def answer(kind: str, label: str, text: str, expected: str | None) -> ShownAnswer:
    return ShownAnswer(kind, label, shorter(text), None if expected is None else is_right(expected, text))


def shorter(long: str) -> str:
    if len(long) <= MAX_CHARACTERS:
        return long
    half = MAX_CHARACTERS // 2
    return f"{long[:half]}\n[… {len(long) - 2 * half:,} characters …]\n{long[-half:]}"
