"""A needle test: one sentence with a number is hidden in filler text, and asked for at the end.

    parse_lengths("1024,4096")                     (1024, 4096)
    measure_needle(generator, (1024, 4096)).adapter
    ((1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.5, 1.0, 1.0))      share found, by length and depth

    Every Monday the baker paints a wooden fence. … The number of the blue locker in Talmere is 48213. …
    What is the number of the blue locker in Talmere? Answer with the number only.

An answer is right if the first number in it is the hidden one. Texts and facts are made from a seed: the same test for
every model, and in no training data. Filler text has no numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np

from trillora.errors import TrilloraError
from trillora.evaluation.result import Needle
from trillora.events import Listener, Progress, ignore_events
from trillora.generation.generator import Generator
from trillora.generation.prompts import Prompt
from trillora.generation.system_message import with_system

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0: the fact is the first sentence
NUM_FACTS = 2  # in each cell of the table
MAX_ANSWER = 32  # tokens
MAX_LENGTHS = 16
_SAMPLE = 32  # sentences, to estimate how many tokens one has
_FORM = "write lengths of prompts in tokens, such as 4096 or 1024,4096,16384"
_WHEN = ("Every Monday", "In the evening", "After the rain", "Before lunch", "Late in autumn", "Once a month")
_WHO = ("the baker", "a tall gardener", "the ferry captain", "my neighbor", "an old teacher", "the young tailor")
_DOES = ("paints", "repairs", "carries home", "draws", "looks for", "sells", "cleans", "admires")
_WHAT = (
    "a wooden fence",
    "two small boats",
    "the green bicycle",
    "a basket of pears",
    "some paper lanterns",
    "a clock",
)
_THINGS = ("blue locker", "garden gate", "night train", "stone cottage", "silver mailbox", "corner shop")
_PLACES = ("Talmere", "Norvik", "Osterby", "Calden", "Brissan", "Vellmar", "Port Ansel", "Lower Hythe")


@dataclass(frozen=True)
class Fact:
    sentence: str
    question: str
    number: str


def parse_lengths(text: str) -> tuple[int, ...]:
    """The lengths of the prompts in tokens, in increasing order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,8}", part) for part in parts) or len(parts) > MAX_LENGTHS:
        raise TrilloraError(
            f"'{text[:80]}' is not a list of at most {MAX_LENGTHS} lengths.", where="--needle", do=_FORM
        )
    return tuple(sorted({int(part) for part in parts}))


def measure_needle(
    generator: Generator,
    lengths: Sequence[int],
    *,
    with_base: bool = True,
    seed: int = 0,
    listener: Listener = ignore_events,
) -> Needle:
    """Asks the adapter and its base. A prompt and its answer have at most the given length together."""
    if generator.longest is not None and lengths[-1] > generator.longest:
        what = f"Prompts of {lengths[-1]:,} tokens are longer than the {generator.longest:,} that this model reads."
        raise TrilloraError(what, where="--needle", do=f"use at most {generator.longest}")
    sides = ("base", "adapter") if with_base else ("adapter",)
    found: dict[str, list[tuple[float, ...]]] = {side: [] for side in sides}
    for number, length in enumerate(lengths):
        cells = [prompts_at(generator, length, depth, seed) for depth in DEPTHS]
        for side in sides:
            listener(Progress(f"Facts in long texts, {side}", number, len(lengths)))
            found[side].append(tuple(_share_found(generator, cell, length, side) for cell in cells))
    base = tuple(found["base"]) if with_base else None
    return Needle(tuple(lengths), DEPTHS, NUM_FACTS, base, tuple(found["adapter"]))


def prompts_at(generator: Generator, length: int, depth: float, seed: int) -> list[tuple[Fact, Prompt]]:
    """The facts of one cell, and prompts with as much filler text as leaves room for the answer."""
    cell = [fact_of(seed, int(100 * depth), number) for number in range(NUM_FACTS)]
    return [(fact, _fitted(generator, fact, depth, length, (seed, number))) for number, fact in enumerate(cell)]


def fact_of(*seed: int) -> Fact:
    choose = np.random.default_rng((0, *seed))
    name = f"{choose.choice(_THINGS)} in {choose.choice(_PLACES)}"
    number = str(choose.integers(10_000, 100_000))
    question = f"What is the number of the {name}? Answer with the number only."
    return Fact(f"The number of the {name} is {number}.", question, number)


def text_of(fact: Fact, depth: float, num_sentences: int, seed: Sequence[int]) -> str:
    """The filler sentences with the fact among them. Fewer sentences are the beginning of more."""
    columns = (_WHEN, _WHO, _DOES, _WHAT)
    sizes = [len(column) for column in columns]
    drawn = np.random.default_rng((1, *seed)).integers(0, sizes, (num_sentences, len(columns)))
    parts = [" ".join(map(getitem, columns, row)) + "." for row in drawn.tolist()]
    parts.insert(round(depth * num_sentences), fact.sentence)
    return " ".join(parts)


def is_found(answer: str, number: str) -> bool:
    """Whether the first number of the answer is this one; 48,213 is one number."""
    said = re.sub(r"(?<=\d)[,. ](?=\d{3}(?!\d))", "", answer.rpartition("</think>")[2])
    return re.findall(r"\d+", said)[:1] == [number]


def prompt_of(generator: Generator, text: str, question: str) -> Prompt:
    """As the model is asked elsewhere: with the system message of its training, or as plain text without a template."""
    if not generator.prompts.has_template:
        return f"{text}\n\nQuestion: {question}\nAnswer:"
    return with_system(f"{text}\n\n{question}", generator.system)


def _fitted(generator: Generator, fact: Fact, depth: float, length: int, seed: Sequence[int]) -> Prompt:
    def built(num_sentences: int) -> Prompt:
        return prompt_of(generator, text_of(fact, depth, num_sentences, seed), fact.question)

    return built(num_fitting(lambda number: _num_tokens(generator, built(number)), length - MAX_ANSWER))


def _num_tokens(generator: Generator, prompt: Prompt) -> int:
    """In the longer of the two chat templates."""
    return max(len(generator.encode(prompt, adapted=adapted)) for adapted in (False, True))


def num_fitting(num_tokens: Callable[[int], int], room: int) -> int:
    """How many sentences fit into `room` tokens. `num_tokens` counts the tokens of a prompt with some sentences; it is
    called only a few times."""
    least = num_tokens(0)
    if least > room:
        what = f"A prompt without filler text and its answer have {least + MAX_ANSWER} tokens already."
        raise TrilloraError(what, where="--needle", do=f"use lengths of at least {2 * (least + MAX_ANSWER)}")
    per_sentence = (num_tokens(_SAMPLE) - least) / _SAMPLE
    number = int((room - least) / per_sentence)
    while number and (excess := num_tokens(number) - room) > 0:
        number = max(0, number - math.ceil(excess / per_sentence))
    return number


def _share_found(generator: Generator, cell: Sequence[tuple[Fact, Prompt]], length: int, side: str) -> float:
    return sum(is_found(_answer(generator, prompt, length, side), fact.number) for fact, prompt in cell) / len(cell)


def _answer(generator: Generator, prompt: Prompt, length: int, side: str) -> str:
    """One prompt at a time, which needs the least memory; all prompts of a length share their programs."""
    adapted, room = side == "adapter", length - MAX_ANSWER
    tokens = generator.encode(prompt, adapted=adapted)
    [(written, _)] = generator.continue_tokens([tokens], max_tokens=MAX_ANSWER, adapted=adapted, at_least=room)
    return generator.prompts.decode(written)
