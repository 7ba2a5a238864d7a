"""SFT, then DPO or its control, by recipes/short-replies.yaml: held-out pairs that are right, and words per answer.

    python benchmarks/preferences.py --out FOLDER --record

The control takes the same steps on the same chosen replies, with SFT as the only loss. Both runs are measured at the
start and at the end of the second stage, by the program that trains: the share of held-out pairs whose chosen reply has
gained more than the rejected one, with its 95 % interval, the margin of their rewards, and the words per answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from record import MODEL_CODE, ROOT, add_record_option, record_if

from trillora.events import Note, Preferences
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

RECIPE = ROOT / "recipes" / "short-replies.yaml"
CONTROL = {"stages.1.loss": ["dpo", "sft"], "stages.1.loss_weights": [0, 1]}
SOURCES = ("benchmarks/preferences.py", "recipes/short-replies.yaml", "recipes/samples/replies", *MODEL_CODE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the runs here")
    add_record_option(parser)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="trillora-preferences-"))
    found = {name: measured(out / name, options) for name, options in {"dpo": {}, "sft": CONTROL}.items()}
    record_if(args.record, "preferences", found, SOURCES)


def measured(run: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run, which is trained unless it exists."""
    train(load_recipe(RECIPE, options), run, listener=show)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    own = [line for line in lines if line.get("stage") == "dpo"]
    before, *_, after = (line for line in own if line["kind"] == "evaluation")
    answers_before, *_, answers_after = (line["samples"] for line in own if line["kind"] == "samples")
    values = {
        "start": side(before["preferences"], answers_before),
        "end": side(after["preferences"], answers_after),
    }
    print(json.dumps({"run": run.name, **values}), flush=True)
    for first, last in zip(answers_before[:3], answers_after, strict=False):
        print(f"  {first['prompt']!r}\n    before  {first['answer']!r}\n    after   {last['answer']!r}", flush=True)
    return values


def side(metrics: dict[str, float], answers: list[dict[str, str]]) -> dict[str, float]:
    found = Preferences(**metrics)
    low, high = found.interval
    words = sum(len(sample["answer"].split()) for sample in answers) / len(answers)
    right = {"right": found.rewards_accuracies, "low": low, "high": high}
    return {**right, "margin": found.rewards_margins, "pairs": found.pairs, "words": words, "answers": len(answers)}


def show(event: object) -> None:
    if isinstance(event, Note):
        print(f"  {event.text}", flush=True)


if __name__ == "__main__":
    main()
