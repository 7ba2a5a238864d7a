"""One batch for the base and several adapters: every row gets the answer that its adapter gives alone."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_run
from dose import slow_case
from jax.sharding import Mesh
from running_server import write_adapter
from tiny_generators import NUM_LAYERS, random_prompts, tiny_generator

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.engine.sampling import Sampling
from trillora.events import Note
from trillora.generation.generator import Generator
from trillora.model import lora
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.decode import Decoder
from trillora.model.layout import Tree
from trillora.model.lora import RowsMixed, chosen_layers, linear_layers
from trillora.model.lora_spec import LoraSpec, TrainedTokens
from trillora.model.trace import ChosenAdapters
from trillora.serving.adapter_stack import (
    LARGEST,
    ReadAdapter,
    chosen_by,
    covering,
    place_stack,
    split_by_kind,
    why_alone,
)
from trillora.serving.engine import Engine
from trillora.serving.job import AnswerPiece, Job
from trillora.serving.lane import BatchSizes, Lane
from trillora.serving.programs import Compiler, ServingPrograms
from trillora.serving.served import Service, open_service
from trillora.step.shardings import weight_shardings

LONGEST = 96
LOGITS = 1e-5  # relative to the largest logit: float32 sums in another order


def adapter_of(generator: Generator, name: str, spec: LoraSpec, seed: int) -> tuple[ReadAdapter, CausalLM, Tree]:
    """A random adapter; and, for itself, its model and its arrays."""
    alone, random = generator.model.with_lora(spec), np.random.default_rng(seed)
    matrices = {n: random.normal(0, 0.2, leaf.shape).astype(np.float32) for n, leaf in alone.adapter_layout.items()}
    layers = chosen_layers(generator.model.module, spec)
    return ReadAdapter(name, Path(name), spec, matrices, layers), alone, jax.tree.map(jnp.asarray, matrices)


@functools.cache
def adapters_of(name: str) -> list[tuple[ReadAdapter, CausalLM, Tree]]:
    """Three adapters with different layers, ranks and scales."""
    generator, _ = tiny_generator(name)
    linear = list(linear_layers(generator.model.module))
    head = [n for n in linear if "head" in n]
    layers = [n for n in linear if n not in head]
    pattern = ((layers[0], 5),)
    specs = [
        LoraSpec(4, 8.0, targets=tuple(layers)),
        LoraSpec(2, 16.0, rslora=True, targets=tuple(layers[::2])),
        LoraSpec(3, 6.0, targets=tuple(layers[: len(layers) // 2 + 1]), rank_pattern=pattern, alpha_pattern=pattern),
    ]
    return [adapter_of(generator, f"adapter{i}", spec, seed=i) for i, spec in enumerate(specs)]


@functools.cache
def stack_of(name: str) -> tuple[CausalLM, Tree]:
    generator, _ = tiny_generator(name)
    read = [adapter for adapter, _, _ in adapters_of(name)]
    model = generator.model.with_lora(covering(read))
    return model, place_stack(read, model, generator.mesh)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",  # transposed weights
        "falcon_h1",  # attention and a recurrence
        "mixtral",
        *map(slow_case, ("exaone4", "gemma2", "mistral", "mamba2", "qwen3_next", "deepseek_v3")),
    ],
)
def test_logits_of_mixed_rows_equal_each_adapter_alone(name: str) -> None:
    """Six rows use three adapters and the base; then two rows, fewer than there are adapters."""
    generator, _ = tiny_generator(name)
    (model, stack), adapters, base = stack_of(name), adapters_of(name), generator.base
    prompts = jnp.asarray(random_prompts([9] * 6), jnp.int32)
    zero = jax.tree.map(jnp.zeros_like, adapters[0][2])
    alone = [(adapters[0][1], zero), *((own, tree) for _, own, tree in adapters)]
    found = [two_steps(own)(base, tree, prompts, jnp.zeros(6, jnp.int32)) for own, tree in alone]
    mixed = two_steps(model, num_adapters=4)
    for numbers in ([3, 0, 1, 2, 1, 0], [2, 3]):
        ours = mixed(base, stack, prompts[: len(numbers)], jnp.asarray(numbers, jnp.int32))
        for step in range(2):
            expected = np.stack([found[number][step][row] for row, number in enumerate(numbers)])
            assert np.abs(ours[step] - expected).max() < LOGITS * np.abs(expected).max()
    different = [np.abs(found[i][1] - found[j][1]).max() for i in range(4) for j in range(i)]
    assert min(different) > 100 * LOGITS * np.abs(found[0][1]).max()


def two_steps(model: CausalLM, num_adapters: int = 1) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Logits after prompts of 9 tokens and after one token more. A prompt is read by itself, as by a server."""
    decoder = Decoder(model)

    @jax.jit
    def read(base: Tree, adapter: Tree, prompt: jax.Array, number: jax.Array) -> Any:
        own, chosen = chosen_by(number, adapter, num_adapters)
        assert chosen is None
        return decoder.prefill(base, own, prompt, jnp.zeros(1, jnp.int32), 16)

    @jax.jit
    def step(base: Tree, adapter: Tree, cache: Any, tokens: jax.Array, numbers: jax.Array) -> jax.Array:
        own, chosen = chosen_by(numbers, adapter, num_adapters)
        assert chosen is None if num_adapters == 1 else chosen.num_adapters == min(len(tokens), num_adapters)
        starts = jnp.zeros(len(tokens), jnp.int32)
        return decoder.decode(base, own, cache, tokens, starts + 9, starts, 16, chosen)[0]

    def steps(base: Tree, adapter: Tree, prompts: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = [read(base, adapter, prompts[b : b + 1], numbers[b : b + 1]) for b in range(len(prompts))]
        first, cache = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
        return first, step(base, adapter, cache, prompts[:, 0], numbers)

    return steps


def test_mixed_rows_on_a_mesh_equal_one_device() -> None:
    """Weights are split over two devices, and each row still uses its own adapter."""
    generator, _ = tiny_generator("llama")
    read = [adapter for adapter, _, _ in adapters_of("llama")]
    prompts, numbers = jnp.asarray(random_prompts([9] * 5), jnp.int32), jnp.asarray([3, 0, 1, 2, 1], jnp.int32)

    def logits(mesh: Mesh) -> np.ndarray:
        options = ModelOptions(scan=False, remat="none", mesh=mesh)
        model = CausalLM(tiny_models.configuration("llama", NUM_LAYERS), options, lora=covering(read))
        base, stack = jax.device_put(generator.base, weight_shardings(model, mesh)), place_stack(read, model, mesh)
        return np.asarray(two_steps(model, num_adapters=4)(base, stack, prompts, numbers)[1])

    one, two = (logits(make_mesh(jax.devices()[:n], MeshShape(tensor=n))) for n in (1, 2))
    assert np.abs(one - two).max() < LOGITS * np.abs(one).max()


@functools.cache
def programs_of(name: str) -> tuple[ServingPrograms, Compiler]:
    generator, _ = tiny_generator(name)
    (model, stack), compiler = stack_of(name), Compiler()
    return ServingPrograms(Decoder(model), generator.base, stack, generator.mesh, compiler, 4), compiler


@contextmanager
def running_engine(name: str, sizes: BatchSizes) -> Iterator[Engine]:
    generator, _ = tiny_generator(name)
    programs, compiler = programs_of(name)
    models = ["base", *(adapter.name for adapter, _, _ in adapters_of(name))]
    stack = stack_of(name)[1]
    lane = Lane(models, programs, generator.base, stack, generator.prompts.decode, sizes, generator.mesh)
    engine = Engine([lane], compiler, num_rows=sizes.rows[-1], max_length=LONGEST, max_waiting=64)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0.0)
        engine.join()


Started = tuple[Job, "queue.SimpleQueue[AnswerPiece]"]


def start(engine: Engine, model: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Started:
    pieces: queue.SimpleQueue[AnswerPiece] = queue.SimpleQueue()
    job = Job(model, tuple(prompt), max_tokens, pieces.put, num_top=1, **options)
    engine.submit([job])
    return job, pieces


def tokens_of(started: Started) -> list[int]:
    tokens: list[int] = []
    while True:
        piece = started[1].get(timeout=300)
        assert piece.error is None
        tokens += [chosen.token for chosen in piece.chosen]
        if piece.is_last:
            return tokens


@pytest.mark.parametrize("name", ["llama", slow_case("exaone4"), slow_case("falcon_h1")])
def test_rows_of_different_adapters_that_come_and_go_get_what_they_get_alone(name: str) -> None:
    """Greedy and sampled. While the batch grows, it has fewer and then more rows than there are adapters."""
    generator, _ = tiny_generator(name)
    prompts = random_prompts((5, 17, 40, 11, 60, 3, 26, 33))
    new, rules = [12, 24, 20, 9, 30, 30, 8, 16], [Sampling(), Sampling(1.1, 0.9, seed=5)]
    with running_engine(name, BatchSizes((2, 6), (LONGEST,))) as engine:
        started = []
        for i, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
            model = ("base", "adapter0", "adapter1", "adapter2")[i % 4]
            started.append(start(engine, model, prompt, count, sampling=rules[i // 4], number=i // 4))
            if i in (0, 1, 4):  # the others join while these run
                while started[-1][1].empty():
                    time.sleep(0.001)
        found = [tokens_of(one) for one in started]
    for number in range(4):
        _, own, tree = adapters_of(name)[max(number - 1, 0)]
        alone = Generator(own, generator.base, tree, generator.prompts, generator.mesh)
        for i, rule in zip((number, number + 4), rules, strict=True):
            answers = alone.continue_tokens(prompts[number::4], max_tokens=30, adapted=number > 0, sampling=rule)
            assert found[i] == answers[i // 4][0][: new[i]], i
    assert len({*map(tuple, found)}) == 8


def test_an_adapter_that_overflows_fails_alone() -> None:
    """Its matrices are finite, its logits are not. Rows of the same batch get what they get without it."""
    generator, _ = tiny_generator("llama")
    large = adapters_of("llama")[0][0]
    matrices = {n: a * np.float32(1e18) for n, a in large.matrices.items()}
    read = [ReadAdapter("large", Path("large"), large.spec, matrices, large.layers), adapters_of("llama")[1][0]]
    model = generator.model.with_lora(covering(read))
    stack, prompts = place_stack(read, model, generator.mesh), jnp.asarray(random_prompts([9] * 3), jnp.int32)
    steps = two_steps(model, num_adapters=3)
    mixed, calm = (steps(generator.base, stack, prompts, jnp.asarray(n, jnp.int32)) for n in ([0, 1, 2], [0, 0, 2]))
    for step in range(2):
        assert not np.isfinite(mixed[step][1]).all()
        assert np.array_equal(mixed[step][::2], calm[step][::2])


def test_only_plain_lora_shares_a_batch() -> None:
    generator, _ = tiny_generator("mixtral")
    linear = linear_layers(generator.model.module)
    q, k = (next(name for name in linear if name.endswith(end)) for end in ("q_proj", "k_proj"))
    experts = "model.layers.0.mlp.experts.down_proj"
    plain = LoraSpec(2, targets=(q, k))
    cases = {
        "it is DoRA": LoraSpec(2, targets=(q,), dora=True),
        "trained as a whole": LoraSpec(2, targets=(q,), tokens=TrainedTokens((3,))),
        "more than linear": LoraSpec(2, targets=(q, experts)),
    }
    found = [adapter_of(generator, reason, spec, seed=0)[0] for reason, spec in cases.items()]
    first = adapter_of(generator, "first", plain, seed=0)[0]
    large = ReadAdapter("large", Path(), plain, {n: a * LARGEST for n, a in first.matrices.items()}, first.layers)
    for adapter in found:
        assert adapter.name in why_alone(adapter, linear)
    assert "too large" in why_alone(large, linear)
    assert why_alone(first, linear) == ""
    shared, alone = split_by_kind([found[0], first, large], generator.model)
    assert [one.name for one in shared] == ["first"] and [one.name for one, _ in alone] == ["it is DoRA", "large"]


def test_padding_to_the_largest_rank_is_bounded() -> None:
    generator, _ = tiny_generator("llama")
    names = tuple(name for name in linear_layers(generator.model.module) if "head" not in name)
    small = [adapter_of(generator, f"small{i}", LoraSpec(1, targets=names), seed=i)[0] for i in range(8)]
    wide = adapter_of(generator, "wide", LoraSpec(32, targets=names), seed=0)[0]
    shared, alone = split_by_kind([wide, *small], generator.model)
    assert [one.name for one in shared] == [one.name for one in small]
    assert [one.name for one, _ in alone] == ["wide"] and "memory" in alone[0][1]
    shared, alone = split_by_kind([wide, small[0]], generator.model)
    assert len(shared) == 2 and not alone


def test_64_adapters_have_the_programs_of_one() -> None:
    """And the matrices of the rows only, where rows are fewer than adapters."""
    generator, _ = tiny_generator("llama")
    names = tuple(name for name in linear_layers(generator.model.module) if "q_proj" in name)
    read = [adapter_of(generator, f"a{i}", LoraSpec(2, targets=names), seed=i)[0] for i in range(64)]
    model = generator.model.with_lora(covering(read))
    stack, compiler = place_stack(read, model, generator.mesh), Compiler()
    programs = ServingPrograms(Decoder(model), generator.base, stack, generator.mesh, compiler, 65)
    models, decode = ["base", *(one.name for one in read)], generator.prompts.decode
    sizes = BatchSizes((4,), (LONGEST,))
    lane = Lane(models, programs, generator.base, stack, decode, sizes, generator.mesh)
    engine = Engine([lane], compiler, num_rows=4, max_length=LONGEST, max_waiting=100)
    engine.start()
    prompt = random_prompts([8])[0]
    found = [tokens_of(one) for one in [start(engine, model, prompt, 6) for model in models]]
    engine.stop(0.0)
    engine.join()
    assert compiler.num_programs == 6  # prefill, begin, advance, insert, and reshape of a new and of a joining row
    for i in (0, 1, 40, 64):
        own = generator.model.with_lora(read[0].spec)
        tree = {n: jnp.asarray(a) for n, a in read[max(i - 1, 0)].matrices.items()}
        alone = Generator(own, generator.base, tree, generator.prompts, generator.mesh)
        assert found[i] == alone.continue_tokens([prompt], max_tokens=6, adapted=i > 0)[0][0], i


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    model = tiny_run.write_model(folder / "model")
    write_adapter(model, folder / "one", seed=1)
    write_adapter(model, folder / "two", seed=2, rank=2, use_rslora=True, target_modules=["o_proj", "down_proj"])
    write_adapter(model, folder / "dora", seed=3, use_dora=True)
    return folder


def answers_of(service: Service, names: Sequence[str], prompt: list[int]) -> list[list[int]]:
    """Of all these models at once."""
    started = [start(service.engine, name, prompt, 12) for name in names]
    return [tokens_of(one) for one in started]


@pytest.mark.parametrize("can_share", [True, False])
def test_what_cannot_share_a_batch_takes_turns_and_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, can_share: bool
) -> None:
    """An adapter of PEFT's that is DoRA; and all of them, if the model mixes the rows of a batch."""
    names, notes = ("one", "two", "dora"), list[str]()

    def mixed(*args: object) -> jax.Array:
        raise RowsMixed("The rows are mixed.", do="use one adapter at a time")

    if not can_share:
        monkeypatch.setattr(lora, "own_ranks", mixed)
    service = open_service(
        str(folder / "model"),
        adapters=[str(folder / name) for name in names],
        num_rows=4,
        max_length=64,
        fewest_slots=64,
        listener=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )
    try:
        lanes = [lane.models for lane in service.engine._lanes]
        assert lanes == ([("model", "one", "two"), ("dora",)] if can_share else [(name,) for name in ("model", *names)])
        said = [note for note in notes if "takes turns" in note]
        assert [note.partition(" ")[0] for note in said] == [name for (name, *_) in lanes[1:]]
        assert "it is DoRA" in said[-1]
        prompt = random_prompts([9])[0]
        found = dict(zip(("model", *names), answers_of(service, ("model", *names), prompt), strict=True))
    finally:
        service.engine.close()
        for served in service.models.values():
            served.prompts.close()
    for name in names:
        generator = Generator.open(str(folder / "model"), adapter=folder / name)
        for model, adapted in ((name, True), ("model", False)):
            generator.prompts.stops = ()
            assert found[model] == generator.continue_tokens([prompt], max_tokens=12, adapted=adapted)[0][0], model
    assert len({*map(tuple, found.values())}) == 4


def test_an_input_without_an_item_per_row_is_refused() -> None:
    low, numbers = jnp.ones((6, 4)), jnp.asarray([0, 1, 1])
    with pytest.raises(RowsMixed, match="3 sequences"):
        lora.own_ranks(low, ChosenAdapters(numbers, 2))
    expected = [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert lora.own_ranks(low[:3], ChosenAdapters(numbers, 2)).tolist() == expected
    assert lora.own_ranks(low[:3, None], ChosenAdapters(numbers, 2))[:, 0].tolist() == expected
