"""Events of a run as lines of text, for logs and terminals.

Evaluated(step=50, loss=1.75, ...)  ->  evaluation at step 50  loss 1.7500  perplexity 5.75  accuracy 61.2%  best
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trillora.evaluation.scores import is_right
from trillora.events import Chosen, Evaluated, Preferences, Progress, Sample, Sampled, Saved, Step
from trillora.report.numbers import format_bytes, format_duration, format_short
from trillora.safe_text import visible

if TYPE_CHECKING:  # it imports torch
    from trillora.step.adapted_share import AdaptedShare

SHOWN_SAMPLES = 4  # per Sampled event


def step_line(step: Step, num_skipped: int = 0, adapters: str = "") -> str:
    """One step; the columns of successive lines are aligned."""
    speed, left = f"{step.tokens_per_second:,.0f} tokens/s", f"left {format_duration(step.seconds_left)}"
    return f"{step_figures(step, adapters)}  {speed}  {left}{num_skipped_text(num_skipped)}"


def chosen_line(chosen: Chosen) -> str:
    return f"{chosen.path} = {chosen.value}  ({chosen.reason})"


def evaluation_line(evaluated: Evaluated) -> str:
    if (found := evaluated.preferences) is not None:
        return (
            f"evaluation {at(evaluated.step)}  loss {evaluated.loss:.4f}  pairs right {share_text(found)}  "
            f"margin {found.rewards_margins:+.3f}  log-probability of chosen answers {found.logps_chosen:.1f}, "
            f"of rejected {found.logps_rejected:.1f}{'  best' if evaluated.is_best else ''}"
        )
    return (
        f"evaluation {at(evaluated.step)}  loss {evaluated.loss:.4f}  perplexity {evaluated.perplexity:.2f}  "
        f"accuracy {evaluated.accuracy:.1%}{'  best' if evaluated.is_best else ''}"
    )


def share_text(found: Preferences) -> str:
    """The share of right pairs with its interval."""
    low, high = found.interval
    return f"{found.rewards_accuracies:.1%} ({low:.0%} to {high:.0%})"


def saved_line(saved: Saved) -> str:
    return f"saved step {saved.step} to {saved.where} ({saved.seconds:.1f} s)"


def adapted_lines(share: AdaptedShare) -> list[str]:
    """What share of the model is adapted; and what else could be, if that is a part of the layers."""
    linear, experts = share.linear, share.experts
    parts = [f"{linear.num_adapted} of {linear.num_adapted + linear.num_frozen} linear layers"]
    if num_weights := experts.num_adapted + experts.num_frozen:
        parts.append(f"{experts.num_adapted} of {num_weights} weights of experts")
    adapted = linear.adapted + experts.adapted
    lines = [
        f"Adapted: {' and '.join(parts)}, {_of_all(adapted, share.total)}; "
        f"the adapter has {format_short(share.trained)} parameters"
    ]
    if experts.num_frozen:
        lines.append(
            f"Frozen: {experts.num_frozen} weights of {share.num_experts} experts each, "
            f"{_of_all(experts.frozen, share.total)}. To adapt them, add experts to lora.targets: [all-linear, experts]"
        )
    if linear.num_frozen:
        lines.append(
            f"Frozen: {linear.num_frozen} linear layers ({' '.join(share.frozen_names[:12])}), "
            f"{_of_all(linear.frozen, share.total)}. To adapt them, add their names to lora.targets"
        )
    if share.left_out:
        lines.append(f"Only the text model is loaded and trained, without {', '.join(share.left_out)}")
    return lines


def _of_all(count: int, total: int) -> str:
    return f"{format_short(count)} of {format_short(total)} parameters ({count / max(total, 1):.0%})"


def in_one_line(text: str, max_characters: int) -> str:
    """Joins the lines of a text, and replaces the middle of a long one with an ellipsis."""
    text = visible(" ".join(text.split()))
    if len(text) > max_characters:
        first = max_characters * 2 // 3
        text = f"{text[:first]} … {text[first + 3 - max_characters :]}"
    return text


def step_figures(step: Step, adapters: str = "") -> str:
    """`adapters` says how many are trained together. Each has its own learning rate and gradient."""
    head = f"step {step.step:>{len(str(step.num_steps))}}/{step.num_steps}"
    if adapters:
        return f"{head}  mean loss {step.loss:.4f}  {adapters}"
    pairs = "" if step.preferences is None else f"  margin {step.preferences.rewards_margins:+.3f}"
    return f"{head}  loss {step.loss:.4f}{pairs}  lr {step.learning_rate:.2e}  grad {step.grad_norm:.3f}"


def num_skipped_text(num_skipped: int) -> str:
    return f"  skipped {num_skipped}" if num_skipped else ""


def at(step: int) -> str:
    return f"at step {step}" if step else "of the base model"


def amount_of(work: Progress) -> str:
    if work.unit == "bytes":
        return f"{format_bytes(work.done)} of {format_bytes(work.total)}"
    return f"{work.done:,}/{work.total:,}"


def sample_lines(sampled: Sampled, cut: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """Yields (mark, text, style) of each prompt, of its answer, and of the expected answer if it is a different one."""
    for sample in sampled.samples[:SHOWN_SAMPLES]:
        yield "?", cut(sample.prompt), "dim"
        yield ">", cut(sample.answer) or "(nothing)", "green" if _is_right(sample) else ""
        if sample.expected is not None and not _is_right(sample):
            yield "=", cut(sample.expected), "dim"
    if num_hidden := len(sampled.samples[SHOWN_SAMPLES:]):
        yield " ", f"and {num_hidden} more", "dim"


def _is_right(sample: Sample) -> bool:
    return sample.expected is not None and is_right(sample.expected, sample.answer)
