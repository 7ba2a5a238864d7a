"""Preflight before anything is launched: a recipe that does not fit is refused here, not after an hour on the chip."""

from __future__ import annotations

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, ignore_events
from trillora.preflight.client import choose_method
from trillora.preflight.result import PreflightResult
from trillora.preflight.verdict import preflight
from trillora.recipe import yaml
from trillora.recipe.schema import Recipe


def require_go(
    recipe: Recipe, slice_name: str, *, force: bool = False, listener: Listener = ignore_events
) -> PreflightResult | None:
    """Preflight's answer for this slice, an estimate where the TPU compiler is not installed. Raises an error unless
    the recipe fits as it is. With `force` it only warns, and returns None if there is no answer."""
    try:
        [result] = preflight(recipe, [slice_name], estimate=_has_no_compiler(listener), listener=listener)
    except TrilloraError as error:
        if not force:
            raise
        listener(Alarm(f"Preflight has no answer: {error.what}"))
        return None
    if result.verdict == "GO":
        return result
    peak = f": {result.hbm_peak_gib:.1f} of {result.hbm_limit_gib:.1f} GiB" if result.hbm_peak_gib else ""
    if result.verdict == "GO WITH CHANGES":
        what = f"This recipe fits {slice_name} only with changes."
        changes = " ".join(f"{change.option}={yaml.write(change.after)}" for change in result.changes)
        do = f"add to the command: {changes}"
    else:
        what = f"NO-GO: this recipe does not fit {slice_name}{peak}."
        larger = f"use --on {result.smallest_go}, which is large enough; or " if result.smallest_go else ""
        do = f"{larger}see `trillora preflight RECIPE --on {slice_name}` for what takes the memory"
    if not force:
        raise TrilloraError(what, where="preflight", do=f"{do}; pass --force to launch it anyway")
    listener(Alarm(f"{what} It is launched because of --force."))
    return result


def _has_no_compiler(listener: Listener) -> bool:
    """Whether libtpu is missing on a machine that could have it, or is of another version; it is said then."""
    try:
        choose_method(use_estimate=False)
    except TrilloraError as error:
        install = str(error.do).partition(";")[0]
        listener(Alarm(f"{error.what} So this answer is an estimate. To ask the compiler before the start: {install}"))
        return True
    return False
