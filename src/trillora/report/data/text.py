"""The sentences of a data report, the same in a terminal and on a page."""

from __future__ import annotations

from trillora.data.lengths import MOST_GOOD, Bin, LabelFacts, Lengths, PairFacts
from trillora.data.prepare import DataProblem, reason_of
from trillora.data.summary import DataReport, DataVerdict, ExampleFacts
from trillora.report.numbers import format_count
from trillora.safe_text import seen_from_here, visible


def say_verdict(report: DataReport) -> DataVerdict:
    """The verdict, without repeating a bad row: the list of bad rows shows it."""
    if report.verdict.ready or not report.bad_rows or report.on_bad_row != "refuse":
        return report.verdict
    rows = format_count(report.bad_rows, "row is", "rows are")
    if not report.rows:
        do = report.first_bad_rows[0].do if len(report.reasons) == 1 else "fix the bad rows shown: no row can be used"
        return DataVerdict(False, f"{rows} bad, and none is good.", do=do)
    return DataVerdict(False, f"{rows} bad.", do="fix the bad rows shown, or set data.on_bad_row to skip")


def bad_rows_by_reason(report: DataReport) -> list[tuple[int, str, list[DataProblem]]]:
    """How many rows are bad for each reason, the reason, and the rows that the report names."""
    found = []
    for reason in report.reasons:
        rows = [row for row in report.first_bad_rows if reason_of(row.what) == reason.what]
        # The exact words where there is only one row: a reason has its numbers replaced by N.
        found.append((reason.rows, rows[0].what if reason.rows == 1 and rows else reason.what, rows))
    return found


def say_lost(report: DataReport) -> str:
    """What the sequence length costs, in a sentence."""
    lost, lengths = report.lost, report.lengths
    if lost is None or lengths is None:
        return "There is no row to train on."
    one = "pair" if report.pairs else "row"
    split = ""
    if lost.split_rows:
        texts = format_count(lost.split_rows, "long text is", "long texts are")
        split = f" {texts} split into pieces of {report.sequence_length:,} tokens."
    if not lost.rows:
        rows = f"every other {one}" if report.bad_rows else f"every {one}"
        none = f"No {one} is too long" if report.bad_rows else "Nothing is lost"
        return f"{none}:{split or f' {rows} fits into {report.sequence_length:,} tokens.'}"
    rows = format_count(lost.rows, f"{one} is", f"{one}s are")
    if lost.refused:  # the verdict has the numbers
        return f"{rows} too long; training would refuse.{split}"
    lengths_to_keep = f"{lost.length_that_keeps_all:,} tokens would keep all"
    almost = lost.length_that_keeps_99_percent
    if report.sequence_length < almost < lost.length_that_keeps_all:
        lengths_to_keep += f", {almost:,} would keep 99%"
    return (
        f"{rows} longer than {report.sequence_length:,} tokens and dropped, with {lost.trained_tokens:,} trained "
        f"tokens ({lost.share:.1%}). {lengths_to_keep}.{split}"
    )


def bins_and_edge(lengths: Lengths) -> list[Bin | None]:
    """The bins of the row lengths; None is where the sequence length is."""
    fitting = [bin for bin in lengths.bins if bin.fits]
    return [*fitting, None, *lengths.bins[len(fitting) :]]


def say_epoch(report: DataReport) -> str:
    if not report.sequences:
        return "No sequence to train on."
    shapes = " and ".join(f"{length:,}" for length in report.sequence_lengths)
    how = "packed" if report.pack else "one pair each" if report.pairs else "one document each"
    filler = ""
    if report.filler_sequences:
        filler = f", completed with {format_count(report.filler_sequences, 'empty one', 'empty ones')}"
    return (
        f"{format_count(report.sequences, 'sequence', 'sequences')} of {shapes} tokens ({how}), "
        f"{report.packed_fill or 0:.1%} filled; {format_count(report.steps_per_epoch, 'step', 'steps')} "
        f"of {report.batch_size:,}{filler}."
    )


def say_rows(report: DataReport) -> list[tuple[str, str]]:
    """Name and value of each fact about the rows."""
    fate = "training would refuse" if report.on_bad_row == "refuse" else "skipped"
    facts = [
        ("rows", f"{report.rows:,}  ({_counts(report.kinds)})"),
        ("bad rows", f"{report.bad_rows:,}  ({fate})" if report.bad_rows else "none"),
        *([("conversations", _counts(report.shapes, "; "))] if report.shapes else []),
        ("duplicates", f"{report.duplicate_rows:,}" if report.duplicate_rows else "none"),
    ]
    if report.shortened_rows:
        facts.append(("shortened", f"{report.shortened_rows:,} rows (data.on_too_long: {report.on_too_long})"))
    facts.append(("split", _counts(report.splits)))
    if any(source.weight != 1 for source in report.sources) or len(report.sources) > 1:
        facts += [
            ("source", f"{nearby(s.path)}  ({format_count(s.rows, 'row', 'rows')}, each {s.weight:g} x)")
            for s in report.sources
        ]
    if report.chat_template is not None:
        owner = report.chat_template.owner
        whose = "the tokenizer's own" if owner == "tokenizer" else visible(nearby(owner))
        facts.append(("chat template", f"{whose}  (sha256 {report.chat_template.sha256[:12]})"))
    facts += say_preferences(report)
    facts.append(("train on", f"auto  ({_auto(report)})" if report.train_on == "auto" else report.train_on))
    return facts


def say_preferences(report: DataReport) -> list[tuple[str, str]]:
    """Name and value of each fact about pairs or labels."""
    pairs, labels = report.pairs, report.labels
    if pairs is not None:
        equal = f"; equally long in {pairs.equally_long / pairs.pairs:.0%}" if pairs.equally_long else ""
        return [
            ("pairs", f"{pairs.pairs:,}, of {format_count(pairs.prompts, 'prompt', 'prompts')}"),
            ("chosen answer", f"{pairs.mean_chosen:,.1f} tokens on average (rejected: {pairs.mean_rejected:,.1f})"),
            ("longer answer", f"the chosen one in {pairs.chosen_longer / pairs.pairs:.0%} of the pairs{equal}"),
        ]
    return [] if labels is None else [("labels", f"{labels.good:,} good, {labels.bad:,} bad")]


def preference_warning(report: DataReport) -> str | None:
    """What a model could learn from these pairs or labels instead of what is meant, and what to change."""
    if report.pairs is not None and report.pairs.warns:
        return _length_warning(report.pairs)
    if report.labels is not None and not report.labels.is_balanced:
        return _balance_warning(report.labels)
    return None


def _length_warning(pairs: PairFacts) -> str:
    is_longer = pairs.share_longer > 0.5
    length, share = ("longer", pairs.share_longer) if is_longer else ("shorter", 1 - pairs.share_longer)
    return (
        f"The chosen answer is the {length} one in {share:.0%} of the pairs whose lengths differ: a model learns the "
        "length first. Use train.loss: sigmoid_norm or simpo, which compare the mean over an answer's tokens, or set "
        "train.ld_alpha below 1."
    )


def _balance_warning(labels: LabelFacts) -> str | None:
    if not labels.good or not labels.bad:
        return f"All answers are {'good' if labels.good else 'bad'}: there is nothing to compare. Add the other ones."
    if not labels.balance:
        return None  # the recipe gives one kind no weight
    good, bad = labels.desirable_weight / labels.balance, labels.undesirable_weight * labels.balance
    return (
        f"All good answers together have {labels.balance:.2f} times the weight of the bad ones; 1 to 1.33 times is "
        f"usual. Set train.desirable_weight from {good:.3g} to {good * MOST_GOOD:.3g}, or train.undesirable_weight "
        f"from {bad / MOST_GOOD:.3g} to {bad:.3g}."
    )


_TRAINED_BY_AUTO = {
    "chat": "the answers of chats",
    "pair": "the completions",
    "text": "the whole of texts",
}


def _auto(report: DataReport) -> str:
    """What `data.train_on: auto` means for these rows."""
    if report.pairs is not None or report.labels is not None:
        return "the answers after the prompt"
    return ", ".join(words for kind, words in _TRAINED_BY_AUTO.items() if report.kinds.get(kind)) or "no row"


def say_bin(bin: Bin) -> str:
    return f"{bin.first:,} to {bin.last:,}" if bin.last > bin.first else f"{bin.first:,}"


def nearby(path: str) -> str:
    """A path relative to the working directory if it is inside, safe to print."""
    return visible(seen_from_here(path)).replace("\n", "\\n")


def nearby_first(note: str) -> str:
    """A note about a file with its path as in `nearby`."""
    path, colon, rest = note.partition(": ")
    return f"{nearby(path)}{colon}{visible(rest)}"


def say_example(example: ExampleFacts) -> str:
    """What the row is, and how much of it is trained."""
    turns = f" of {format_count(example.turns, 'turn', 'turns')}" if example.turns else ""
    shape = f" ({example.shape})" if example.shape else ""
    if example.rejected is not None:
        return f"{example.kind}{turns}{shape}, two answers"
    label = f", a {example.side} answer" if example.side else ""
    return f"{example.kind}{turns}{shape}{label}, {_share_trained(example)}"


def say_side(side: ExampleFacts) -> str:
    """Which answer of a pair it is, and how much of it is trained."""
    return f"{side.side}: {_share_trained(side)}"


def _share_trained(example: ExampleFacts) -> str:
    return f"{example.trained_tokens:,} of {example.tokens:,} tokens trained"


def sides_of(example: ExampleFacts) -> list[ExampleFacts]:
    """The sides of a pair; none of another row."""
    return [] if example.rejected is None else [example, example.rejected]


def title_of_lengths(report: DataReport) -> str:
    pairs = "Lengths of pairs in tokens (both answers, each with the prompt)"
    return pairs if report.pairs is not None else "Row lengths in tokens"


def _counts(counts: dict[str, int], separator: str = ", ") -> str:
    return separator.join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
