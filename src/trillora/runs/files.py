"""The names of the files in a run's folder. No other module has them (`tests/runs/test_runs.py`).

    runs/first/
      recipe.json  resolved.yaml  run.json        what it was made from: for programs, for people, and the manifest
      metrics.jsonl  history.jsonl  stalls.log    what happened
      saved.json  checkpoints/  references/       what it resumes from
      adapter/                                    the result: a run with this folder is finished
      adapters/NAME/  group.json                  the results of a run that trains several adapters together
      eval.json  report.html  exports/            what was made of it

Standard library only: a notebook imports this module before anything is installed.
"""

from __future__ import annotations

import os
from pathlib import Path

RECIPE_FILE = "recipe.json"
RESOLVED_FILE = "resolved.yaml"
MANIFEST_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"  # also in every checkpoint
HISTORY_FILE = "history.jsonl"
STALLS_FILE = "stalls.log"  # stacks of steps that took long
SAVED_FILE = "saved.json"  # where the newest checkpoint is
CHECKPOINTS = "checkpoints"
REFERENCES = "references"  # what the reference of a stage thinks of its answers, by digest
ADAPTER = "adapter"
ADAPTERS = "adapters"
GROUP_FILE = "group.json"  # how each of several adapters ended; written last
MERGE_FILE = "merge.json"  # in the folder of a merged adapter: what it was made from
EVAL_FILE = "eval.json"
REPORT_FILE = "report.html"
EXPORTS = "exports"
TENSORBOARD = "tensorboard"
MARKS = (MANIFEST_FILE, METRICS_FILE, HISTORY_FILE, RESOLVED_FILE, RECIPE_FILE)  # a folder with one is a run's
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # in PEFT's format
ROPE_FILE = "rope.json"  # next to an adapter: the rotary positions that it was trained with
KEPT_FILE = "adapters.safetensors"  # in a checkpoint of several adapters: arrays called NAME/PARAMETER


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, finished or not."""
    return os.path.isfile(folder / RECIPE_FILE)


def is_finished(folder: Path) -> bool:
    return (folder / ADAPTER).exists() or (folder / GROUP_FILE).exists()
