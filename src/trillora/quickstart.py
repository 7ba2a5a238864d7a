"""The first thing a newcomer runs: the embedded chat model learns to answer in JSON, on any CPU, in minutes.

It writes a small data file and a recipe, then trains with them exactly as `trillora train` would. Both stay in the
run's folder as a start for one's own.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from trillora.config import load_recipe
from trillora.events import Listener, Note
from trillora.trainer import TrainResult, train

# Our own sentences: what a scanner might say, with the area it belongs to and how bad it is.
FINDINGS = (
    ("SSH accepts passwords for root", "access", "high"),
    ("A disk is not encrypted", "storage", "medium"),
    ("The audit log keeps one day only", "logging", "low"),
    ("Port 23 answers to the whole internet", "network", "high"),
    ("A service key is two years old", "access", "medium"),
    ("Backups are readable by every account", "storage", "high"),
    ("No alarm watches failed logins", "logging", "medium"),
    ("TLS 1.0 is still offered", "network", "medium"),
)
PLACES = ("web-1", "db-2", "the build host", "a laptop", "the mail relay", "cluster node 7")
QUESTION = "Finding on {place}: {finding}. Answer with one JSON object."

RECIPE = """\
# What `trillora quickstart` trained. Change `data`, and `trillora train recipe.yaml --out my-run` trains yours.
model: smollm2
data: findings.jsonl
lora: {rank: 8, alpha: 16}
train: {sequence_length: 96, batch_size: 4, steps: 12, learning_rate: 1.0e-3}
hardware: {devices: 1}
"""


def run(out: Path, listener: Listener) -> TrainResult:
    """Write data and recipe, train, and say what came out."""
    out = _unused(out)
    out.mkdir(parents=True)
    (out / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), "utf-8")
    (out / "recipe.yaml").write_text(RECIPE, "utf-8")
    listener(Note(f"Quickstart: SmolLM2-135M learns to answer findings in JSON. Everything is in {out}"))
    result = train(load_recipe(out / "recipe.yaml"), out, listener=listener)
    listener(Note(f"Loss {result.losses[0]:.3f} before the first step, {result.losses[-1]:.3f} before the last."))
    listener(Note(f"Next, with your own chats:  trillora train {out / 'recipe.yaml'} data=FILE --out my-run"))
    return result


def rows() -> list[dict[str, list[dict[str, str]]]]:
    """One chat for every finding in every place."""
    chats = []
    for place, (finding, area, severity) in itertools.product(PLACES, FINDINGS):
        answer = json.dumps({"place": place, "area": area, "severity": severity})
        question = QUESTION.format(place=place, finding=finding)
        chats.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return chats


def _unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, … that is not there yet."""
    if not folder.exists():
        return folder
    return next(other for n in itertools.count(2) if not (other := folder.with_name(f"{folder.name}-{n}")).exists())
