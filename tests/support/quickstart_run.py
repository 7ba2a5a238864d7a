"""The quickstart with a tiny model."""

from __future__ import annotations

from pathlib import Path

import tiny_run

NUM_ROWS = 2


QUICKSTART = f"""
import json, sys
from trillora.cli import main
from trillora.quickstart import run
run.NUM_TRAINED = run.NUM_TESTED = {NUM_ROWS}
for old, new in json.loads(sys.argv[1]).items():
    assert old in run.RECIPE
    run.RECIPE = run.RECIPE.replace(old, new)
sys.argv = ["trillora", "quickstart", *sys.argv[2:]]
main()
"""


def tiny_model(folder: Path) -> dict[str, str]:
    """What changes in the recipe. A small vocabulary makes longer sequences of the same text; still one row in each."""
    tiny_run.write_model(folder, tiny_run.long_llama(width=32))
    return {
        "model: smollm2": f"model: {folder}",
        "data: train.jsonl": "data: {path: train.jsonl, pack: false}",
        "sequence_length: 184": "sequence_length: 1024",
    }
