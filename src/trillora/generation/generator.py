"""Text generation with a run or a model: prompts in batches, lengths in buckets, two programs per bucket.

    from trillora.generation.generator import Generator
    answers = Generator.open("runs/first").generate(["What is LoRA?"])

A prefill program is compiled for a number of sequences, of prompt slots and of cache slots (a bucket), when it is first
used; a decode program for the sequences and cache slots. Temperature, seed and stop tokens are inputs, so changing them
compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from trillora.devices.mesh import (
    BATCH_AXES,
    batch_sharding,
    find_devices,
    remember_programs,
    replicated,
)
from trillora.engine.sampling import GREEDY, DecodeState, Sampling, begin, write_on
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, Progress, ignore_events
from trillora.files.cache_dir import cache_root
from trillora.files.user_path import user_path
from trillora.generation.placement import place_adapter, place_model
from trillora.generation.prompts import Prompt, Prompts, configured_stops
from trillora.model.adapters import fitting, load_adapter
from trillora.model.bridge import CausalLM
from trillora.model.decode import Decoder
from trillora.model.kv_cache import Arrays, moved
from trillora.model.layout import Tree
from trillora.model.loading.growth import check_rows
from trillora.model.loading.source import OpenModel
from trillora.model.loading.weights import load_weights
from trillora.recipe.load import load_model_section
from trillora.recipe.schema import DataSection, Quantize, Recipe, stages_of
from trillora.runs.adapter import adapter_of, template_of
from trillora.runs.files import ADAPTER, is_run
from trillora.runs.saved import SavedAdapter, SavedRun, find_adapter
from trillora.step.background import Program, compile_program
from trillora.step.shardings import shard_adapter, weight_shardings

if TYPE_CHECKING:
    pass

SHORTEST_BUCKET = 32  # prompt slots
ANSWER_STEP = 64  # cache slots for answers are a multiple of this, so that few lengths need a program of their own
ROWS_PER_READ = 8  # prompts of a batch that are read together where padding costs more than calls do
TOKENS_PER_CALL = 32  # generated before the host checks whether all sequences have stopped
OTHER_MODEL = {"model", "model.name", "model.revision"}  # overrides that ask for another base than the run's


@dataclass(frozen=True)
class Answer:
    """The model's answer to one prompt."""

    text: str
    tokens: tuple[int, ...]  # without the stop token
    num_prompt_tokens: int
    stopped: bool  # ended by a stop token, not by the length limit


@dataclass(frozen=True)
class Bucket:
    """The shapes of a prefill program."""

    num_rows: int
    num_prompt: int
    num_slots: int
    ends_later: bool = False  # prompts are moved to end where the batch's longest prompts end


@dataclass(frozen=True)
class _Batch:
    """Prompts that are answered together."""

    order: list[int]  # of the prompts
    groups: list[list[int]]  # prompts that are read together
    lengths: list[int]  # slots of each group's prompts
    num_rows: int
    num_slots: int

    def bucket(self, group: list[int], length: int) -> Bucket:
        return Bucket(len(group), length, self.num_slots, ends_later=len(self.groups) > 1)


class Generator:
    """A model with or without an adapter. `base_prompts`: the base's prompts, if its chat template is another one.
    `longest` limits the tokens of prompt and answer together. `is_tight`: prompts are read in groups of similar length
    with little padding, which takes more programs. That pays off on CPUs. `system`: the system message that all rows of
    the training had; the caller decides whether prompts get it.
    """

    def __init__(
        self,
        model: CausalLM,
        base: Tree,
        adapter: Tree,
        prompts: Prompts,
        mesh: Mesh,
        *,
        base_prompts: Prompts | None = None,
        longest: int | None = None,
        batch_size: int = 8,
        is_tight: bool = False,
        system: str = "",
        listener: Listener = ignore_events,
    ) -> None:
        self.prompts, self.base_prompts, self.batch_size = prompts, base_prompts or prompts, batch_size
        self._decoder, self._mesh = Decoder(model), mesh
        self.base, self.adapter = base, adapter  # may be replaced at any time by others with the same shapes
        positions = getattr(model.module.config.get_text_config(), "max_position_embeddings", None)
        limits = [limit for limit in (positions, longest) if limit is not None]
        self.longest = min(limits) if limits else None
        self.system = system
        self.is_tight, self.listener = is_tight, listener  # the listener may be replaced at any time
        self._readers: dict[Bucket, tuple[Any, Any]] = {}
        self._writers: dict[tuple[int, int], Any] = {}

    @classmethod
    def open(
        cls,
        name: str,
        *,
        overrides: Sequence[str] = (),
        opened: OpenModel | None = None,
        with_adapter: bool = True,
        adapter: str | Path | None = None,
        quantize: Quantize | None = None,
        backend: str = "auto",
        longest: int | None = None,
        batch_size: int = 8,
        listener: Listener = ignore_events,
    ) -> Generator:
        """Opens a run's folder, a model's folder, a hub id or `smollm2`. `overrides` replace options of the run's
        recipe; only they can allow a model's Python code to run. `adapter` is used instead of the run's own: the name
        of one of several, or a folder. `quantize`: format of the base; None: the run's format. `opened`: the model, if
        it is already open."""
        folder = user_path(name, where="the run or model")
        run = SavedRun.open(folder, overrides) if is_run(folder) else None
        recipe = run.recipe if run is not None else None
        used = _used(run, adapter, listener) if with_adapter else None
        adapter_folder = used.folder if used is not None else None
        source = load_model_section(name, overrides) if recipe is None else recipe.model
        trusted = source.trust_remote_code
        listener(Note(f"Model {source.name}" + (f" with {adapter_folder}" if adapter_folder else "")))
        own = recipe_of(used) or recipe
        tokens = own.tokens if own is not None and with_adapter else None  # the base has no rows for them
        opened = opened or OpenModel.of(source, tokens=tokens or (), adapter=adapter_folder)
        if run is not None and not OTHER_MODEL.intersection(given.partition("=")[0] for given in overrides):
            run.check_base(opened)
        spec, matrices = load_adapter(adapter_folder) if adapter_folder else (None, {})
        if spec is not None:
            check_rows(opened.tokenizer, spec, str(adapter_folder), tokens or ())
        if quantize is not None and quantize != source.quantize and adapter_folder is not None:
            listener(_other_base(source.quantize, quantize))
        remember_programs(cache_root() / "programs")
        devices = find_devices(backend, None)
        codes_for = recipe.engine.matmul if recipe is not None and quantize is None else "full"
        with fitting(str(adapter_folder)):
            base_format = quantize or source.quantize
            model, mesh = place_model(
                opened.config, devices, spec, source.dtype, base_format, codes_for, trust_remote_code=trusted
            )
        of_base, prompts = _prompts(opened, own, used or SavedAdapter(folder / ADAPTER, None))
        base = load_weights(opened.folder, model.module, model.layout, weight_shardings(model, mesh), listener)
        return cls(
            model,
            base,
            place_adapter(matrices, model, mesh, where=str(adapter_folder)),
            prompts,
            mesh,
            base_prompts=of_base,
            longest=longest,
            batch_size=batch_size,
            is_tight=devices[0].platform == "cpu" and mesh.size == 1,
            system=_system(run, used) if prompts.has_template else "",
            listener=listener,
        )

    @property
    def model(self) -> CausalLM:
        return self._decoder.model

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @cached_property
    def neutral_adapter(self) -> Tree:
        """An adapter that changes nothing: it gives the base's answers."""
        return jax.device_put(
            self.model.initial_adapter(self.base, seed=0), shard_adapter(self.model.adapter_layout, self._mesh)
        )

    @property
    def num_compiles(self) -> int:
        return len(self._readers) + len(self._writers)

    def encode(self, prompt: Prompt, *, adapted: bool = True) -> list[int]:
        """The tokens of a prompt, in the chat template of the model that answers."""
        return (self.prompts if adapted and self.adapter else self.base_prompts).encode(prompt)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        adapted: bool = True,
    ) -> list[Answer]:
        """One answer per prompt, in order. `adapted=False` uses the base, through the same programs."""
        encoded = [self.encode(prompt, adapted=adapted) for prompt in prompts]
        written = self.continue_tokens(encoded, max_tokens=max_tokens, sampling=sampling, adapted=adapted)
        return [
            Answer(self.prompts.decode(tokens), tuple(tokens), len(prompt), stopped)
            for prompt, (tokens, stopped) in zip(encoded, written, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        adapted: bool = True,
    ) -> Iterator[str]:
        """One answer as a stream of text pieces. It stops at the model's maximum length at the latest."""
        tokens = self.encode(prompt, adapted=adapted)
        if self.longest is not None and len(tokens) < self.longest:
            max_tokens = min(max_tokens, self.longest - len(tokens))
        self._check([tokens], max_tokens, sampling)

        def one_by_one() -> Iterator[int]:
            for written in self.write([tokens], max_tokens=max_tokens, sampling=sampling, adapted=adapted, at_once=1):
                if written[0, -1] in self.prompts.stops:
                    return
                yield int(written[0, -1])

        return self.prompts.decode_stream(one_by_one())

    def continue_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        adapted: bool = True,
        at_least: int = 0,
    ) -> list[tuple[list[int], bool]]:
        """The tokens after each prompt up to its stop token, and whether a stop token was reached. Prompts of similar
        length are batched. Prompts are padded to at least `at_least` tokens, so that they
        share programs."""
        self._check(prompts, max_tokens, sampling)
        answers: dict[int, tuple[list[int], bool]] = {}
        for rows, num_rows in self._batches(prompts):
            parts = list(
                self.write(
                    [prompts[i] for i in rows],
                    max_tokens=max_tokens,
                    sampling=sampling,
                    adapted=adapted,
                    numbers=rows,
                    num_rows=num_rows,
                    at_least=at_least,
                )
            )
            for i, row in zip(rows, np.concatenate(parts, axis=1)[:, :max_tokens].tolist(), strict=False):
                end = next((at for at, token in enumerate(row) if token in self.prompts.stops), None)
                answers[i] = (row[:end], end is not None)
        return [answers[i] for i in range(len(prompts))]

    def prepare(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, at_least: int = 0) -> None:
        """Compiles the programs with which `continue_tokens` answers these prompts. Base and adapter may be shapes, and
        the devices of the mesh need not be attached."""
        rule, stops = _shapes((_as_arrays(GREEDY), _stop_array(self.prompts.stops)), self._everywhere)
        for rows, wanted in self._batches(prompts):
            batch = self._arranged([prompts[i] for i in rows], max_tokens, wanted, at_least, is_tight=self.is_tight)
            for group, length in zip(batch.groups, batch.lengths, strict=True):
                arrays, end = self._inputs([prompts[rows[i]] for i in group], list(group), length, batch.lengths[-1])
                inputs = (*_shapes(arrays, batch_sharding(self._mesh)), _shapes(end, self._everywhere))
                _, state = self._reader(batch.bucket(group, length), self.adapter, inputs, rule, stops)
            joined = jax.tree.map(lambda a, n=batch.num_rows: a.update(shape=(n, *a.shape[1:])) if a.ndim else a, state)
            self._writer(batch.num_rows, batch.num_slots, self.adapter, joined, rule, stops)

    def _batches(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], int | None]]:
        """The numbers of the prompts of each batch, and its size if it is given."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        num_rows = self.batch_size if len(order) > self.batch_size else None
        for first in range(0, len(order), self.batch_size):
            yield order[first : first + self.batch_size], num_rows

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        adapted: bool = True,
        numbers: Sequence[int] | None = None,
        at_once: int = TOKENS_PER_CALL,
        num_rows: int | None = None,
        at_least: int = 0,
    ) -> Iterator[np.ndarray]:
        """Yields tokens [B, n] of one batch as they are generated: first one, then at most `at_once` per call, until
        all sequences have stopped. The last part may be padded beyond the limit. `numbers` are the prompts' numbers,
        for their random keys; `num_rows` is the size of the batch, if it should be larger than the number of prompts.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        # A chat becomes longer with every turn, and a new length costs more there than padding.
        batch = self._arranged(prompts, max_tokens, num_rows, at_least, is_tight=self.is_tight and at_once > 1)
        rule, stops = self._rule(sampling)
        adapter = self.adapter if adapted else self.neutral_adapter
        states = []
        for group, length in zip(batch.groups, batch.lengths, strict=True):
            arrays, end = self._inputs(
                [prompts[i] for i in group], [numbers[i] for i in group], length, batch.lengths[-1]
            )
            placed = jax.device_put(arrays, batch_sharding(self._mesh))
            inputs = (*placed, jax.device_put(end, self._everywhere))
            read, _ = self._reader(batch.bucket(group, length), adapter, inputs, rule, stops)
            states.append(read(self.base, adapter, *inputs, rule, stops))
        state = states[0] if len(states) == 1 else self._join(states)
        del states  # their memory is needed again
        write = self._writer(batch.num_rows, batch.num_slots, adapter, state, rule, stops)
        back = np.argsort(batch.order)
        yield np.asarray(state.token_B)[back, None]
        left = max_tokens - 1
        while left > 0 and not np.asarray(state.done_B).all():
            limit = jax.device_put(np.int32(min(at_once, left)), replicated(self._mesh))
            state, new = write(self.base, adapter, state, limit, rule, stops)
            left -= at_once
            yield np.asarray(new)[back, :at_once]

    def _arranged(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        num_rows: int | None,
        at_least: int,
        *,
        is_tight: bool,
    ) -> _Batch:
        longest = max(at_least, *map(len, prompts))
        num_rows, num_slots = self._size(len(prompts), longest, max_tokens, num_rows)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i])) if is_tight else list(range(len(prompts)))
        rows = [*order, *order[-1:] * (num_rows - len(order))]  # unused sequences repeat the last prompt
        group_size = min(ROWS_PER_READ, num_rows) if is_tight else num_rows
        groups = [rows[first : first + group_size] for first in range(0, num_rows, group_size)]
        lengths = [bucket_length(max(at_least, *(len(prompts[i]) for i in group)), tight=is_tight) for group in groups]
        return _Batch(order, groups, lengths, num_rows, num_slots)

    def _rule(self, sampling: Sampling) -> tuple[Any, Any]:
        """The sampling rule and the stop tokens, on the devices."""
        return jax.device_put((_as_arrays(sampling), _stop_array(self.prompts.stops)), self._everywhere)

    @staticmethod
    def _inputs(prompts: Sequence[Sequence[int]], numbers: Sequence[int], length: int, end: int) -> Any:
        """Tokens [B, P] padded on the left, where each prompt starts, its number; and the slot after the prompts."""
        tokens, starts = np.zeros((len(prompts), length), np.int32), np.zeros(len(prompts), np.int32)
        for b, prompt in enumerate(prompts):
            starts[b] = length - len(prompt)
            tokens[b, starts[b] :] = prompt
        return (tokens, starts, np.array(numbers, np.int32)), np.int32(end)

    def _reader(
        self, bucket: Bucket, adapter: Tree, inputs: tuple[jax.Array, ...], rule: Sampling, stops: jax.Array
    ) -> tuple[Program, DecodeState]:
        """The prefill program of a bucket, and the shapes of its result. It is compiled ahead of time: other shapes are
        an error, never a recompilation."""
        if bucket in self._readers:
            return self._readers[bucket]
        decoder = self._decoder

        def read(
            base: Tree,
            adapter: Tree,
            tokens: jax.Array,
            starts: jax.Array,
            rows: jax.Array,
            end: jax.Array,
            rule: Sampling,
            stops: jax.Array,
        ) -> DecodeState:
            logits, cache = decoder.prefill(base, adapter, tokens, starts, bucket.num_slots)
            if not bucket.ends_later:
                return begin(logits, cache, bucket.num_prompt, starts, rows, rule, stops)
            shift = end - bucket.num_prompt
            return begin(logits, moved(cache, shift), end, starts + shift, rows, rule, stops)

        program = jax.jit(read, out_shardings=self._places).lower(self.base, adapter, *inputs, rule, stops)
        compiled = self._compiled(program, f"prompts of up to {bucket.num_prompt:,} tokens")
        self._readers[bucket] = compiled, self._state_shapes(program.out_info)
        return self._readers[bucket]

    def _writer(
        self, num_rows: int, num_slots: int, adapter: Tree, state: DecodeState, rule: Sampling, stops: jax.Array
    ) -> Program:
        """The decode program."""
        if (num_rows, num_slots) in self._writers:
            return self._writers[num_rows, num_slots]
        decoder = self._decoder

        def write(
            base: Tree, adapter: Tree, state: DecodeState, limit: jax.Array, rule: Sampling, stops: jax.Array
        ) -> tuple[DecodeState, jax.Array]:
            def forward(
                cache: Arrays, tokens: jax.Array, slot: jax.Array, starts: jax.Array
            ) -> tuple[jax.Array, Arrays]:
                return decoder.decode(base, adapter, cache, tokens, slot, starts, num_slots)

            return write_on(forward, state, limit, rule, stops, most=TOKENS_PER_CALL, padding=0)

        limit = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._everywhere)
        program = jax.jit(write, donate_argnums=2, out_shardings=(self._places, batch_sharding(self._mesh)))
        lowered = program.lower(self.base, adapter, state, limit, rule, stops)
        self._writers[num_rows, num_slots] = self._compiled(lowered, f"texts of up to {num_slots:,} tokens")
        return self._writers[num_rows, num_slots]

    def _compiled(self, program: Any, what_for: str) -> Any:
        self.listener(Progress(f"Compiling for {what_for}", 0, 1))
        compiled = compile_program(program)
        self.listener(Progress(f"Compiling for {what_for}", 1, 1))
        return compiled

    @cached_property
    def _join(self) -> Any:
        """Groups of sequences as one batch."""

        def join(states: list[DecodeState]) -> DecodeState:
            return jax.tree.map(lambda *arrays: jnp.concatenate(arrays) if arrays[0].ndim else arrays[0], *states)

        return jax.jit(join, out_shardings=self._places)

    @property
    def _everywhere(self) -> NamedSharding:
        return replicated(self._mesh)

    @property
    def _places(self) -> DecodeState:
        rows = batch_sharding(self._mesh)
        return DecodeState._make(
            self._everywhere if name in ("slot", "num_written") else rows for name in DecodeState._fields
        )

    def _state_shapes(self, state: DecodeState) -> DecodeState:
        return DecodeState._make(map(_shapes, state, self._places))

    def _size(self, num_prompts: int, longest: int, max_tokens: int, num_rows: int | None) -> tuple[int, int]:
        """The numbers of sequences and of cache slots."""
        shards = int(np.prod([self._mesh.shape[axis] for axis in BATCH_AXES]))
        wanted = num_rows or 2 ** (num_prompts - 1).bit_length()
        answer = -(-max_tokens // ANSWER_STEP) * ANSWER_STEP
        return -(-wanted // shards) * shards, bucket_length(longest) + answer

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling) -> None:
        """Rejects requests that cannot be answered, with what to change."""
        if max_tokens < 1:
            raise TrilloraError(
                f"--max-tokens must be at least 1, got {max_tokens}.", where="--max-tokens", do="use 1 or more"
            )
        if sampling.temperature < 0:
            raise TrilloraError(
                "The temperature must not be negative.", where="--temperature", do="use 0 for greedy decoding"
            )
        if not 0 < sampling.top_p <= 1:
            raise TrilloraError(
                "top-p must be above 0 and at most 1.", where="--top-p", do="use a probability such as 0.9"
            )
        for number, prompt in enumerate(prompts, 1):
            where = f"prompt {number} of {len(prompts)}"
            if not prompt:
                raise TrilloraError("The prompt is empty.", where=where, do="write at least one word")
            if self.longest is None or len(prompt) + max_tokens <= self.longest:
                continue
            room = self.longest - len(prompt)
            do = f"generate at most {room} new tokens, or shorten" if room > 0 else "shorten"
            raise TrilloraError(
                f"The prompt's {len(prompt)} tokens and {max_tokens} new ones exceed the limit of {self.longest}.",
                where=where,
                do=f"{do} the prompt to at most {max(self.longest - max_tokens, 1)} tokens",
            )


def _shapes(arrays: object, place: NamedSharding) -> Any:
    """The shapes of arrays that are put there."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=place), arrays)


def bucket_length(length: int, *, tight: bool = False) -> int:
    """The number of prompt slots: 32, 48, 64, 96, 128, … so that at most a third is padding. `tight`: multiples of 16
    up to 256, then eight lengths for each doubling."""
    size = SHORTEST_BUCKET
    while 2 * size < length:
        size *= 2
    step = max(size // (8 if tight else 2), 16)
    return size + max(-(-(length - size) // step), 0) * step


def _as_arrays(sampling: Sampling) -> Sampling:
    t, p, k, seed = sampling
    return Sampling(np.float32(t), np.float32(p), np.int32(k), np.uint32(int(seed) % 2**32))  # type: ignore[arg-type]


def _stop_array(stops: Sequence[int]) -> np.ndarray:
    """Padded to a fixed length with -1, which is not a token."""
    return np.array([*stops, *[-1] * (8 - len(stops))], np.int32)


def _used(run: SavedRun | None, adapter: str | Path | None, listener: Listener) -> SavedAdapter | None:
    """The adapter that answers: the given one, or the run's own."""
    if run is None:
        return None if adapter is None else find_adapter(adapter)
    found = adapter_of(run, adapter, listener=listener)
    is_own = found.run is not None and found.run.folder.absolute() == run.folder.absolute()
    return replace(found, run=run) if is_own else found  # with the overrides


def _system(run: SavedRun | None, used: SavedAdapter | None) -> str:
    """The system message of the training. The base of a run gets the run's, so that answers can be compared."""
    if used is None and run is not None:
        used = SavedAdapter(run.folder / ADAPTER, run)
    return "" if used is None else used.system


def prompts_of(adapter: SavedAdapter, base: Prompts) -> Prompts:
    """Prompts of another adapter: with the chat template that it was trained with, and what its run gives to it."""
    template = template_of(adapter.folder) or base.template
    recipe = recipe_of(adapter)
    if recipe is None:
        return base.with_template(template)
    data = _data_of(recipe, adapter)
    return base.with_options(template, data.template_date, data.template_arguments)


def recipe_of(adapter: SavedAdapter | None) -> Recipe | None:
    """What an adapter was trained with, if its run is known. The base that it names is not opened: its code need not be
    allowed."""
    if adapter is None or adapter.run is None:
        return None
    return replace(adapter.run, overrides=(*adapter.run.overrides, "model.trust_remote_code=false")).recipe


def _data_of(recipe: Recipe, adapter: SavedAdapter) -> DataSection:
    """Of several adapters of a run, each has its own; after several stages, the last one counts."""
    stages = stages_of(recipe)
    own = [stage for stage in stages if stage.name == adapter.part] or stages
    return own[-1].recipe.data


def _prompts(opened: OpenModel, recipe: Recipe | None, adapter: SavedAdapter) -> tuple[Prompts, Prompts]:
    """Prompts of the base, in its own chat template, and of the adapter, in the one it was trained with. A base without
    a template gets the adapter's. The adapter's stop tokens include the base's."""
    tokenizer = opened.tokenizer
    own = tokenizer.get_chat_template() if tokenizer.chat_template else None
    trained = template_of(adapter.folder)
    data = _data_of(recipe, adapter) if recipe is not None else None
    base = Prompts(
        tokenizer,
        template=own or trained,
        template_date=data.template_date if data is not None else None,
        arguments=data.template_arguments if data is not None else None,
        stops=configured_stops(opened.folder, opened.config),
    )
    return base, base.with_template(trained or own)


def _other_base(trained: str, quantize: str) -> Note:
    was = f"in {trained}" if trained not in ("none", "auto") else "not quantized"
    now = "is not quantized" if quantize == "none" else f"is quantized to {quantize}"
    return Note(f"The base {now}. In training it was {was}, so answers may differ.")
