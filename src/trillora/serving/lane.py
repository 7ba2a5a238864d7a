"""The rows of one or several adapters: a batch that requests join and leave between calls.

The device is always one call ahead: `advance` only enqueues the next call, and `collect` reads the one before, so that
text is made and sent while the device computes.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from trillora.devices.mesh import batch_sharding, replicated
from trillora.engine.rows import NOTHING, RowStates, Written
from trillora.errors import TrilloraError, as_error
from trillora.model.kv_cache import Arrays
from trillora.model.layout import Tree
from trillora.serving.job import AnswerPiece, Finish, Job, NotFinite, SampledToken
from trillora.serving.programs import (
    SCORED_AT_ONCE,
    SHORTEST_PROMPT,
    TOKENS_PER_CALL,
    BatchShape,
    ServingPrograms,
    rule_of,
)
from trillora.serving.text import AnswerText

SECONDS_PER_CALL = 0.04  # a call generates as many tokens as fit, so that text arrives evenly and others can join
SHRINK_AFTER = 8  # calls with rows to spare
IMPOSSIBLE = -9999.0  # log-probability of a token that the model excludes, as in other servers: JSON has no infinity


@dataclass(frozen=True)
class BatchSizes:
    """The shapes a batch can have."""

    rows: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def up_to(cls, num_rows: int, num_slots: int, fewest_slots: int) -> BatchSizes:
        rows, slots = [1], [min(fewest_slots, num_slots)]
        while rows[-1] < num_rows:
            rows.append(min(rows[-1] * 4, num_rows))
        while slots[-1] < num_slots:
            slots.append(min(slots[-1] * 2, num_slots))
        return cls(tuple(rows), tuple(slots))

    def shape(self, num_rows: int, num_slots: int) -> BatchShape:
        return BatchShape(
            next(size for size in self.rows if size >= num_rows), next(size for size in self.slots if size >= num_slots)
        )


@dataclass(eq=False)
class Running:
    """A job that has a row."""

    job: Job
    text: AnswerText
    num_ahead: int = 1  # tokens that the device may have generated
    is_done: bool = False

    @property
    def num_slots(self) -> int:
        """That the device may have used after the next call."""
        return min(len(self.job.prompt) + self.num_ahead + TOKENS_PER_CALL, self.job.num_reserved)


class Waiting(NamedTuple):
    """A job that cannot join yet, because a program is being compiled."""

    num_prompt: int
    num_slots: int  # that it needs next to the running answers
    num_expected: int


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that was read: several answers can follow it."""

    model: str
    prompt: tuple[int, ...]
    logits: jax.Array
    cache: Arrays
    length: jax.Array  # with its padding
    starts: jax.Array

    def is_of(self, job: Job) -> bool:
        """The jobs of one request have the same tuple. To compare tokens would take long in a long queue."""
        return self.model == job.model and self.prompt is job.prompt


class Lane:
    """One batch. `models`: the names of the models that it answers for, in the order of their adapters in `adapter`.
    All methods run in the engine's thread."""

    def __init__(
        self,
        models: Sequence[str],
        programs: ServingPrograms,
        base: Tree,
        adapter: Tree,
        decode: Callable[[Sequence[int]], str],
        sizes: BatchSizes,
        mesh: Mesh,
    ) -> None:
        self.models, self.programs, self.sizes = tuple(models), programs, sizes
        self._base, self._adapter, self._decode = base, adapter, decode
        self._by_row, self._everywhere = batch_sharding(mesh), replicated(mesh)
        self.shape: BatchShape | None = None
        self._rows: RowStates | None = None
        self._places: list[Running | None] = []
        self._waiting: Waiting | None = None
        self._last_prompt: ReadPrompt | None = None
        self.is_broken = False  # during a call that uses up the arrays of the batch
        self._unread: collections.deque[tuple[Written, list[tuple[int, Running]], int]] = collections.deque()
        self._seconds_per_token, self._last_read, self._num_spare = 0.0, 0.0, 0
        # The present and the next shape, whose programs are started.
        self._prepared: tuple[BatchShape, BatchShape] | None = None

    @property
    def running(self) -> list[Running]:
        return [running for running in self._places if running is not None]

    @property
    def is_empty(self) -> bool:
        return self.shape is None

    def num_bytes(self, shape: BatchShape | None) -> int:
        return self.programs.num_bytes(shape) if shape is not None else 0

    def largest(self, jobs: list[Job], num_rows: int) -> BatchShape:
        """The shape when all answers, the answers of `jobs` included, are as long as they may become."""
        all_jobs = [*(running.job for running in self.running), *jobs]
        return self.sizes.shape(num_rows, max(job.num_reserved for job in all_jobs))

    def join(self, job: Job, num_expected: int) -> bool:
        """Starts a job. False while one of the programs that it needs is being compiled. `num_expected`: the jobs, this
        one included, that will join now."""
        num_prompt = max(min(_prompt_slots(len(job.prompt)), self.sizes.slots[-1]), len(job.prompt))
        running = Running(job, AnswerText(self._decode, job.stop_texts))
        first, needed = BatchShape(1, num_prompt + 1), running.num_slots
        shape = self.shape
        if shape is None or None not in self._places or shape.num_slots < needed:
            most = max([needed, *(other.num_slots for other in self.running)])
            shape = self.sizes.shape(len(self.running) + num_expected, most)
        programs = self.programs
        if job.scores_prompt:
            score = programs.score(_prompt_slots(len(job.prompt)))
            if not _ready([score]):
                return False
            if job.max_tokens == 0:
                self._score(job, score.result())
                return True
        wanted = [programs.prefill(num_prompt), programs.begin(), programs.advance(shape)]
        if self.shape is None:
            wanted += [programs.reshape(first, shape)]
        else:
            wanted += [programs.reshape(first, BatchShape(1, shape.num_slots)), programs.insert(shape)]
            if shape != self.shape:
                wanted += [programs.reshape(self.shape, shape)]
        if not _ready(wanted):
            self._waiting = Waiting(num_prompt, needed, num_expected)
            return False
        if job.scores_prompt:
            self._score(job, score.result())
        prefill, begin, _, fit, *rest = (future.result() for future in wanted)
        row, told = self._begin(job, self._read(job, num_prompt, prefill), begin)
        if self.shape is None:
            self._rows = fit(row, self._put(np.zeros(shape.num_rows, np.int32)))
            self.shape, self._places = shape, [None] * shape.num_rows
        else:
            self._change(shape)
            number = np.int32(self._places.index(None))
            one = fit(row, self._put(np.zeros(1, np.int32)))
            self.is_broken = True
            self._rows = rest[0](self._rows, one, jax.device_put(number, self._everywhere))
            self.is_broken = False
        self._places[self._places.index(None)] = running
        self._unread.append((told, [(0, running)], 0))
        return True

    def advance(self) -> bool:
        """Enqueues the next call. False if there is nothing to do until a program is compiled."""
        self.sweep()
        if self.shape is None or not self.running:
            return False
        if not self._fit():
            return False
        program = self.programs.advance(self.shape)
        if not program.done():
            return False
        active = np.array([running is not None for running in self._places])
        num_steps = self._num_steps()
        steps = jax.device_put(np.int32(num_steps), self._everywhere)
        self._rows, told = program.result()(self._base, self._adapter, self._rows, self._put(active), steps)
        placed = [(place, running) for place, running in enumerate(self._places) if running is not None]
        for _, running in placed:
            running.num_ahead += num_steps
        self._unread.append((told, placed, num_steps))
        return True

    def sweep(self) -> None:
        """Makes the rows free whose answers have ended."""
        for place, running in enumerate(self._places):
            if running is not None and (running.is_done or running.job.is_cancelled):
                self._places[place] = None

    def collect(self, *, all_calls: bool) -> None:
        """Reads what was generated, up to the last call but one, or all. Frees the memory of an empty batch."""
        while len(self._unread) > (0 if all_calls else 1):
            told, placed, num_steps = self._unread.popleft()
            host = Written(*jax.device_get(tuple(told)))
            now = time.monotonic()
            if num_steps:
                each = (now - self._last_read) / num_steps
                self._seconds_per_token = min(each, 2 * self._seconds_per_token) if self._seconds_per_token else each
            self._last_read = now
            for place, running in placed:
                if not running.is_done and not running.job.is_cancelled:
                    try:
                        self._deliver(running, host, place)
                    except Exception as error:  # of the tokenizer: this answer alone fails
                        running.is_done = True
                        running.job.receive(AnswerPiece(error=as_error(error)))
        self.sweep()
        if not self._unread and not self.running:
            self.reset()

    def keep_prompt(self, waiting: Iterable[Job]) -> None:
        """Frees the memory of the last prompt, unless one of these jobs begins with it."""
        if self._last_prompt is not None and not any(map(self._last_prompt.is_of, waiting)):
            self._last_prompt = None

    def reset(self) -> None:
        """Forgets all rows."""
        self.shape, self._rows, self._places, self._num_spare, self.is_broken = None, None, [], 0, False
        self._unread.clear()

    def _deliver(self, running: Running, told: Written, place: int) -> None:
        job, text, shown = running.job, running.text, ""
        finish: Finish | None = None
        for i, token in enumerate(told.tokens_BN[place].tolist()):
            if token == NOTHING or finish is not None:
                break
            chosen = _chosen(told, (place, i), job.num_top)
            if token in job.stop_tokens:
                finish = "stop"
                break
            shown += text.add(chosen)
            finish = "stop" if text.is_stopped else "length" if text.num_tokens >= job.max_tokens else None
        if finish is not None:
            shown += text.rest()
            finish = "stop" if text.is_stopped else finish
            running.is_done = True
        if shown or finish is not None:
            job.receive(AnswerPiece(shown, text.chosen(at_end=finish is not None), (), text.num_tokens, finish))

    def _fit(self) -> bool:
        """Gives the batch a shape that the next call fits in. False while the programs for it are being compiled."""
        assert self.shape is not None
        needed = self.sizes.shape(len(self.running), max(running.num_slots for running in self.running))
        if needed.num_slots > self.shape.num_slots:
            target = self._grown(needed.num_slots)
            others = self._to_insert(target)  # if one fails, the answer that waits fails alone
            if not _ready([self.programs.reshape(self.shape, target), self.programs.advance(target)]):
                return False
            if not all(program.done() for program in others):
                return False
            self._change(target)
            return True
        self._compile_next()
        is_smaller = needed.num_rows < self.shape.num_rows or 2 * needed.num_slots <= self.shape.num_slots
        self._num_spare = self._num_spare + 1 if is_smaller else 0
        if self._num_spare >= SHRINK_AFTER and _ready(
            [self.programs.reshape(self.shape, needed), self.programs.advance(needed)]
        ):
            self._change(needed)
        return True

    def _grown(self, num_slots: int) -> BatchShape:
        """The shape with more slots, and with a row for an answer that waits. Without it, the batch would run away from
        that answer, which needs other programs for each shape."""
        assert self.shape is not None
        if self._waiting is None:
            return BatchShape(self.shape.num_rows, num_slots)
        num_rows = max(self.shape.num_rows, len(self.running) + self._waiting.num_expected)
        return self.sizes.shape(num_rows, max(num_slots, self._waiting.num_slots))

    def _to_insert(self, shape: BatchShape) -> list[Future[jax.stages.Compiled]]:
        """The programs with which the answer that waits joins a batch of this shape."""
        if self._waiting is None:
            return []
        programs, num_prompt = self.programs, self._waiting.num_prompt
        fit = programs.reshape(BatchShape(1, num_prompt + 1), BatchShape(1, shape.num_slots))
        return [programs.prefill(num_prompt), programs.begin(), fit, programs.insert(shape)]

    def _compile_next(self) -> None:
        """Starts to compile the programs for more slots when half of the present ones are used."""
        assert self.shape is not None
        reserved = max(running.job.num_reserved for running in self.running)
        used = max(running.num_slots for running in self.running)
        if reserved > self.shape.num_slots and 2 * used > self.shape.num_slots:
            larger = self._grown(self.sizes.shape(1, self.shape.num_slots + 1).num_slots)
            if self._prepared != (self.shape, larger):  # a failure matters when the programs are needed
                self._prepared = self.shape, larger
                self.programs.advance(larger)
                self.programs.reshape(self.shape, larger)
                self._to_insert(larger)

    def _change(self, shape: BatchShape) -> None:
        """Moves the running rows to a batch of another shape."""
        if shape == self.shape:
            return
        assert self.shape is not None
        kept = [place for place, running in enumerate(self._places) if running is not None]
        numbers = np.array([*kept, *[0] * (shape.num_rows - len(kept))], np.int32)
        program = self.programs.reshape(self.shape, shape).result()
        self._rows = program(self._rows, self._put(numbers))
        self._places = [*(self._places[place] for place in kept), *[None] * (shape.num_rows - len(kept))]
        self.shape, self._num_spare = shape, 0

    def forget_waiting(self) -> None:
        """No answer waits for this batch any more."""
        self._waiting = None

    def _num_steps(self) -> int:
        if not self._seconds_per_token:
            return 1
        return min(max(int(SECONDS_PER_CALL / self._seconds_per_token), 1), TOKENS_PER_CALL)

    def _read(self, job: Job, num_prompt: int, prefill: jax.stages.Compiled) -> ReadPrompt:
        """The job's prompt: the last one that was read, if it is the same, as it is for several answers to one."""
        last = self._last_prompt
        if last is None or not last.is_of(job):
            tokens, starts, number = self._prompt(job, num_prompt)
            logits, cache = prefill(self._base, self._adapter, tokens, starts, number)
            length = self._put(np.array([num_prompt], np.int32))
            last = self._last_prompt = ReadPrompt(job.model, job.prompt, logits, cache, length, starts)
        return last

    def _begin(self, job: Job, read: ReadPrompt, begin: jax.stages.Compiled) -> tuple[RowStates, Written]:
        rule = jax.device_put(rule_of(job, self.models.index(job.model)), self._by_row)
        row, told = begin(read.logits, read.length, read.starts, rule)
        return row._replace(cache=read.cache), told

    def _prompt(self, job: Job, num_prompt: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens [1, P], where they start, and the number of the adapter."""
        tokens = np.zeros((1, num_prompt), np.int32)
        start = num_prompt - len(job.prompt)
        tokens[0, start:] = job.prompt
        number = self.models.index(job.model)
        return jax.device_put((tokens, np.array([start], np.int32), np.array([number], np.int32)), self._by_row)

    def _score(self, job: Job, program: jax.stages.Compiled) -> None:
        """Delivers the probabilities of the prompt's own tokens."""
        tokens = np.zeros((1, _prompt_slots(len(job.prompt))), np.int32)
        tokens[0, : len(job.prompt)] = job.prompt
        number = np.array([self.models.index(job.model)], np.int32)
        inputs = jax.device_put((tokens, number), self._everywhere)
        told = Written(*jax.device_get(tuple(program(self._base, self._adapter, *inputs))))
        places = [divmod(i, SCORED_AT_ONCE) for i in range(len(job.prompt) - 1)]
        scored = (SampledToken(job.prompt[0], None, ()), *(_chosen(told, place, job.num_top) for place in places))
        job.receive(AnswerPiece(prompt=scored, finish="length" if job.max_tokens == 0 else None))

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._by_row)


def _chosen(told: Written, at: tuple[int, int], num_top: int) -> SampledToken:
    logprob = float(told.logprobs_BN[at])
    if math.isnan(logprob):
        raise NotFinite(
            "The logits of this model are not finite: its numbers have overflowed.",
            do="check the adapter: it may be damaged or scaled too strongly, or its training diverged",
        )
    tokens, logprobs = told.top_tokens_BNK[at][:num_top].tolist(), told.top_logprobs_BNK[at][:num_top].tolist()
    top = tuple((token, max(value, IMPOSSIBLE)) for token, value in zip(tokens, logprobs, strict=True))
    return SampledToken(int(told.tokens_BN[at]), max(logprob, IMPOSSIBLE), top)


def _prompt_slots(length: int) -> int:
    """64, 96, 128, 192, …: at most a third is padding if the prompt is not shorter than the shortest of them."""
    slots = SHORTEST_PROMPT
    while slots < length:
        if slots * 3 // 2 >= length:
            return slots * 3 // 2
        slots *= 2
    return slots


def _ready(programs: list[Future[jax.stages.Compiled]]) -> bool:
    """Whether all are compiled. One that failed raises its error."""
    for program in programs:
        if program.done() and (error := program.exception()) is not None:
            if isinstance(error, TrilloraError):
                raise error
            raise RuntimeError(f"A program did not compile: {error}") from error
    return all(program.done() for program in programs)
