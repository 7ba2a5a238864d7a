"""The two screens of docs/preflight.md: runs preflight, keeps its answers in a file, and shows them.

python tools/preflight_screens.py           asks the TPU compiler again; needs libtpu, about two minutes
python tools/preflight_screens.py --show    only writes the screens again, from the answers in the file
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys

from generated import ROOT, write_part
from rich.console import Console

from trillora.preflight.result import PreflightResult
from trillora.report.preflight_screen import show

PAGE, ANSWERS = "docs/preflight.md", ROOT / "docs" / "preflight_screens.json"
RECIPE = "recipes/gemma-3-270m-chat.yaml"
OPTIONS = {"train.micro_batch_size": 8, "engine.remat": "linear"}  # as auto on colab; so one step is compiled
FIRST, SLICES = "colab", ("colab", "colab-v6e")
WIDTH = 88  # columns of the page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="ask nothing")
    if not parser.parse_args().show:
        from trillora.preflight.verdict import preflight
        from trillora.recipe.load import load_recipe

        os.environ["HF_HUB_OFFLINE"] = "1"  # shapes come with Trillora
        results = preflight(load_recipe(ROOT / RECIPE, OPTIONS), SLICES, use_cache=False)
        ANSWERS.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n", "utf-8")
    for name, text in screens().items():
        write_part(PAGE, name, text)
    return 0


def screens() -> dict[str, str]:
    """The generated parts of the page."""
    results = [PreflightResult.from_dict(tree) for tree in json.loads(ANSWERS.read_text("utf-8"))]
    asked = {"one slice": ([result for result in results if result.slice == FIRST], FIRST)}
    asked["several slices"] = results, ",".join(SLICES)
    options = " ".join(f"{name}={value}" for name, value in OPTIONS.items())
    return {
        name: f"```\n$ trillora preflight {RECIPE} --on {slices} \\\n    {options}\n{printed(shown)}```\n"
        for name, (shown, slices) in asked.items()
    }


def printed(results: list[PreflightResult]) -> str:
    file = io.StringIO()
    show(results, Console(file=file, width=WIDTH, highlight=False, color_system=None))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
