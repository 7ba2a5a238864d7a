"""The compiled programs of a server: prefill, begin, advance, insert and reshape, in a bounded number of shapes.

A batch has a shape, (rows, slots). It grows and shrinks in few sizes, so few programs exist: with at most 32 rows and
2048 slots these are

    prefill   1 row, 64, 96, 128, 192, … 2048 prompt slots   11 programs
    advance   1, 4, 16 or 32 rows, 256 to 2048 slots         16 programs

each of them only when it is first needed.

`begin` samples the first token, `insert` puts a prefilled row into a batch, and `reshape` copies rows to a batch of
another shape; they contain no model, so they are small. `score` gives the probabilities of a prompt's own tokens.

All are compiled ahead of time in a thread of their own: while one is compiled, rows that do not need it continue, and
another shape is an error, never a hidden compilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trillora.devices.mesh import batch_sharding, replicated
from trillora.engine.rows import MOST_STOPS, NOTHING, RowRules, RowStates, Written, advance, begin_rows, probabilities
from trillora.engine.sampling import Sampling
from trillora.model.decode import Decoder
from trillora.model.kv_cache import Arrays, resized
from trillora.model.layout import Tree
from trillora.serving.adapter_stack import chosen_by
from trillora.serving.job import Job

SHORTEST_PROMPT = 64  # slots
SCORED_AT_ONCE = 32  # tokens whose logits are in memory; divides all lengths of prompts
FEWEST_SLOTS = 256
TOKENS_PER_CALL = 16  # at most, before the host reads them
PROBE_ROWS = 11  # unlike the other sizes of a model: a layer's input with 11 items has one per row


@dataclass(frozen=True)
class BatchShape:
    num_rows: int
    num_slots: int


class Compiler:
    """Compiles in one thread: transformers' modules can only be traced by one at a time. `when_ready` is called after
    each program."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._futures: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()
        self.when_ready: Callable[[], None] = lambda: None

    def program(self, key: Hashable, build: Callable[[], jax.stages.Compiled]) -> Future[jax.stages.Compiled]:
        """The program, perhaps not compiled yet. One that failed is returned once, then tried again."""
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                if known.done() and known.exception() is not None:
                    del self._futures[key]
                return known
            known = self._futures[key] = self._thread.submit(build)
        known.add_done_callback(lambda _: self.when_ready())  # without the lock: it may run here and now
        return known

    @property
    def num_programs(self) -> int:
        with self._lock:
            return len(self._futures)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class ServingPrograms:
    """The programs for one model and all adapters of the same shapes: each is one, or several side by side
    (`adapter_stack`), of which every row uses its own. `RowsMixed` is raised if the model cannot do that."""

    def __init__(
        self, decoder: Decoder, base: Tree, adapter: Tree, mesh: Mesh, compiler: Compiler, num_adapters: int = 1
    ) -> None:
        self._decoder, self._base, self._mesh, self._compiler = decoder, base, mesh, compiler
        self._adapter = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), adapter)
        self._num_adapters = num_adapters
        self._rows, self._everywhere = batch_sharding(mesh), replicated(mesh)
        traced = self._traced_prefill(SHORTEST_PROMPT)
        logits, cache = traced.out_info
        self._logits = jax.ShapeDtypeStruct(logits.shape, logits.dtype, sharding=self._rows)
        row, told = jax.eval_shape(begin_rows, logits, cache, *self._ends(), rule_of(None))
        self._row: RowStates = row  # the shapes of one prefilled row
        self._num_top = told.top_tokens_BNK.shape[-1]
        self._shapes: dict[BatchShape, RowStates] = {}
        if num_adapters > 1:
            self._traced_advance(BatchShape(PROBE_ROWS, SHORTEST_PROMPT + 1))
        self._start("prefill", SHORTEST_PROMPT, build=lambda: traced.lower().compile())
        self.begin()

    def prefill(self, num_prompt: int) -> Future[jax.stages.Compiled]:
        """(base, adapter, tokens [1, P], starts [1], number of the adapter [1]) -> logits [1, V], and a cache of P + 1
        slots."""
        return self._start("prefill", num_prompt, build=lambda: self._traced_prefill(num_prompt).lower().compile())

    def _traced_prefill(self, num_prompt: int) -> jax.stages.Traced:
        def read(
            base: Tree, adapter: Tree, tokens: jax.Array, starts: jax.Array, number: jax.Array
        ) -> tuple[jax.Array, Arrays]:
            own, _ = chosen_by(number, adapter, self._num_adapters)
            return self._decoder.prefill(base, own, tokens, starts, num_prompt + 1)

        numbers = (np.zeros((1, num_prompt), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
        jitted = jax.jit(read, out_shardings=self._rows)
        return jitted.trace(self._base, self._adapter, *jax.device_put(numbers, self._rows))

    def begin(self) -> Future[jax.stages.Compiled]:
        """(logits [1, V], length of the prompt [1], starts [1], rule) -> a row without its cache, and its first token.
        Several answers to one prompt begin with the same logits and cache."""

        def first(logits: jax.Array, length: jax.Array, starts: jax.Array, rule: RowRules) -> tuple[RowStates, Written]:
            return begin_rows(logits, [], length, starts, rule)

        def build() -> jax.stages.Compiled:
            inputs = jax.device_put((*self._ends(), rule_of(None)), self._rows)
            return jax.jit(first, out_shardings=self._rows).lower(self._logits, *inputs).compile()

        return self._start("begin", (), build=build)

    @staticmethod
    def _ends() -> tuple[np.ndarray, np.ndarray]:
        """Where a prompt ends and starts, for its shapes."""
        return np.zeros(1, np.int32), np.zeros(1, np.int32)

    def advance(self, shape: BatchShape) -> Future[jax.stages.Compiled]:
        """(base, adapter, rows, active [B], number of tokens) -> rows, what was written. `rows` is used up."""
        return self._start("advance", shape, build=lambda: self._traced_advance(shape).lower().compile())

    def _traced_advance(self, shape: BatchShape) -> jax.stages.Traced:
        def write(
            base: Tree, adapter: Tree, rows: RowStates, active: jax.Array, num_steps: jax.Array
        ) -> tuple[RowStates, Written]:
            own, chosen = chosen_by(rows.rule.adapters_B, adapter, self._num_adapters)

            def forward(
                cache: Arrays, tokens: jax.Array, slots: jax.Array, starts: jax.Array
            ) -> tuple[jax.Array, Arrays]:
                return self._decoder.decode(base, own, cache, tokens, slots, starts, shape.num_slots, chosen)

            return advance(forward, rows, active, num_steps, TOKENS_PER_CALL, self._num_top)

        active = jax.ShapeDtypeStruct((shape.num_rows,), jnp.bool_, sharding=self._rows)
        steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._everywhere)
        jitted = jax.jit(write, donate_argnums=2, out_shardings=self._rows)
        return jitted.trace(self._base, self._adapter, self.shapes(shape), active, steps)

    def insert(self, shape: BatchShape) -> Future[jax.stages.Compiled]:
        """(rows, one row, number) -> rows with this row in place of that number. `rows` is used up."""

        def put(rows: RowStates, row: RowStates, number: jax.Array) -> RowStates:
            return jax.tree.map(lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, number, 0), rows, row)

        def build() -> jax.stages.Compiled:
            number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._everywhere)
            one = self.shapes(BatchShape(1, shape.num_slots))
            jitted = jax.jit(put, donate_argnums=0, out_shardings=self._rows)
            return jitted.lower(self.shapes(shape), one, number).compile()

        return self._start("insert", shape, build=build)

    def reshape(self, old: BatchShape, new: BatchShape) -> Future[jax.stages.Compiled]:
        """(rows, numbers [B]) -> the same rows in a batch of the new shape."""

        def build() -> jax.stages.Compiled:
            numbers = jax.ShapeDtypeStruct((new.num_rows,), jnp.int32, sharding=self._rows)
            jitted = jax.jit(lambda rows, n: self._reshaped(rows, n, new.num_slots), out_shardings=self._rows)
            return jitted.lower(self.shapes(old), numbers).compile()

        return self._start("reshape", (old, new), build=build)

    def score(self, num_prompt: int) -> Future[jax.stages.Compiled]:
        """(base, adapter, tokens [1, P], number of the adapter [1]) -> the probability of every next token. Padding is
        at the end."""
        model = self._decoder.model
        limit = getattr(model.module.config.get_text_config(), "max_position_embeddings", None)

        def score(base: Tree, adapter: Tree, tokens: jax.Array, number: jax.Array) -> Written:
            adapter, _ = chosen_by(number, adapter, self._num_adapters)
            next_tokens = jnp.roll(tokens[0], -1).reshape(-1, SCORED_AT_ONCE)
            inputs = {"tokens": tokens}
            if limit is not None and num_prompt > limit:  # a learned position beyond the last is NaN, even of padding
                inputs["positions"] = jnp.minimum(jnp.arange(num_prompt), limit - 1)[None]

            def of_chunk(logits: jax.Array, chosen: jax.Array) -> Written:
                return probabilities(logits.astype(jnp.float32), chosen, chosen >= 0)

            if not model.has_separate_head:
                logits = model.logits(base, adapter, inputs).reshape(*next_tokens.shape, -1)
                return jax.lax.map(lambda x: of_chunk(*x), (logits, next_tokens))
            hidden = model.hidden(base, adapter, inputs).reshape(*next_tokens.shape, -1)
            head = model.head_adapter(adapter)
            return jax.lax.map(lambda x: of_chunk(model.head(base, head, x[0][None])[0], x[1]), (hidden, next_tokens))

        def build() -> jax.stages.Compiled:
            tokens = jax.ShapeDtypeStruct((1, num_prompt), jnp.int32, sharding=self._everywhere)
            number = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=self._everywhere)
            jitted = jax.jit(score, out_shardings=self._everywhere)
            return jitted.lower(self._base, self._adapter, tokens, number).compile()

        return self._start("score", num_prompt, build=build)

    def shapes(self, shape: BatchShape) -> RowStates:
        """The arrays of a batch, without their values."""
        if shape not in self._shapes:
            numbers = jax.ShapeDtypeStruct((shape.num_rows,), jnp.int32)
            found = jax.eval_shape(lambda row, n: self._reshaped(row, n, shape.num_slots), self._row, numbers)
            placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._rows), found)
            self._shapes[shape] = placed
        return self._shapes[shape]

    def num_bytes(self, shape: BatchShape) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.shapes(shape)))

    def _reshaped(self, rows: RowStates, numbers: jax.Array, num_slots: int) -> RowStates:
        taken: RowStates = jax.tree.map(lambda a: a[numbers], rows)
        return taken._replace(cache=resized(self._decoder.config, taken.cache, taken.slot_B - 1, num_slots))

    def _start(
        self, name: str, shape: Hashable, *, build: Callable[[], jax.stages.Compiled]
    ) -> Future[jax.stages.Compiled]:
        return self._compiler.program((id(self), name, shape), build)


def rule_of(job: Job | None, adapter: int = 0) -> RowRules:
    """The rule of one row, as arrays [1]. `adapter`: the number of its adapter."""
    t, p, k, seed = job.sampling if job is not None else Sampling()
    stops = [*(job.stop_tokens if job is not None else ())][:MOST_STOPS]
    return RowRules(
        Sampling(
            np.array([t], np.float32),  # type: ignore[arg-type]
            np.array([p], np.float32),  # type: ignore[arg-type]
            np.array([k], np.int32),  # type: ignore[arg-type]
            np.array([int(seed) % 2**32], np.uint32),  # type: ignore[arg-type]
        ),
        np.array([job.number if job is not None else 0], np.int32),  # type: ignore[arg-type]
        np.array([job.max_tokens if job is not None else 1], np.int32),  # type: ignore[arg-type]
        np.array([[*stops, *[NOTHING] * (MOST_STOPS - len(stops))]], np.int32),  # type: ignore[arg-type]
        np.array([job is not None and job.num_top > 0]),  # type: ignore[arg-type]
        np.array([adapter], np.int32),  # type: ignore[arg-type]
    )
