"""Writes all commands with their options into docs/commands.md: `python tools/command_reference.py`.

They are read from the command line itself, so that the page says what `--help` prints:

    --max-tokens N    Maximum length of an answer, in tokens.  [default: 256]

becomes

    | `--max-tokens N` | Maximum length of an answer, in tokens. Default: `256`. |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from generated import cell, write_part

from trillora.cli import app

DOCUMENT, PART = "docs/commands.md", "commands"
EVERYWHERE = ("--help", "--traceback")  # options of every command, in the text of the page


def page_part() -> str:
    """The generated part of the page: a list of the commands, and a section for each."""
    found = list(commands())
    lines = ["| command | |", "|---|---|"]
    for path, command, _ in found:
        about = (command.help or "").split("\n\n")[0]
        lines.append(f"| [`{path}`](#{path.replace(' ', '-')}) | {cell(about)} |")
    for path, command, context in found:
        lines += ["", f"## {path}", "", *_section(path, command, context)]
    return "\n".join([*lines, ""])


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Every command that does something: its words, the command, and its context."""
    group: Any = typer.main.get_command(app)
    yield from _below(group, group.make_context("trillora", ["--help"], resilient_parsing=True))


def _below(command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    if not hasattr(command, "commands"):
        yield context.command_path, command, context
        return
    for name, each in command.commands.items():
        if not each.hidden:
            yield from _below(each, type(context)(each, info_name=name, parent=context))


def options(command: Any, context: Any) -> list[tuple[str, str]]:
    """Arguments and options as `--help` shows them: names and effect."""
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    shown = [(re.sub(r" <.*>$", "", names), about) for names, about in filter(None, records)]
    return [(names, about) for names, about in shown if not names.endswith(EVERYWHERE)]


def _section(path: str, command: Any, context: Any) -> list[str]:
    usage = " ".join(re.sub("[{}]", "", piece) for piece in command.collect_usage_pieces(context))
    paragraphs = [re.sub(r"\s+", " ", text) for text in (command.help or "").split("\n\n")]
    lines = ["```", f"{path} {usage}", "```", *(cell(text) for text in paragraphs), "", "| | |", "|---|---|"]
    return [
        *lines,
        *(
            f"| `{names.replace('|', chr(92) + '|')}` | {_effect(about)} |"
            for names, about in options(command, context)
        ),
    ]


def _effect(about: str) -> str:
    text, _, note = about.partition("  [")
    note = (
        re.sub(r"default: (.*)\]", r"Default: `\1`.", note)
        if "default" in note
        else note.replace("required]", "**Required.**")
    )
    return " ".join(filter(None, (cell(text), note)))


def main() -> None:
    write_part(DOCUMENT, PART, page_part())
    print(f"{DOCUMENT}: {len(list(commands()))} commands")


if __name__ == "__main__":
    main()
