"""What was measured: the records behind the figures in README and docs, and whether their sources have changed since.

    benchmarks/results/data-prep.json     {"commit": "c5b4579", "sources": ["src/trillora/data", …], "values": {…}, …}

    records = read_records(ROOT)
    records["data-prep"].at("200000.trillora.seconds")     # 50.1
    changed_since(records["data-prep"], ROOT)              # ["src/trillora/data/pack.py", …]; None: unknown commit

`benchmarks/record.py` writes the files in benchmarks/results. Measurements that have a format of their own are read as
they are. A record is stale if one of its sources differs from what it was in the commit that was measured.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = "benchmarks/results"
PROOF_COMMITS = {"NVIDIA-H200-1": "8d3eea1"}  # by benchmarks/RESULTS.md; `doctor --prove` does not know its commit
MODEL_CODE = ("src/trillora/engine", "src/trillora/model", "src/trillora/step")


class Missing(LookupError):
    """A figure names a record or a value that does not exist."""


@dataclass(frozen=True)
class Record:
    """One measurement. `commit` may end with "+": the tree had changes that were not committed."""

    name: str
    file: str
    values: Mapping[str, Any]
    commit: str
    date: str
    machine: str
    sources: tuple[str, ...]
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    transcribed: str = ""  # where the values were copied from, if no script wrote this file

    def at(self, path: str) -> Any:
        """The value at a path such as `1b-2048.trillora.step_ms`. Names in a path may contain dots."""
        found = _find(self.values, path)
        if found is None:
            raise Missing(f"{self.file} has no value {path}")
        return found


def _find(node: Any, path: str) -> Any:
    if not path:
        return node
    if isinstance(node, Mapping):
        for name, below in node.items():
            if path == name or path.startswith(f"{name}."):
                found = _find(below, path[len(name) + 1 :])
                if found is not None:
                    return found
    return None


def read_records(root: Path) -> dict[str, Record]:
    """All records by name."""
    _changed.cache_clear()
    readers = (written, recipes, compile_matrix, proofs, preflight_records, atlas)
    records = [record for read in readers for record in read(root)]
    by_name = {record.name: record for record in records}
    assert len(by_name) == len(records), "two records have one name"
    return by_name


def changed_since(record: Record, root: Path) -> list[str] | None:
    """Files among the sources that differ from those that were measured. None if git does not know the commit."""
    if record.commit.endswith("+"):
        return [f"not committed when it was measured, after {record.commit[:-1]}"]
    return _changed(root, record.commit, record.sources)


@functools.cache
def _changed(root: Path, commit: str, sources: tuple[str, ...]) -> list[str] | None:
    found = git(root, "diff", "--name-only", f"{commit}^{{commit}}", "--", *sources)
    return None if found is None else found.splitlines()


def git(root: Path, *words: str) -> str | None:
    """What git prints; None if it fails, as for a commit that a shallow clone does not have."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def commit_of_file(root: Path, file: str, date: str = "") -> str:
    """The last commit, up to a day, that changed a file. For records that do not name their commit.

    A shallow clone does not know it.
    """
    if git(root, "rev-parse", "--is-shallow-repository") != "false\n":
        return "unknown"
    until = [f"--until={date}T23:59:59Z"] if date else []
    return (git(root, "log", "-1", "--format=%h", "--abbrev=7", *until, "--", file) or "unknown").strip() or "unknown"


def measured_commit(root: Path, sources: Sequence[str]) -> str:
    """For a new record: the commit of the tree, with "+" if the sources differ from it; "unknown" without git."""
    commit, changes = git(root, "rev-parse", "--short=7", "HEAD"), git(root, "status", "--porcelain", "--", *sources)
    return "unknown" if commit is None else commit.strip() + ("+" if changes else "")


# ---- one reader for each format


def written(root: Path) -> Iterator[Record]:
    for file in sorted((root / RESULTS).glob("*.json")):
        found = json.loads(file.read_text("utf-8"))
        assert found.pop("name") == file.stem, f"{file} is the record of another name"
        yield Record(file.stem, f"{RESULTS}/{file.name}", **{**found, "sources": tuple(found["sources"])})


def recipes(root: Path) -> Iterator[Record]:
    """recipes/results.json: `recipe-NAME-preflight.v5e-8.step_seconds`, `recipe-NAME-tiny.test.train.adapter.loss`."""
    file = "recipes/results.json"
    for name, parts in _json(root / file, {}).items():
        for part, found in parts.items():
            values = found
            if part == "preflight":
                values = {place["slice"]: {"minutes": 60 * place.get("hours", 0), **place} for place in found["slices"]}
            compiler = f"TPU compiler (libtpu {found['versions'].get('libtpu')})"
            code = ("src/trillora/preflight",) if part == "preflight" else ("src/trillora/training",)
            yield Record(
                f"recipe-{name}-{part}",
                file,
                values,
                found.get("commit") or commit_of_file(root, file, found["date"]),
                found["date"],
                found.get("machine", compiler),
                (f"recipes/{name}.yaml", *MODEL_CODE, "src/trillora/data", *code),
                command="make recipes",
                versions=found["versions"],
            )


def compile_matrix(root: Path) -> Iterator[Record]:
    """docs/compile_matrix.jsonl, a record for each commit: `compile-matrix-909c950.ROW.step.peak_gib`."""
    file = "docs/compile_matrix.jsonl"
    by_commit: dict[str, dict[str, Any]] = {}
    for line in _lines(root / file):
        by_commit.setdefault(line["commit"], {}).setdefault(line["row"], {})[line["program"]] = line
    for commit, rows in by_commit.items():
        first = next(iter(next(iter(rows.values())).values()))
        yield Record(
            f"compile-matrix-{commit}",
            file,
            rows,
            commit,
            first["date"],
            f"TPU compiler (libtpu {first['libtpu']})",
            (*MODEL_CODE, "src/trillora/generation", "src/trillora/prove"),
            command="python tools/compile_matrix.py",
        )


def proofs(root: Path) -> Iterator[Record]:
    """Records of `trillora doctor --prove`: `proof-NVIDIA-H200-1.matrix_tflops`; figures of checks by their name."""
    for file in sorted((root / "benchmarks/proofs").glob("*.json")):
        found = json.loads(file.read_text("utf-8"))
        name, date = f"benchmarks/proofs/{file.name}", found["date"][:10]
        leading = {check["name"]: re.match(r"\d+\.\d+", check["figures"]) for check in found["checks"]}
        checks = {check: float(number[0]) for check, number in leading.items() if number}
        yield Record(
            f"proof-{file.stem}",
            name,
            {**found, "checks": checks},
            PROOF_COMMITS.get(file.stem) or commit_of_file(root, name, date),
            date,
            f"{found['num_devices']} {found['device_kind']}",
            (*MODEL_CODE, "src/trillora/prove"),
            command="trillora doctor --prove --json",
            versions=found["libraries"],
        )


def preflight_records(root: Path) -> Iterator[Record]:
    """src/trillora/preflight/records.json: `preflight-records.MODEL SLICE BATCH ROWS TOKENS REMAT.hbm_peak_gib`."""
    file = "src/trillora/preflight/records.json"
    found = _json(root / file, [])
    if found:
        date = (git(root, "log", "-1", "--format=%cs", "--", file) or "unknown").strip()
        yield Record(
            "preflight-records",
            file,
            {" ".join(map(str, case["case"][:6])): case for case in found},
            commit_of_file(root, file),
            date,
            f"TPU compiler (libtpu {found[0]['versions']['libtpu']})",
            MODEL_CODE,
            command="python tools/preflight_records.py",
            versions=found[0]["versions"],
        )


def atlas(root: Path) -> Iterator[Record]:
    """docs/atlas.jsonl, which has no commits: a record for each day, of the last commit of the file on that day."""
    file = "docs/atlas.jsonl"
    by_versions: dict[tuple[str, str], dict[str, Any]] = {}
    for line in _lines(root / file):
        versions, _, date = line["made_with"].partition("; ")
        key = f"{line['model']} {line['slice']} {line['tokens']}"
        by_versions.setdefault((date, versions), {})[key] = line
    for (date, versions), cells in sorted(by_versions.items()):
        number = sum(other < versions for day, other in by_versions if day == date)
        yield Record(
            f"atlas-{date}{f'-{number + 1}' if number else ''}",
            file,
            cells,
            commit_of_file(root, file, date),
            date,
            f"TPU compiler ({versions})",
            (*MODEL_CODE, "src/trillora/preflight"),
            command="make atlas",
        )


def _json(file: Path, otherwise: Any) -> Any:
    return json.loads(file.read_text("utf-8")) if file.exists() else otherwise


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
