"""Makes scans in the format of sys-scan: findings of ten producers, what connects them, and the analyst's answer.

    python tools/sys_scan_findings.py recipes/data/massive_dataset.tar.gz                        # 4,000 scans
    python tools/sys_scan_findings.py recipes/samples/sys-scan-tiny.tar.gz --brief --scans 200   # for --tiny

A row satisfies `recipes/schemas/sys-scan-ground-truth.schema.json`. Its summaries and actions follow from its findings
by fixed rules, so a model can learn them:

    severity   of the worst finding or correlation; severity itself follows from the risk score
    executive  how many findings of which severity; then the title and the reason of the worst correlation or finding
    analyst    the reasons of the three worst findings
    actions    the action of each finding from medium on, worst first, members of a correlation before all others

`--brief` makes scans with one finding, no prose and one action, short enough for `trillora train --tiny`.

Every scan has its own random numbers, from the seed and its number, so the first thousand scans are the same however
many are made. Scans are written one by one; the archive appears when it is complete.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from sys_scan_kinds import KINDS, PRODUCERS, STORIES, Kind, Story

SEVERITIES = ("info", "low", "medium", "high", "critical")
LOWEST_RISK = {"critical": 85, "high": 70, "medium": 50, "low": 30, "info": 0}
WEIGHTS = {"impact": 0.4, "exposure": 0.25, "anomaly": 0.2, "confidence": 0.15}  # of the risk score
SCANS_PER_FILE = 250
MAX_SCANS = 10**6
Finding = dict[str, Any]


def scans(num_scans: int, seed: int = 0, *, brief: bool = False) -> Iterator[dict[str, Any]]:
    """Scans one after the other. Each depends only on the seed and its number."""
    for number in range(num_scans):
        dice = Random(f"{seed}/{number}")  # noqa: S311  (no secrets)
        yield _brief_scan(dice, number) if brief else _scan(dice)


def _scan(dice: Random) -> dict[str, Any]:
    """A scan with two to eighteen findings, of which some belong together."""
    numbers = Counter[str]()
    findings: list[Finding] = []
    correlations: list[Finding] = []
    for story in dice.sample(STORIES, dice.choice((0, 1, 1, 1, 2))):
        shared = story.shared(dice)
        members = [_finding(dice, KINDS[producer][kind], numbers, shared) for producer, kind in story.members]
        findings += members
        correlations.append(_correlation(story, shared, members, f"corr-{len(correlations) + 1:03}"))
    for producer in dice.sample(PRODUCERS, dice.choice((2, 3, 4, 5, 5, 6, 6, 7, 8, 10))):
        findings += [_finding(dice, kind, numbers, {}) for kind in dice.sample(KINDS[producer], dice.choice((1, 1, 2)))]
    dice.shuffle(findings)
    return _record(findings, correlations, _summaries(findings, correlations), _actions(findings))


def _brief_scan(dice: Random, number: int) -> dict[str, Any]:
    """A scan with one finding. The producers and their kinds take turns, so that few rows show them all."""
    kinds = KINDS[PRODUCERS[number % len(PRODUCERS)]]
    kind = kinds[number // len(PRODUCERS) % len(kinds)]
    finding = _finding(dice, kind, Counter(), {})
    finding |= {"description": "", "rationale": "", "tags": [kind.producer]}
    return _record([finding], [], {"severity": finding["severity"]}, [_action(1, finding)])


def _record(
    findings: list[Finding], correlations: list[Finding], summaries: dict[str, str], actions: list[Any]
) -> dict[str, Any]:
    worst = max([*findings, *correlations], key=_risk)
    shown = [{key: value for key, value in finding.items() if not key.startswith("_")} for finding in findings]
    return {
        "version": "ground_truth_v1",
        "enriched_findings": shown,
        "correlations": correlations,
        "reductions": {"num_findings": len(findings), "worst": worst["id"]},
        "summaries": summaries,
        "actions": actions,
    }


def _finding(dice: Random, kind: Kind, numbers: Counter[str], shared: dict[str, Any]) -> Finding:
    """One finding. Values that it shares with others of a story replace its own. `_kind` is not written."""
    numbers[kind.producer] += 1
    metadata = kind.make(dice)
    metadata |= {name: value for name, value in shared.items() if name in metadata}
    status = "new" if shared else dice.choice(("new", "new", "changed", "known"))
    lower = {"new": 0.0, "changed": 0.15, "known": 0.4}[status]
    base = dict(zip(WEIGHTS, kind.risk, strict=True))
    base["anomaly"] -= lower
    subscores = {name: _share(value + dice.choice((-0.05, 0, 0, 0.05))) for name, value in base.items()}
    return {
        "id": f"{kind.producer}-{numbers[kind.producer]:03}",
        "title": kind.title.format_map(metadata),
        **_assessed(subscores),
        "description": kind.description.format_map(metadata),
        "metadata": metadata,
        "risk_subscores": subscores,
        "probability_actionable": _share((subscores["anomaly"] + subscores["confidence"]) / 2),
        "baseline_status": status,
        "tags": [kind.producer, status],
        "rationale": kind.rationale.format_map(metadata),
        "correlation_refs": [],
        "_kind": kind,
    }


def _correlation(story: Story, shared: dict[str, Any], members: Sequence[Finding], name: str) -> Finding:
    """What connects the members. Each of its subscores is the highest of theirs, a little raised."""
    subscores = {part: _share(max(member["risk_subscores"][part] for member in members) + 0.05) for part in WEIGHTS}
    for member in members:
        member["correlation_refs"] = [name]
    producers = " and ".join(dict.fromkeys(member["id"].rpartition("-")[0] for member in members))
    return {
        "id": name,
        "title": story.title,
        **_assessed(subscores),
        "description": f"{len(members)} findings of {producers} agree in {', '.join(shared)}.",
        "metadata": shared,
        "risk_subscores": subscores,
        "probability_actionable": _share((subscores["anomaly"] + subscores["confidence"]) / 2),
        "baseline_status": "new",
        "tags": ["correlation", story.type],
        "rationale": story.rationale.format_map(shared),
        "correlation_refs": [member["id"] for member in members],
        "correlation_type": story.type,
    }


def _assessed(subscores: dict[str, float]) -> dict[str, Any]:
    total = 0.0
    for part, share in subscores.items():  # sum() rounds differently from Python 3.12 on, and the rows must not
        total += WEIGHTS[part] * share
    risk = round(100 * total)
    severity = next(name for name, lowest in LOWEST_RISK.items() if risk >= lowest)
    return {"severity": severity, "risk_score": risk, "base_severity_score": 2 * SEVERITIES.index(severity) + 1}


def _summaries(findings: list[Finding], correlations: list[Finding]) -> dict[str, str]:
    worst = max(correlations or findings, key=_risk)
    counts = Counter(finding["severity"] for finding in findings)
    listed = ", ".join(f"{counts[name]} {name}" for name in reversed(SEVERITIES) if counts[name])
    reasons = [finding["rationale"] for finding in _ordered(findings)[:3]]
    return {
        "severity": max([*findings, *correlations], key=_risk)["severity"],
        "executive": f"{len(findings)} findings: {listed}. {worst['title']}: {worst['rationale']}",
        "analyst": " ".join(reasons),
    }


def _actions(findings: list[Finding]) -> list[dict[str, Any]]:
    urgent = [finding for finding in _ordered(findings) if finding["risk_score"] >= LOWEST_RISK["medium"]]
    return [_action(number, finding) for number, finding in enumerate(urgent, 1)]


def _action(number: int, finding: Finding) -> dict[str, Any]:
    return {
        "priority": number,
        "finding": finding["id"],
        "action": finding["_kind"].action.format_map(finding["metadata"]),
    }


def _ordered(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (not f["correlation_refs"], -_risk(f), f["id"]))


def _risk(finding: Finding) -> int:
    return finding["risk_score"]


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 2)


def write_archive(path: Path, rows: Iterator[dict[str, Any]], num_rows: int) -> None:
    """A .tar.gz of JSON Lines files. The same rows give the same archive: names and times are fixed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            unfinished.open("wb") as file,
            gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for start in range(0, num_rows, SCANS_PER_FILE):
                count = min(SCANS_PER_FILE, num_rows - start)
                text = "".join(json.dumps(next(rows), ensure_ascii=False) + "\n" for _ in range(count)).encode()
                member = tarfile.TarInfo(f"synthetic-data/scans-{start // SCANS_PER_FILE + 1:04}.jsonl")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
                print(f"\r{start + count:,} of {num_rows:,} scans", end="", file=sys.stderr, flush=True)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"\r{num_rows:,} scans in {path}", file=sys.stderr)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_SCANS):
        raise argparse.ArgumentTypeError(f"'{text[:30]}' is not a whole number from 1 to {MAX_SCANS:,}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make scans in the format of sys-scan.")
    parser.add_argument("out", type=Path, metavar="FILE.tar.gz")
    parser.add_argument("--scans", type=_count, default=4_000, metavar="N", help="number of scans (default: 4,000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--brief", action="store_true", help="one finding per scan, and short answers")
    args = parser.parse_args(arguments)
    write_archive(args.out, scans(args.scans, args.seed, brief=args.brief), args.scans)


if __name__ == "__main__":
    main()
