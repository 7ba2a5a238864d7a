"""Paths that a person wrote, in a recipe or as an argument: `~` is expanded, and what no file system takes is refused.

>>> str(user_path("chats.jsonl", where="data.path", folder=Path("/recipes")))
'/recipes/chats.jsonl'
"""

from __future__ import annotations

import os
from pathlib import Path

from trillora.errors import TrilloraError

MAX_NAME, MAX_PATH = 255, 4096  # bytes; the limits of Linux and macOS for one name and for a whole path


def user_path(text: str | os.PathLike[str], *, where: str, folder: Path | None = None) -> Path:
    """The path, counted from `folder` if it is relative. `where` names the option or argument in errors."""
    path = os.fspath(text)
    check_letters(path, where)
    path = os.path.expanduser(path)  # unlike Path.expanduser it leaves `~backup.jsonl` alone if there is no such user
    path = path if folder is None else os.path.join(folder, path)
    longest = max(map(len, os.fsencode(path).split(os.fsencode(os.sep))))
    if longest > MAX_NAME or len(os.fsencode(path)) > MAX_PATH:
        raise TrilloraError(
            f"This path is too long: {path[:40]}…",
            where=where,
            do=f"use at most {MAX_NAME} bytes for one name, and {MAX_PATH} for the whole path",
        )
    return Path(path)


def check_letters(path: str, where: str) -> None:
    """Refuses characters that no path can contain."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name:
        raise TrilloraError(
            "This path contains a character that no file name can have.",
            where=where,
            do="remove NUL characters and halves of surrogate pairs from it",
        )
