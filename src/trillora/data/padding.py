"""A warning for runs that compute mostly padding, with the changes that would help.

    >>> print(padding_warning(
    ...     0.96, pack=True, sequence_length=512, longest_document=213, num_sequences=5, batch_size=128
    ... ))
    96% of the computed tokens are padding: the data fills only 5 sequences of a batch of 128. Set train.batch_size to \
5 or less, or use more data.

`Batches.padding_warning()` calls it with the values of a run.
"""

from __future__ import annotations

MAX_PADDING = 0.5  # warn above this share of the computed tokens
_MAX_EMPTY = 0.25  # share of empty sequences above which the batch size is a cause
_MIN_FILL = 2 / 3  # fill of the other sequences below which their length is a cause


def padding_warning(
    padding_fraction: float,
    *,
    pack: bool,
    sequence_length: int,
    longest_document: int,
    num_sequences: int,
    batch_size: int,
    unit: str = "document",
) -> str | None:
    """The causes and the remedies in two sentences, or None if at most half of the computed tokens are padding.

    `padding_fraction` is the share of padding in an epoch, including the empty sequences that complete a batch.
    `num_sequences` counts the sequences that hold a document. `unit`: what is packed, a document or a pair.
    """
    if padding_fraction <= MAX_PADDING:
        return None
    num_batches = -(-num_sequences // batch_size)
    num_computed = num_batches * batch_size
    fill = (1 - padding_fraction) * num_computed / num_sequences  # of the sequences that hold a document
    causes, remedies = [], []
    has_empty = 1 - num_sequences / num_computed > _MAX_EMPTY
    if has_empty and num_batches == 1:
        sequences = "1 sequence" if num_sequences == 1 else f"{num_sequences:,} sequences"
        causes.append(f"the data fills only {sequences} of a batch of {batch_size:,}")
        remedies.append(f"set train.batch_size to {num_sequences:,}" + (" or less" if num_sequences > 1 else ""))
    elif has_empty:
        causes.append(f"{num_computed - num_sequences:,} sequences of the last batch are empty")
        remedies.append(f"set train.batch_size to {-(-num_sequences // num_batches):,}")
    if fill < _MIN_FILL or not has_empty:  # if neither limit is passed, padding is at most 1 - 3/4 * 2/3, one half
        causes.append(f"the longest {unit} has {longest_document:,} tokens and a sequence {sequence_length:,}")
        if not pack:
            remedies.append("set data.pack to true")
        step = 128 if longest_document > 128 else 8  # TPU kernels take multiples of 128
        shorter = -(-longest_document // step) * step
        if shorter < sequence_length:
            remedies.append(f"set train.sequence_length to {shorter:,}")
    if pack or has_empty:
        remedies.append("use more data")
    wish = f"{', '.join(remedies[:-1])}, or {remedies[-1]}" if len(remedies) > 1 else remedies[0]
    return (
        f"{padding_fraction:.0%} of the computed tokens are padding: {' and '.join(causes)}. "
        f"{wish[0].upper()}{wish[1:]}."
    )
