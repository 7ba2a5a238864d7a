"""A run in a fresh process prints our own lines and nothing else: no warnings and no logs of the libraries.

At full dose: test_quickstart.py always has such a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny_run
import yaml
from conftest import FASTER_COMPILATION
from dose import full_dose_only
from kept_variables import FILES
from run_process import WAIT

KEPT = (*FILES, "JAX_DISABLE_MOST_OPTIMIZATIONS")


@full_dose_only
def test_training_prints_only_our_lines(tmp_path: Path) -> None:
    settings = tiny_run.recipe(
        tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1, width=32)),
        data={"split": {"validation": 0.2}},
        train={"steps": 3, "checkpoint_every": 2},
        evaluate={"every_steps": 2, "num_samples": 1, "max_tokens": 4},
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"TRILLORA_CACHE": str(tmp_path / "cache"), "XLA_FLAGS": " ".join(FASTER_COMPILATION)}
    command = [sys.executable, "-m", "trillora", "train", "recipe.yaml", "--out", "run", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    kinds = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert kinds.count("step") == 3 and {"note", "chosen", "evaluated", "sampled", "saved"} <= set(kinds)
