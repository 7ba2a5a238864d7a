"""The engine of the server: rows that join and leave get the same tokens as alone, and failures stay with their row."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dose import slow_case
from test_generate import random_prompts, tiny_generator

from trillora.engine.sampling import Sampling
from trillora.generation.generator import Generator
from trillora.model.decode import Decoder
from trillora.serving.engine import Engine
from trillora.serving.job import Job, Piece
from trillora.serving.lane import Lane, Sizes
from trillora.serving.programs import Compiler, Programs

LONGEST = 96
Started = tuple[Job, "queue.SimpleQueue[Piece]"]


@contextmanager
def running_engine(generator: Generator, num_rows: int = 8, max_waiting: int = 64) -> Iterator[Engine]:
    """An engine with the adapter and the base of a generator. Caches start with 32 slots, so that they have to grow."""
    compiler = Compiler()
    programs = Programs(Decoder(generator.model), generator.base, generator.adapter, generator.mesh, compiler)
    sizes = Sizes.up_to(num_rows, LONGEST, fewest_slots=32)
    trees = {"adapter": generator.adapter, "base": generator.neutral_adapter}
    lanes = {
        name: Lane(programs, generator.base, tree, generator.prompts.decode, sizes, generator.mesh)
        for name, tree in trees.items()
    }
    engine = Engine(lanes, compiler, num_rows=num_rows, max_length=LONGEST, max_waiting=max_waiting)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0.0)
        engine.join()


def start(engine: Engine, prompt: list[int], max_tokens: int, **options: Any) -> Started:
    pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    job = Job(options.pop("model", "adapter"), tuple(prompt), max_tokens, pieces.put, num_top=1, **options)
    engine.submit([job])
    return job, pieces


def finished(started: Started) -> tuple[list[int], Piece]:
    """The tokens of an answer, and its last piece."""
    tokens: list[int] = []
    while True:
        piece = started[1].get(timeout=60)
        tokens += [chosen.token for chosen in piece.chosen]
        if piece.is_last:
            return tokens, piece


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon_h1", slow_case("gemma2"), slow_case("mamba2")])
def test_rows_that_join_at_different_times_get_the_tokens_they_get_alone(name: str) -> None:
    generator, _ = tiny_generator(name)
    lengths = (5, 17, 40, 11, 70, 3, 26, 33)
    prompts = random_prompts(lengths)
    new = [12, 24, 20, 9, 26, 30, 8, 16]
    with running_engine(generator) as engine:
        started = []
        for i, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
            started.append(start(engine, prompt, count, model="base" if i == 3 else "adapter"))
            if i in (0, 2, 5):  # the others join while these run
                started[-1][1].put(started[-1][1].get(timeout=120))
        found = [finished(one) for one in started]
    for i, (prompt, count, (tokens, last)) in enumerate(zip(prompts, new, found, strict=True)):
        [(alone, _)] = generator.continue_tokens([prompt], max_tokens=count, adapted=i != 3)
        assert tokens == alone, i
        assert last.finish == "length" and last.num_tokens == count


def test_sampling_repeats_for_a_seed_whoever_else_is_in_the_batch() -> None:
    generator, _ = tiny_generator("llama")
    prompts = random_prompts((5, 17, 11, 30))
    rules = [Sampling(0.9, seed=3), Sampling(0.0), Sampling(1.5, 0.8, 20, seed=2**31), Sampling(0.7, 0.9, seed=3)]
    with running_engine(generator) as engine:
        started = [start(engine, p, 12, sampling=rule) for p, rule in zip(prompts, rules, strict=True)]
        second = start(engine, prompts[0], 12, sampling=rules[0], number=1)
        found = [finished(one)[0] for one in started]
        other = finished(second)[0]
    for prompt, rule, tokens in zip(prompts, rules, found, strict=True):
        assert [tokens] == [t for t, _ in generator.continue_tokens([prompt], max_tokens=12, sampling=rule)]
    assert other != found[0]
