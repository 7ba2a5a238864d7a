"""Results of a run: the model's answers before and after training."""

from __future__ import annotations

from collections.abc import Iterable

from trillora.evaluation.scores import is_right
from trillora.events import Sample, Sampled
from trillora.report.html import text
from trillora.report.run.read import RunRecord

MAX_SAMPLES = 12
MAX_CHARACTERS = 3000  # of one text; a longer one loses its middle

STYLE = """
.sample { border-top: 1px solid var(--line); padding-top: .9rem; margin-top: 1.1rem; }
.sample:first-of-type { border-top: 0; padding-top: 0; margin-top: 0; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow-y: auto; margin-top: .15rem; }
.says { display: grid; grid-template-columns: repeat(auto-fit, minmax(14.5rem, 1fr)); gap: .75rem; margin-top: .7rem; }
.says > div { min-width: 0; }
.says pre { margin-top: .25rem; max-height: 20rem; overflow-y: auto; border: 1px solid var(--line); line-height: 1.5; }
.says .after pre { border-color: var(--trained); }
.label { font-size: .8rem; color: var(--faint); }
.badge { display: inline-block; border-radius: 99px; padding: 0 .5rem; margin-left: .4rem; font-size: .75rem;
  background: var(--trained-back); color: var(--trained); }
.badge.no { background: none; color: var(--faint); border: 1px solid var(--line); }
"""


def samples(run: RunRecord) -> str:
    """For each prompt, its first and its last answer. Each of several adapters has prompts of its own."""
    if not run.adapters:
        return _samples(run.samples, MAX_SAMPLES)
    names = list(dict.fromkeys(event.stage for event in run.samples))
    most = max(MAX_SAMPLES // max(len(names), 1), 1)
    return "".join(
        f"<h3>{text(name)}</h3>{_samples([event for event in run.samples if event.stage == name], most)}"
        for name in names[: 2 * MAX_SAMPLES]
    )


def _samples(events: list[Sampled], most: int) -> str:
    by_prompt: dict[str, list[tuple[int, Sample]]] = {}
    for event in events:
        for sample in event.samples:
            by_prompt.setdefault(sample.prompt, []).append((event.step, sample))
    latest_first = sorted(by_prompt.values(), key=lambda answers: -answers[-1][0])
    shown = "".join(_sample(answers) for answers in latest_first[:most])
    if len(by_prompt) > most:
        shown += f'<p class="faint">{len(by_prompt) - most:,} more prompts are in metrics.jsonl.</p>'
    return shown


def _sample(answers: list[tuple[int, Sample]]) -> str:
    (first_step, first), (last_step, last) = answers[0], answers[-1]
    sides = []
    if len(answers) > 1:
        sides.append(answer_box("before", f"Before, {_when(first_step)}", first.answer, last.expected))
    side = "after" if last_step else "before"
    sides.append(answer_box(side, f"{side.capitalize()}, {_when(last_step)}", last.answer, last.expected))
    if last.expected is not None:
        sides.append(answer_box("expected", "Expected", last.expected, None))
    return conversation(last.prompt, sides)


def _when(step: int) -> str:
    return f"step {step:,}" if step else "the base model"


def conversation(prompt: str, sides: Iterable[str]) -> str:
    question = f'<div class="label">Prompt</div><div class="prompt">{text(shorter(prompt))}</div>'
    return f'<div class="sample">{question}<div class="says">{"".join(sides)}</div></div>'


def answer_box(side: str, label: str, answer: str, expected: str | None) -> str:
    badge = ""
    if expected is not None:
        right = is_right(expected, answer)
        badge = '<span class="badge">as expected</span>' if right else '<span class="badge no">not as expected</span>'
    body = text(shorter(answer)) if answer else '<span class="gap">empty</span>'
    return f'<div class="{side}"><span class="label">{text(label)}</span>{badge}<pre>{body}</pre></div>'


def shorter(long: str) -> str:
    if len(long) <= MAX_CHARACTERS:
        return long
    half = MAX_CHARACTERS // 2
    return f"{long[:half]}\n[… {len(long) - 2 * half:,} characters …]\n{long[-half:]}"
