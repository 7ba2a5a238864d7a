"""What the fit atlas asks the compiler about a model on a slice, and the answers in docs/atlas.jsonl. No jax.

    steps = read_steps(Path("docs/atlas.jsonl"))
    ask = next_ask("Qwen/Qwen3-8B", "v5e-8", of_cell(steps, "Qwen/Qwen3-8B", "v5e-8"))
    ask                                   # Ask(tokens=2048, is_long=False); None if the cell is complete

A cell is a model on a slice. Its first step has sequences of 2048 tokens and everything else on auto. The next ones
look for the longest sequence, with one sequence per device. Each ask depends only on the answers before it, so a sweep
can be stopped and resumed anywhere.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from trillora.devices.chips import CHIPS
from trillora.devices.slices import find_slice
from trillora.files.atomic import write_file
from trillora.preflight.inputs import KNOWN_MODELS
from trillora.preflight.question import Question
from trillora.preflight.result import Method, StageResult
from trillora.recipe.load import load_recipe
from trillora.recipe.resolve import StepSettings
from trillora.recipe.schema import stages_of

# Those that most people ask for first: a sweep with little time begins at the top.
MODELS = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-0.6B",
    "google/gemma-3-270m",
    "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "google/gemma-3-1b-pt",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "google/gemma-2-9b",
    "google/gemma-2-2b",
    "microsoft/phi-4",
    "HuggingFaceTB/SmolLM2-135M",
    "mistralai/Mistral-Small-24B-Base-2501",
    "mistralai/Mistral-Nemo-Base-2407",
    "Qwen/Qwen3-30B-A3B",
    "HuggingFaceTB/SmolLM3-3B",
    "allenai/OLMo-2-1124-7B",
    "ibm-granite/granite-3.3-8b-instruct",
)
SLICES = (
    *("v5e-8", "v5e-1", "v6e-1", "v6e-8", "v5e-4", "v5p-8"),
    *("v6e-4", "v4-8", "v5e-16", "v6e-16", "v5p-16", "7x-8"),
)
TOKENS = 2048  # per sequence, of the step that is timed
SHORTER = (512, 1024)  # tried where the step does not fit
LONGEST = 131072
MAX_LONG = 5  # asks per cell for the longest sequence
HOPELESS = 1.4  # times the memory, by a line through two compiled steps: not compiled, as in preflight
ROOM = 0.97  # of a device's memory, as in preflight
# Tokens that fit with remat full, relative to the chosen policy, roughly: to start the search. Others are in between.
LESS_MEMORY = {"none": 4.0, "linear": 2.0, "full": 1.0}
BETWEEN = 1.5
_NUM_STEPS = 100  # the length of the run does not change its step


@dataclass(frozen=True)
class Ask:
    tokens: int  # per sequence
    is_long: bool  # one sequence per device, remat full, and the base in the format of the first step


@dataclass(frozen=True)
class Step:
    """One answer: a line of the file. Sizes are GiB of one device."""

    model: str
    slice: str
    tokens: int
    is_long: bool
    method: Method
    fits: bool
    made_with: str  # versions of the libraries, and the date
    batch_size: int = 0  # sequences of one step of the optimizer
    peak_gib: float | None = None  # None: the compiler stopped before it knew
    fixed_gib: float = 0.0  # the part that does not grow with the tokens
    seconds: float | None = None
    timed_by: Method | None = None
    flops: float | None = None  # of all devices
    settings: dict[str, Any] | None = None  # of StepSettings; only of first steps
    num_parameters: int | None = None
    problem: str | None = None  # why it does not fit, or why there is no answer
    failed: bool = False  # no answer: the compiler crashed, or was stopped
    took_seconds: float = 0.0
    took_gib: float = 0.0  # memory of the compiler process

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    @property
    def place(self) -> tuple[int, int, bool, int]:
        """The order of the file."""
        return _rank(MODELS, self.model), _rank(SLICES, self.slice), self.is_long, self.tokens

    @property
    def tokens_per_device(self) -> int:
        """Of one micro-batch."""
        if self.settings is None:
            return self.tokens
        return self.tokens * int(self.settings["micro_batch_size"]) // find_slice(self.slice).num_devices


def _rank(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


_STEP = TypeAdapter(Step)


def read_steps(file: Path) -> list[Step]:
    """The answers so far. An incomplete last line, of a sweep that was killed, is left out."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    return [_STEP.validate_json(line) for line in lines[:-1] if line]


def append_step(file: Path, step: Step) -> None:
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(_line(step) + "\n")


def write_steps(file: Path, steps: Iterable[Step]) -> None:
    """The file in its order. Of two answers to the same ask the compiler's remains, else the later one. Cells that are
    not in the atlas any more are left out."""
    best: dict[tuple[str, str, int, bool], Step] = {}
    shown = [step for step in steps if step.model in MODELS and step.slice in SLICES]
    for step in sorted(shown, key=lambda step: (step.method == "compiler", not step.failed)):
        best[(step.model, step.slice, step.tokens, step.is_long)] = step
    compiled = {(step.model, step.slice) for step in best.values() if step.method == "compiler"}
    kept = [s for s in best.values() if s.method == "compiler" or (s.model, s.slice) not in compiled]
    write_file(file, "".join(_line(step) + "\n" for step in sorted(kept, key=lambda step: step.place)))


def _line(step: Step) -> str:
    return json.dumps(_STEP.dump_python(step, mode="json", exclude_defaults=True))


def of_cell(steps: Iterable[Step], model: str, slice_name: str) -> list[Step]:
    """The answers about one cell: the compiler's if there are any."""
    found = [step for step in steps if (step.model, step.slice) == (model, slice_name)]
    return [step for step in found if step.method == "compiler"] or found


# ---- the next ask


def lengths(model: str) -> list[int]:
    """Sequence lengths that the atlas tries: powers of two, and the longest that the model supports."""
    longest = min(config_of(model)["max_position_embeddings"], LONGEST)
    powers = [2**k for k in range(9, 18) if 2**k < longest]
    return [*powers, longest]


def config_of(model: str) -> dict[str, Any]:
    """The configuration that comes with Trillora."""
    return _known_models()[model]


@functools.cache
def _known_models() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = json.loads(KNOWN_MODELS.read_text(encoding="utf-8"))
    return models


def next_ask(model: str, slice_name: str, cell: Sequence[Step]) -> Ask | None:
    """What to ask about a cell; None if it is complete, or if the compiler failed."""
    first = next((step for step in cell if not step.is_long), None)
    if first is None:
        return Ask(TOKENS, is_long=False)
    long = [step for step in cell if step.is_long]
    if len(long) >= MAX_LONG or any(step.failed for step in cell):
        return None
    fitting = max((step.tokens for step in cell if step.fits), default=0)
    refused = min((step.tokens for step in cell if not step.fits), default=LONGEST + 1)
    between = [tokens for tokens in lengths(model) if fitting < tokens < refused]
    if not first.fits:
        between = [tokens for tokens in between if tokens in SHORTER]
    if not between or (fitting and _is_hopeless(between[0], cell)):
        return None
    guess = _guess(first, long)
    return Ask(max((tokens for tokens in between if tokens <= guess), default=between[0]), is_long=True)


def _full_remat(cell: Iterable[Step]) -> list[Step]:
    """Steps whose memory follows the same line."""
    return [s for s in cell if s.peak_gib and (s.is_long or (s.settings and s.settings["remat"] == "full"))]


def _line_through(steps: Sequence[Step]) -> tuple[float, float] | None:
    """GiB without tokens, and GiB per token, by the two steps with the most tokens per device; None if there are none
    or if the memory does not grow."""
    points = sorted({step.tokens_per_device: float(step.peak_gib or 0.0) for step in steps}.items())[-2:]
    if len(points) < 2:
        return None
    (tokens, gib), (more_tokens, more_gib) = points
    slope = (more_gib - gib) / (more_tokens - tokens)
    return (gib - slope * tokens, slope) if slope > 0 else None


def limit_of(slice_name: str) -> float:
    """Usable GiB of one device."""
    return CHIPS[find_slice(slice_name).chip].hbm_gib


def _is_hopeless(tokens: int, cell: Sequence[Step]) -> bool:
    line = _line_through(_full_remat(cell))
    return line is not None and line[0] + line[1] * tokens > HOPELESS * limit_of(cell[0].slice)


def _guess(first: Step, long: Sequence[Step]) -> float:
    """Tokens that fit on a device, to start from."""
    room = ROOM * limit_of(first.slice)
    line = _line_through(_full_remat([first, *long]))
    if line is not None:
        return (room - line[0]) / line[1]
    if first.peak_gib is None or first.settings is None or first.peak_gib <= first.fixed_gib:
        return 0.0
    per_token = (first.peak_gib - first.fixed_gib) / first.tokens_per_device
    return (room - first.fixed_gib) / per_token * LESS_MEMORY.get(first.settings["remat"], BETWEEN)


# ---- questions and answers of preflight's compiler process


def question(model: str, slice_name: str, ask: Ask, first: Step | None, method: Method, folder: Path) -> Question:
    """As preflight asks it: LoRA of rank 16 on all linear layers, AdamW. `folder` has the model's configuration."""
    num_devices = find_slice(slice_name).num_devices
    batch_size = batch_size_of(slice_name, ask)
    recipe: dict[str, Any] = {
        "model": {"name": model, "quantize": "auto"},
        "data": "data.jsonl",
        "lora": {"rank": 16, "targets": "all-linear"},
        "train": {"batch_size": batch_size, "sequence_length": ask.tokens, "steps": _NUM_STEPS},
    }
    if ask.is_long:
        recipe["train"]["micro_batch_size"] = num_devices
        recipe["engine"] = {"remat": "full"}
        # Not in its mesh: the fastest may copy the base to every device, which leaves less room. int4 is the smallest
        # format for TPUs, if nothing larger fitted.
        recipe["model"]["quantize"] = first.settings["quantize"] if first is not None and first.settings else "int4"
    return Question(slice_name, method, str(folder), stages_of(load_recipe(recipe))[0].recipe, _NUM_STEPS)


def batch_size_of(slice_name: str, ask: Ask) -> int:
    """Sequences per step of the optimizer: eight per device up to 64, and at least one per device."""
    num_devices = find_slice(slice_name).num_devices
    return num_devices if ask.is_long else max(num_devices, min(8 * num_devices, 64))


def step_of(model: str, slice_name: str, ask: Ask, result: StageResult, method: Method, **took: Any) -> Step:
    """The answer as a line of the file."""
    settings: StepSettings | None = result.settings
    fixed = sum(gib for part, gib in result.memory.items() if part not in ("activations", "gathered"))
    return Step(
        model=model,
        slice=slice_name,
        tokens=ask.tokens,
        is_long=ask.is_long,
        method=method,
        fits=result.fits,
        batch_size=batch_size_of(slice_name, ask),
        peak_gib=_peak(result, method),
        fixed_gib=round(fixed, 3),
        seconds=result.step and round(result.step.seconds, 5),
        timed_by=result.step and result.step.timed_by,
        flops=result.step and float(f"{result.step.flops:.5g}"),
        settings=None if settings is None or ask.is_long else settings.to_dict(),
        num_parameters=None if ask.is_long else result.weights_bytes // 2,  # bfloat16
        problem=result.problem and result.problem[:300],
        **took,
    )


def _peak(result: StageResult, method: Method) -> float | None:
    """GiB that the step needs. Of a refused step, the result has the smallest figure that was found, which may be an
    estimate: candidates that are far too large are not compiled. The reason has the compiler's own."""
    if result.fits or method == "estimate":
        return result.hbm_peak_gib
    needs = re.search(r"needs ([0-9.]+) GiB per device", result.problem or "")
    return float(needs[1]) if needs else None
