"""Runs the reliability tests at full scale: `make soak` writes dev/SOAK.md.

    python tools/soak.py                        everything: hours on two cores
    python tools/soak.py --part kills           one part; the other rows of the table do not change
    python tools/soak.py --scale 0.05           a trial at 5 % of the scale; prints the table instead of writing it

A row of the table is a guarantee and the tests that check it: tests of `make test-all`, run with TRILLORA_DOSE=full.
The row shows what the tests counted with `record_property`. Only goodput is measured here: it is a number, not a
property.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from guarantee_rows import HEAD, ROOT, Row, commit, run_part, say, write_table
from guarantees import GUARANTEES

TABLE = ROOT / "dev" / "SOAK.md"
GOODPUT = "goodput"
GOODPUT_TESTED = "time lost per preemption with a warm compile cache; one preemption every 60 s for 5 minutes"
NAMES = (*(guarantee.name for guarantee in GUARANTEES), GOODPUT)
PARTS = (*dict.fromkeys(guarantee.part for guarantee in GUARANTEES), "goodput")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel test processes")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of the full scale, for a trial; does not write the table"
    )
    parser.add_argument("--commit", help="the commit for the table, if git is not available")
    parser.add_argument("--model", default="smollm2", help="model for the goodput measurement: smollm2 or tiny")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows: list[Row] = []
    for part in args.part or PARTS:
        say(f"part {part}")
        if part == "goodput":
            new = [measure_goodput(args.model, args.scale)]
        else:
            new = run_part([one for one in GUARANTEES if one.part == part], args.workers, args.scale)
        for row in new:
            say(str(row))
        rows += new
        if args.scale == 1.0:
            # After each part, so that an interruption loses little.
            write_table(TABLE, PAGE, NAMES, rows, args.commit or commit(TABLE))
    if args.scale != 1.0:
        print("\n".join(["", *HEAD.splitlines(), *map(str, rows)]))
    failed = [row.guarantee for row in rows if not row.passed]
    say(f"failed: {', '.join(failed)}" if failed else f"all {len(rows)} passed")
    return 1 if failed else 0


# Goodput


def measure_goodput(model: str, scale: float) -> Row:
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "support"), str(ROOT / "src")]
    import soak_goodput

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak_goodput.measure(Path(folder), model, 60 * scale, 300 * scale, say)
    seconds = time.monotonic() - started
    return Row(GOODPUT, GOODPUT_TESTED, figures.text(), figures.passed, seconds)


PAGE = """# Reliability tests at full scale

Written by `make soak`; run one part with `make soak PART=kills`. The seconds are the sum over the tests, which run in
parallel.

{rows}

Date, commit and machine of each row:

{notes}
"""


if __name__ == "__main__":
    sys.exit(main())
