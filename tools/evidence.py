"""Proves in continuous integration what a release rests on: `.ci/run` calls it after `make test`.

    python tools/evidence.py                     the rows of every change, half an hour on two cores
    python tools/evidence.py --all               also those that only a release needs
    python tools/evidence.py --only quickstart   rows whose name contains the word
    python tools/evidence.py --write             also writes dev/EVIDENCE.md, with the commit and the machine
    python tools/evidence.py --make audit        runs `make audit` instead, and writes its row

A row is a promise and the tests of `make test-all` that check it, with every case but few of the random repetitions;
`make soak` has all of them. It fails if a test fails, is gone, or if fewer tests pass than the row names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from guarantee_rows import HEAD, ROOT, Row, commit, run_part, say, write_table
from guarantees import EVERY_CHANGE, EVIDENCE, RELEASE

TABLE = ROOT / "dev" / "EVIDENCE.md"
SCALE = 0.02  # of the random repetitions
# Targets that are run before a release and not for every change.
TARGETS = {
    "test": "lint, types and the tests of every change",
    "test-all": "every test with every case, and a twentieth of the random repetitions",
    "audit": "known vulnerabilities of the locked packages",
    "compat-oldest": "core tests with the oldest libraries that pip may choose",
    "compat-newest": "core tests with the newest libraries that pip may choose",
    "harness": "the interface to lm-evaluation-harness",
    "clouds": "launch files in the real SkyPilot and xpk",
}
PAGE = """# What continuous integration proves

Written by `python tools/evidence.py --write`. `.ci/run` runs these rows for every change, after `make test`
(multimodal wrappers: before a release, with `--all`). The seconds are the sum over the tests, which run in parallel.
Rows that begin with `make` are runs of that target, written by `python tools/evidence.py --make TARGET`.

{rows}

Date, commit and machine of each row:

{notes}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name contains this")
    parser.add_argument("--all", action="store_true", help="rows of a release too")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel test processes")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    parser.add_argument("--make", choices=tuple(TARGETS), action="append", help="run this target; may be repeated")
    args = parser.parse_args()
    if args.make:
        return record([made(target) for target in args.make])
    parts = (EVERY_CHANGE, RELEASE) if args.all or args.only else (EVERY_CHANGE,)
    chosen = [each for each in EVIDENCE if args.only in each.name and each.part in parts]
    if not chosen:
        parser.error(f"no row contains {args.only!r}: {', '.join(each.name for each in EVIDENCE)}")
    started = time.monotonic()
    rows = run_part(chosen, args.workers, SCALE)
    print("\n".join(["", *HEAD.splitlines(), *map(str, rows)]))
    if args.write:
        record(rows)
    failed = [row.guarantee for row in rows if not row.passed]
    minutes = (time.monotonic() - started) / 60
    say(f"failed: {', '.join(failed)}" if failed else f"all {len(rows)} rows passed in {minutes:.0f} minutes")
    return 1 if failed else 0


def record(rows: list[Row]) -> int:
    names = (*(each.name for each in EVIDENCE), *(f"make {target}" for target in TARGETS))
    write_table(TABLE, PAGE, names, rows, commit(TABLE))
    return 0 if all(row.passed for row in rows) else 1


def made(target: str) -> Row:
    """Runs a target that is too large for every change. What it observed is its last line."""
    started = time.monotonic()
    done = subprocess.run(["make", target], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("make")]
    say("\n".join(lines[-20:]))
    observed = lines[-1].strip("= ") if lines else "nothing"
    return Row(f"make {target}", TARGETS[target], observed, done.returncode == 0, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
