"""The forgetting meter: what an adapter cost outside its task.

`forgetting` is accuracy lost: the base's accuracy on 72 easy general questions minus the adapter's, at least 0. It is
an accuracy because that has a meaning of its own: 0.05 means that one general question in twenty is no longer answered.
With it comes the KL divergence of the adapter from its base on general texts: it is much finer, and rises before
answers change, but no value of it is good or bad by itself.

Both run without the chat template, so that the figures are about the model and not about its format of chats. The
questions are asked as `Question: …\\nAnswer:`, and the most likely choice is the answer (`choices`).
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from trillora.evaluation.bootstrap import differences
from trillora.evaluation.kinds.choices import ChoiceQuestion, accuracies, answers_of
from trillora.evaluation.likelihood import Encode, TokenScorer, in_two
from trillora.evaluation.result import Forgetting
from trillora.events import Listener, ignore_events
from trillora.files.read_json import parse_json
from trillora.model.layout import Tree


def measure_forgetting(
    scorer: TokenScorer, encode: Encode, base: Tree, adapter: Tree, listener: Listener = ignore_events
) -> Forgetting:
    """`encode` gives the tokens of a plain text, with BOS if the model has one and without EOS; `base` is an adapter
    that changes nothing."""
    questions = general_questions()
    asked = [
        in_two(encode, f"Question: {q.question}\nAnswer:", f" {choice}") for q in questions for choice in q.choices
    ]
    sums = {}
    for name, tree in (("base", base), ("adapter", adapter)):
        found = scorer.continuations(asked, tree, label=f"General questions, {name}", listener=listener)
        sums[name] = accuracies(questions, answers_of(questions, found))
    kl = scorer.divergence([tuple(encode(text)) for text in general_texts()], base, adapter, listener)
    before, after = (sums[name]["choice_accuracy"].value for name in ("base", "adapter"))
    return Forgetting(
        base_accuracy=before,
        adapter_accuracy=after,
        forgetting=max(before - after, 0.0),
        kl=float(kl.mean()),
        num_questions=len(questions),
        num_tokens=len(kl),
        interval=differences(sums["base"], sums["adapter"])["choice_accuracy"].interval(),
    )


def general_questions() -> list[ChoiceQuestion]:
    return [
        ChoiceQuestion(row["question"], tuple(row["choices"]), row["answer"]) for row in _rows_of("questions.jsonl")
    ]


def general_texts() -> list[str]:
    return [row["text"] for row in _rows_of("texts.jsonl")]


def _rows_of(name: str) -> list[dict[str, Any]]:
    lines = (resources.files("trillora.evaluation") / "data" / name).read_bytes().splitlines()
    return [parse_json(line, dict[str, Any], where=name, do="install trillora again") for line in lines]
