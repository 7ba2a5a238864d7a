"""`trillora quickstart`: the embedded chat model learns to classify security findings, on any CPU, in minutes.

    prompt  Failed check: Bucket is not public ... Answer in JSON: provider, area, severity.
    answer  {"provider": "aws", "area": "storage", "severity": "high"}

It writes data and a recipe into the run's folder, trains as `trillora train` does, and evaluates base model and adapter
on held-out findings. Run it again to resume an interrupted quickstart.
"""

from __future__ import annotations

import itertools
from importlib import resources
from pathlib import Path

from trillora.adapters.card import refresh_card
from trillora.evaluation.evaluate import Evaluation, evaluate
from trillora.events import Listener, Note
from trillora.files.atomic import write_file
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.recipe.load import load_recipe
from trillora.report.run.write import write_report
from trillora.runs.files import ADAPTER
from trillora.training.run_process import TrainResult
from trillora.training.trainer import train

NUM_TRAINED = 160  # of 1,285, to keep it short on a CPU. The rows alternate between services, so all are covered.
NUM_TESTED = 32  # of 128

RECIPE = """\
# The recipe of `trillora quickstart`: findings of a cloud scanner in, one JSON verdict out. To train on your own rows,
# change `data` and run `trillora train recipe.yaml --out my-run`.
model: smollm2
data: train.jsonl
lora: {rank: 16, alpha: 32}
train: {sequence_length: 184, batch_size: 1, epochs: 1, learning_rate: 2.0e-3, warmup_steps: 5}
hardware: {devices: 1}
"""


def run(out: Path, listener: Listener) -> tuple[TrainResult, Evaluation | None]:
    """Writes the data and the recipe, trains and evaluates. The evaluation is None if the training was stopped."""
    out = _resumable_or_new(out)
    out.mkdir(parents=True, exist_ok=True)
    for name, most in (("train.jsonl", NUM_TRAINED), ("test.jsonl", NUM_TESTED)):
        write_file(out / name, "".join(_findings(name)[:most]))
    write_file(out / "recipe.yaml", RECIPE)
    listener(
        Note(
            f"Quickstart: SmolLM2-135M learns to classify findings of the cloud scanner prowler (Apache-2.0). It "
            f"trains on {NUM_TRAINED} rows, which takes about six minutes on two cores. {EMBEDDED_NOTE} "
            f"All files are in {out}"
        )
    )
    result = train(load_recipe(out / "recipe.yaml"), out, listener=listener)
    if result.stopped is not None:
        return result, None
    listener(Note(f"Evaluating base model and adapter on {NUM_TESTED} findings that were not trained on"))
    evaluation = evaluate(out, out / "test.jsonl", batch_size=NUM_TESTED, listener=listener)
    refresh_card(out)
    write_report(out)
    return result, evaluation


def _findings(name: str) -> list[str]:
    text = (resources.files("trillora.quickstart") / "data" / name).read_text("utf-8")
    return text.splitlines(keepends=True)


def _resumable_or_new(folder: Path) -> Path:
    """The first of folder, folder-2, ... that does not exist or holds an unfinished quickstart."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists() or _is_resumable(name))


def _is_resumable(run: Path) -> bool:
    recipe = run / "recipe.yaml"
    return recipe.is_file() and recipe.read_text("utf-8") == RECIPE and not (run / ADAPTER).exists()
