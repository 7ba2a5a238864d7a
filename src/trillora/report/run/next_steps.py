"""What to do after a run: where its files are, and the commands that use it.

Report      runs/qa/report.html
Ask it      trillora chat runs/qa
Measure it  trillora eval runs/qa
Export it   trillora export runs/qa --to merged    (others: gguf, ollama, hub)
"""

from __future__ import annotations

import shlex
from pathlib import Path

from trillora.own_command import runnable
from trillora.recipe.schema import Recipe, stages_of
from trillora.runs.files import ADAPTER, REPORT_FILE

RESUME = "Run the same command again to resume."
TEMPLATE_FILE = "chat_template.jinja"  # in the folder of an adapter that was trained on chats


def after_training(run: Path, recipe: Recipe) -> str:
    """The lines that a finished training ends with. Without one adapter for the whole run, only the report's; in a
    process that does not write the run, none."""
    report = run / REPORT_FILE
    steps = [("Report", str(report))] if report.is_file() else []
    if (run / ADAPTER).is_dir():
        folder = shlex.quote(str(run))
        is_chat = (run / ADAPTER / TEMPLATE_FILE).is_file()
        steps.append(("Ask it", f"trillora chat {folder}" if is_chat else f"trillora generate {folder} --prompt TEXT"))
        steps.append(("Measure it", f"trillora eval {folder}{_test_rows(recipe)}"))
        steps.append(("Export it", f"trillora export {folder} --to merged    (others: gguf, ollama, hub)"))
    return "".join(f"{what:<10}  {runnable(how)}\n" for what, how in steps)


def after_quickstart(run: Path) -> str:
    """The lines that the quickstart ends with."""
    folder, recipe = shlex.quote(str(run)), shlex.quote(str(run / "recipe.yaml"))
    chat = runnable(f"trillora chat {folder}")
    train = runnable(f"trillora train {recipe} data=FILE --out my-run")
    return f"""\
Adapter  {run / ADAPTER}   (PEFT format)
Report   {run / REPORT_FILE}

Chat with it:           {chat}
Train on your own data: {train}"""


def _test_rows(recipe: Recipe) -> str:
    """The options of `trillora eval` for rows that were not trained on."""
    last = stages_of(recipe)[-1]
    if last.recipe.data.split is None or not last.recipe.data.split.test:
        return " --data FILE"
    return "" if recipe.phases is None else f" --stage {shlex.quote(last.name)}"
