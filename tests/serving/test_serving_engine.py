"""The engine of the server: rows that join and leave get the same tokens as alone, and failures stay with their row."""

from __future__ import annotations

import copy
import functools
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from chat_tokenizers import chat_tokenizer
from dose import slow_case
from tiny_generators import random_prompts, tiny_generator

from trillora.engine.rows import probabilities
from trillora.engine.sampling import Sampling
from trillora.events import ignore_events
from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompts
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.decode import Decoder
from trillora.model.kv_cache import StaticCache, held_slots, resized
from trillora.serving.engine import Engine, QueueFull, Stopping
from trillora.serving.job import AnswerPiece, Job, SampledToken
from trillora.serving.lane import BatchSizes, Lane
from trillora.serving.programs import BatchShape, Compiler, ServingPrograms
from trillora.serving.served import AdapterBatch, _warm_up
from trillora.serving.text import AnswerText

LONGEST = 96
Started = tuple[Job, "queue.SimpleQueue[AnswerPiece]"]


@functools.cache
def programs_of(generator: Generator) -> tuple[ServingPrograms, Compiler]:
    compiler = Compiler()
    return ServingPrograms(
        Decoder(generator.model), generator.base, generator.adapter, generator.mesh, compiler
    ), compiler


@contextmanager
def running_engine(
    generator: Generator, rows: tuple[int, ...] = (4,), slots: tuple[int, ...] = (48, LONGEST), max_waiting: int = 64
) -> Iterator[Engine]:
    """An engine with the adapter and the base of a generator. Caches start with few slots, so that they have to grow.
    Few shapes: each takes a second to compile."""
    programs, compiler = programs_of(generator)
    sizes = BatchSizes(rows, slots)
    trees = {"adapter": generator.adapter, "base": generator.neutral_adapter}
    lanes = [
        Lane([name], programs, generator.base, tree, generator.prompts.decode, sizes, generator.mesh)
        for name, tree in trees.items()
    ]
    engine = Engine(lanes, compiler, num_rows=rows[-1], max_length=LONGEST, max_waiting=max_waiting)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0.0)
        engine.join()


def start(engine: Engine, prompt: list[int], max_tokens: int, **options: Any) -> Started:
    pieces: queue.SimpleQueue[AnswerPiece] = queue.SimpleQueue()
    job = Job(options.pop("model", "adapter"), tuple(prompt), max_tokens, pieces.put, num_top=1, **options)
    engine.submit([job])
    return job, pieces


def finished(started: Started) -> tuple[list[int], AnswerPiece]:
    """The tokens of an answer, and its last piece."""
    tokens: list[int] = []
    while True:
        piece = started[1].get(timeout=60)
        tokens += [chosen.token for chosen in piece.chosen]
        if piece.is_last:
            return tokens, piece


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("exaone4", (48, LONGEST)),  # layers with and without a window
        ("falcon_h1", (LONGEST,)),  # attention and a recurrence
        *(slow_case(name, (48, LONGEST)) for name in ("gemma2", "llama", "mistral", "mamba2", "qwen3_next", "mixtral")),
    ],
)
def test_rows_that_join_at_different_times_get_the_tokens_they_get_alone(name: str, slots: tuple[int, ...]) -> None:
    generator, _ = tiny_generator(name)
    prompts = random_prompts((5, 17, 40, 11, 60, 3, 26, 33))
    new = [12, 24, 20, 9, 36, 30, 8, 16]
    with running_engine(generator, slots=slots) as engine:
        engine._budget *= 2  # rows of both lanes at the same time
        started = []
        for i, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
            started.append(start(engine, prompt, count, model="base" if i == 3 else "adapter"))
            if i in (0, 2, 5):  # the others join while these run
                while started[-1][1].empty():
                    time.sleep(0.001)
        found = [finished(one) for one in started]
    alone = {
        adapted: generator.continue_tokens(prompts, max_tokens=max(new), adapted=adapted) for adapted in (False, True)
    }
    for i, (count, (tokens, last)) in enumerate(zip(new, found, strict=True)):
        assert tokens == alone[i != 3][i][0][:count], i
        assert last.finish == "length" and last.num_tokens == count


def test_sampling_repeats_for_a_seed_with_any_others_in_the_batch() -> None:
    generator, _ = tiny_generator("exaone4")
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


def test_answers_to_one_prompt_share_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy or sampled, each is what it is alone, also if they are more than rows. Another prompt or another model is
    read for itself, and nothing stays in memory."""
    generator, _ = tiny_generator("exaone4")
    prompt, other = random_prompts((17, 11))
    read: list[tuple[str, int]] = []
    prompt_of = Lane._prompt

    def counted(lane: Lane, job: Job, num_prompt: int) -> Any:
        read.append((job.model, len(job.prompt)))
        return prompt_of(lane, job, num_prompt)

    monkeypatch.setattr(Lane, "_prompt", counted)
    rules = [Sampling(0.9, seed=3)] * 5 + [Sampling()]
    with running_engine(generator) as engine:
        engine._budget *= 2  # rows of both lanes at the same time
        pieces: list[queue.SimpleQueue[AnswerPiece]] = [queue.SimpleQueue() for _ in rules]
        shared = tuple(prompt)
        jobs = [Job("adapter", shared, 12, pieces[i].put, rule, number=i) for i, rule in enumerate(rules)]
        engine.submit(jobs)
        found = [finished((job, own))[0] for job, own in zip(jobs, pieces, strict=True)]
        assert read == [("adapter", 17)]
        started = [start(engine, p, 12, model=model) for p, model in ((other, "adapter"), (other, "base"))]
        assert finished(started[0])[0] != finished(started[1])[0]
        assert sorted(read[1:]) == [("adapter", 11), ("base", 11)]
        while any(lane._last_prompt is not None for lane in engine._lanes):
            time.sleep(0.001)
    alone = [
        np.concatenate(list(generator.write([prompt], max_tokens=12, sampling=rule, numbers=[i])), axis=1)[
            0, :12
        ].tolist()
        for i, rule in enumerate(rules)
    ]
    assert found == alone and len({*map(tuple, found)}) == len(rules)


def test_text_is_shown_in_whole_characters_and_never_a_part_of_a_stop_string() -> None:
    pieces = ["Hel", "lo E", "N", "X E", "N", "D tail"]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(pieces[token] for token in tokens)

    text = AnswerText(decode, stops=("END", "never"))
    shown = [text.add(SampledToken(i, -0.5, ())) for i in range(5)]
    assert shown == ["Hel", "lo ", "", "ENX ", ""]
    assert [chosen.token for chosen in text.chosen()] == [0, 1, 2, 3]
    assert text.add(SampledToken(5, -0.5, ())) == "" and text.is_stopped
    assert text.rest() == "" and text.chosen(at_end=True) == ()  # no token of the stop string
    assert text.num_tokens == 6

    whole = "a ☃ \U0001f600é".encode()
    text = AnswerText(lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    shown = [text.add(SampledToken(byte, 0.0, ())) for byte in whole]
    assert "".join(shown) == whole.decode() and "\ufffd" not in "".join(shown)
    text = AnswerText(lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    assert "".join(text.add(SampledToken(0xFF, 0.0, ())) for _ in range(40)) + text.rest() == "\ufffd" * 40


@pytest.mark.parametrize("name", ["chatml", "mistral"])  # Mistral's decoder removes the first space
def test_pieces_of_text_equal_the_decoded_answer(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    prompts = Prompts(tokenizer, template=None)
    random, words = np.random.default_rng(0), tokenizer("the quick brown", add_special_tokens=False)["input_ids"]
    for stops in ((), ("zzzz no",)):
        for i in range(20):
            tokens = random.integers(0, len(tokenizer), 30).tolist()
            tokens += [*words, *[tokenizer.eos_token_id] * (i % 4), *words]  # control tokens have no text
            text = AnswerText(prompts.decode, stops)
            assert "".join(text.add(SampledToken(t, 0.0, ())) for t in tokens) + text.rest() == prompts.decode(tokens)


def test_scores_are_of_the_models_own_positions() -> None:
    """A prompt of 98 tokens has 128 slots, which are more than the 100 positions that this model has learned."""
    generator, _ = tiny_generator("gpt2")
    [prompt] = random_prompts((98,))
    config = copy.deepcopy(generator.model.module.config)
    config.n_positions = 100
    [table] = [name for name in generator.base if "wpe" in name]
    few = {**generator.base, table: generator.base[table][:100]}
    found = []
    for limit, base in ((128, generator.base), (100, few)):
        config.n_positions = limit
        options = ModelOptions(scan=False, remat="none", mesh=generator.mesh)
        decoder = Decoder(CausalLM(copy.deepcopy(config), options, lora=generator.model.lora))
        compiler = Compiler()
        programs = ServingPrograms(decoder, base, generator.adapter, generator.mesh, compiler)
        lane = Lane(["adapter"], programs, base, generator.adapter, str, BatchSizes((1,), (limit,)), generator.mesh)
        pieces: queue.SimpleQueue[AnswerPiece] = queue.SimpleQueue()
        job = Job("adapter", tuple(prompt), 0, pieces.put, scores_prompt=True)
        lane._score(job, programs.score(128).result())
        found.append([token.logprob for token in pieces.get().prompt])
        compiler.close()
    assert found[0][1:] == pytest.approx(found[1][1:], abs=1e-5)  # float32, perhaps in another order


def test_probabilities_next_to_an_infinite_logit_are_not_numbers() -> None:
    logits = jnp.asarray([[0.0, jnp.inf, 1.0], [0.0, 2.0, -jnp.inf]])
    written = probabilities(logits, jnp.asarray([0, 0]), jnp.asarray([False, False]))
    assert np.isnan(written.logprobs_BN).tolist() == [True, False]


def test_a_larger_batch_that_does_not_compile_fails_only_answers_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, _ = tiny_generator("exaone4")
    [prompt] = random_prompts((5,))
    [(tokens, _)] = generator.continue_tokens([prompt], max_tokens=20)
    stop = next(token for i, token in enumerate(tokens) if i > 6 and token not in tokens[:i])
    asked: list[int] = []
    advance = ServingPrograms.advance

    def failing(programs: ServingPrograms, shape: BatchShape) -> Future[Any]:
        if shape.num_slots != LONGEST:
            return advance(programs, shape)
        asked.append(shape.num_slots)
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("no memory"))
        return failed

    with running_engine(generator) as engine:
        monkeypatch.setattr(ServingPrograms, "advance", failing)
        monkeypatch.setattr(Lane, "_num_steps", lambda lane: 1)
        short = finished(start(engine, prompt, 80, stop_tokens=(stop,)))
        assert short[1].finish == "stop" and short[0] == tokens[: tokens.index(stop)] and len(asked) == 1
        error = finished(start(engine, prompt, 80))[1].error
        assert error is not None and "no memory" in error.what
        assert finished(start(engine, prompt, 9))[1].finish == "length"


def test_a_server_with_one_row_and_no_queue_starts_with_several_programs() -> None:
    generator, _ = tiny_generator("exaone4")
    programs, _ = programs_of(generator)
    with running_engine(generator, rows=(1,), slots=(LONGEST,), max_waiting=0) as engine:
        batches = [AdapterBatch((lane.models[0],), {}, copy.copy(programs), num_tokens=0) for lane in engine._lanes]
        _warm_up(engine, batches, ignore_events)
        assert len(batches) == 2 and engine.is_alive


def test_a_cache_keeps_its_tokens_when_it_changes_its_size() -> None:
    config, last = tiny_models.configuration("mistral"), jnp.asarray([9, 20, 11])
    window = StaticCache(config, 64).layers[0].num_slots
    assert window == 8

    def ring(size: int) -> jax.Array:  # holds the number of each slot
        held = held_slots(last[:, None], min(size, window))
        return jnp.broadcast_to(held[:, None, :, None], (3, 1, min(size, window), 1))

    def cache(size: int) -> list[dict[str, jax.Array]]:
        return [{"keys": ring(size), "values": -ring(size), "recurrence0": ring(1)}]

    config.num_hidden_layers = 1
    for old, new in ((4, 6), (6, 4), (6, 64), (64, 6), (16, 64)):
        [found] = resized(config, cache(old), last, new)
        expected = held_slots(last[:, None], min(new, window))
        kept = expected > last[:, None] - min(old, window)
        assert (found["keys"][:, 0, :, 0] == expected)[kept].all() and kept.sum() >= 3 * min(old, new, window)
        assert (found["values"] == -found["keys"])[kept[:, None, :, None]].all()
        assert (found["recurrence0"] == ring(1)).all()


def test_the_queue_is_bounded_and_cancelled_jobs_leave_it() -> None:
    generator, _ = tiny_generator("exaone4")
    with running_engine(generator, rows=(1,), slots=(LONGEST,), max_waiting=3) as engine:
        jobs = [start(engine, [5] * 10, 60) for _ in range(4)]
        with pytest.raises(QueueFull):
            for _ in range(3):
                jobs.append(start(engine, [5] * 10, 60))
        engine.cancel([job for job, _ in jobs[1:]])
        assert finished(jobs[0])[1].finish == "length"
        assert finished(start(engine, [5] * 10, 3))[1].num_tokens == 3
        assert all(pieces.empty() or not pieces.get().is_last for _, pieces in jobs[1:])
        left = start(engine, [5] * 10, 60)
        engine.stop(0.0)
        error = finished(left)[1].error
        assert isinstance(error, Stopping)
        with pytest.raises(Stopping):
            start(engine, [5], 1)


def test_lanes_share_the_memory_of_the_rows() -> None:
    """Many jobs of two lanes: the caches never exceed the budget, and every job ends."""
    generator, _ = tiny_generator("exaone4")
    with running_engine(generator, rows=(1, 4), slots=(LONGEST,)) as engine:
        lanes, largest = engine._lanes, 0
        started = [start(engine, [5 + i] * (3 + i), 40, model=("adapter", "base")[i % 2]) for i in range(10)]
        waiting = list(started)
        while waiting:
            largest = max(largest, sum(lane.num_bytes(lane.shape) for lane in lanes))
            waiting = [one for one in waiting if one[1].empty() or finished_now(one) is None]
            time.sleep(0.002)
        assert 0 < largest <= engine._budget


def finished_now(started: Started) -> AnswerPiece | None:
    while not started[1].empty():
        piece = started[1].get()
        if piece.is_last:
            assert piece.finish == "length"
            return piece
    return None
