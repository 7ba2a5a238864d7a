"""Time and scores of `make quickstart` in a fresh clone of this repository, as a new user gets them.

    python benchmarks/quickstart.py --record      minutes; the machine should have nothing else to do

Set-up is timed too: the clone has no environment. Packages come from pip's cache where it has them. The cache of
converted models and compiled programs is empty. Only what is committed is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import MODEL_CODE, ROOT, add_record_option, record_if

SOURCES = (
    *("src/trillora/quickstart", "src/trillora/training", "src/trillora/evaluation", "src/trillora/generation"),
    *("src/trillora/data", *MODEL_CODE, "tools/setup_env.py"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        clone = Path(folder) / "trillora"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        started = time.monotonic()
        subprocess.run([sys.executable, "tools/setup_env.py", "--runtime"], cwd=clone, check=True)
        set_up = time.monotonic()
        environment = os.environ | {"TRILLORA_CACHE": str(Path(folder) / "cache")}
        subprocess.run(["make", "quickstart", f"PYTHON={sys.executable}"], cwd=clone, env=environment, check=True)
        seconds = time.monotonic() - started
        values = {"seconds": round(seconds), "setup_seconds": round(set_up - started)} | scores(clone)
    print(json.dumps(values, indent=1))
    record_if(args.record, "quickstart", values, SOURCES)


def scores(clone: Path) -> dict[str, Any]:
    """Of the base and of the adapter on the test rows, and how often the most frequent answer is right."""
    run = clone / "runs" / "quickstart"
    found = json.loads((run / "eval.json").read_text("utf-8"))
    rows = len((run / "train.jsonl").read_text("utf-8").splitlines())
    values: dict[str, Any] = {"num_trained": rows, "num_tested": found["num_rows"]}
    values["json"] = {"before": found["base"]["right_fields"], "after": found["adapter"]["right_fields"]}
    for name, share in found["majority"].items():
        before, after = (found[who]["fields"].get(name, 0.0) for who in ("base", "adapter"))
        values[name] = {"before": before, "after": after, "most_frequent": share}
    return values


if __name__ == "__main__":
    main()
