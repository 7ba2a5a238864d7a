"""Writes what a script measured to benchmarks/results, from where README and docs take their figures.

    add_record_option(parser)                                     # --record [COMMIT]
    record_if(args.record, "parity", {"largest": 2.0e-05}, sources=["benchmarks/parity.py", "src/trillora/engine"])

    benchmarks/results/parity.json    {"name": "parity", "command": "python benchmarks/parity.py --steps 100",
                                       "commit": "909c950", "date": "2026-11-18", "machine": "2 cores of x86_64",
                                       "versions": {"jax": …}, "sources": […], "values": {"largest": 2.0e-05}}

The record of an earlier run is replaced. `sources` are the files and folders whose change makes the figures stale;
`make claims` compares them with the commit. If they have changes that are not committed, the commit ends with "+", and
the figures are stale from the start: commit first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from claim_records import MODEL_CODE, RESULTS, measured_commit  # noqa: E402

__all__ = ["MODEL_CODE", "PACKAGES", "ROOT", "add_record_option", "by_name", "record_if"]
PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "transformers")


def add_record_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="COMMIT",
        help="write the figures to benchmarks/results too; name the commit where git does not know it",
    )


def record_if(
    option: str | None,
    name: str,
    values: Mapping[str, Any],
    sources: Sequence[str],
    *,
    packages: Sequence[str] = PACKAGES,
    on: str = "",
    root: Path = ROOT,
) -> None:
    """Writes the record NAME if the option was given; its value is the commit, or empty for git's.

    `on` says what measured, if it was not this machine.
    """
    if option is None:
        return
    missing = [source for source in sources if not (root / source).exists()]
    assert not missing, f"sources of {name} that do not exist: {missing}"
    record = {
        "name": name,
        "command": command(root),
        "commit": option or measured_commit(root, sources),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": on or machine(),
        "versions": versions(packages),
        "sources": list(sources),
        "values": values,
    }
    file = root / RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {file}; `python tools/claims.py --write` puts its figures into README and docs", file=sys.stderr)


def by_name(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[str, Any]:
    """Rows as a tree: by the values of these columns, one below the other. Of equal rows the last one stays."""
    found: dict[str, Any] = {}
    for row in rows:
        place = found
        for name in names:
            place = place.setdefault(str(row[name]), {})
        place |= {name: value for name, value in row.items() if name not in (*names, "versions")}
    return found


def machine() -> str:
    """The GPU, or the cores."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout.split("\n")
        names = [name for name in found if name]
        return f"{len(names)} {names[0]}"
    except (OSError, subprocess.CalledProcessError, IndexError):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"{cores} cores of {platform.machine()}"


def command(root: Path) -> str:
    """The command line of this process, without --record."""
    script, words = Path(sys.argv[0]).resolve(), []
    skip = False
    for word, following in zip(sys.argv[1:], [*sys.argv[2:], ""], strict=False):
        if skip or word.startswith("--record"):
            skip = word == "--record" and not following.startswith("-") and "=" not in following and following != ""
            continue
        words.append(word)
    shown = script.relative_to(root) if script.is_relative_to(root) else script.name
    return shlex.join(["python", str(shown), *words])


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
