"""The one error users meet: what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrilloraError(Exception):
    """A mistake or obstacle a person can act on. The command line prints it without a traceback."""

    exit_code = 2  # of the command line

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
    """The candidate a person most likely meant, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None
