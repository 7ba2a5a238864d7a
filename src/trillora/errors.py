"""The error for everything a user can fix: what happened, where, and what to do.

The command line prints it as

    LoRA target 'q_prj' matches no layer.
      where: lora.targets[0]
      do:    did you mean 'q_proj'?
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `name`, or None if none is similar."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None
