"""What to do after a run: where its files are, and the commands that use it.

Recipe      runs/qa/recipe.yaml
Report      runs/qa/report.html
Ask it      trillora chat runs/qa
Measure it  trillora eval runs/qa
Export it   trillora export runs/qa --to merged    (others: gguf, ollama, hub)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from trillora.own_command import runnable
from trillora.recipe.schema import Recipe, stages_of
from trillora.runs.files import ADAPTER, ADAPTERS, REPORT_FILE
from trillora.secrets import mask_message, secrets_of_url

OWN_RECIPE = "recipe.yaml"  # in the folder of a run that was started without a recipe
TEMPLATE_FILE = "chat_template.jinja"  # in the folder of an adapter that was trained on chats


def after_training(run: Path, recipe: Recipe) -> str:
    """The lines that a finished training ends with. None in a process that does not write the run."""
    steps = _files(run)
    if (run / ADAPTER).is_dir():
        folder = shlex.quote(str(run))
        is_chat = (run / ADAPTER / TEMPLATE_FILE).is_file()
        steps.append(("Ask it", f"trillora chat {folder}" if is_chat else f"trillora generate {folder} --prompt TEXT"))
        steps.append(("Measure it", f"trillora eval {folder}{_test_rows(recipe)}"))
        steps.append(("Export it", f"trillora export {folder} --to merged    (others: gguf, ollama, hub)"))
    elif several := sorted(folder.name for folder in (run / ADAPTERS).glob("*") if folder.is_dir()):
        one = shlex.quote(str(run / ADAPTERS / several[0]))
        others = f"    (others: {', '.join(several[1:8])})" if several[1:] else ""
        steps.append(("Ask one", f"trillora chat {shlex.quote(str(run))} --adapter {one}{others}"))
    return _lines(steps)


def after_stop(run: Path, command: Sequence[str]) -> str:
    """The lines after a run that was interrupted and saved. `command` is the one that started it."""
    again = mask_message(shlex.join(command), [part for word in command for part in secrets_of_url(word)])
    return _lines([*_files(run), ("Resume it", again)])


def _files(run: Path) -> list[tuple[str, str]]:
    found = (("Recipe", run / OWN_RECIPE), ("Report", run / REPORT_FILE))
    return [(what, str(file)) for what, file in found if file.is_file()]


def _lines(steps: Iterable[tuple[str, str]]) -> str:
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
