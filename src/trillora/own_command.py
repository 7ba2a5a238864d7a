"""Commands as they can be typed on this machine.

After `make quickstart`, a new shell does not know `trillora`: it is in `.venv/bin`, which is not on the PATH. There,

    >>> runnable("Chat with it: trillora chat runs/quickstart")
    'Chat with it: .venv/bin/trillora chat runs/quickstart'

Where the PATH leads to this very installation, the text stays as it is. `pip install` is treated in the same way.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from trillora.safe_text import seen_from_here

# A command starts a line or follows a blank, a quotation mark or a bracket; a lower-case word or an option follows.
_TRILLORA = re.compile(r"(?<![^\s`'\"(])trillora(?= (?:--)?[a-z])")
_PIP = re.compile(r"(?<![^\s`'\"(])(?<!uv )(?<!-m )pip ((?:un)?install)\b")


def runnable(text: str) -> str:
    """The text with its commands as they can be typed here."""
    text = _TRILLORA.sub(lambda _: own_command(), text)
    return _PIP.sub(lambda found: own_pip(found[1]), text)


def own_command() -> str:
    """How to call this very Trillora: by its name, if the PATH leads to it; else by its path."""
    script = _script()
    if script is None:
        return f"{_shown(Path(sys.executable))} -m trillora"
    return script.name if _is_on_path(script) else _shown(script)


def own_pip(verb: str) -> str:
    """How to install into this very environment, or uninstall from it."""
    python = Path(sys.executable)
    if _is_on_path(python.with_name("pip")):
        return f"pip {verb}"
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):  # environments of uv have no pip
        return f"uv pip {verb} --python {_shown(python)}"
    return f"{_shown(python)} -m pip {verb}"


def _script() -> Path | None:
    """The program that was called, or the one of this environment."""
    candidates = Path(sys.argv[0] if sys.argv else ""), Path(sysconfig.get_path("scripts")) / "trillora"
    return next((path for path in candidates if path.name == "trillora" and path.is_file()), None)


def _is_on_path(program: Path) -> bool:
    found = shutil.which(program.name)
    return found is not None and program.exists() and os.path.samefile(found, program)


def _shown(program: Path) -> str:
    """Relative to the working folder if it is inside it: shorter, and right after a move of the folder."""
    return shlex.quote(seen_from_here(os.path.abspath(program)))
