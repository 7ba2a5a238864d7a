"""A recipe with comments, made of the answers to five questions: `trillora new`.

text = new_recipe(NewRecipe("smollm2", "qa.csv", "auto", "Answer in one word.", Path("runs/qa")), Path.cwd())

# Train it:  trillora train qa.yaml --out runs/qa
model: smollm2
data:
  path: qa.csv
  template: {system: Answer in one word., user: "{{ question }}", assistant: "{{ answer }}"}
…
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from trillora.data.reading.readers import first_rows
from trillora.data.rendering.formats import columns_of, detect
from trillora.data.rendering.render import parse
from trillora.data.rows import BadRow, Fault
from trillora.early.training import check_data, check_files, loss_for
from trillora.errors import TrilloraError, nearest
from trillora.recipe import yaml
from trillora.recipe.data_section import DataSection
from trillora.recipe.losses import rows_of

BACKENDS = ("auto", "cpu", "gpu", "tpu")  # of this machine
NOTEBOOKS = ("colab", "kaggle")
PLACES = (*BACKENDS, *NOTEBOOKS)
_IN_THE_ROWS = "leave out --system, and write the prompt into the rows: the first message has the role system"
_INPUT = "{% if input | default('', true) | trim %}\n\n{{ input }}{% endif %}"  # of alpaca; not every row has it


@dataclass(frozen=True)
class NewRecipe:
    """What a recipe is made of."""

    model: str
    data: str
    place: str  # one of PLACES
    system: str  # the system prompt of every row; empty: none
    out: Path


def check_place(place: str) -> str:
    """Refuses a place that is not known."""
    if place not in PLACES:
        meant = nearest(place, PLACES)
        do = f"did you mean {meant}? Use {', '.join(PLACES)}" if meant else f"use {', '.join(PLACES)}"
        raise TrilloraError(f"There is no place '{place[:40]}' to train on.", where="--on", do=do)
    return place


def new_recipe(answers: NewRecipe, folder: Path) -> str:
    """The text of a recipe in `folder`."""
    data = DataSection(path=os.path.abspath(os.path.expanduser(answers.data)))
    assert isinstance(data.path, str)
    loss = loss_for(data.path)
    compares = loss != "sft"
    check_data(data, rows_of([loss]))
    if compares and answers.system:
        what = f"The rows of this file have answers to compare ({loss}): no system prompt can be added to them."
        raise TrilloraError(what, where=data.path, do=_IN_THE_ROWS)
    is_here = Path.cwd() == folder  # relative paths of a recipe start at its folder
    shown = answers.data if is_here and not answers.data.startswith("~") else str(data.path)
    model = answers.model if is_here or not answers.model.startswith(".") else os.path.abspath(answers.model)
    lines = [
        "# Made by `trillora new`. A line that begins with # is an option that is not used; docs/recipes.md has all.",
        f"model: {yaml.write(model)}  # smollm2 is embedded; else a Hugging Face id or a folder",
        "data:",
        f"  path: {yaml.write(shown)}",
    ]
    if answers.system:
        lines.append(f"  template: {yaml.write(_template(data, answers.system))}")
        lines.append(
            "  # `trillora chat` and `trillora generate` use the same system prompt. Other programs have to send it."
        )
    lines += [
        "  # split: {validation: 0.1, test: 0.1}  # rows that are held out, for evaluations and `trillora eval`",
        "lora: {rank: 16, alpha: 32}",
        "train:",
        "  epochs: 1  # passes over the data",
        *([f"  loss: {loss}  # the rows have answers to compare; docs/preferences.md has the other losses"] * compares),
        f"  learning_rate: {'2.0e-5' if compares else '2.0e-4'}  # auto: eight rates are tried on the first steps",
        "  sequence_length: 512  # tokens; `trillora inspect` shows how long the rows are",
        "  batch_size: 8  # sequences per step",
    ]
    if answers.place in BACKENDS[1:]:
        lines.append(f"hardware: {{backend: {answers.place}}}")
    return "\n".join(lines) + "\n"


def next_commands(answers: NewRecipe, recipe: Path) -> list[tuple[str, str]]:
    """What to do with a new recipe, in order."""
    file, out = shlex.quote(str(recipe)), shlex.quote(str(answers.out))
    steps = [("Look at its data", f"trillora inspect {file}")]
    if answers.place in NOTEBOOKS:
        steps.append(("See if it fits", f"trillora preflight {file} --on {answers.place}"))
        return [*steps, ("Train it", f"trillora launch {answers.place} {file}")]
    return [*steps, ("Train it", f"trillora train {file} --out {out}"), ("Ask it", f"trillora chat {out}")]


def _template(data: DataSection, system: str) -> dict[str, str]:
    """A template with a system prompt, for rows that have a question and an answer."""
    assert isinstance(data.path, str)
    rows = [row for file in check_files(data.path)[:1] for row in first_rows(file, 1) if not isinstance(row, Fault)]
    try:
        row = parse(rows[0].raw) if rows else {}
        columns = columns_of(detect(row), row)
    except BadRow as error:
        raise TrilloraError(error.what, where=data.path, do=error.do) from None
    if columns is None:
        what = "A system prompt can be added to rows with a question and an answer; the rows of this file have others."
        raise TrilloraError(what, where=data.path, do=_IN_THE_ROWS)
    question, answer = (_variable(name) for name in columns)
    user = question + _INPUT if columns[0] == "instruction" else question
    return {"system": _literal(system), "user": user, "assistant": answer}


def _variable(column: str) -> str:
    """Jinja for the value of a column, whatever its name is."""
    return f"{{{{ {column} }}}}" if column.isidentifier() else f"{{{{ row[{column!r}] }}}}"


def _literal(text: str) -> str:
    """Jinja for a text, whose braces mean nothing."""
    return f"{{% raw %}}{text}{{% endraw %}}" if "{" in text else text
