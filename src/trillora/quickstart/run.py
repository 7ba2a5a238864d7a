"""The first thing a newcomer runs: the embedded chat model learns to judge security findings, on any CPU, in minutes.

It writes data and a recipe into the run's folder, trains with them exactly as `trillora train` would, and puts held-out
findings to the model before and after. What was interrupted goes on when it is started again.
"""

from __future__ import annotations

import itertools
from importlib import resources
from pathlib import Path

from trillora.evaluation.evaluate import Evaluation, evaluate
from trillora.events import Listener, Note
from trillora.files.atomic import write_file
from trillora.recipe.load import load_recipe
from trillora.report.run.write import write_report
from trillora.training.trainer import TrainResult, train

NUM_TRAINED = 208  # of 1,285 findings, for a CPU's sake; services take turns, so all are shown
NUM_TESTED = 40  # of 128

RECIPE = """\
# What `trillora quickstart` trained: findings of a cloud scanner in, one JSON verdict out. Change `data`, and
# `trillora train recipe.yaml --out my-run` trains yours.
model: smollm2
data: train.jsonl
lora: {rank: 16, alpha: 32}
train: {sequence_length: 184, batch_size: 1, epochs: 1, learning_rate: 2.0e-3, warmup_steps: 5}
hardware: {devices: 1}
"""


def run(out: Path, listener: Listener) -> tuple[TrainResult, Evaluation | None]:
    """Write data and recipe, train, and test; no test where the training was stopped."""
    out = _open_or_unused(out)
    out.mkdir(parents=True, exist_ok=True)
    for name, most in (("train.jsonl", NUM_TRAINED), ("test.jsonl", NUM_TESTED)):
        write_file(out / name, "".join(_findings(name)[:most]))
    write_file(out / "recipe.yaml", RECIPE)
    listener(
        Note(
            f"Quickstart: SmolLM2-135M learns to judge {NUM_TRAINED} findings of the cloud scanner prowler "
            f"(Apache-2.0), seven minutes on two cores. Everything is in {out}"
        )
    )
    result = train(load_recipe(out / "recipe.yaml"), out, listener=listener)
    if result.stopped is not None:
        return result, None
    listener(Note(f"Putting {NUM_TESTED} findings it has never seen to the model, before and after training"))
    evaluation = evaluate(out, out / "test.jsonl", listener=listener)
    write_report(out)
    return result, evaluation


def next_steps(run: Path) -> str:
    """What a person may want to do now."""
    return f"""\
Adapter  {run / "adapter"}   (PEFT loads it)
Report   {run / "report.html"}

Ask it:              trillora chat {run}
Train your own file: trillora train {run / "recipe.yaml"} data=FILE --out my-run"""


def _findings(name: str) -> list[str]:
    text = (resources.files("trillora.quickstart") / "data" / name).read_text("utf-8")
    return text.splitlines(keepends=True)


def _open_or_unused(folder: Path) -> Path:
    """The first of folder, folder-2, … that is not there yet or not finished."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists() or _can_go_on(name))


def _can_go_on(run: Path) -> bool:
    recipe = run / "recipe.yaml"
    return recipe.is_file() and recipe.read_text("utf-8") == RECIPE and not (run / "adapter").exists()
