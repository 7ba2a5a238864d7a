"""Evaluation during training: the loss on a fixed set of documents, and answers to fixed prompts.

Both depend only on the adapter, so an evaluation that is repeated after an interruption gives the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trillora.data.batches import Batches
from trillora.data.documents import Documents
from trillora.data.questions import Question, question_of
from trillora.data.stage import StageData, evaluation_batches
from trillora.devices.chips import GIB
from trillora.devices.mesh import local_rows, put_batch, replicated
from trillora.engine.step import Batch
from trillora.errors import TrilloraError
from trillora.evaluation.token_metrics import PreferenceSums, RunningSums, TokenMetrics, TokenSums
from trillora.events import Listener, Note, Sample
from trillora.generation.generator import Generator, bucket_length
from trillora.generation.prompts import Prompts, configured_stops
from trillora.model.layout import Tree
from trillora.model.limits import why_not_decode
from trillora.model.loading.source import OpenModel
from trillora.step.build import Assembly
from trillora.step.compile_guard import Planned, Programs, shape_text

TEXT_PROMPT = 24  # tokens of a plain text that the model has to continue
TEXT_ANSWER = 48  # tokens of the real continuation, shown next to the model's
PROMPTS_AT_ONCE = 8


class Evaluator:
    """Computes the loss of the evaluation set with one compiled program, in batches of one shape."""

    def __init__(self, assembly: Assembly, batches: Batches, stage: str, like: Evaluator | None = None) -> None:
        """`like`: another evaluator with the same shapes, whose program is used."""
        self._mesh, self.batches = assembly.mesh, batches
        shape = (batches.batch_size, batches.sequence_length)
        self.compiled: Any = assembly.compile_evaluation(*shape) if like is None else like.compiled
        self._program = Programs(f"The evaluation of stage {stage}", {shape: self.compiled})
        self._has_preferences = assembly.has_preferences

    def measure(
        self, adapter: Tree, base: Tree, check: Callable[[], None], reference: Tree | None = None, beta: float = 0.0
    ) -> TokenMetrics:
        """`check` is called before every batch; it may raise to abandon the evaluation. For preferences, `reference`
        is the adapter that they are compared with, and `beta` their strength."""
        beta_on_devices = jax.device_put(np.float32(beta), replicated(self._mesh))
        sums: RunningSums = PreferenceSums() if self._has_preferences else TokenSums()
        for number in range(self.batches.steps_per_epoch):
            check()
            sums.add(self._program(adapter, reference, base, beta_on_devices, self._placed(number)))
        return sums.metrics()

    def _placed(self, number: int) -> Batch:
        rows = local_rows(self.batches.batch_size, self._mesh)
        return put_batch(self.batches.batch(number, rows), self._mesh, self.batches.batch_size)


@dataclass(frozen=True)
class Measures:
    """The evaluation of a stage. Without an evaluation set or prompts, its parts are None."""

    evaluator: Evaluator | None = None
    sampler: Sampler | None = None
    questions: tuple[Question, ...] = ()

    def __bool__(self) -> bool:
        return self.evaluator is not None or self.sampler is not None


class Sampler:
    """Answers fixed prompts with the current adapter."""

    def __init__(self, assembly: Assembly, prompts: Prompts, max_tokens: int) -> None:
        self._make = functools.partial(
            Generator,
            assembly.model,
            assembly.base_shapes,
            assembly.state_shapes.adapter,
            prompts,
            assembly.mesh,
            batch_size=PROMPTS_AT_ONCE,
        )
        self._prompts, self._max_tokens = prompts, max_tokens
        self.has_answered = False  # the first answers compile its programs

    @functools.cached_property
    def _generator(self) -> Generator:
        return self._make()

    def prepare(self, questions: Sequence[Question]) -> None:
        """Compiles the programs before they are needed."""
        self._generator.prepare([q.prompt for q in questions], max_tokens=self._room(questions))

    def answer(self, questions: Sequence[Question], adapter: Tree, base: Tree) -> tuple[Sample, ...]:
        generator = self._generator
        generator.base, generator.adapter = base, adapter
        answers = generator.continue_tokens([q.prompt for q in questions], max_tokens=self._room(questions))
        # The next step reuses the adapter's memory, so keep no reference to it.
        generator.adapter = {}
        self.has_answered = True
        decode = self._prompts.decode
        return tuple(
            Sample(
                self._prompts.shown_question(question.prompt),
                decode(tokens),
                decode(question.expected) if question.expected else None,
            )
            for question, (tokens, _) in zip(questions, answers, strict=True)
        )

    def _room(self, questions: Sequence[Question]) -> int:
        """How long an answer may be, in tokens."""
        longest = self._generator.longest
        room = min(self._max_tokens, *(longest - len(q.prompt) for q in questions)) if longest else self._max_tokens
        if room < 1:
            raise TrilloraError(
                "A prompt for sampling leaves no room for an answer.",
                where="evaluate.prompts",
                do=f"keep prompts below {longest} tokens, or set evaluate.num_samples to 0",
            )
        return room


@dataclass(frozen=True)
class EvalPlan:
    """What to evaluate in a stage, before anything is compiled for it."""

    stage: str
    batches: Batches | None = None  # of the evaluation set
    prompts: Prompts | None = None
    questions: tuple[Question, ...] = ()
    max_tokens: int = 0  # of an answer

    def programs(self) -> Iterator[Planned]:
        if self.batches is not None:
            shape = shape_text((self.batches.batch_size, self.batches.sequence_length))
            yield Planned(f"the evaluation of stage {self.stage}", shapes=shape)
        if self.questions:
            lengths = sorted(len(question.prompt) for question in self.questions)
            groups = [lengths[first : first + PROMPTS_AT_ONCE] for first in range(0, len(lengths), PROMPTS_AT_ONCE)]
            slots = dict.fromkeys(bucket_length(group[-1]) for group in groups)
            shapes = f"prompts of up to {', '.join(map(str, slots))} tokens, read and answered"
            yield Planned(f"the answers of stage {self.stage}", 2 * len(slots), shapes)


def plan_evaluation(
    stage: StageData, batch_size: int, opened: OpenModel, listener: Listener, *, answers: bool = True
) -> EvalPlan:
    """What the stage's recipe asks for, without samples where the model or the setup cannot generate."""
    options = stage.recipe.evaluate
    batches = evaluation_batches(stage, batch_size)
    if not answers or not (options.prompts or (options.num_samples and stage.evaluation is not None)):
        return EvalPlan(stage.name, batches)
    why_not = why_not_decode(opened.config)
    if jax.process_count() > 1:
        why_not = "runs with several processes cannot generate answers"
    if why_not:
        listener(Note(f"No samples: {why_not}"))
        return EvalPlan(stage.name, batches)
    tokenizer = opened.tokenizer
    template = stage.template or (tokenizer.get_chat_template() if tokenizer.chat_template else None)
    stops = configured_stops(opened.folder, opened.config)
    data = stage.recipe.data
    prompts = Prompts(
        tokenizer,
        template=template,
        template_date=data.template_date,
        arguments=data.template_arguments,
        stops=stops,
    )
    if options.prompts:
        questions = [Question(tuple(prompts.encode(prompt)), ()) for prompt in options.prompts]
    else:
        assert stage.evaluation is not None
        questions = sample_questions(stage.evaluation, options.num_samples)
    listener(Note(f"Every evaluation answers {len(questions)} prompts"))
    return EvalPlan(stage.name, batches, prompts, tuple(questions), options.max_tokens)


def make_measures(plan: EvalPlan, assembly: Assembly, listener: Listener, *, at_once: bool) -> Measures:
    """Compiles the evaluation; with `at_once` also the programs that answer prompts, else the first answers do."""
    evaluator = sampler = None
    if plan.batches is not None:
        num_documents = len(plan.batches.documents)
        listener(Note(f"Compiling the evaluation of {num_documents:,} held-out documents"))
        evaluator = Evaluator(assembly, plan.batches, plan.stage)
    if plan.prompts is not None and plan.questions:
        sampler = Sampler(assembly, plan.prompts, plan.max_tokens)
        if at_once:
            sampler.prepare(plan.questions)
    return Measures(evaluator, sampler, plan.questions)


def sample_questions(documents: Documents, count: int) -> list[Question]:
    """Prompts from the first evaluation documents: questions with their answer, or plain texts to continue."""
    found: list[Question] = []
    for index in range(len(documents)):
        if len(found) == count:
            break
        document = documents[index]
        if document.weight < 0:
            continue  # a bad answer is not what is expected
        if (question := question_of(document)) is None:
            cut = min(TEXT_PROMPT, len(document) // 2)
            tokens = document.tokens.tolist()
            question = Question(tuple(tokens[:cut]), tuple(tokens[cut : cut + TEXT_ANSWER]))
        if question.prompt:
            found.append(question)
    return found


def peak_memory_gib(mesh: Mesh, process_bytes: Callable[[], int]) -> float | None:
    """Peak memory of a device; on a CPU, the memory of this process."""
    device: Any = mesh.local_devices[0]
    if device.platform == "cpu":
        return process_bytes() / GIB
    stats = device.memory_stats()
    return stats["peak_bytes_in_use"] / GIB if stats and "peak_bytes_in_use" in stats else None
