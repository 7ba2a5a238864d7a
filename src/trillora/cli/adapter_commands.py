"""The commands that work on finished adapters: merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trillora.cli.options import JsonResult, number_parser, parse_share
from trillora.cli.output import print_json, progress_on_stderr
from trillora.errors import TrilloraError

METHODS = "linear (exact sum), cat, svd, ties, dare-linear, dare-ties or magnitude-prune."


def merge(
    adapters: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER", help="Two or more adapters: folders of adapters or of finished runs."),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="New folder for the merged adapter.")],
    method: Annotated[str, typer.Option("--method", metavar="NAME", help=METHODS)] = "linear",
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W", help="One weight per adapter, such as 1,0.5 (default: 1).")
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            "--density",
            metavar="P",
            parser=parse_share,
            help="Share of entries that ties, dare and magnitude-prune keep (default: 0.5).",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="R",
            parser=number_parser(int, 1, 1 << 16),
            help="Rank of the result (default: linear needs no limit; else the largest rank of the adapters).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", parser=number_parser(int, 0, 2**31 - 1), help="Random seed of dare."),
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """Merge adapters of one base model into one adapter."""
    from trillora.recipe.group_section import MergeOptions

    options = MergeOptions(method, _numbers(weights), density, rank, seed)  # type: ignore[arg-type]
    with progress_on_stderr(as_json=as_json) as listener:
        from trillora.runs.saved import find_adapter

        for adapter in adapters:
            find_adapter(adapter)
        from trillora.adapters.merge import merge_adapters

        result = merge_adapters(adapters, options, out, listener=listener)
    if as_json:
        print_json(result.to_dict())
        return
    from trillora.report.merge_table import show
    from trillora.report.safe_console import SafeConsole

    show(result, SafeConsole())


def _numbers(text: str | None) -> tuple[float, ...] | None:
    """ "1,0.5" -> (1.0, 0.5)"""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        what = f"'{text[:80]}' is not a list of weights."
        raise TrilloraError(what, where="--weights", do="write numbers with commas between them: 1,0.5") from None
