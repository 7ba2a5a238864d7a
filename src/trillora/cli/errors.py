"""How a command ends: every error is printed as text, once, and has its exit code."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

import trillora
from trillora.errors import Bug, TrilloraError, as_error, nearest
from trillora.own_command import runnable
from trillora.report.output import closed_pipe_safe, guarded_output
from trillora.safe_text import seen_from_here, visible
from trillora.secrets import mask_message, secrets_of_url

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
OWN_PROCESS = "own process"  # the context's obj under `main`: nothing else runs in this process afterwards
TRACEBACK = "show_traceback"  # the option, and its value in the context
ANYWHERE = {"doctor", "schema"}  # verbs that work in a folder with any name
OTHER_VERBS = {"version": "--version"}  # of other programs
USAGE_ERROR = typer.BadParameter.__mro__[1]  # typer has no public name for it


class Verbs(TyperGroup):
    """Prints every error of a command as text, once, and exits with its code. Untrusted text is printed as escapes."""

    def main(self, *args: Any, **options: Any) -> Any:
        with guarded_output():
            return super().main(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["command"] = ["trillora", *args]
        with _errors_as_text(ctx):
            for argument in args:
                check_text(argument, "An argument", where=argument)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_text(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0]
        if self.get_command(ctx, verb) is None:
            if ctx.resilient_parsing:  # the shell completes a word
                return None, None, args[1:]
            meant = OTHER_VERBS.get(verb) or nearest(verb, self.list_commands(ctx))
            hint = f"did you mean {meant}? " if meant else ""
            raise TrilloraError(f"Unknown command '{verb}'.", where="command line", do=f"{hint}See `trillora --help`.")
        if verb not in ANYWHERE:
            _check_folder()
        name, command, rest = super().resolve_command(ctx, args)
        assert command is not None
        shared = [option for option in self.params if option.name == TRACEBACK]  # may stand before or after the verb
        command.params += [option for option in shared if option not in command.params]
        _show_names_only(command)
        return name, command, rest


def _show_names_only(command: Any) -> None:
    """Shows arguments by their names in the help of a command. New versions of typer add `<list[str]>` and braces."""

    def without_braces(pieces: Any) -> Any:
        return lambda ctx: [piece.replace("{", "").replace("}", "") for piece in pieces(ctx)]

    for each in (command, *getattr(command, "commands", {}).values()):
        for argument in each.params:
            if argument.param_type_name == "argument":
                argument.display_type_rich = lambda ctx: None
                argument.get_usage_pieces = without_braces(argument.get_usage_pieces)


@contextmanager
def _errors_as_text(ctx: Any) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _print_error("interrupted", ctx)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, USAGE_ERROR):
            command = error.ctx.command_path if error.ctx else "trillora"  # type: ignore[attr-defined]
            what = error.format_message()  # type: ignore[attr-defined]
            shown = TrilloraError(what, where=command, do=f"{_example(error)}see `{command} --help`")
        elif isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # the reader of the output is gone; typer exits silently
        else:
            shown = as_error(error)
        shown.where = shown.where and seen_from_here(shown.where)
        shown.do = runnable(shown.do)
        if ctx.meta.get(TRACEBACK) or os.environ.get("TRILLORA_TRACEBACK", "0") not in ("", "0"):
            _print_error("".join(traceback.format_exception(error)).rstrip(), ctx)
        _print_error(f"{shown}{_for_the_report(ctx)}" if isinstance(shown, Bug) else str(shown), ctx)
        raise typer.Exit(shown.exit_code) from None


def _example(error: Any) -> str:
    """What to add for an option that is missing, with an example where the help has none."""
    option = (getattr(getattr(error, "param", None), "opts", None) or [""])[0]
    example = {"--out": "runs/first", "--on": "kaggle"}.get(option)
    return (
        f"add it, for example {option} {example}; "
        if example and error.__class__.__name__.startswith("Missing")
        else ""
    )


def _for_the_report(ctx: Any) -> str:
    """What the developers need to know about a bug."""
    versions = f"trillora {trillora.__version__}, Python {platform.python_version()}, {platform.platform()}"
    command = shlex.join(ctx.find_root().meta["command"])
    return f"\n         {command}\n         {versions}\n         the output of the same command with --traceback"


def check_text(text: str, name: str, where: str | None = None) -> None:
    """Refuses text that is not UTF-8. Python reads other bytes as characters that most libraries cannot write."""
    if "\0" in text:
        raise TrilloraError(f"{name} contains a NUL character.", where=where, do="remove it")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        encoding = sys.getfilesystemencoding()
        do = "use UTF-8" if encoding == "utf-8" else f"set PYTHONUTF8=1: the encoding of this terminal is {encoding}"
        raise TrilloraError(f"{name} is not valid {encoding} text.", where=where, do=do)


def _check_folder() -> None:
    try:
        folder = os.getcwd()
    except OSError as error:
        what = f"The current folder cannot be used: {error.strerror}."
        raise TrilloraError(what, where="current folder", do="change to another folder") from error
    check_text(folder, "The path of the current folder", where=folder)


def _print_error(text: str, ctx: Any) -> None:
    # A URL may reach the message in pieces: as a path, "s3://k:pw@b/x" has the name "x" in the folder "s3:/k:pw@b".
    known = [part for word in ctx.find_root().meta["command"] for part in secrets_of_url(word) if len(part) > 3]
    print(visible(mask_message(text, known)), file=closed_pipe_safe(sys.stderr))
