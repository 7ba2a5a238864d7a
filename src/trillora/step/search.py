"""Finds the fastest step that fits, with few compilations. No jax.

A candidate is a `StepSettings`. Each has a guess of its time and memory, and compiling it gives better figures.
`Search` names the next candidate to compile: the one that could be the fastest, if its guess is wrong by as much as
guesses are. What was compiled corrects the guesses of the rest. Example, with guesses that may be wrong by 15 %:

    candidate                 guess           could be      compiled
    remat linear, 64 rows     50 ms   6 GiB   50 ms         first: 49 ms, 6.1 GiB
    remat none, 64 rows       52 ms  20 GiB   43 ms         second: 58 ms; slower
    remat full, 64 rows       60 ms   2 GiB   50 ms         never: it cannot be faster than 49 ms

The search ends when no candidate could save more time in the whole run than a compilation takes, and the micro-batches
next to the fastest one are slower. Candidates with the same mesh and remat are a family: inside a family, guesses are
compared with more confidence than between families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trillora.devices.chips import GIB
from trillora.recipe.resolve import StepSettings

# Once something fits. With guesses as wrong as below, 56 candidates and a long run, the choice is then at most a tenth
# slower than the fastest one, and at most 2 % in nine of ten shapes; with three compilations it was up to 23 % slower.
MAX_COMPILES = 6
COMPILE_SECONDS = 20.0  # a typical step on a TPU's host or a GPU machine
HOPELESS = 1.4  # times the limit: a guess is never that far from the truth
# Times the limit: by so much a guess of the memory may be wrong. As long as nothing fits, all of those are tried; once
# something does, only those that are nearly small enough.
UNSURE, NEARLY = 1.15, 1.06
# Of the guessed time, between families and inside one, relative. In 19 candidates of six shapes the ratios of compiled
# to guessed times of a shape differed by at most 0.14; with half the rows a step was 12 % faster than guessed.
ERROR, ERROR_IN_FAMILY = 0.15, 0.12
SMALL_CHUNK, SMALL_CHUNK_TIME = 0.25, 1.02  # of the loss chunk, and its cost: times the step's time
FASTER = 1.02  # times: a smaller difference is not worth more guesses
# Where nothing is predicted: the time of a step that recomputes, relative to one that does not (full: 1.28 at 1.2B on
# an H200; linear: 1.08, before fused kernels), and the tokens that take as long as a micro-batch takes in addition to
# its own (950 to 1,230 there, with 256 to 4,096 tokens).
RECOMPUTED = {"none": 1.0, "linear": 1.1, "full": 1.3}
EXTRA_TOKENS = 1100

Family = tuple[str, str]


@dataclass(frozen=True)
class Guess:
    """What a step is expected to need, before it is compiled."""

    seconds: float
    needed: float  # bytes per device
    logits: float = 0.0  # bytes, as a part of `needed`: one chunk of the loss
    state: float = 0.0  # bytes in addition to `needed`: the copy of the state that is made to save it


@dataclass(frozen=True)
class Attempt:
    """A candidate, the memory it needs, and its predicted time."""

    settings: StepSettings
    needed: float  # bytes per device; infinite if the compiler gave up before it knew
    fits: bool
    seconds: float | None = None  # None: not known
    is_compiled: bool = True

    @property
    def what(self) -> str:
        return str(self.settings)

    def __str__(self) -> str:
        time = "" if self.seconds is None else f"{format_seconds(self.seconds)}, "
        return f"{self.what}: {time}{format_gib(self.needed)}"


class Search:
    """Compile what `next` returns and give the result to `add`, until `next` returns None. `best` is the answer.

    `limit`: bytes per device, None if unknown. `error`: of guessed times between families; 0 if compiling does not
    improve them, so that the first that fits wins.
    """

    def __init__(
        self,
        guesses: Mapping[StepSettings, Guess],
        limit: float | None,
        num_steps: int,
        error: float = ERROR,
    ) -> None:
        self.guesses, self._limit = guesses, math.inf if limit is None else limit
        self._num_steps, self._error = num_steps, error
        self.attempts: list[Attempt] = []

    @property
    def best(self) -> Attempt | None:
        """The fastest of those that fit."""
        return min((a for a in self.attempts if a.fits), key=self._seconds_of, default=None)

    def add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)

    def next(self) -> StepSettings | None:
        done = {attempt.settings for attempt in self.attempts}
        left = [settings for settings in self.guesses if settings not in done]
        best = self.best
        if best is None:
            most = (UNSURE if self.attempts else HOPELESS) * self._limit
            return min((s for s in left if self._needed(s) <= most), key=self._first_key, default=None)
        if len(self.attempts) >= MAX_COMPILES:
            return None
        saved = COMPILE_SECONDS / max(self._num_steps, 1) if self._error else 0.0
        worthwhile = [
            s
            for s in left
            if self._needed(s) <= NEARLY * self._limit and self._could_take(s) < self._seconds_of(best) - saved
        ]
        if worthwhile:
            return min(worthwhile, key=lambda s: (self._needed(s) > self._limit, self._could_take(s)))
        if self._seconds_of(best) * ERROR_IN_FAMILY <= saved or not self._error:
            return None
        return next((s for s in self._neighbours(best) if s in left and self._needed(s) <= self._limit), None)

    def _neighbours(self, best: Attempt) -> list[StepSettings]:
        """With the next larger and the next smaller micro-batch. Guesses inside a family come from its smallest and its
        largest size, and the fastest one is often between: large enough to fill the matrix units, small enough for
        on-chip memory."""
        alike = replace(best.settings, micro_batch_size=0)
        family = [s for s in self.guesses if replace(s, micro_batch_size=0) == alike]
        if len(family) <= 2:
            return []
        family.sort(key=lambda s: s.micro_batch_size)
        place = family.index(best.settings)
        return [*family[place + 1 : place + 2], *family[max(place - 1, 0) : place]]

    def _first_key(self, settings: StepSettings) -> tuple[bool, float]:
        """What should fit comes first, fastest first; then the rest, smallest first."""
        needed = self._needed(settings)
        return (True, needed) if needed > self._limit else (False, self._seconds(settings))

    def too_large(self) -> list[Attempt]:
        """The fastest candidate that was not compiled because its guess is too large, to explain the choice."""
        done = {attempt.settings for attempt in self.attempts}
        large = [s for s in self.guesses if s not in done and self._needed(s) > self._limit]
        best = self.best
        if best is not None:
            large = [s for s in large if self._seconds(s) < self._seconds_of(best)]
        found = min(large, key=self._seconds if best else self._needed, default=None)
        return [Attempt(found, self._needed(found), False, None, is_compiled=False)] if found else []

    # ---- guesses, corrected by what was compiled

    def _seconds_of(self, attempt: Attempt) -> float:
        return self.guesses[attempt.settings].seconds if attempt.seconds is None else attempt.seconds

    def _seconds(self, settings: StepSettings) -> float:
        timed = [a for a in self.attempts if a.seconds is not None]
        return self.guesses[settings].seconds * self._ratio(settings, timed, lambda a, g: (a.seconds or 0) / g.seconds)

    def _could_take(self, settings: StepSettings) -> float:
        """Seconds, if the guess is as wrong as guesses are."""
        if not self._error:
            return self._seconds(settings)
        known = {_family(a.settings) for a in self.attempts if a.seconds is not None}
        error = ERROR_IN_FAMILY if _family(settings) in known else self._error
        return (1 - error) * self._seconds(settings)

    def _needed(self, settings: StepSettings) -> float:
        """Bytes. If the compiler gave up on a step, it was at least a little too large."""

        def ratio(attempt: Attempt, guess: Guess) -> float:
            needed = attempt.needed if math.isfinite(attempt.needed) else max(1.05 * self._limit, guess.needed)
            return needed / guess.needed if guess.needed else 1.0

        guess = self.guesses[settings]
        return guess.needed * self._ratio(settings, self.attempts, ratio) + guess.state

    def _ratio(
        self, settings: StepSettings, found: Iterable[Attempt], ratio: Callable[[Attempt, Guess], float]
    ) -> float:
        """Compiled to guessed: of the family, or else the mean of all families."""
        ratios: dict[Family, float] = {}
        for attempt in found:  # the newest of each family counts
            ratios[_family(attempt.settings)] = ratio(attempt, self.guesses[attempt.settings])
        if not ratios:
            return 1.0
        return ratios.get(_family(settings), sum(ratios.values()) / len(ratios))


def _family(settings: StepSettings) -> Family:
    return str(settings.mesh), settings.remat


def fastest_first(candidates: Sequence[StepSettings], sequence_length: int) -> list[StepSettings]:
    """Where nothing can be predicted. Two micro-batches that save everything are faster than one that is recomputed, as
    long as each has many tokens."""

    def relative_time(settings: StepSettings) -> float:
        tokens = settings.micro_batch_size / (settings.mesh.data * settings.mesh.fsdp) * sequence_length
        return RECOMPUTED.get(settings.remat, 1.0) * (1 + EXTRA_TOKENS / tokens)

    return sorted(candidates, key=relative_time)


def in_order(candidates: Sequence[StepSettings]) -> dict[StepSettings, Guess]:
    """Guesses where nothing can be predicted: the candidates are sorted, fastest first."""
    return {settings: Guess(float(1 + rank), 0.0) for rank, settings in enumerate(candidates)}


def guess_sizes(
    settings: StepSettings, sizes: Sequence[int], limit: float, guess: Callable[[StepSettings], Guess]
) -> dict[StepSettings, Guess]:
    """Guesses for all micro-batch sizes of a family, largest first, from those for the smallest and the largest: bytes
    are linear in the size, seconds in the number of micro-batches. If even the smallest is hopeless, it is the only
    one."""
    largest, smallest = max(sizes), min(sizes)
    low = guess(replace(settings, micro_batch_size=smallest))
    if largest == smallest or low.needed > HOPELESS * limit:
        return {replace(settings, micro_batch_size=smallest): low}
    high = guess(replace(settings, micro_batch_size=largest))

    def between(size: int) -> Guess:
        rows = (size - smallest) / (largest - smallest)
        calls = (1 / size - 1 / largest) / (1 / smallest - 1 / largest)
        return Guess(
            high.seconds + calls * (low.seconds - high.seconds),
            low.needed + rows * (high.needed - low.needed),
            low.logits + rows * (high.logits - low.logits),
            low.state,
        )

    return {replace(settings, micro_batch_size=size): between(size) for size in sizes}


def smaller_chunks(guesses: Mapping[StepSettings, Guess], limit: float) -> dict[StepSettings, Guess]:
    """The candidates that fit only if the loss is computed in smaller chunks, with such chunks."""
    found = {}
    for settings, guess in guesses.items():
        needed = guess.needed - (1 - SMALL_CHUNK) * guess.logits
        if needed + guess.state <= limit < guess.needed + guess.state:
            small = replace(settings, loss_chunk=max(1, int(SMALL_CHUNK * settings.loss_chunk)))
            found[small] = Guess(SMALL_CHUNK_TIME * guess.seconds, needed, SMALL_CHUNK * guess.logits, guess.state)
    return found


def leaves_room(guesses: Mapping[StepSettings, Guess], limit: float) -> bool:
    """Whether something is faster than all that fits, but too large; or everything must be recomputed to fit. A policy
    that saves less may then fit, and be faster."""
    fitting = {s: guess for s, guess in guesses.items() if guess.needed + guess.state <= limit}
    best = min(fitting, key=lambda s: fitting[s].seconds, default=None)
    if best is None or len(fitting) == len(guesses):
        return False
    fastest = min(guess.seconds for guess in guesses.values())
    return best.remat == "full" or guesses[best].seconds > FASTER * fastest


def reason(chosen: Attempt, limit: float | None, others: Sequence[Attempt]) -> str:
    """Why this one: its time and memory next to the others'."""
    time = "" if chosen.seconds is None else f"{format_seconds(chosen.seconds)} per step, "
    slower = [str(other) for other in others if other.fits]
    large = [str(other) for other in others if not other.fits]
    first = "fastest, and " if not (time or large) else ""
    parts = [f"{first}{time}needs an estimated {format_gib(chosen.needed)} of {format_gib(limit)} per device"]
    parts += [f"slower: {'; '.join(slower)}"] if slower else []
    parts += [f"too large: {'; '.join(large)}"] if large else []
    return "; ".join(parts)


def format_seconds(seconds: float) -> str:
    """A short time with three significant digits: 18.7 ms, 901 ms, 20.4 s, 2.5 min."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def format_gib(size: float | None) -> str:
    return "unknown" if size is None else "more than available" if math.isinf(size) else f"{size / GIB:.2f} GiB"
