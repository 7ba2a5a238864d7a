"""The error for everything a user can fix: what happened, where, and what to do.

The command line prints it as

    LoRA target 'q_prj' matches no layer.
      where: lora.targets[0]
      do:    did you mean 'q_proj'?

Any other exception becomes such an error too (`as_error`): a full disk and too little memory are the machine's, and all
that remain are bugs of Trillora.
"""

from __future__ import annotations

import difflib
import errno
import traceback
from collections.abc import Iterable
from pathlib import Path

EXIT_STOPPED = 75  # exit code of `trillora train`: saved before its end; the same command resumes the run


class TrilloraError(Exception):
    """An error that the user can fix. The command line prints it without a traceback."""

    exit_code = 2  # of the command-line program

    def __init__(self, what: str, *, where: str | None = None, do: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines.append(f"  do:    {self.do}")
        return "\n".join(lines)


class Bug(TrilloraError):
    """An exception without an explanation. The user cannot fix it, only report it."""

    exit_code = 70  # EX_SOFTWARE of sysexits.h: an internal error


def as_error(error: Exception) -> TrilloraError:
    """The exception as an error that can be shown: unchanged, a problem of this machine, or else a bug."""
    match error:
        case TrilloraError():
            return error
        case OSError():
            return _of_the_system(error)
        case MemoryError():
            do = "close other programs, or use a smaller model, shorter sequences or less data"
            return TrilloraError("This machine does not have enough memory.", do=do)
        case RecursionError():
            what = "An input is nested too deeply."
            return TrilloraError(what, where=_place(error), do="look for deep nesting in the recipe, data or template")
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] != "trillora":
            what = f"The Python package {name.partition('.')[0]} is not installed."
            return TrilloraError(what, do="run `trillora doctor`, which shows how to install it")
    do = "report it to the developers of Trillora, with the following lines"
    return Bug(f"This is a bug of Trillora: {in_words(error)}", where=_place(error), do=do)


def in_words(error: BaseException) -> str:
    """Type and text of an exception, as one sentence."""
    try:
        text = str(error).strip()
    except Exception:  # the text of an exception is made by code of its own
        text = ""
    return f"{type(error).__name__}: {text[:_LONGEST]}".removesuffix(": ").removesuffix(".") + "."


_LONGEST = 2000  # characters of an exception's text; some libraries put a whole program into it
_TO_DO = {
    errno.ENOSPC: "free some disk space, or use another disk",
    errno.EDQUOT: "free some disk space, or use another disk: your quota is used up",
    errno.EROFS: "use a folder that you can write to",
    errno.EACCES: "change the permissions, or use another folder",
    errno.EPERM: "change the permissions, or use another folder",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENAMETOOLONG: "use a shorter path",
}


def _of_the_system(error: OSError) -> TrilloraError:
    files = [str(file) for file in (error.filename, error.filename2) if file is not None]
    if error.strerror is None or error.errno is None:
        return TrilloraError(in_words(error), where=_place(error), do="check the files and the network")
    if "temporary directory" in error.strerror:  # of the module tempfile, which has tried several
        return TrilloraError(f"{error.strerror}.", do="set TMPDIR to a folder that you can write to")
    do = _TO_DO.get(error.errno, "check the file and the disk it is on")
    return TrilloraError(f"{error.strerror}.", where=" and ".join(files) or _place(error), do=do)


def _place(error: BaseException) -> str | None:
    """The last line of our own code that the exception passed."""
    ours = Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if ours in Path(frame.filename).parents:
            return f"trillora/{Path(frame.filename).relative_to(ours)}, line {frame.lineno}"
    return None


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `name`, or None if none is similar."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None
