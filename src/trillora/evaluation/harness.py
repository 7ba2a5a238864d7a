"""Tasks of lm-evaluation-harness (extra `lm-eval`) with a run: its base and its adapter, through the harness' own model
interface.

    from trillora.evaluation.harness import run_tasks
    run_tasks("runs/first", ["arc_easy"], max_rows=100)
    # {"arc_easy": {"acc": {"base": 0.41, "adapter": 0.40, "stderr": 0.05}, …}}

The harness makes the texts and counts; `HarnessModel` answers its three kinds of requests. Texts are split into tokens
as the harness' own Hugging Face model does it, so that the figures can be compared with published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillora.engine.sampling import GREEDY, Sampling
from trillora.errors import TrilloraError, nearest
from trillora.evaluation.likelihood import Continuation, TokenScorer, in_two
from trillora.events import Listener, ignore_events
from trillora.generation.generator import Generator
from trillora.locks.extras import install_command
from trillora.runs.adapter import adapter_of
from trillora.runs.saved import SavedRun

if TYPE_CHECKING:
    from trillora.model.loading.types import Tokenizer

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise TrilloraError(
        "Tasks of lm-evaluation-harness need the package lm_eval, which brings about forty others.",
        where="--harness",
        do=install_command("lm-eval"),
    ) from error

MAX_NEW_TOKENS = 256  # of an answer, if the task does not say: the harness' own default
DEFAULT_LENGTH = 2048  # of models that do not say how long they can be
BOOTSTRAP_ROUNDS = 1000  # for the standard errors of metrics that have no formula

Results = dict[str, dict[str, dict[str, float | None]]]


class HarnessModel(LM):
    """A generator as the harness' model: its adapter, or its base."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, *, adapted: bool = True, listener: Listener = ignore_events
    ) -> None:
        super().__init__()
        self._generator, self._tokenizer, self._adapted, self._listener = generator, tokenizer, adapted, listener
        self._scorer = TokenScorer(generator)
        self._label = "Harness, adapter" if adapted else "Harness, base"
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self._first = int(first)  # what comes before a text without context

    @property
    def max_length(self) -> int:
        return self._generator.longest or DEFAULT_LENGTH

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as text, rendered in a process with limits. Without `add_generation_prompt`, its last message is the
        beginning of the answer."""
        asked = chat_history if add_generation_prompt else chat_history[:-1]
        tokens = self._generator.prompts.encode(asked)
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if add_generation_prompt else text + chat_history[-1]["content"]

    def encode(self, text: str) -> list[int]:
        """With BOS if the tokenizer adds it, and the text does not start with it already."""
        start = self._tokenizer.bos_token
        return list(self._tokenizer.encode(text, add_special_tokens=not (start and text.startswith(start))))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._likelihoods([self._in_two(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, each in windows of the model's length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[Continuation] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.encode(request.args[0])
            found = get_rolling_token_windows(tokens, self._first, self.max_length, context_len=1)
            windows += [Continuation(*map(tuple, make_disjoint_window(window))) for window in found]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._likelihoods(windows), strict=True):
            totals[owner] += log_probability
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop text. Requests with the same options are answered together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        answers: dict[int, str] = {}
        for numbers in groups.values():
            options = requests[numbers[0]].args[1]
            texts = self._answers([requests[number].args[0] for number in numbers], options)
            answers |= dict(zip(numbers, texts, strict=True))
        return [answers[number] for number in range(len(requests))]

    def _answers(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = min(int(options.get("max_gen_toks", MAX_NEW_TOKENS)), self.max_length - 1)
        room = self.max_length - most
        prompts = [self.encode(context)[-room:] or [self._first] for context in contexts]
        sampling = GREEDY
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            sampling = Sampling(float(options.get("temperature", 1.0)), float(options.get("top_p", 1.0)), seed=0)
        written = self._generator.continue_tokens(prompts, max_tokens=most, sampling=sampling, adapted=self._adapted)
        return [_cut(self._generator.prompts.decode(tokens), stops) for tokens, _ in written]

    def _in_two(self, context: str, continuation: str) -> Continuation:
        prompt, tokens = in_two(self.encode, context, continuation) if context else ((), ())
        if not prompt:
            tokens = tuple(self._tokenizer.encode(context + continuation, add_special_tokens=False))
            prompt = (self._first,)
            if tokens[:1] == prompt:
                tokens = tokens[1:]
        # Too long: the beginning of the context is lost, as in the harness' own models.
        return Continuation(prompt[-max(self.max_length + 1 - len(tokens), 1) :], tokens)

    def _likelihoods(self, asked: Sequence[Continuation]) -> list[tuple[float, bool]]:
        adapter = self._generator.adapter if self._adapted else self._generator.neutral_adapter
        found = self._scorer.continuations(asked, adapter, label=self._label, listener=self._listener)
        return [(one.log_probability, one.is_greedy) for one in found]


def run_tasks(
    run: str | Path,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    max_rows: int | None = None,
    with_base: bool = True,
    adapter: str | Path | None = None,
    overrides: Sequence[str] = (),
    backend: str = "auto",
    listener: Listener = ignore_events,
) -> Results:
    """The scores of base and adapter, by task and metric. With `include_path`, a folder with tasks as YAML files, only
    these are known, and nothing is downloaded unless they say so."""
    from lm_eval.tasks import TaskManager

    saved = SavedRun.open(run, overrides)
    used = adapter_of(saved, adapter, listener=listener)
    if include_path is not None and not include_path.is_dir():
        raise TrilloraError(
            "This is not a folder.", where=f"--include-path {include_path}", do="give a folder of tasks"
        )
    manager = TaskManager(include_path=str(include_path) if include_path else None, include_defaults=not include_path)
    names = [task.strip() for task in tasks if task.strip()]
    _check_tasks(names, manager.all_tasks)
    opened = saved.open_base(adapter=used.folder)
    generator = Generator.open(
        str(saved.folder), overrides=overrides, opened=opened, adapter=used.folder, backend=backend, listener=listener
    )
    found = {
        which: _scores(
            HarnessModel(generator, opened.tokenizer, adapted=which == "adapter", listener=listener),
            names,
            manager,
            max_rows,
        )
        for which in (("base", "adapter") if with_base else ("adapter",))
    }
    return _side_by_side(found)


def _check_tasks(names: Sequence[str], known: Sequence[str]) -> None:
    if not names:
        raise TrilloraError("No task is given.", where="--harness", do="name one or more tasks, separated by commas")
    for name in names:
        if name not in known:
            meant = nearest(name, known)
            shown = f"did you mean {meant}?" if meant else f"use one of: {' '.join(sorted(known)[:20])}"
            do = f"{shown}; or name the folder of your own task with --include-path"
            raise TrilloraError(f"The harness knows no task '{name[:80]}'.", where="--harness", do=do)


def _scores(model: HarnessModel, names: list[str], manager: Any, max_rows: int | None) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate

    result = simple_evaluate(
        model=model,
        tasks=names,
        task_manager=manager,
        limit=max_rows,
        log_samples=False,
        bootstrap_iters=BOOTSTRAP_ROUNDS,
    )
    return result["results"]


def _side_by_side(found: dict[str, dict[str, dict[str, Any]]]) -> Results:
    """The harness writes `"acc,none": 0.5, "acc_stderr,none": 0.1`: the name of a metric, then a filter's name."""
    results: Results = {}
    for which, tasks in found.items():
        for task, values in tasks.items():
            for key, value in values.items():
                name, _, chosen = key.partition(",")
                if not chosen or name.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                label = name if chosen == "none" else f"{name} ({chosen})"
                row = results.setdefault(task, {}).setdefault(label, {})
                row[which] = float(value)
                error = values.get(f"{name}_stderr,{chosen}")
                row["stderr"] = float(error) if isinstance(error, int | float) else None  # the adapter's: it is last
    return results


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        if stop:
            text = text.partition(stop)[0]
    return text
